"""C++ that runs the threads of a block, or of the blocks of a cluster, on the CPU.

Threads are fibers. One runs until it meets a barrier or an instruction of its warp. Compiled once, and linked to every
kernel (see ``_cuda_build``).
"""

from ._cuda_bulk import BULK
from ._cuda_memory import INTERFACE, MEMORY
from ._cuda_warpgroups import WARPGROUPS
from ._cuda_warps import WARPS

_LAUNCH = r"""
static Body body; static void** arguments;
// A variable that nobody sets holds NaN, not what a thread before left on the stack.
static void __attribute__((noinline)) Smear() {
  char waste[8192]; std::memset(waste, 0xff, sizeof waste); asm volatile("" :: "r"(waste) : "memory");
}
static void Entry() {
  Fiber* self = current;
  if (!_setjmp(self->jump)) _longjmp(scheduler, 1);
  while (true) {
    Smear();
    body(arguments);
    if (self->block->remote >= self->waits)
      Fail({0, nullptr}, "the block may end before another block of the cluster has used its shared memory");
    self->state = kEnded; self->block->ended = true; MyWarp().alive &= ~(1u << self->lane);
    Yield();  // until the next block
  }
}
static bool Resume(Fiber& fiber) {  // whether it failed
  current = &fiber;
  const int code = _setjmp(scheduler);
  if (code) return code == 2;
  if (!started) setcontext(&fiber.start);
  _longjmp(fiber.jump, 1);
}
// Whether one thread waits for another.
static bool Lacks(const Fiber& fiber, const Fiber& other) {
  if (fiber.state == kAtBarrier) return other.block == fiber.block && other.state != kAtBarrier;
  if (fiber.state == kAtClusterBarrier) return other.state != kEnded && other.arrivals <= fiber.waits;
  if (fiber.post.op == kWarpgroup && other.warp != fiber.warp)
    return other.block == fiber.block && FirstOfGroup(other.warp) == FirstOfGroup(fiber.warp) && !AtWarpgroup(other);
  return other.warp == fiber.warp && (Needed(fiber) >> other.lane & 1) && other.state != kAtWarp;
}
static int Explain() {
  for (const Fiber& fiber : fibers) {
    if (fiber.state == kEnded) continue;
    if (fiber.state == kAtPhase) return ExplainPhase(fiber);
    const char* what = fiber.state == kAtBarrier ? "a barrier" :
        fiber.state == kAtClusterBarrier ? "a barrier of the cluster" : fiber.post.name;
    for (const Fiber& other : fibers) {
      if (!other.block || !Lacks(fiber, other)) continue;
      const Dim3 i = other.index;
      if (other.state == kEnded)
        return Deadlock(fiber, "%s is not reached by every thread: thread (%u, %u, %u) has ended", what, i.x, i.y, i.z);
      return Deadlock(fiber, "%s is not reached by every thread: thread (%u, %u, %u) waits at %s (line %d)", what,
                      i.x, i.y, i.z, other.state == kAtWarp ? other.post.name : "a barrier", other.line);
    }
  }
  return Deadlock(fibers[0], "a barrier is not reached by every thread");
}
static bool RunReady(bool* progress) {
  const int count = int(warps.size());
  for (int i = 0; i < count; ++i) {
    const int warp = backward ? count - 1 - i : i;
    if (!warps[warp].ready) continue;
    *progress = true;
    if (Resume(Next(warp))) return true;
  }
  return false;
}
// Lanes that ended may have been all that others waited for.
static bool RunLeft(bool* progress) {
  for (Fiber& fiber : fibers) {
    Warp& warp = warps[fiber.warp];
    if (!(warp.waiting >> fiber.lane & 1) || (Needed(fiber) & ~warp.waiting) || AtWarpgroup(fiber)) continue;
    *progress = true; current = &fiber;
    if (_setjmp(scheduler)) return true;
    Agree(fiber.warp, Needed(fiber)); Complete(fiber.warp, Needed(fiber));
  }
  return false;
}
static void Ready(Fiber& fiber) { fiber.state = kRunning; warps[fiber.warp].ready |= 1u << fiber.lane; }
// Lets threads go on from barriers that all have reached; 0 if it fails.
static int PassBarriers(bool* progress) {
  const size_t size = fibers.size() / blocks.size(), threads = block_size.x * block_size.y * block_size.z;
  for (Block& block : blocks) {
    Fiber* first = &fibers[block.rank * size];
    size_t count = 0;
    for (size_t i = 0; i < threads; ++i) count += first[i].state == kAtBarrier;
    if (count != threads) continue;
    for (size_t i = 0; i < threads; ++i) {
      if (first[i].line != first->line)
        return Deadlock(first[i], "a barrier is not reached by every thread: thread (0, 0, 0) waits at another one, of "
                        "line %d", first->line);
      Ready(first[i]);
    }
    TogetherInBlock(first, size);
    block.interval = ++clock_now;
    for (size_t warp = 0; warp < size / 32; ++warp) ++warps[first->warp + warp].order;
    *progress = true;
  }
  for (Fiber& fiber : fibers) {
    if (fiber.state != kAtClusterBarrier || !ClusterArrived(fiber.waits)) continue;
    Ready(fiber); *progress = true;
  }
  return 0;
}
static void StartCluster(const Dim3& cluster, long number) {
  const Dim3 count = {grid_size.x / cluster.x, grid_size.y / cluster.y, grid_size.z / cluster.z};
  const unsigned n = unsigned(number);
  const Dim3 at = {n % count.x * cluster.x, n / count.x % count.y * cluster.y, n / count.x / count.y * cluster.z};
  first_interval = clock_now + 1;
  for (Block& block : blocks) {
    const unsigned r = block.rank;
    block.index = {at.x + r % cluster.x, at.y + r / cluster.x % cluster.y, at.z + r / cluster.x / cluster.y};
    block.interval = ++clock_now; block.remote = 0; block.ended = false;
    std::memset(block.shared + kDynamic, 0xff, dynamic_bytes); std::memset(block.shared + kStatic, 0xff, static_used);
  }
  for (Warp& warp : warps) warp.ready = warp.waiting = warp.alive = 0;
  ForgetBulk();
  for (Fiber& fiber : fibers) if (first_phase < fiber.arrivals + 1) first_phase = fiber.arrivals + 1;
  for (Fiber& fiber : fibers) {
    for (const Copy& copy : fiber.copies)  // never waited for
      for (int i = 0; i < copy.bytes / 2; ++i) shadow[(copy.to - shared) / 2 + i].pending = false;
    ForgetProducts(fiber);
    fiber.copies.clear(); fiber.groups = 0; fiber.arrivals = fiber.waits = first_phase;
    if (!fiber.block) continue;  // fills a warp up
    Ready(fiber); warps[fiber.warp].alive |= 1u << fiber.lane;
  }
}
// Runs every thread up to its next barrier or its end, one warp after the other, until all have ended.
static int RunCluster(const Dim3& cluster, long number) {
  StartCluster(cluster, number);
  while (true) {
    bool progress = false;
    if (RunReady(&progress)) return 1;
    if (progress) continue;
    if (RunLeft(&progress)) return 1;
    if (progress) continue;
    if (PassBarriers(&progress)) return 1;
    if (progress) continue;
    if (PassPhases(&progress)) return 1;
    if (progress) continue;
    for (const Fiber& fiber : fibers) if (fiber.state != kEnded) return Explain();
    return 0;
  }
}
static char* Map(size_t bytes, int rights = PROT_READ | PROT_WRITE) {
  void* at = mmap(nullptr, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}
static char* MapThreads(size_t count) {
  const size_t threads = block_size.x * block_size.y * block_size.z, size = (threads + 31) / 32 * 32;
  shared = Map(count * kSharedArea);
  shadow = reinterpret_cast<Shadow*>(Map(count * (kSharedArea / 2) * sizeof(Shadow)));
  char* stacks = Map(count * size * kStack);
  if (!shared || !shadow || !stacks) return nullptr;
  blocks.assign(count, Block());
  fibers.clear(); fibers.resize(count * size); warps.assign(count * size / 32, Warp());
  for (size_t i = 0; i < count; ++i) { blocks[i].rank = int(i); blocks[i].shared = shared + i * kSharedArea; }
  started = false;
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    const unsigned n = unsigned(i % size), x = block_size.x, y = block_size.y;
    fiber.index = {n % x, n / x % y, n / x / y};
    fiber.number = int(i); fiber.warp = int(i / 32); fiber.lane = int(i % 32); fiber.state = kEnded;
    if (n >= threads) continue;
    fiber.block = &blocks[i / size];
    fiber.stack = stacks + i * kStack;
    mprotect(fiber.stack, kPage, PROT_NONE);  // a stack that overflows
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack; fiber.start.uc_stack.ss_size = kStack; fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, reinterpret_cast<void (*)()>(Entry), 0);
    Resume(fiber);
  }
  started = true;
  Own({kDynamic, dynamic_bytes, nullptr});
  for (const Variable& variable : variables) Own(variable);
  return stacks;
}
// Arrays are copied to where nothing else is near.
static bool MapArray(void** pointer, long bytes, uint8_t* written) {
  const size_t inner = (bytes + kPage - 1) / kPage * kPage, whole = inner + 2 * kGap;
  char* base = Map(whole, PROT_NONE);
  if (!base) return false;
  mprotect(base + kGap, inner, PROT_READ | PROT_WRITE);
  std::memcpy(base + kGap, *pointer, bytes);
  arrays.push_back({base + kGap, uintptr_t(bytes), written, base, whole});
  *pointer = base + kGap;
  return true;
}
struct Request {
  void** pointers; const long* bytes; uint8_t** written; int count; const int* sizes;  // of grid, block and cluster
  const long* clusters; long cluster_count; int shared_bytes, backward, check_races; char* message; long* place;
};
static Dim3 Size(const int* sizes) { return {unsigned(sizes[0]), unsigned(sizes[1]), unsigned(sizes[2])}; }
static int Launch(Body entry, const Request& request) {
  body = entry; backward = request.backward; check_races = request.check_races;
  message = request.message; place = request.place;
  std::vector<void*> own(request.pointers, request.pointers + request.count);
  arguments = own.data(); arrays.clear();
  grid_size = Size(request.sizes); block_size = Size(request.sizes + 3);
  const Dim3 cluster = Size(request.sizes + 6);
  const size_t count = cluster.x * cluster.y * cluster.z;
  if (kDynamic + size_t(request.shared_bytes) + kApart > kStatic) return 3;
  dynamic_bytes = request.shared_bytes;
  int status = 0;
  for (int i = 0; i < request.count && !status; ++i)
    if (!MapArray(&own[i], request.bytes[i], request.written[i])) status = 2;
  char* stacks = status ? nullptr : MapThreads(count);
  if (!stacks) status = 2;
  for (long i = 0; i < request.cluster_count && !status; ++i) status = RunCluster(cluster, request.clusters[i]);
  for (size_t i = 0; i < arrays.size(); ++i) {
    std::memcpy(request.pointers[i], arrays[i].base, arrays[i].bytes);
    munmap(arrays[i].whole, arrays[i].whole_bytes);
  }
  if (stacks) {
    munmap(stacks, fibers.size() * kStack); munmap(shared, count * kSharedArea);
    munmap(shadow, count * (kSharedArea / 2) * sizeof(Shadow));
  }
  place[2] = long(reinterpret_cast<uintptr_t>(__ehdr_start));
  return status;
}
}  // namespace simt
extern "C" int simt_launch(simt::Body entry, const simt::Request* request) {
  return simt::Launch(entry, *request);
}
"""

