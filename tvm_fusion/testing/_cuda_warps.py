"""C++ of the emulated barriers, and of what the lanes of a warp do together.

A lane that meets such an instruction lets the others run; the last one to arrive does it for all of them.
"""

#: Barriers of blocks and clusters, exchanges, votes, matrix instructions.
WARPS = r"""
static Warp& MyWarp() { return warps[current->warp]; }
#define INDEX(NAME, VALUE) \
  unsigned NAME##X() { return VALUE.x; } unsigned NAME##Y() { return VALUE.y; } unsigned NAME##Z() { return VALUE.z; }
INDEX(ThreadIndex, current->index) INDEX(BlockIndex, current->block->index)
INDEX(BlockSize, block_size) INDEX(GridSize, grid_size)
unsigned ActiveLanes() { return MyWarp().alive; }

static Fiber& Next(int warp) {
  unsigned& ready = warps[warp].ready;
  const int lane = backward ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
  ready &= ~(1u << lane);
  return fibers[warp * 32 + lane];
}
// Lets another lane of the warp run, or where there is none, the scheduler.
static void Yield() {
  Fiber* self = current;
  if (_setjmp(self->jump)) return;
  if (!MyWarp().ready) _longjmp(scheduler, 1);
  current = &Next(self->warp);
  _longjmp(current->jump, 1);
}
void Barrier(int line) { current->state = kAtBarrier; current->line = line; Yield(); }
unsigned ClusterRank() { return unsigned(current->block->rank); }
// Relaxed arrivals count as releasing: what comes before them is taken to be visible.
void ClusterArrive(int line) {
  if (current->arrivals != current->waits)
    Fail({line, nullptr}, "barrier.cluster.arrive without a wait for the last one");
  ++current->arrivals;
}
static bool ClusterArrived(uint32_t phase) {
  for (const Fiber& fiber : fibers) if (fiber.state != kEnded && fiber.arrivals <= phase) return false;
  return true;
}
void ClusterWait(int line) {
  if (current->arrivals != current->waits + 1) Fail({line, nullptr}, "barrier.cluster.wait without an arrive before");
  if (!ClusterArrived(current->waits)) { current->state = kAtClusterBarrier; current->line = line; Yield(); }
  ++current->waits;
}

static void DoShuffle(Fiber* lanes, unsigned need) {
  char values[32][16]; std::memset(values, 0xff, sizeof values);  // what a lane that is not there gives
  for (int lane = 0; lane < 32; ++lane)
    if (need >> lane & 1) std::memcpy(values[lane], lanes[lane].post.a, lanes[lane].post.size);
  for (int lane = 0; lane < 32; ++lane)
    if (need >> lane & 1) std::memcpy(lanes[lane].post.out, values[lanes[lane].post.x & 31], lanes[lane].post.size);
}
static void DoBallot(Fiber* lanes, unsigned need) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (need >> lane & 1) votes |= unsigned(lanes[lane].post.x) << lane;
  for (int lane = 0; lane < 32; ++lane)
    if (need >> lane & 1) std::memcpy(lanes[lane].post.out, &votes, 4);
}
// PTX ISA, "Matrix fragments for mma.m16n8k16 (.f16 and .bf16)" and "... for mma.m16n8k8 (.tf32)".
static float Widen(unsigned pair, int which, int kind) {
  if (kind == kBfloat16) pair = which ? pair & 0xffff0000u : pair << 16;
  if (kind == kTf32) pair &= 0xffffe000u;  // the hardware does not look at the last 13 bits
  float wide;
  if (kind == kHalf) {
    const uint16_t bits = uint16_t(pair >> 16 * which);
    _Float16 narrow; std::memcpy(&narrow, &bits, 2); wide = float(narrow);
  } else {
    std::memcpy(&wide, &pair, 4);
  }
  return wide;
}
template <int kind> static void DoMultiply(Fiber* lanes) {
  constexpr int per = kind == kTf32 ? 1 : 2, depth = 8 * per;
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Post& post = lanes[lane].post; const int row = lane / 4, pair = lane % 4;
    unsigned from_a[4], from_b[2]; float from_d[4];
    std::memcpy(from_a, post.a, 16); std::memcpy(from_b, post.b, 8); std::memcpy(from_d, post.out, 16);
    for (int i = 0; i < 4; ++i) {
      for (int h = 0; h < per; ++h) {
        const int k = pair * per + h + i / 2 * (4 * per);
        a[row + i % 2 * 8][k] = Widen(from_a[i], h, kind);
        if (i < 2) b[pair * per + h + i * (4 * per)][row] = Widen(from_b[i], h, kind);
      }
      d[row + i / 2 * 8][pair * 2 + i % 2] = from_d[i];
    }
  }
  for (int i = 0; i < 16; ++i) for (int k = 0; k < depth; ++k) for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      std::memcpy(static_cast<float*>(lanes[lane].post.out) + i, &d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2], 4);
}
static void DoLoadMatrix(Fiber* lanes) {
  Fiber* self = current;
  const int count = lanes[0].post.size; const bool transposed = lanes[0].post.x;
  uint16_t values[32][8];
  for (int i = 0; i < 8 * count; ++i) {
    current = &lanes[i];
    Touch(lanes[i].post.a, 16, false, {lanes[i].post.line, nullptr});
    std::memcpy(values[i], lanes[i].post.a, 16);
  }
  current = self;
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < count; ++m) {
      uint16_t pair[2];
      for (int h = 0; h < 2; ++h) {
        const int row = lane / 4, column = lane % 4 * 2 + h;
        pair[h] = transposed ? values[8 * m + column][row] : values[8 * m + row][column];
      }
      std::memcpy(static_cast<unsigned*>(lanes[lane].post.out) + m, pair, 4);
    }
}
static void Agree(int warp, unsigned need) {
  Fiber* lanes = &fibers[warp * 32];
  const Post& first = lanes[__builtin_ctz(need)].post;
  for (int lane = 0; lane < 32; ++lane) {
    const Post& post = lanes[lane].post;
    if ((need >> lane & 1) && (post.op != first.op || post.line != first.line || post.mask != first.mask))
      Fail({first.line, nullptr}, "lanes of a warp meet at different instructions: %s (line %d, mask %#x) and %s "
           "(line %d, mask %#x)", first.name, first.line, first.mask, post.name, post.line, post.mask);
  }
}
static void Release(int warp, unsigned need) {
  warps[warp].waiting &= ~need; warps[warp].ready |= need;
  for (int lane = 0; lane < 32; ++lane) if (need >> lane & 1) fibers[warp * 32 + lane].state = kRunning;
}
static void TogetherInWarp(Fiber* first, unsigned lanes);
static void Complete(int warp, unsigned need) {
  Fiber* lanes = &fibers[warp * 32];
  const Post& first = lanes[__builtin_ctz(need)].post;
  switch (first.op) {
    case kAligned: case kWarpgroup: break;
    case kShuffle: DoShuffle(lanes, need); break;
    case kBallot: DoBallot(lanes, need); break;
    case kWarpBarrier: ++warps[warp].order; TogetherInWarp(lanes, need); break;
    case kLoadMatrix: DoLoadMatrix(lanes); break;
    case kMultiply:
      if (first.x == kHalf) DoMultiply<kHalf>(lanes);
      else if (first.x == kBfloat16) DoMultiply<kBfloat16>(lanes);
      else DoMultiply<kTf32>(lanes);
  }
  Release(warp, need);
}
static unsigned Needed(const Fiber& fiber) {
  return fiber.post.op >= kMultiply ? ~0u : fiber.post.mask & warps[fiber.warp].alive;
}
static bool CompleteWarpgroup(int warp);  // whether all its warps are there
static void Meet(const Post& post) {
  Warp& warp = MyWarp();
  current->post = post; current->line = post.line; current->state = kAtWarp;
  warp.waiting |= 1u << current->lane;
  const unsigned need = Needed(*current);
  const Where where = {post.line, nullptr};
  if (need & ~warp.alive) Fail(where, "%s is not reached by all 32 lanes of warp %d", post.name,
                               WarpInBlock(current->warp));
  if (!(post.mask >> current->lane & 1)) Fail(where, "%s: the lane is not in its own mask %#x", post.name, post.mask);
  if (need & ~warp.waiting) return Yield();
  Agree(current->warp, need);
  if (post.op != kWarpgroup) Complete(current->warp, need);
  else if (!CompleteWarpgroup(current->warp)) return Yield();
  warp.ready &= ~(1u << current->lane);
}
void WarpBarrier(unsigned mask, int line) {
  Meet({kWarpBarrier, "__syncwarp", line, mask, nullptr, nullptr, nullptr, 0, 0});
}
void Shuffle(void* result, const void* value, int bytes, int from, unsigned mask, const char* name, int line) {
  Meet({kShuffle, name, line, mask, value, nullptr, result, from, bytes});
}
unsigned Ballot(bool vote, unsigned mask, int line) {
  unsigned result; Meet({kBallot, "a vote", line, mask, nullptr, nullptr, &result, vote, 4}); return result;
}
void Multiply(Kind kind, float* d, const unsigned* a, const unsigned* b, int line) {
  Meet({kMultiply, "mma", line, ~0u, a, b, d, kind, 0});
}
void LoadMatrix(unsigned* fragment, unsigned at, int count, bool transposed, int line) {
  const void* from = shared;  // lanes beyond the matrices give no address
  if (current->lane < 8 * count) from = CheckShared(at, 16, "ldmatrix", line);
  Meet({kLoadMatrix, "ldmatrix", line, ~0u, from, nullptr, fragment, transposed, count});
}
"""
