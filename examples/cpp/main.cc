// Runs a model that `tvm-fusion compile --target llvm` wrote, from C++ with TVM's runtime alone.
//
//   run_model MODEL.so INPUT.npy... [--expect OUTPUT.npy]
//
// Inputs stand in the model's order. With --expect the first output is compared, and the exit code
// is 1 if it differs by more than one part in ten thousand of the largest value.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "npy.h"

namespace ffi = tvm::ffi;

namespace {

constexpr DLDevice kCpu{kDLCPU, 0};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};

// Memory of a tensor: compiled code loads vectors, so it is aligned to 64 bytes.
struct AlignedAlloc {
  void AllocData(DLTensor* tensor) {
    size_t bytes = (ffi::GetDataSize(*tensor) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, std::max<size_t>(bytes, 64));
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

ffi::Tensor ToTensor(const Array& array) {
  ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(
      AlignedAlloc(), ffi::Shape(array.shape.begin(), array.shape.end()), kFloat32, kCpu);
  std::memcpy(tensor.data_ptr(), array.values.data(), array.values.size() * sizeof(float));
  return tensor;
}

// A model is a program of TVM's virtual machine; this makes one that runs on the CPU.
ffi::Module StartMachine(const std::string& library) {
  // The loader searches system folders for a bare name, so it gets a whole path.
  ffi::Module module = ffi::Module::LoadFromFile(std::filesystem::absolute(library).string());
  ffi::Optional<ffi::Function> load = module->GetFunction("vm_load_executable");
  if (!load.has_value()) throw std::runtime_error(library + " holds no compiled model");
  ffi::Module machine = (*load)().cast<ffi::Module>();
  constexpr int kPooledAllocator = 2;
  (*machine->GetFunction("vm_initialization"))(static_cast<int>(kDLCPU), 0, kPooledAllocator);
  return machine;
}

// One output comes back as itself, several as an array.
ffi::Tensor FirstOutput(const ffi::Any& result) {
  if (auto tensor = result.as<ffi::Tensor>()) return *tensor;
  return result.cast<ffi::Array<ffi::Any>>()[0].cast<ffi::Tensor>();
}

bool IsNear(const ffi::Tensor& got, const Array& expected) {
  ffi::ShapeView shape = got.shape();
  if (!std::equal(shape.begin(), shape.end(), expected.shape.begin(), expected.shape.end())) {
    std::cerr << "the output has another shape than was expected\n";
    return false;
  }
  const float* values = static_cast<const float*>(got.data_ptr());
  float largest = 0, worst = 0;
  for (size_t i = 0; i < expected.values.size(); ++i) {
    float error = std::fabs(values[i] - expected.values[i]);
    if (!std::isfinite(error)) error = INFINITY;  // NaN compares false
    worst = std::max(worst, error);
    largest = std::max(largest, std::fabs(expected.values[i]));
  }
  std::cout << "largest difference " << worst << " of " << largest << "\n";
  return worst <= 1e-4f * largest;
}

int Run(const std::vector<std::string>& arguments) {
  std::vector<std::string> files;
  std::string expected;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--expect" && i + 1 < arguments.size()) {
      expected = arguments[++i];
    } else {
      files.push_back(arguments[i]);
    }
  }
  if (files.size() < 2) {
    throw std::runtime_error("usage: run_model MODEL.so INPUT.npy... [--expect OUTPUT.npy]");
  }

  ffi::Module machine = StartMachine(files[0]);
  std::cout << (*machine->GetFunction("tvm_fusion_signature"))().cast<ffi::String>() << "\n";
  ffi::Function main = *machine->GetFunction("main");
  std::vector<ffi::Tensor> inputs;
  for (size_t i = 1; i < files.size(); ++i) inputs.push_back(ToTensor(LoadNpy(files[i])));
  std::vector<ffi::AnyView> packed(inputs.begin(), inputs.end());

  ffi::Any result;
  main.CallPacked(packed.data(), static_cast<int>(packed.size()), &result);  // loads and allocates
  auto started = std::chrono::steady_clock::now();
  main.CallPacked(packed.data(), static_cast<int>(packed.size()), &result);
  std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - started;
  std::cout << "second call: " << took.count() << " us\n";

  return expected.empty() || IsNear(FirstOutput(result), LoadNpy(expected)) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run({argv + 1, argv + argc});
  } catch (const ffi::Error& error) {
    std::cerr << "run_model: " << error.what() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "run_model: " << error.what() << "\n";
  }
  return 2;
}
