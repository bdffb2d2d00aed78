"""Kernels of convolutions with few channels a group: a thread computes a strip of outputs from registers alone."""
