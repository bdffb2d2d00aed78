"""C++ of the emulated memory: shared and global, asynchronous copies, the check of every access."""

from ._cuda_bulk import BULK_STATE

#: What a kernel's code calls; included by both sides.
INTERFACE = r"""
#include <cstdint>
namespace simt {
struct Dim3 { unsigned x, y, z; };
// Nothing of these changes while a thread runs. Of scalar functions the compiler knows how to call them once.
#define SIMT_INDEX(NAME) \
  unsigned NAME##X() __attribute__((const, nothrow)); unsigned NAME##Y() __attribute__((const, nothrow)); \
  unsigned NAME##Z() __attribute__((const, nothrow)); \
  static inline __attribute__((always_inline)) Dim3 NAME() { return {NAME##X(), NAME##Y(), NAME##Z()}; }
SIMT_INDEX(ThreadIndex) SIMT_INDEX(BlockIndex) SIMT_INDEX(BlockSize) SIMT_INDEX(GridSize)
char* DynamicShared() __attribute__((const, nothrow));
int Reserve(long bytes, const char* name);  // place of a __shared__ variable
char* Shared(int place);
void Barrier(int line);
void ClusterArrive(int line);
void ClusterWait(int line);
unsigned ClusterRank();
void WarpBarrier(unsigned mask, int line);
unsigned ActiveLanes();
void Shuffle(void* result, const void* value, int bytes, int from, unsigned mask, const char* name, int line);
unsigned Ballot(bool vote, unsigned mask, int line);
enum Kind { kHalf, kBfloat16, kTf32 };
void Multiply(Kind kind, float* d, const unsigned* a, const unsigned* b, int line);
// Of a warpgroup: `d` is written, and its bytes are NaN, until the thread waits.
// `across`: 1 if the rows, 2 if the columns lie in memory with the reduction outermost.
void MultiplyWarpgroup(Kind kind, int columns, float* d, uint64_t a, uint64_t b, bool add, int across, int line);
void WarpgroupFence(int line);
void WarpgroupCommit(int line);
void WarpgroupWait(int left, int line);
void ProxyFence();
// A tensor map: of which array, extents, strides in bytes, and the box of a copy.
struct Map { int64_t array, rank, element, swizzle, extents[5], strides[5], boxes[5]; };
void BarrierInit(unsigned at, int count, int line);
void PublishBarriers();
void BarrierArrive(unsigned at, int bytes, int line);
unsigned BarrierWait(unsigned at, int parity, int line);
void BulkLoad(unsigned at, const Map* map, const int* from, int rank, unsigned barrier_at, int line);
void Registers(int line);
// Instructions for shared memory take an address within it; those for a cluster one that MapRank gives as well.
unsigned Offset(const void* pointer);
unsigned MapRank(unsigned at, unsigned rank, int line);
void LoadMatrix(unsigned* fragment, unsigned from, int count, bool transposed, int line);
void CopyAsync(unsigned to, const void* from, int bytes, int read, int line);
void Commit();
void Wait(int left);
void StoreShared(unsigned to, const void* values, int bytes, bool cluster, int line);
void LoadShared(void* values, unsigned from, int bytes, bool cluster, int line);
void Store(void* to, const void* values, int bytes, int line);
void Load(void* values, const void* from, int bytes, int line);
void Outside(int bytes, long room, int line);  // of an array
static inline float RoundTf32(float x, bool even) {  // to nearest; ties to even, or away from zero
  uint32_t bits; __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;  // infinities and NaNs
  bits = (bits + (even ? 0xfffu + (bits >> 13 & 1) : 0x1000u)) & 0xffffe000u;
  __builtin_memcpy(&x, &bits, 4); return x;
}
void Atomic(void* at, int bytes);
typedef void (*Body)(void**);
}
"""

