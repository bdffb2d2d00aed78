"""Kernels of float32 multiply-adds written statement by statement: sums of products with any epilogue."""
