// Arrays of integers that Python passes as bytes: int64, native byte order.
#ifndef TVM_FUSION_CSRC_WIRE_H_
#define TVM_FUSION_CSRC_WIRE_H_

#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace tvm_fusion {

inline std::vector<int64_t> Unpack(const tvm::ffi::Bytes& bytes) {
  if (bytes.size() % sizeof(int64_t) != 0) {
    TVM_FFI_THROW(ValueError) << bytes.size() << " bytes are no array of 8-byte integers";
  }
  std::vector<int64_t> out(bytes.size() / sizeof(int64_t));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

inline tvm::ffi::Bytes Pack(const std::vector<int64_t>& values) {
  return tvm::ffi::Bytes(
      std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)));
}

// Ends of consecutive parts of an array of `size` elements: as many as `lengths`, which must sum
// up.
inline std::vector<int64_t> Offsets(const std::vector<int64_t>& lengths, size_t size) {
  std::vector<int64_t> offsets{0};
  offsets.reserve(lengths.size() + 1);
  for (int64_t length : lengths) {
    if (length < 0 || length > static_cast<int64_t>(size) - offsets.back()) {
      TVM_FFI_THROW(ValueError) << "the lengths do not add up to the " << size << " elements";
    }
    offsets.push_back(offsets.back() + length);
  }
  if (offsets.back() != static_cast<int64_t>(size)) {
    TVM_FFI_THROW(ValueError) << "the lengths do not add up to the " << size << " elements";
  }
  return offsets;
}

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_WIRE_H_