#: Shared and global memory, asynchronous copies, and what is wrong with an access.
MEMORY = (
    r"""
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

namespace simt {
enum Op { kShuffle, kBallot, kWarpBarrier, kMultiply, kLoadMatrix, kAligned, kWarpgroup };
struct Post {  // what a lane brings to an instruction of its warp
  Op op; const char* name; int line; unsigned mask; const void* a; const void* b; void* out; int x, size;
};
struct Copy { char* to; const char* from; int bytes, read, group; };
// Of a warpgroup's matrix instructions: sums of 64 rows, with where its threads have them; the 16-byte pieces of shared
// memory that one reads, and how many threads have not waited for it; what a thread has to wait for.
struct Sums { float* at[128]; int columns; std::vector<float> values; };
struct Seen { int thread; uint32_t release; };  // a use by a thread, before which of its releases (`BULK`)
struct Products {
  int line, left; std::vector<char*> pieces; std::shared_ptr<Sums> sums; std::vector<Seen> waited;
};
struct Pending { std::shared_ptr<Products> products; int group; };
struct ProxyOrder { uint32_t interval, phase; };  // when a thread executed fence.proxy.async
// Of the blocks that run together: `clock` of the last barrier, and the last cluster barrier before which another block
// used its shared memory.
struct Block { Dim3 index; int rank; char* shared; uint32_t interval, remote; bool ended; };
enum State { kRunning, kAtBarrier, kAtClusterBarrier, kAtWarp, kAtPhase, kEnded };
struct Fiber {
  jmp_buf jump; ucontext_t start; Dim3 index; Block* block; int number, warp, lane; char* stack; State state; int line;
  Post post; std::vector<Copy> copies; int groups; uint32_t arrivals, waits;  // at cluster barriers
  std::vector<Pending> products; int product_groups; std::vector<ProxyOrder> proxy_fences;
  int barrier, parity; std::vector<uint32_t> clock;  // an mbarrier that it waits for; see `BULK`
  bool fenced; std::vector<std::shared_ptr<Sums>> done;  // wgmma.fence since the last wait; sums that it waited for
};
// Lanes that can run, that wait for an instruction of the warp, that have not ended; `order` counts warp barriers.
struct Warp { unsigned ready, waiting, alive; uint32_t order; };
struct Array { char* base; uintptr_t bytes; uint8_t* written; char* whole; size_t whole_bytes; };
// Who used two bytes of shared memory last: the interval of the block, the count of the warp's and of the cluster's
// barriers. A reader is a thread, or -1 for several, or -2 - warp for several of it; -1 is several blocks. The writer's
// number of proxy fences then; how many matrix instructions of warpgroups read it.
struct Shadow {
  uint32_t written, write_order, write_phase, read, read_order, read_phase; int16_t writer, reader;
  int8_t writer_block, reader_block; bool valid, pending; uint16_t held; uint32_t proxy_fences;
};

// Dynamic shared memory of a block, then its variables; both larger than hardware has. The first is aligned to no more
// than what matrix instructions and banks need, as with CUDA.
static const size_t kSharedArea = 1 << 19, kStatic = kSharedArea / 2, kApart = 256, kDynamic = 256;
static const size_t kStack = 1 << 17, kPage = 4096, kGap = 1 << 26;
static std::vector<Block> blocks;
static std::vector<Fiber> fibers;  // those of a block from a multiple of 32 on
static std::vector<Warp> warps;
static std::vector<Array> arrays;
static Shadow* shadow;
static char* shared;
static size_t static_used, dynamic_bytes;
struct Variable { size_t first, bytes; const char* name; };
static std::vector<Variable> variables;
static uint32_t clock_now, first_phase;  // count barriers of blocks and of clusters
static uint32_t first_interval;  // of these blocks
static jmp_buf scheduler;
static Fiber* current;
static Dim3 block_size, grid_size;
static bool backward, check_races, started;
static char* message; static long* place;

static void Report(const Fiber& who, int line, const void* code, const char* format, va_list values) {
  const Dim3 b = who.block->index, i = who.index;
  int used = snprintf(message, 512, "block (%u, %u, %u), thread (%u, %u, %u): ", b.x, b.y, b.z, i.x, i.y, i.z);
  vsnprintf(message + used, 512 - used, format, values);
  place[0] = line; place[1] = long(reinterpret_cast<uintptr_t>(code));
}
// Where an access comes from: a line, or the address of the code behind it.
struct Where { int line; const void* code; };
[[noreturn]] static void Fail(Where where, const char* format, ...) {
  va_list values; va_start(values, format); Report(*current, where.line, where.code, format, values); va_end(values);
  _longjmp(scheduler, 2);
}
static int Deadlock(const Fiber& who, const char* format, ...) {
  va_list values; va_start(values, format); Report(who, who.line, nullptr, format, values); va_end(values);
  return 1;
}

// Whether nothing orders an access of another thread before what this one does.
static bool Unordered(int other, int block, uint32_t interval, uint32_t order, uint32_t phase) {
  if (phase < current->waits) return false;  // a barrier of the cluster does
  if (block != current->block->rank) return true;
  if (interval != current->block->interval || other == current->number) return false;
  return other / 32 != current->warp || order >= warps[current->warp].order;
}
static bool ReadByOthers(const Shadow& s) {
  if (s.read_phase < current->waits) return false;
  if (s.reader_block != current->block->rank) return true;
  if (s.reader >= 0) return Unordered(s.reader, s.reader_block, s.read, s.read_order, s.read_phase);
  if (s.read != current->block->interval) return false;
  return s.reader == -1 || -2 - s.reader != current->warp || s.read_order >= warps[current->warp].order;
}
static void MarkWritten(Shadow* s) {
  s->written = current->block->interval; s->writer = int16_t(current->number);
  s->writer_block = int8_t(current->block->rank);
  s->write_order = warps[current->warp].order; s->write_phase = current->arrivals;
  s->proxy_fences = uint32_t(current->proxy_fences.size());
}
static void MarkRead(Shadow* s) {
  const int rank = current->block->rank;
  if (s->reader_block != rank && s->read_phase >= current->waits) {
    s->reader_block = -1;
  } else if (s->read != current->block->interval || s->reader == current->number) {
    s->reader = int16_t(current->number); s->reader_block = int8_t(rank);
  } else {
    const int warp = s->reader >= 0 ? s->reader / 32 : -2 - s->reader;
    s->reader = int16_t(warp == current->warp ? -2 - warp : -1);
  }
  s->read = current->block->interval; s->read_order = warps[current->warp].order; s->read_phase = current->arrivals;
}
// Threads and warps by their number in their block.
static int InBlock(int thread) { return thread % int(fibers.size() / blocks.size()); }
static int WarpInBlock(int warp) { return warp % int(warps.size() / blocks.size()); }
static int FirstOfGroup(int warp) { return warp - WarpInBlock(warp) % 4; }
static int LaneInGroup(const Fiber& fiber) { return WarpInBlock(fiber.warp) % 4 * 32 + fiber.lane; }
// What a message calls a byte of shared memory.
static const char* Name(uintptr_t offset) {
  offset %= kSharedArea;
  static char text[128];
  Variable found = {kDynamic, 0, "dynamic shared memory"};
  for (const Variable& variable : variables) if (variable.first <= offset) found = variable;
  snprintf(text, sizeof text, "byte %ld of %s", long(offset - found.first), found.name);
  return text;
}
[[noreturn]] static void FailRace(const Shadow& s, bool write, const char* what, Where where) {
  const char* done = write ? "written" : "read";
  if (s.pending)
    Fail(where, "%s %s while an asynchronous copy of thread %d writes it (no wait yet)", what, done, InBlock(s.writer));
  if (Unordered(s.writer, s.writer_block, s.written, s.write_order, s.write_phase)) {
    if (s.writer_block == current->block->rank)
      Fail(where, "%s %s without a barrier after thread %d wrote it", what, done, InBlock(s.writer));
    Fail(where, "%s %s without a barrier of the cluster after thread %d of block %d of it wrote it", what, done,
         InBlock(s.writer), s.writer_block);
  }
  if (s.reader_block != current->block->rank)
    Fail(where, "%s written without a barrier of the cluster after another block read it", what);
  if (s.reader >= 0) Fail(where, "%s written without a barrier after thread %d read it", what, InBlock(s.reader));
  if (s.reader == -1) Fail(where, "%s written without a barrier after several warps read it", what);
  Fail(where, "%s written without a barrier after warp %d read it", what, WarpInBlock(-2 - s.reader));
}
[[noreturn]] static void FailHeld(const char* at, const char* what, Where where) {
  int line = 0;
  for (const Fiber& fiber : fibers)
    for (const Pending& pending : fiber.products)
      for (const char* piece : pending.products->pieces)
        if (uintptr_t(at - piece) < 16) line = pending.products->line;
  Fail(where, "%s written while wgmma of line %d reads it (not every thread has waited)", what, line);
}
"""
    + BULK_STATE
    + r"""
static void Touch(const void* at, int bytes, bool write, Where where) {
  const uintptr_t offset = static_cast<const char*>(at) - shared;
  for (Shadow* s = shadow + offset / 2, *end = shadow + (offset + bytes + 1) / 2; s < end; ++s) {
    const uintptr_t byte = (s - shadow) * 2;
    if (!s->valid) Fail(where, "%s %s, which is out of range", Name(byte), write ? "written" : "read");
    if (!check_races || bytes == 1) continue;
    if (write && s->held) FailHeld(shared + byte, Name(byte), where);
    if (Piece* piece = PieceOf(s); piece && piece->bulk) {
      TouchBulk(piece, Name(byte), write, where);
      if (!write) continue;
      MarkWritten(s); MarkRead(s);
      continue;
    }
    if (s->pending || Unordered(s->writer, s->writer_block, s->written, s->write_order, s->write_phase) ||
        (write && ReadByOthers(*s))) FailRace(*s, write, Name(byte), where);
    if (write) MarkWritten(s); else MarkRead(s);
  }
}
static Array* Find(const void* at, uintptr_t bytes) {
  static size_t last = 0;
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (last >= arrays.size()) last = 0;
    Array& array = arrays[last];
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(array.base);
    if (offset < array.bytes && offset + bytes <= array.bytes) return &array;
    ++last;
  }
  return nullptr;
}
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];
static bool InShared(const void* at) {
  return uintptr_t(static_cast<const char*>(at) - current->block->shared) < kSharedArea;
}
// Registers that a thread has given to matrix instructions of its warpgroup.
static void CheckSums(const void* at, int bytes, bool write, Where where) {
  for (const Pending& pending : current->products) {
    const Sums& sums = *pending.products->sums;
    const long offset = static_cast<const char*>(at) - reinterpret_cast<char*>(sums.at[LaneInGroup(*current)]);
    if (check_races && offset < 2 * sums.columns && offset + bytes > 0)
      Fail(where, "sums %s while wgmma of line %d computes them (no wait yet)", write ? "written" : "read",
           pending.products->line);
  }
}
static inline void Access(const void* at, int bytes, bool write, Where where) {
  if (uintptr_t(static_cast<const char*>(at) - current->stack) < kStack) {
    if (!current->products.empty()) CheckSums(at, bytes, write, where);
    return;
  }
  if (InShared(at)) return Touch(at, bytes, write, where);
  if (Array* array = Find(at, bytes)) {
    if (write) std::memset(array->written + (static_cast<const char*>(at) - array->base), 1, bytes);
    return;
  }
  // Constants and variables of the kernel's code.
  if (at >= __ehdr_start && at < _end) return;
  const Array* nearest = nullptr;
  for (const Array& array : arrays)
    if (static_cast<const char*>(at) >= array.whole && static_cast<const char*>(at) < array.whole + array.whole_bytes)
      nearest = &array;
  if (!nearest) Fail(where, "memory %s at an address of no array", write ? "written" : "read");
  Fail(where, "{%d} %s out of range: byte %ld of %zu", int(nearest - arrays.data()), write ? "written" : "read",
       long(static_cast<const char*>(at) - nearest->base), size_t(nearest->bytes));
}
unsigned Offset(const void* pointer) { return unsigned(static_cast<const char*>(pointer) - current->block->shared); }
unsigned MapRank(unsigned at, unsigned rank, int line) {
  if (rank >= blocks.size())
    Fail({line, nullptr}, "a cluster of %zu blocks has none of number %u", blocks.size(), rank);
  return (at & 0xffffff) | (rank + 1) << 24;
}
// The shared memory of another block is there for sure only behind a barrier of the cluster, and before its last one.
static char* Remote(unsigned rank, const char* name, int line) {
  Block& block = blocks[rank];
  if (&block == current->block) return block.shared;
  const Where where = {line, nullptr};
  if (current->waits == first_phase)
    Fail(where, "%s: block %u of the cluster may not have started (no barrier of the cluster yet)", name, rank);
  if (block.ended) Fail(where, "%s: block %u of the cluster may have ended", name, rank);
  if (block.remote < current->arrivals) block.remote = current->arrivals;
  return block.shared;
}
static char* CheckShared(unsigned at, int bytes, const char* name, int line, bool cluster = false) {
  const unsigned rank = at >> 24, offset = at & 0xffffff;
  if (offset + bytes > kSharedArea || (rank && (!cluster || rank > blocks.size())))
    Fail({line, nullptr}, "%s: the address is not in shared memory", name);
  if (offset % bytes) Fail({line, nullptr}, "%s: %s is not aligned to %d bytes", name, Name(offset), bytes);
  return (rank ? Remote(rank - 1, name, line) : current->block->shared) + offset;
}
static void CheckGlobal(const void* at, int bytes, const char* name, int line) {
  if (reinterpret_cast<uintptr_t>(at) % bytes)
    Fail({line, nullptr}, "%s: an address in global memory is not aligned to %d bytes", name, bytes);
}
void Outside(int bytes, long room, int line) {
  Fail({line, nullptr}, "operands of %d bytes where their array has %ld", bytes, room);
}
void Atomic(void* at, int bytes) {  // atomic accesses do not race with each other
  const bool races = check_races; check_races = false;
  Access(at, bytes, true, {0, __builtin_return_address(0)});
  check_races = races;
}

static void Own(const Variable& variable) {
  for (const Block& block : blocks) {
    std::memset(block.shared + variable.first, 0xff, variable.bytes);
    Shadow* first = shadow + (block.shared - shared + variable.first) / 2;
    for (size_t i = 0; i < (variable.bytes + 1) / 2; ++i) first[i].valid = true;
  }
}
// Variables keep their place for the life of the code.
int Reserve(long bytes, const char* name) {
  const size_t first = kStatic + static_used;
  static_used += (bytes + kApart - 1) / kApart * kApart + kApart;
  if (kStatic + static_used > kSharedArea) Fail({0, nullptr}, "more shared memory than is emulated");
  variables.push_back({first, size_t(bytes), name});
  Own(variables.back());
  return int(first);
}
char* Shared(int at) { return current->block->shared + at; }
char* DynamicShared() { return current->block->shared + kDynamic; }

// A copy is in nobody's hands from its issue on: its bytes hold NaN until its thread waits for it.
void CopyAsync(unsigned at, const void* from, int bytes, int read, int line) {
  char* to = CheckShared(at, bytes, "cp.async", line);
  CheckGlobal(from, bytes, "cp.async", line);
  if (read < 0 || read > bytes) Fail({line, nullptr}, "cp.async: %d bytes to be read of %d", read, bytes);
  if (read && !Find(from, read)) Access(from, read, false, {line, nullptr});
  Touch(to, bytes, true, {line, nullptr});
  for (Shadow* s = shadow + (to - shared) / 2, *end = s + bytes / 2; s < end; ++s) {
    s->pending = true; s->writer = int16_t(current->number);
  }
  std::memset(to, 0xff, bytes);
  current->copies.push_back({to, static_cast<const char*>(from), bytes, read, current->groups});
}
void Commit() { ++current->groups; }
void Wait(int left) {
  size_t count = 0;
  for (; count < current->copies.size() && current->copies[count].group < current->groups - left; ++count) {
    const Copy& copy = current->copies[count];
    std::memset(copy.to, 0, copy.bytes); std::memcpy(copy.to, copy.from, copy.read);
    for (Shadow* s = shadow + (copy.to - shared) / 2, *end = s + copy.bytes / 2; s < end; ++s) {
      s->pending = false; MarkWritten(s);
    }
  }
  current->copies.erase(current->copies.begin(), current->copies.begin() + count);
}
void StoreShared(unsigned at, const void* values, int bytes, bool cluster, int line) {
  char* to = CheckShared(at, bytes, "st.shared", line, cluster);
  Touch(to, bytes, true, {line, nullptr}); std::memcpy(to, values, bytes);
}
void LoadShared(void* values, unsigned at, int bytes, bool cluster, int line) {
  const char* from = CheckShared(at, bytes, "ld.shared", line, cluster);
  Touch(from, bytes, false, {line, nullptr}); std::memcpy(values, from, bytes);
}
void Store(void* to, const void* values, int bytes, int line) {
  CheckGlobal(to, bytes, "st.global", line);
  Access(to, bytes, true, {line, nullptr}); std::memcpy(to, values, bytes);
}
void Load(void* values, const void* from, int bytes, int line) {
  CheckGlobal(from, bytes, "ld.global", line);
  Access(from, bytes, false, {line, nullptr}); std::memcpy(values, from, bytes);
}
"""
)
