"""C++ that stands in for the CUDA runtime when a kernel runs on the CPU (see ``cuda_emulation``)."""

#: Types and functions that TVM's CUDA code uses, and the scheduler that runs a block's threads as fibers.
SHIM = r"""
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
using std::max; using std::min;
typedef unsigned int uint; typedef unsigned char uchar; typedef unsigned short ushort;
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

template <int kExponent> struct Narrow {  // binary16 for 5 exponent bits, bfloat16 for 8
  uint16_t bits;
  Narrow() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  Narrow(T value) : bits(Round(static_cast<float>(value))) {}
  operator float() const {
    if constexpr (kExponent == 8) {
      uint32_t wide = uint32_t(bits) << 16; float out; std::memcpy(&out, &wide, 4); return out;
    } else {
      _Float16 narrow; std::memcpy(&narrow, &bits, 2); return float(narrow);
    }
  }
  static uint16_t Round(float value) {
    if constexpr (kExponent == 8) {
      uint32_t wide; std::memcpy(&wide, &value, 4);
      if (std::isnan(value)) return 0x7fff;
      return uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    } else {
      _Float16 narrow = _Float16(value); uint16_t out; std::memcpy(&out, &narrow, 2); return out;
    }
  }
  friend Narrow operator+(Narrow a, Narrow b) { return Narrow(float(a) + float(b)); }
  friend Narrow operator-(Narrow a, Narrow b) { return Narrow(float(a) - float(b)); }
  friend Narrow operator*(Narrow a, Narrow b) { return Narrow(float(a) * float(b)); }
  friend Narrow operator/(Narrow a, Narrow b) { return Narrow(float(a) / float(b)); }
  friend Narrow operator-(Narrow a) { return Narrow(-float(a)); }
  friend Narrow max(Narrow a, Narrow b) { return float(a) > float(b) ? a : b; }
  friend Narrow min(Narrow a, Narrow b) { return float(a) < float(b) ? a : b; }
};
typedef Narrow<5> half; typedef Narrow<5> __half;
typedef Narrow<8> nv_bfloat16; typedef Narrow<8> __nv_bfloat16;
static inline half __float2half_rn(float x) { return half(x); }
static inline half __float2half(float x) { return half(x); }
static inline float __half2float(half x) { return float(x); }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
static inline nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
static inline float __bfloat162float(nv_bfloat16 x) { return float(x); }
#define NARROW_UNARY(NAME, FUNCTION) \
  template <int k> static inline Narrow<k> NAME(Narrow<k> x) { return Narrow<k>(FUNCTION(float(x))); }
NARROW_UNARY(hexp, std::exp) NARROW_UNARY(hlog, std::log) NARROW_UNARY(hsqrt, std::sqrt)
NARROW_UNARY(htanh, std::tanh) NARROW_UNARY(herf, std::erf) NARROW_UNARY(hcos, std::cos)
NARROW_UNARY(hsin, std::sin) NARROW_UNARY(hfloor, std::floor) NARROW_UNARY(hceil, std::ceil)
NARROW_UNARY(htrunc, std::trunc) NARROW_UNARY(hrint, std::nearbyint) NARROW_UNARY(__habs, std::fabs)
NARROW_UNARY(hrsqrt, 1.0f / std::sqrt) NARROW_UNARY(htan, std::tan) NARROW_UNARY(hatan, std::atan)
template <int k> static inline Narrow<k> hpow(Narrow<k> x, Narrow<k> y) {
  return Narrow<k>(std::pow(float(x), float(y)));
}
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float __fdividef(float x, float y) { return x / y; }
// The C library declares functions of these names itself.
#define __expf expf
#define __logf logf
#define __powf powf

template <typename T> struct alignas(2 * sizeof(T)) Vec2 { T x, y; };
template <typename T> struct Vec3 { T x, y, z; };
template <typename T> struct alignas(4 * sizeof(T)) Vec4 { T x, y, z, w; };
#define VECTORS(T, NAME) \
  typedef Vec2<T> NAME##2; typedef Vec3<T> NAME##3; typedef Vec4<T> NAME##4; \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; } \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float, float) VECTORS(int, int) VECTORS(uint, uint) VECTORS(half, half) VECTORS(nv_bfloat16, nv_bfloat16)
VECTORS(char, char) VECTORS(uchar, uchar) VECTORS(short, short) VECTORS(ushort, ushort)
typedef nv_bfloat162 __nv_bfloat162; typedef half2 __half2;
template <int k> static inline unsigned Pack(Narrow<k> x, Narrow<k> y) { return (uint(y.bits) << 16) | x.bits; }
static inline unsigned __pack_half2(half x, half y) { return Pack(x, y); }
static inline unsigned __pack_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return Pack(x, y); }

namespace simt {
struct Dim3 { int x, y, z; };
enum State { kReady, kBarrier, kWarp, kDone };
struct Fiber {
  ucontext_t context; std::unique_ptr<char[]> stack; State state; Dim3 index; int parity; bool waits_for_count;
};
static const int kStack = 1 << 17;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Fiber* current;
static uint64_t slots[32][2][32];  // warp, parity of the exchange, lane
static void Switch(State state) { current->state = state; swapcontext(&current->context, &scheduler); }
}  // namespace simt
static simt::Dim3 blockIdx, blockDim, gridDim;
#define threadIdx (simt::current->index)
static inline void __syncthreads() { simt::Switch(simt::kBarrier); }
static inline void __syncwarp(unsigned = 0xffffffffu) { simt::Switch(simt::kWarp); }
static inline unsigned __activemask() { return 0xffffffffu; }
template <typename T> static T Exchange(T value, int source) {
  int self = int(simt::current - simt::fibers.data()), parity = simt::current->parity;
  simt::current->parity ^= 1;
  std::memcpy(&simt::slots[self / 32][parity][self % 32], &value, sizeof(T));
  simt::Switch(simt::kWarp);
  T result; std::memcpy(&result, &simt::slots[self / 32][parity][source & 31], sizeof(T)); return result;
}
static inline int Lane() { return int(simt::current - simt::fibers.data()) & 31; }
template <typename T> static T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return Exchange(value, (Lane() & ~(width - 1)) | (lane & (width - 1)));
}
template <typename T> static T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  int lane = Lane(), from = lane + int(delta);
  return Exchange(value, (from & ~(width - 1)) == (lane & ~(width - 1)) ? from : lane);
}
template <typename T> static T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  int lane = Lane(), from = lane - int(delta);
  return Exchange(value, from >= (lane & ~(width - 1)) ? from : lane);
}
template <typename T> static T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return Exchange(value, (Lane() & ~(width - 1)) | ((Lane() ^ mask) & (width - 1)));
}
// Shared memory lives in one section, so that every block can start with it filled with NaN.
#define __shared__ static __attribute__((section("simt_shared")))
__attribute__((used)) __shared__ char simt_shared_anchor[64];
extern "C" char __start_simt_shared[], __stop_simt_shared[];

namespace simt {
typedef void (*Body)(void**);
static Body body; static void** arguments;
static void Entry() { body(arguments); current->state = kDone; }
// Runs every thread up to its next barrier, warp exchange or end. `backward` reverses the order of the threads: a
// kernel whose result depends on the order lacks a barrier.
static int RunBlock(bool backward) {
  const int count = int(fibers.size());
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    fiber.state = kReady; fiber.parity = 0;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(Entry), 0);
  }
  while (true) {
    for (int i = 0; i < count; ++i) {
      current = &fibers[backward ? count - 1 - i : i];
      if (current->state == kReady) swapcontext(&scheduler, &current->context);
    }
    int done = 0, at_barrier = 0; bool progress = false;
    for (int warp = 0; warp * 32 < count; ++warp) {
      int waiting = 0, lanes = 0;
      for (int i = warp * 32; i < std::min(count, warp * 32 + 32); ++i) {
        done += fibers[i].state == kDone; at_barrier += fibers[i].state == kBarrier;
        waiting += fibers[i].state == kWarp; lanes += fibers[i].state != kDone;
      }
      if (waiting && waiting == lanes) {
        for (int i = warp * 32; i < std::min(count, warp * 32 + 32); ++i)
          if (fibers[i].state == kWarp) fibers[i].state = kReady;
        progress = true;
      }
    }
    if (progress) continue;
    if (done == count) return 0;
    if (at_barrier != count) return 1;  // a barrier or an exchange that not every thread reaches
    for (Fiber& fiber : fibers) fiber.state = kReady;
  }
}
static int Launch(Body entry, void** args, const int* grid, const int* block, bool backward) {
  body = entry; arguments = args;
  gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], block[2]};
  fibers.clear(); fibers.resize(block[0] * block[1] * block[2]);
  for (size_t i = 0; i < fibers.size(); ++i) {
    fibers[i].stack.reset(new char[kStack]);
    int linear = int(i);
    fibers[i].index = {linear % block[0], linear / block[0] % block[1], linear / block[0] / block[1]};
  }
  for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y) for (int x = 0; x < grid[0]; ++x) {
    blockIdx = {x, y, z};
    std::memset(__start_simt_shared, 0xff, __stop_simt_shared - __start_simt_shared);
    if (int error = RunBlock(backward)) return error;
  }
  return 0;
}
}  // namespace simt
"""
