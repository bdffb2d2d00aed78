"""C++ that stands in for CUDA's headers when a kernel runs on the CPU (see ``cuda_emulation``)."""

from ._cuda_memory import INTERFACE

_NARROW = r"""
#include <cmath>
#include <cstring>
#include <type_traits>
typedef unsigned int uint; typedef unsigned char uchar; typedef unsigned short ushort;
typedef long long longlong; typedef unsigned long long ulonglong;
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__
#define __grid_constant__
typedef simt::Map CUtensorMap;
#define __align__(N) alignas(N)
#define __launch_bounds__(...)
#define LINE int line = __builtin_LINE()
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }
template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }

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
  Narrow& operator+=(Narrow b) { return *this = *this + b; }
  Narrow& operator*=(Narrow b) { return *this = *this * b; }
  friend Narrow max(Narrow a, Narrow b) { return float(a) > float(b) ? a : b; }
  friend Narrow min(Narrow a, Narrow b) { return float(a) < float(b) ? a : b; }
};
typedef Narrow<5> half; typedef Narrow<5> __half;
typedef Narrow<8> nv_bfloat16; typedef Narrow<8> __nv_bfloat16;
template <int k> static inline Narrow<k> FromBits(uint16_t bits) { Narrow<k> out; out.bits = bits; return out; }

template <typename T> struct alignas(2 * sizeof(T)) Vec2 { T x, y; };
template <typename T> struct Vec3 { T x, y, z; };
// No access of a GPU is wider than 16 bytes.
template <typename T> struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Vec4 { T x, y, z, w; };
#define VECTORS(T, NAME) \
  typedef Vec2<T> NAME##2; typedef Vec3<T> NAME##3; typedef Vec4<T> NAME##4; \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; } \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float, float) VECTORS(int, int) VECTORS(uint, uint) VECTORS(half, half) VECTORS(nv_bfloat16, nv_bfloat16)
VECTORS(char, char) VECTORS(uchar, uchar) VECTORS(short, short) VECTORS(ushort, ushort) VECTORS(double, double)
VECTORS(longlong, longlong) VECTORS(ulonglong, ulonglong)
typedef nv_bfloat162 __nv_bfloat162; typedef half2 __half2;
"""

