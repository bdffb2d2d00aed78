"""Tensor-core kernels written statement by statement: sums of products through ``mma.sync`` with any epilogue."""
