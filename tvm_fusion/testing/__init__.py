"""What tests, tutorials and demos share: model builders, and generated CUDA run on the CPU."""
