// Marks on XLA's own stream, as a custom call: what the benchmark's protocol needs from inside a
// program.
//
// kind 0: hold the stream for a while, so that the host is ahead, then record an event.
// kind 1: the same, with `bytes` written at `address` before the event.
// kind 2: record an event.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Stream = void*;

// Longer than the host needs to enqueue a program.
constexpr int kHoldMicroseconds = 2000;

template <typename F>
F Driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
}

void Hold(void* microseconds) {
  usleep(static_cast<unsigned>(reinterpret_cast<std::intptr_t>(microseconds)));
}

ffi::Error Mark(Stream stream, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, std::int64_t kind,
                std::int64_t event, std::int64_t address, std::int64_t bytes) {
  int code = 0;
  if (kind != 2) {
    auto launch = Driver<int (*)(Stream, void (*)(void*), void*)>("cuLaunchHostFunc");
    code = launch(stream, Hold,
                  reinterpret_cast<void*>(static_cast<std::intptr_t>(kHoldMicroseconds)));
  }
  if (code == 0 && kind == 1) {
    auto set = Driver<int (*)(std::uint64_t, unsigned, std::size_t, Stream)>("cuMemsetD32Async");
    code =
        set(static_cast<std::uint64_t>(address), 1u, static_cast<std::size_t>(bytes) / 4, stream);
  }
  if (code == 0) {
    auto record = Driver<int (*)(void*, Stream)>("cuEventRecord");
    code = record(reinterpret_cast<void*>(static_cast<std::intptr_t>(event)), stream);
  }
  return code == 0 ? ffi::Error::Success()
                   : ffi::Error(ffi::ErrorCode::kInternal,
                                "CUDA error " + std::to_string(code) + " in a mark");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(mark, Mark,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<Stream>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::int64_t>("kind")
                                  .Attr<std::int64_t>("event")
                                  .Attr<std::int64_t>("address")
                                  .Attr<std::int64_t>("bytes"));