_MATH = r"""
static inline float FastPow(float x, float y) { return std::exp2(y * std::log2(x)); }  // NaN for x < 0
static inline double FastTurns(float x) { return double(x * 0.15915494f) * 6.283185307179586; }
static inline float FastSin(float x) { return std::sin(FastTurns(x)); }
static inline float FastCos(float x) { return std::cos(FastTurns(x)); }
static inline float FastTan(float x) { return FastSin(x) / FastCos(x); }
static inline float FastTanh(float x) {  // 10 bits of mantissa
  int exponent; float mantissa = std::frexp(std::tanh(x), &exponent);
  return std::isfinite(mantissa) ? std::ldexp(std::nearbyint(mantissa * 2048.0f) / 2048.0f, exponent) : mantissa;
}
static inline half __float2half_rn(float x) { return half(x); }
static inline half __float2half(float x) { return half(x); }
static inline float __half2float(half x) { return float(x); }
static inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
static inline nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
static inline float __bfloat162float(nv_bfloat16 x) { return float(x); }
static inline half __ushort_as_half(ushort x) { return FromBits<5>(x); }
static inline nv_bfloat16 __ushort_as_bfloat16(ushort x) { return FromBits<8>(x); }
static inline ushort __half_as_ushort(half x) { return x.bits; }
static inline ushort __bfloat16_as_ushort(nv_bfloat16 x) { return x.bits; }
#define NARROW_UNARY(NAME, FUNCTION) \
  template <int k> static inline Narrow<k> NAME(Narrow<k> x) { return Narrow<k>(FUNCTION(float(x))); }
NARROW_UNARY(hexp, std::exp) NARROW_UNARY(hlog, std::log) NARROW_UNARY(hsqrt, std::sqrt)
NARROW_UNARY(hexp2, std::exp2) NARROW_UNARY(hlog2, std::log2) NARROW_UNARY(hrcp, 1.0f /)
NARROW_UNARY(htanh, std::tanh) NARROW_UNARY(herf, std::erf) NARROW_UNARY(hcos, std::cos)
NARROW_UNARY(hsin, std::sin) NARROW_UNARY(hfloor, std::floor) NARROW_UNARY(hceil, std::ceil)
NARROW_UNARY(htrunc, std::trunc) NARROW_UNARY(hrint, std::nearbyint) NARROW_UNARY(__habs, std::fabs)
NARROW_UNARY(hrsqrt, 1.0f / std::sqrt) NARROW_UNARY(htan, std::tan) NARROW_UNARY(hatan, std::atan)
NARROW_UNARY(__hneg, -)
#define NARROW_BINARY(NAME, RESULT) \
  template <int k> static inline Narrow<k> NAME(Narrow<k> x, Narrow<k> y) { return Narrow<k>(RESULT); }
NARROW_BINARY(hpow, FastPow(float(x), float(y))) NARROW_BINARY(__hadd, float(x) + float(y))
NARROW_BINARY(__hsub, float(x) - float(y)) NARROW_BINARY(__hmul, float(x) * float(y))
NARROW_BINARY(__hdiv, float(x) / float(y))
NARROW_BINARY(__hmax, float(max(x, y))) NARROW_BINARY(__hmin, float(min(x, y)))
template <int k> static inline Narrow<k> __hfma(Narrow<k> x, Narrow<k> y, Narrow<k> z) {
  return Narrow<k>(std::fma(float(x), float(y), float(z)));
}
#define NARROW_COMPARE(NAME, OPERATOR) \
  template <int k> static inline bool NAME(Narrow<k> x, Narrow<k> y) { return float(x) OPERATOR float(y); }
NARROW_COMPARE(__hgt, >) NARROW_COMPARE(__hge, >=) NARROW_COMPARE(__hlt, <) NARROW_COMPARE(__hle, <=)
NARROW_COMPARE(__heq, ==) NARROW_COMPARE(__hne, !=)
template <int k> static inline bool __hisnan(Narrow<k> x) { return std::isnan(float(x)); }
#define PAIR_BINARY(NAME, OPERATION) \
  template <int k> static inline Vec2<Narrow<k>> NAME(Vec2<Narrow<k>> a, Vec2<Narrow<k>> b) { \
    return {OPERATION(a.x, b.x), OPERATION(a.y, b.y)}; }
PAIR_BINARY(__hadd2, __hadd) PAIR_BINARY(__hsub2, __hsub) PAIR_BINARY(__hmul2, __hmul) PAIR_BINARY(__h2div, __hdiv)
PAIR_BINARY(__hmax2, __hmax) PAIR_BINARY(__hmin2, __hmin) PAIR_BINARY(operator+, __hadd)
PAIR_BINARY(operator-, __hsub) PAIR_BINARY(operator*, __hmul) PAIR_BINARY(operator/, __hdiv)
template <int k> static inline Vec2<Narrow<k>> __hfma2(Vec2<Narrow<k>> a, Vec2<Narrow<k>> b, Vec2<Narrow<k>> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <int k> static inline Narrow<k> __low2half(Vec2<Narrow<k>> a) { return a.x; }
template <int k> static inline Narrow<k> __high2half(Vec2<Narrow<k>> a) { return a.y; }
template <int k> static inline float __low2float(Vec2<Narrow<k>> a) { return float(a.x); }
template <int k> static inline float __high2float(Vec2<Narrow<k>> a) { return float(a.y); }
static inline half2 __halves2half2(half x, half y) { return {x, y}; }
static inline half2 __half2half2(half x) { return {x, x}; }
static inline half2 __float2half2_rn(float x) { return {half(x), half(x)}; }
static inline half2 __floats2half2_rn(float x, float y) { return {half(x), half(y)}; }
static inline half2 __float22half2_rn(float2 a) { return {half(a.x), half(a.y)}; }
static inline float2 __half22float2(half2 a) { return {float(a.x), float(a.y)}; }
static inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
static inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 x) { return {x, x}; }
static inline nv_bfloat162 __float2bfloat162_rn(float x) { return {nv_bfloat16(x), nv_bfloat16(x)}; }
static inline nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {nv_bfloat16(x), nv_bfloat16(y)}; }
static inline nv_bfloat162 __float22bfloat162_rn(float2 a) { return {nv_bfloat16(a.x), nv_bfloat16(a.y)}; }
static inline float2 __bfloat1622float2(nv_bfloat162 a) { return {float(a.x), float(a.y)}; }
template <int k> static inline unsigned Pack(Narrow<k> x, Narrow<k> y) { return (uint(y.bits) << 16) | x.bits; }
static inline unsigned __pack_half2(half x, half y) { return Pack(x, y); }
static inline unsigned __pack_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return Pack(x, y); }

#define CUDART_INF_F INFINITY
#define CUDART_INF double(INFINITY)
#define CUDART_NAN_F NAN
#define CUDART_NAN double(NAN)
// Fast forms give the accurate value here, but for those that --use_fast_math makes much worse or wrong.
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float fdividef(float x, float y) { return x / y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline float rcbrtf(float x) { return 1.0f / std::cbrt(x); }
static inline float normcdff(float x) { return 0.5f * std::erfc(-x * 0.70710678f); }
// The C library declares functions of these names itself.
#define __expf expf
#define __exp10f(x) std::pow(10.0f, x)
#define exp10f(x) std::pow(10.0f, x)
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf FastPow
#define powf FastPow
#define __sinf FastSin
#define sinf FastSin
#define __cosf FastCos
#define cosf FastCos
#define __tanf FastTan
#define tanf FastTan
#define __tanhf FastTanh
#define tanhf FastTanh
template <typename To, typename From> static inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From)); To to; std::memcpy(&to, &from, sizeof to); return to;
}
static inline int __float_as_int(float x) { return BitCast<int>(x); }
static inline uint __float_as_uint(float x) { return BitCast<uint>(x); }
static inline float __int_as_float(int x) { return BitCast<float>(x); }
static inline float __uint_as_float(uint x) { return BitCast<float>(x); }
static inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
static inline int __float2int_rz(float x) { return int(x); }
static inline float __int2float_rn(int x) { return float(x); }
static inline int __popc(uint x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline uint __umulhi(uint x, uint y) { return uint(ulonglong(x) * y >> 32); }
static inline int __mulhi(int x, int y) { return int(longlong(x) * y >> 32); }
template <typename T> static inline T __ldg(const T* at) { return *at; }
template <typename T> static inline T __ldcs(const T* at) { return *at; }
template <typename T> static inline T __ldcg(const T* at) { return *at; }
template <typename T> static inline void __stcs(T* at, T value) { *at = value; }
template <typename T> static inline void __stcg(T* at, T value) { *at = value; }
"""