#: The compiler's ThreadSanitizer and UndefinedBehaviorSanitizer call these; only their instrumentation is used.
_HOOKS = r"""
#define CALLER {0, __builtin_return_address(0)}
#define HOOK(NAME, BYTES, WRITE) extern "C" void NAME(void* at) { simt::Access(at, BYTES, WRITE, CALLER); }
#define HOOKS(BYTES) \
  HOOK(__tsan_read##BYTES, BYTES, false) HOOK(__tsan_write##BYTES, BYTES, true) \
  HOOK(__tsan_unaligned_read##BYTES, BYTES, false) HOOK(__tsan_unaligned_write##BYTES, BYTES, true) \
  HOOK(__tsan_volatile_read##BYTES, BYTES, false) HOOK(__tsan_volatile_write##BYTES, BYTES, true)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" void __tsan_read_range(void* at, long bytes) { simt::Access(at, int(bytes), false, CALLER); }
extern "C" void __tsan_write_range(void* at, long bytes) { simt::Access(at, int(bytes), true, CALLER); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit(void*) {}
extern "C" void __tsan_init() {}
namespace simt {
struct Place { const char* file; unsigned line, column; };
struct Type { uint16_t kind, info; char name[1]; };
struct Mismatch { Place place; const Type* type; unsigned char log_alignment, kind; };
struct OutOfBounds { Place place; const Type* array; const Type* index; };
}
extern "C" void __ubsan_handle_type_mismatch_v1(simt::Mismatch* data, void* at) {
  simt::Fail({int(data->place.line), nullptr}, "%s at an address that is not aligned to %d bytes", data->type->name,
             1 << data->log_alignment);
}
extern "C" void __ubsan_handle_out_of_bounds(simt::OutOfBounds* data, long index) {
  simt::Fail({int(data->place.line), nullptr}, "index %ld is out of range of %s", index, data->array->name);
}
"""

#: The whole of it.
RUNTIME = INTERFACE + MEMORY + WARPS + WARPGROUPS + BULK + _LAUNCH + _HOOKS
