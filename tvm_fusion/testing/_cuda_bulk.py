"""C++ of the emulated copy engine (TMA) and of barriers in shared memory (``mbarrier``).

A copy arrives as late as it may: when no thread can go on without it, the oldest first, or with threads in reverse
order the newest. From its issue on, its bytes hold NaN. Who may use what it writes, and when it may be written again,
follows from what a thread has seen: every thread has a *clock* with the last release of every other thread that is
ordered before it (by arrivals and waits, barriers of the block and of warps), and the phases whose end it knows.
"""

#: What `MEMORY` needs of the below.
BULK_STATE = r"""
// Of 16 bytes that a copy has written: the barrier's phase that it ends, and who read them.
struct Piece {
  bool bulk; int barrier; uint32_t phase;
  std::vector<std::shared_ptr<Products>> products; std::vector<Seen> readers;
};
static std::vector<Piece> pieces;  // none before the first barrier
static const int kMostBarriers = 64;
static Piece* PieceOf(const Shadow* s) { return pieces.empty() ? nullptr : &pieces[(s - shadow) / 8]; }
static void TouchBulk(Piece* piece, const char* what, bool write, Where where);
"""

#: Barriers in shared memory, copies, what threads know of each other.
BULK = r"""
typedef std::vector<uint32_t> Clock;
struct MBarrier {
  int block; unsigned at; int count, pending; long bytes; uint32_t phase; int maker; uint32_t made; bool published;
  Clock gathered, released;
};
struct BulkCopy { char* to; unsigned at; Map map; int from[5]; int barrier, bytes, line; };
static std::vector<MBarrier> barriers;
static std::vector<BulkCopy> bulk_copies;  // under way
static void Join(Clock* one, const Clock& other) {
  for (size_t i = 0; i < one->size(); ++i) if ((*one)[i] < other[i]) (*one)[i] = other[i];
}
static void Together(Fiber* first, size_t count, const std::vector<bool>& takes_part) {
  if (pieces.empty()) return;
  Clock all(fibers.size() + kMostBarriers);
  for (size_t i = 0; i < count; ++i) if (takes_part[i]) Join(&all, first[i].clock);
  for (size_t i = 0; i < count; ++i)
    if (takes_part[i]) { first[i].clock = all; ++first[i].clock[first[i].number]; }
}
static void TogetherInBlock(Fiber* first, size_t count) { Together(first, count, std::vector<bool>(count, true)); }
static void TogetherInWarp(Fiber* first, unsigned lanes) {
  std::vector<bool> takes_part(32);
  for (int lane = 0; lane < 32; ++lane) takes_part[lane] = lanes >> lane & 1;
  Together(first, 32, takes_part);
}
static void ForgetBulk() { barriers.clear(); bulk_copies.clear(); pieces.clear(); }
static void StartClocks() {
  if (!pieces.empty()) return;
  pieces.resize(blocks.size() * (kSharedArea / 16));
  for (Fiber& fiber : fibers) {
    fiber.clock.assign(fibers.size() + kMostBarriers, 0); fiber.clock[fiber.number] = 1;
  }
}
static MBarrier* FindBarrier(unsigned at) {
  for (MBarrier& barrier : barriers) if (barrier.block == current->block->rank && barrier.at == at) return &barrier;
  return nullptr;
}
static MBarrier& BarrierAt(unsigned at, const char* name, int line) {
  const Where where = {line, nullptr};
  CheckShared(at, 8, name, line);
  MBarrier* found = FindBarrier(at);
  if (!found) Fail(where, "%s: no mbarrier.init of %s", name, Name(at));
  if (found->maker != current->number && current->clock[found->maker] < found->made)
    Fail(where, "%s without a barrier after thread %d made the mbarrier", name, InBlock(found->maker));
  return *found;
}
void BarrierInit(unsigned at, int count, int line) {
  const Where where = {line, nullptr};
  Touch(CheckShared(at, 8, "mbarrier.init", line), 8, true, where);
  StartClocks();
  if (FindBarrier(at)) Fail(where, "mbarrier.init of %s, which is one already", Name(at));
  if (count < 1) Fail(where, "mbarrier.init for %d arrivals", count);
  if (barriers.size() == size_t(kMostBarriers)) Fail(where, "more than %d mbarriers are not emulated", kMostBarriers);
  barriers.push_back({current->block->rank, at, count, count, 0, 0, current->number,
                      current->clock[current->number], false,
                      Clock(fibers.size() + kMostBarriers), Clock(fibers.size() + kMostBarriers)});
}
// The copy engine sees barriers that their thread has fenced.
void PublishBarriers() {
  for (MBarrier& barrier : barriers) if (barrier.maker == current->number) barrier.published = true;
}
static void EndPhase(MBarrier* barrier) {
  if (barrier->pending || barrier->bytes) return;
  barrier->gathered[fibers.size() + (barrier - barriers.data())] = ++barrier->phase;
  Join(&barrier->released, barrier->gathered);
  std::fill(barrier->gathered.begin(), barrier->gathered.end(), 0);
  barrier->pending = barrier->count;
}
void BarrierArrive(unsigned at, int bytes, int line) {
  MBarrier& barrier = BarrierAt(at, "mbarrier.arrive", line);
  if (!barrier.pending)
    Fail({line, nullptr}, "mbarrier.arrive at %s more than %d times in a phase", Name(at), barrier.count);
  barrier.bytes += bytes; --barrier.pending;
  Join(&barrier.gathered, current->clock);
  ++current->clock[current->number];
  EndPhase(&barrier);
}
static bool PhaseIsOver(const Fiber& fiber) {
  return (barriers[fiber.barrier].phase & 1) != unsigned(fiber.parity);
}
unsigned BarrierWait(unsigned at, int parity, int line) {
  MBarrier& barrier = BarrierAt(at, "mbarrier.try_wait", line);
  if (parity != 0 && parity != 1) Fail({line, nullptr}, "mbarrier.try_wait for parity %d", parity);
  current->barrier = int(&barrier - barriers.data()); current->parity = parity;
  if (!PhaseIsOver(*current)) { current->state = kAtPhase; current->line = line; Yield(); }
  Join(&current->clock, barriers[current->barrier].released);
  return 1;
}
// Whether what a copy wrote is there for a thread.
static bool HasArrived(const Piece& piece, const Fiber& fiber) {
  return fiber.clock[fibers.size() + piece.barrier] > piece.phase;
}
static void CheckReaders(const Piece& piece, const char* what, const char* by, Where where) {
  const auto check = [&](const Seen& reader) {
    if (reader.thread != current->number && current->clock[reader.thread] < reader.release)
      Fail(where, "%s written by %s while thread %d may still read it (no arrival of it that is waited for)", what, by,
           InBlock(reader.thread));
  };
  for (const auto& products : piece.products) for (const Seen& reader : products->waited) check(reader);
  for (const Seen& reader : piece.readers) check(reader);
}
static void TouchBulk(Piece* piece, const char* what, bool write, Where where) {
  if (!HasArrived(*piece, *current))
    Fail(where, "%s %s before the thread has waited for the copy that writes it", what, write ? "written" : "read");
  const Seen own = {current->number, current->clock[current->number]};
  if (!write) {
    if (piece->readers.empty() || piece->readers.back().thread != own.thread) piece->readers.push_back(own);
    else piece->readers.back() = own;
    return;
  }
  CheckReaders(*piece, what, "a thread", where);
  piece->bulk = false; piece->products.clear(); piece->readers.clear();
}
// All threads of the warpgroup have to know that the copy has arrived.
static void TouchOperandBulk(Piece* piece, const std::shared_ptr<Products>& products, const char* what) {
  const Fiber* lanes = &fibers[FirstOfGroup(current->warp) * 32];
  for (int lane = 0; lane < 128; ++lane)
    if (check_races && !HasArrived(*piece, lanes[lane]))
      Fail({products->line, nullptr}, "wgmma reads %s before thread %d has waited for the copy that writes it", what,
           InBlock(lanes[lane].number));
  if (piece->products.empty() || piece->products.back() != products) piece->products.push_back(products);
}
void BulkLoad(unsigned at, const Map* map, const int* from, int rank, unsigned barrier_at, int line) {
  const Where where = {line, nullptr};
  const char* name = "cp.async.bulk.tensor";
  if (map->rank != rank) Fail(where, "%s of %d axes with a map of %d", name, rank, int(map->rank));
  MBarrier& barrier = BarrierAt(barrier_at, name, line);
  if (!barrier.published) Fail(where, "%s: no fence after mbarrier.init of %s", name, Name(barrier_at));
  int bytes = int(map->element);
  for (int i = 0; i < rank; ++i) bytes *= int(map->boxes[i]);
  CheckShared(at & ~127u, 128, name, line);
  if (at % 128) Fail(where, "%s: %s is not aligned to 128 bytes", name, Name(at));
  if (at + bytes > kSharedArea) Fail(where, "%s: the box ends outside of shared memory", name);
  const int index = int(&barrier - barriers.data());
  char* to = current->block->shared + at;
  for (int place = 0; place < bytes; place += 16) {
    Shadow* s = shadow + (to + place - shared) / 2;
    Piece* piece = PieceOf(s);
    const char* what = Name(at + place);
    if (!s->valid) Fail(where, "%s writes %s, which is out of range", name, what);
    if (check_races) {
      if (s->held) FailHeld(to + place, what, where);
      if (!piece->bulk) {
        for (int i = 0; i < 8; ++i)
          if (s[i].pending || ReadByOthers(s[i]) ||
              Unordered(s[i].writer, s[i].writer_block, s[i].written, s[i].write_order, s[i].write_phase))
            FailRace(s[i], true, what, where);
      } else {
        if (!HasArrived(*piece, *current)) Fail(where, "%s written by a copy while another is on its way there", what);
        CheckReaders(*piece, what, "a copy", where);
      }
    }
    *piece = {true, index, barrier.phase, {}, {}};
  }
  std::memset(to, 0xff, bytes);
  BulkCopy copy = {to, at, *map, {}, index, bytes, line};
  for (int i = 0; i < rank; ++i) copy.from[i] = from[i];
  bulk_copies.push_back(copy);
}
static void Fetch(const BulkCopy& copy) {
  const Map& map = copy.map;
  const Array& array = arrays[map.array];
  const int line = int(map.boxes[0] * map.element);
  int place[5] = {};
  for (int first = 0; first < copy.bytes; first += line) {
    bool inside = true; long source = 0;
    for (int i = 1; i < map.rank; ++i) {
      const long where = copy.from[i] + place[i];
      inside &= where >= 0 && where < map.extents[i];
      source += where * map.strides[i];
    }
    for (int byte = 0; byte < line; ++byte) {
      const long where = copy.from[0] + byte / map.element;
      unsigned at = copy.at + first + byte;
      if (map.swizzle == 3) at ^= (at >> 7 & 7) << 4;
      char value = 0;
      if (inside && where >= 0 && where < map.extents[0]) {
        const long offset = source + where * map.element + byte % map.element;
        if (uintptr_t(offset) >= array.bytes)
          Fail({copy.line, nullptr}, "cp.async.bulk.tensor reads byte %ld of {%d}, which has %zu", offset,
               int(map.array), size_t(array.bytes));
        value = array.base[offset];
      }
      copy.to[long(at) - long(copy.at)] = value;
    }
    for (int i = 1; i < map.rank && ++place[i] == map.boxes[i]; ++i) place[i] = 0;
  }
}
// Lets threads go on whose phase is over, or else a copy arrive; 1 if that fails.
static int PassPhases(bool* progress) {
  for (Fiber& fiber : fibers) {
    if (fiber.state != kAtPhase || !PhaseIsOver(fiber)) continue;
    fiber.state = kRunning; warps[fiber.warp].ready |= 1u << fiber.lane; *progress = true;
  }
  if (*progress || bulk_copies.empty()) return 0;
  const size_t which = backward ? bulk_copies.size() - 1 : 0;
  const BulkCopy copy = bulk_copies[which];
  if (_setjmp(scheduler)) return 1;
  Fetch(copy);
  bulk_copies.erase(bulk_copies.begin() + which);
  MBarrier& barrier = barriers[copy.barrier];
  barrier.bytes -= copy.bytes;
  EndPhase(&barrier);
  *progress = true;
  return 0;
}
static int ExplainPhase(const Fiber& fiber) {
  const MBarrier& barrier = barriers[fiber.barrier];
  return Deadlock(fiber, "the phase of parity %d of the mbarrier at %s never ends: %d of %d arrivals and %ld bytes are "
                  "missing", fiber.parity, Name(barrier.at), barrier.pending, barrier.count, barrier.bytes);
}
void Registers(int line) { MeetAligned("setmaxnreg", line); }
"""