_THREADS = r"""
#define threadIdx (simt::ThreadIndex())
#define blockIdx (simt::BlockIndex())
#define blockDim (simt::BlockSize())
#define gridDim (simt::GridSize())
static const int warpSize = 32;
template <typename T> using Plain = T;
static inline void __syncthreads(LINE) { simt::Barrier(line); }
static inline void __syncwarp(unsigned mask = 0xffffffffu, LINE) { simt::WarpBarrier(mask, line); }
// For device functions: with the line of their call, and checks of operands whose arrays the compiler knows.
static inline void SimtSync_threads(int line) { simt::Barrier(line); }
static inline void SimtSync_warp(int line) { simt::WarpBarrier(0xffffffffu, line); }
#define ROOM(ARRAY, COUNT) \
  if (long room = long(__builtin_object_size(ARRAY, 0)); room >= 0 && room < long(COUNT * sizeof(*ARRAY))) \
    simt::Outside(int(COUNT * sizeof(*ARRAY)), room, line)
template <typename To, typename From> static inline To SimtCast(From value) {
  static_assert(sizeof(From) == 4); To to; std::memcpy(&to, &value, 4); return to;
}
template <typename T, typename From> static inline void SimtSet(T& to, From value) { std::memcpy(&to, &value, 4); }
static inline size_t __cvta_generic_to_shared(const void* pointer) { return simt::Offset(pointer); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline unsigned __activemask() { return simt::ActiveLanes(); }
static inline int Lane() {
  const simt::Dim3 i = simt::ThreadIndex(), size = simt::BlockSize(); return ((i.z * size.y + i.y) * size.x + i.x) & 31;
}
template <typename T> static inline T Exchange(unsigned mask, T value, int from, const char* name, int line) {
  static_assert(sizeof(T) <= 16);
  T result; simt::Shuffle(&result, &value, sizeof(T), from, mask, name, line); return result;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, LINE) {
  return Exchange(mask, value, (Lane() & ~(width - 1)) | (lane & (width - 1)), "__shfl_sync", line);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, LINE) {
  int lane = Lane(), from = lane + int(delta);
  return Exchange(mask, value, (from & ~(width - 1)) == (lane & ~(width - 1)) ? from : lane, "__shfl_down_sync", line);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, LINE) {
  int lane = Lane(), from = lane - int(delta);
  return Exchange(mask, value, from >= (lane & ~(width - 1)) ? from : lane, "__shfl_up_sync", line);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, LINE) {
  int lane = Lane(), from = lane ^ bits;  // a lane of a later part of the warp is out of reach
  return Exchange(mask, value, from < (lane & ~(width - 1)) + width ? from : lane, "__shfl_xor_sync", line);
}
static inline unsigned __ballot_sync(unsigned mask, int vote, LINE) { return simt::Ballot(vote != 0, mask, line); }
static inline int __any_sync(unsigned mask, int vote, LINE) { return simt::Ballot(vote != 0, mask, line) != 0; }
static inline int __all_sync(unsigned mask, int vote, LINE) { return simt::Ballot(vote == 0, mask, line) == 0; }
#define ATOMIC(NAME, RESULT) \
  template <typename T> __attribute__((no_sanitize("thread"), noinline)) T NAME(T* at, std::common_type_t<T> value) { \
    simt::Atomic(at, sizeof(T)); const T old = *at; *at = RESULT; return old; }
ATOMIC(atomicAdd, T(old + value))
ATOMIC(atomicMax, (old < value ? value : old)) ATOMIC(atomicMin, (value < old ? value : old))
ATOMIC(atomicExch, value) ATOMIC(atomicOr, T(old | value)) ATOMIC(atomicAnd, T(old & value))
template <typename T> __attribute__((no_sanitize("thread"), noinline))
T atomicCAS(T* at, std::common_type_t<T> compare, std::common_type_t<T> value) {
  simt::Atomic(at, sizeof(T)); const T old = *at; if (old == compare) *at = value; return old;
}
"""

#: What a kernel's code is compiled with.
SHIM = INTERFACE + _NARROW + _MATH + _THREADS
