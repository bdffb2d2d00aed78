"""CUDA templates."""
