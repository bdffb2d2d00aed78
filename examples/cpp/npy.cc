#include "npy.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

Array LoadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char magic[10];
  if (!file.read(magic, sizeof(magic)) || std::string(magic, 6) != "\x93NUMPY" || magic[6] != 1) {
    throw std::runtime_error(path + " is no .npy file of version 1.0");
  }
  size_t length = static_cast<unsigned char>(magic[8]) | static_cast<unsigned char>(magic[9]) << 8;
  std::string header(length, ' ');
  file.read(&header[0], static_cast<std::streamsize>(length));
  if (header.find("'<f4'") == std::string::npos ||
      header.find("'fortran_order': False") == std::string::npos) {
    throw std::runtime_error(path +
                             " must be float32 in C order, as numpy.ascontiguousarray gives");
  }

  Array array;
  size_t open = header.find('('), close = header.find(')');
  std::stringstream sizes(header.substr(open + 1, close - open - 1));
  size_t count = 1;
  for (std::string size; std::getline(sizes, size, ',');) {
    if (size.find_first_of("0123456789") == std::string::npos) continue;
    array.shape.push_back(std::stoll(size));
    count *= static_cast<size_t>(array.shape.back());
  }
  array.values.resize(count);
  auto bytes = static_cast<std::streamsize>(count * sizeof(float));
  if (!file.read(reinterpret_cast<char*>(array.values.data()), bytes)) {
    throw std::runtime_error(path + " is cut short");
  }
  return array;
}
