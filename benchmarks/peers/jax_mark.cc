// Marks around what XLA runs, as custom calls: between them the work of XLA's own stream is captured
// into a CUDA graph, which the benchmark's protocol then replays as it does everyone's.
//
// `begin` copies its operands to its results, so that all that follows depends on it, and begins the
// capture; `end` depends on all that the workload computed, and ends the capture. Nothing is
// captured unless `arm` was called before the program ran.
//
// With -DMARK_HOST the same for XLA on a CPU, where there is nothing to capture (a test of the program).
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

std::atomic<bool> armed{false};
std::atomic<void*> captured{nullptr};
std::atomic<int> begun{0}, ended{0};

ffi::Error Failed(const char* what, int code) {
  return ffi::Error(ffi::ErrorCode::kInternal,
                    "CUDA error " + std::to_string(code) + " in " + what);
}

#ifdef MARK_HOST

struct Stream {};

int Copy(Stream, void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return 0;
}
int BeginCapture(Stream) { return 0; }
int EndCapture(Stream, void**) { return 0; }

#else

using Stream = void*;

template <typename F>
F Driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
}

int Copy(Stream stream, void* to, const void* from, std::size_t bytes) {
  static auto copy = Driver<int (*)(std::uint64_t, std::uint64_t, std::size_t, Stream)>(
      "cuMemcpyDtoDAsync_v2");
  return copy(reinterpret_cast<std::uint64_t>(to), reinterpret_cast<std::uint64_t>(from), bytes,
              stream);
}

int BeginCapture(Stream stream) {
  static auto begin = Driver<int (*)(Stream, int)>("cuStreamBeginCapture_v2");
  return begin(stream, 2);  // relaxed: XLA's other threads may call what they like
}

int EndCapture(Stream stream, void** graph) {
  static auto end = Driver<int (*)(Stream, void**)>("cuStreamEndCapture");
  return end(stream, graph);
}

#endif

ffi::Error Begin(Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  for (std::size_t i = 0; i < args.size(); ++i) {
    auto from = args.get<ffi::AnyBuffer>(i);
    auto to = rets.get<ffi::AnyBuffer>(i);
    if (!from.has_value() || !to.has_value() || (*to)->size_bytes() != from->size_bytes()) {
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, "operands and results differ");
    }
    int code = Copy(stream, (*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    if (code) return Failed("a copy of an operand", code);
  }
  ++begun;
  int code = armed ? BeginCapture(stream) : 0;
  return code ? Failed("cuStreamBeginCapture", code) : ffi::Error::Success();
}

ffi::Error End(Stream stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  ++ended;
  if (!armed.exchange(false)) return ffi::Error::Success();
  void* graph = nullptr;
  int code = EndCapture(stream, &graph);
  captured = graph;
  return code ? Failed("cuStreamEndCapture", code) : ffi::Error::Success();
}

}  // namespace

extern "C" {

// Capture the next run of a marked program.
void arm() { armed = true; }

// The graph of that run (a CUgraph, now the caller's), or null.
void* take() { return captured.exchange(nullptr); }

// How often a workload was begun and ended.
int times_begun() { return begun; }
int times_ended() { return ended; }

}  // extern "C"

#ifdef MARK_HOST
#define MARK_BIND ffi::Ffi::Bind()
static ffi::Error HostBegin(ffi::RemainingArgs a, ffi::RemainingRets r) { return Begin({}, a, r); }
static ffi::Error HostEnd(ffi::RemainingArgs a, ffi::Result<ffi::AnyBuffer> r) {
  return End({}, a, r);
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(mark_begin, HostBegin, MARK_BIND.RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mark_end, HostEnd, MARK_BIND.RemainingArgs().Ret<ffi::AnyBuffer>());
#else
#define MARK_BIND ffi::Ffi::Bind().Ctx<ffi::PlatformStream<Stream>>()
XLA_FFI_DEFINE_HANDLER_SYMBOL(mark_begin, Begin, MARK_BIND.RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mark_end, End, MARK_BIND.RemainingArgs().Ret<ffi::AnyBuffer>());
#endif
