// Arrays of float32 in NumPy's .npy format (version 1.0, C order): enough for the example.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Array {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// Throws std::runtime_error if the file is missing or of another type or order.
Array LoadNpy(const std::string& path);
