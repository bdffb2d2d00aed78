"""C++ of the emulated matrix instructions of warpgroups (Hopper's ``wgmma``), which run asynchronously.

Products are computed when the four warps meet; each thread gets its sums when it waits for them.
"""

#: Matrix instructions of four warps, their groups, and the fences that they need.
WARPGROUPS = r"""
static bool AtWarpgroup(const Fiber& fiber) { return fiber.state == kAtWarp && fiber.post.op == kWarpgroup; }
// PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16": place in `Sums::values` of a thread's number `n`.
static int PlaceOfSum(int lane, int n, int columns) {
  const int row = lane / 32 * 16 + lane % 32 / 4 + n % 4 / 2 * 8;
  return row * columns + n / 4 * 8 + lane % 4 * 2 + n % 2;
}
// The matrix instruction reads 16 bytes: what all of its warps have to see. Only a barrier of all orders four warps.
static void TouchOperandBulk(Piece* piece, const std::shared_ptr<Products>& products, const char* what);
static void TouchOperand(char* piece, const std::shared_ptr<Products>& products) {
  const int line = products->line;
  const Where where = {line, nullptr};
  const Block& block = *current->block;
  for (Shadow* s = shadow + (piece - shared) / 2, *end = s + 8; s < end; ++s) {
    const auto what = [&] { return Name(uintptr_t(s - shadow) * 2); };
    if (!s->valid) Fail(where, "wgmma reads %s, which is out of range", what());
    ++s->held;
    if (Piece* own = PieceOf(s); own && own->bulk) { TouchOperandBulk(own, products, what()); continue; }
    if (!check_races || s->written < first_interval) continue;
    const int writer = InBlock(s->writer);
    if (s->pending)
      Fail(where, "wgmma reads %s while an asynchronous copy of thread %d writes it (no wait yet)", what(), writer);
    const auto ordered = [&](uint32_t interval, uint32_t phase) {
      return phase < current->waits || (s->writer_block == block.rank && interval != block.interval);
    };
    if (!ordered(s->written, s->write_phase))
      Fail(where, "wgmma reads %s without a barrier after thread %d wrote it", what(), writer);
    const std::vector<ProxyOrder>& fences = fibers[s->writer].proxy_fences;
    if (s->proxy_fences >= fences.size() ||
        !ordered(fences[s->proxy_fences].interval, fences[s->proxy_fences].phase))
      Fail(where, "wgmma reads %s without fence.proxy.async between its write by thread %d and a barrier", what(),
           writer);
  }
}
// PTX ISA, "Matrix descriptor format" and "Strides": lines of 128 bytes, eight of them, then a stride to the next
// eight; bits 4 to 6 of an address are combined with bits 7 to 9.
static void ReadOperand(uint64_t descriptor, int lines, int kind, bool across, float (*out)[16],
                        const std::shared_ptr<Products>& products) {
  const Where where = {products->line, nullptr};
  const unsigned start = unsigned(descriptor & 0x3fff) << 4, stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) Fail(where, "wgmma: only 128-byte swizzle is emulated, not descriptor %#lx", descriptor);
  if (descriptor >> 49 & 7) Fail(where, "wgmma: a base offset is not emulated, as in descriptor %#lx", descriptor);
  const unsigned leading = unsigned(descriptor >> 16 & 0x3fff) << 4;
  for (int line = 0; line < lines; line += across ? 8 : 1)
    for (int half = 0; half < (across ? 16 : 2); ++half) {
      // Transposed, `half` is a step of the reduction, and a piece has that of eight lines.
      unsigned at = start + (across ? line / 64 * leading + half / 8 * stride + half % 8 * 128 + line % 64 * 2
                                    : line / 8 * stride + line % 8 * 128 + half * 16);
      at ^= (at >> 7 & 7) << 4;
      if (at + 16 > kSharedArea) Fail(where, "wgmma: the address is not in shared memory");
      char* piece = current->block->shared + at;
      TouchOperand(piece, products);
      products->pieces.push_back(piece);
      unsigned pairs[4]; std::memcpy(pairs, piece, 16);
      for (int k = 0; k < 8; ++k)
        (across ? out[line + k][half] : out[line][half * 8 + k]) = Widen(pairs[k / 2], k % 2, kind);
    }
}
// Whether a thread's sums are still those that it waited for.
static bool Unchanged(const Fiber& fiber, int lane) {
  const float* at = static_cast<const float*>(fiber.post.out);
  for (const std::shared_ptr<Sums>& sums : fiber.done) {
    if (sums->at[lane] != at || sums->columns != fiber.post.size) continue;
    for (int n = 0; n < sums->columns / 2; ++n)
      if (std::memcmp(at + n, &sums->values[PlaceOfSum(lane, n, sums->columns)], 4)) return false;
    return true;
  }
  return false;
}
// Sums that an instruction adds to: those of one before that is not waited for, or else what the threads have.
static std::shared_ptr<Sums> SumsOf(Fiber* lanes, const Post& first) {
  const Where where = {first.line, nullptr};
  const int columns = first.size;
  std::shared_ptr<Sums> found;
  for (int lane = 0; lane < 128; ++lane) {
    const char* at = static_cast<const char*>(lanes[lane].post.out);
    std::shared_ptr<Sums> own;
    for (const Pending& pending : lanes[lane].products) {
      const std::shared_ptr<Sums>& sums = pending.products->sums;
      const char* other = reinterpret_cast<const char*>(sums->at[lane]);
      if (at == other && columns == sums->columns) own = sums;
      else if (at < other + 2 * sums->columns && other < at + 2 * columns)
        Fail(where, "wgmma: the sums share registers with those of line %d", pending.products->line);
    }
    if (lane && own != found) Fail(where, "wgmma: only some threads of the warpgroup have waited for its sums");
    found = own;
  }
  if (found) return found;
  found = std::make_shared<Sums>();
  found->columns = columns; found->values.resize(64 * columns);
  for (int lane = 0; lane < 128; ++lane) {
    float* at = found->at[lane] = static_cast<float*>(lanes[lane].post.out);
    if (check_races && !lanes[lane].fenced && !Unchanged(lanes[lane], lane))
      Fail(where, "wgmma: no wgmma.fence of thread %d after it set its sums", InBlock(lanes[lane].number));
    for (int n = 0; n < columns / 2; ++n) found->values[PlaceOfSum(lane, n, columns)] = at[n];
    std::memset(at, 0xff, 2 * columns);
  }
  return found;
}
static void DoWarpgroup(Fiber* lanes) {
  static float a[64][16], b[256][16], across[16][256];
  const Post first = lanes[0].post;
  for (int lane = 1; lane < 128; ++lane) {
    const Post& post = lanes[lane].post;
    if (post.line != first.line || post.size != first.size)
      Fail({first.line, nullptr}, "warps of a warpgroup meet at wgmma of lines %d and %d", first.line, post.line);
    if (post.a != first.a || post.b != first.b || post.mask != first.mask)
      Fail({first.line, nullptr}, "wgmma: descriptors of threads of a warpgroup differ");
  }
  const int kind = first.x >> 3, columns = first.size;
  auto products = std::make_shared<Products>();
  products->line = first.line; products->left = 128; products->sums = SumsOf(lanes, first);
  ReadOperand(reinterpret_cast<uint64_t>(first.a), 64, kind, first.x & 2, a, products);
  ReadOperand(reinterpret_cast<uint64_t>(first.b), columns, kind, first.x & 4, b, products);
  for (int j = 0; j < columns; ++j) for (int k = 0; k < 16; ++k) across[k][j] = b[j][k];
  std::vector<float>& values = products->sums->values;
  if (!(first.x & 1)) values.assign(values.size(), 0.0f);
  for (int i = 0; i < 64; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < columns; ++j) values[i * columns + j] += a[i][k] * across[k][j];
  for (int lane = 0; lane < 128; ++lane) lanes[lane].products.push_back({products, lanes[lane].product_groups});
}
static bool CompleteWarpgroup(int warp) {
  const int first = FirstOfGroup(warp);
  for (int w = first; w < first + 4; ++w)
    for (int lane = 0; lane < 32; ++lane) if (!AtWarpgroup(fibers[w * 32 + lane])) return false;
  DoWarpgroup(&fibers[first * 32]);
  for (int w = first; w < first + 4; ++w) Release(w, ~0u);
  return true;
}
static void FreePieces(const Products& products) {
  for (char* piece : products.pieces)
    for (Shadow* s = shadow + (piece - shared) / 2, *end = s + 8; s < end; ++s) {
      --s->held;
      MarkRead(s);
      if (s->reader_block == current->block->rank) s->reader = -1;  // all of the warpgroup
    }
}
// Before the next block: what was never waited for.
static void ForgetProducts(Fiber& fiber) {
  for (const Pending& pending : fiber.products)
    for (char* piece : pending.products->pieces) for (int i = 0; i < 8; ++i) shadow[(piece - shared) / 2 + i].held = 0;
  fiber.products.clear(); fiber.proxy_fences.clear(); fiber.done.clear();
  fiber.product_groups = 0; fiber.fenced = false;
}
static void MeetAligned(const char* name, int line) {
  Meet({kAligned, name, line, ~0u, nullptr, nullptr, nullptr, 0, 0});
}
void MultiplyWarpgroup(Kind kind, int columns, float* d, uint64_t a, uint64_t b, bool add, int across, int line) {
  const int first = FirstOfGroup(current->warp), end = current->warp - WarpInBlock(current->warp) +
      int(warps.size() / blocks.size());
  for (int w = first; w < first + 4; ++w)
    if (w >= end || ~warps[w].alive)
      Fail({line, nullptr}, "wgmma is not reached by all 4 warps of the warpgroup of warp %d", WarpInBlock(first));
  Meet({kWarpgroup, "wgmma", line, ~0u, reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b), d,
        kind << 3 | across << 1 | add, columns});
}
void WarpgroupFence(int line) { MeetAligned("wgmma.fence", line); current->fenced = true; }
void WarpgroupCommit(int line) { MeetAligned("wgmma.commit_group", line); ++current->product_groups; }
void WarpgroupWait(int left, int line) {
  MeetAligned("wgmma.wait_group", line);
  std::vector<Pending>& pending = current->products;
  size_t count = 0;
  while (count < pending.size() && pending[count].group < current->product_groups - left) ++count;
  const std::vector<Pending> done(pending.begin(), pending.begin() + count);
  pending.erase(pending.begin(), pending.begin() + count);
  const int lane = LaneInGroup(*current);
  for (const Pending& each : done) {
    if (!pieces.empty()) each.products->waited.push_back({current->number, current->clock[current->number]});
    if (!--each.products->left) FreePieces(*each.products);
    const std::shared_ptr<Sums>& sums = each.products->sums;
    bool used = false;
    for (const Pending& other : pending) used |= other.products->sums == sums;
    for (const auto& given : current->done) used |= given == sums;
    if (used) continue;
    for (int n = 0; n < sums->columns / 2; ++n) {
      uint32_t bits; std::memcpy(&bits, sums->at[lane] + n, 4);  // written meanwhile, it stays NaN
      sums->at[lane][n] = bits == ~0u ? sums->values[PlaceOfSum(lane, n, sums->columns)] : NAN;
    }
    std::vector<std::shared_ptr<Sums>> kept = {sums};
    for (const auto& old : current->done) if (old->at[lane] != sums->at[lane]) kept.push_back(old);
    current->done = std::move(kept);
    current->fenced = false;
  }
}
void PublishBarriers();
void ProxyFence() { PublishBarriers(); current->proxy_fences.push_back({current->block->interval, current->arrivals}); }
"""
