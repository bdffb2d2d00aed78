#include "region_search.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "region.h"

namespace tvm_fusion {

namespace {

// Width of the first run, whose result prunes the others. In most regions it drops nothing.
constexpr int64_t kFirstWidth = 64;
// Transitions that a run without a width may try, per state that it may create.
constexpr int64_t kWorkPerState = 256;

// A partial solution: what stands before `place` is decided.
struct State {
  int32_t place;      // first operator that is neither covered nor given up
  int32_t parent;     // state it came from
  int32_t candidate;  // what was taken on the way, or -1
  uint32_t key;       // start of its key in the pool of keys
  int32_t covered;    // key words that are covered places
  int32_t bans;       // key words after them
  int64_t value;      // saved so far
  int64_t rest;       // price of what is not covered: at most this much can be added
};

// Dynamic programming over the places of a region.
class Run {
 public:
  Run(const Region& region, const std::vector<int64_t>& prices, int64_t known_saving)
      : region_(region), prices_(prices), known_(known_saving), stamp_(region.size(), 0) {
    suffix_.assign(region.size() + 1, 0);
    for (int32_t p = region.size() - 1; p >= 0; --p) suffix_[p] = suffix_[p + 1] + prices[p];
    for (const LocalCandidate& c : region.candidates()) {
      int64_t total = 0;
      for (int32_t place : c.places) total += prices[place];
      slack_.push_back(total - c.saving);
    }
  }

  // False if the search was given up because it would create more than `max_states` states. With a
  // `width`, states beyond it are dropped at each place, the least promising first.
  bool Go(int64_t max_states, int64_t width);

  bool found() const { return last_ >= 0; }
  int64_t best() const { return states_[last_].value; }
  int64_t root_bound() const { return suffix_[0]; }
  // What the most promising of the dropped states could have reached; -1 if none was dropped.
  int64_t dropped_bound() const { return dropped_bound_; }
  int64_t num_states() const { return static_cast<int64_t>(states_.size()); }
  // Local candidates, ascending.
  std::vector<int32_t> Chosen() const;

 private:
  void Expand(int32_t s);
  void Reach(int32_t from, int32_t candidate);
  bool NextBans(int32_t from, int32_t candidate, int32_t place);
  void AddBan(int32_t no_good, int32_t place);
  bool IsOpen(int32_t candidate, int32_t place) const;
  bool IsPreferred(int32_t parent, int32_t candidate, const State& old) const;
  int32_t* Slot(int32_t place, uint64_t hash);
  void Grow();
  uint64_t Hash(const State& state) const;
  void Cut(int32_t place, int64_t width);
  void Mark(const uint32_t* places, int32_t count);

  const Region& region_;
  const std::vector<int64_t>& prices_;
  const int64_t known_;
  std::vector<int64_t> suffix_, slack_;
  std::vector<State> states_;
  std::vector<uint32_t> keys_;
  std::vector<std::vector<int32_t>> at_;  // states by place
  std::vector<int32_t> table_;            // open addressing; state or -1
  std::vector<uint32_t> next_, bans_;     // key under construction
  std::vector<uint32_t> stamp_;           // places covered in the state at hand carry `mark_`
  uint32_t mark_ = 0;
  int32_t last_ = -1;
  int64_t work_ = 0;
  int64_t dropped_bound_ = -1;
};

uint64_t Run::Hash(const State& state) const {
  uint64_t hash = static_cast<uint64_t>(state.place) * 0x9E3779B97F4A7C15u + state.covered;
  for (int32_t i = 0; i < state.covered + state.bans; ++i) {
    hash = (hash ^ keys_[state.key + i]) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  }
  return hash;
}

// The slot of the state whose key stands in next_ (covered) and bans_, or an empty one.
int32_t* Run::Slot(int32_t place, uint64_t hash) {
  size_t mask = table_.size() - 1;
  for (size_t i = hash & mask;; i = (i + 1) & mask) {
    if (table_[i] < 0) return &table_[i];
    const State& s = states_[table_[i]];
    if (s.place == place && s.covered == static_cast<int32_t>(next_.size()) &&
        s.bans == static_cast<int32_t>(bans_.size()) &&
        std::equal(next_.begin(), next_.end(), keys_.begin() + s.key) &&
        std::equal(bans_.begin(), bans_.end(), keys_.begin() + s.key + s.covered)) {
      return &table_[i];
    }
  }
}

void Run::Grow() {
  table_.assign(table_.size() * 2, -1);
  size_t mask = table_.size() - 1;
  for (size_t s = 0; s < states_.size(); ++s) {
    size_t i = Hash(states_[s]) & mask;
    while (table_[i] >= 0) i = (i + 1) & mask;
    table_[i] = static_cast<int32_t>(s);
  }
}

void Run::Mark(const uint32_t* places, int32_t count) {
  ++mark_;
  for (int32_t i = 0; i < count; ++i) stamp_[places[i]] = mark_;
}

// Is a candidate still to be decided at `place`, and not blocked by the marked places?
bool Run::IsOpen(int32_t candidate, int32_t place) const {
  const LocalCandidate& c = region_.candidates()[candidate];
  if (c.first() < place) return false;
  return std::none_of(c.places.begin(), c.places.end(),
                      [&](int32_t p) { return stamp_[p] == mark_; });
}

// Note that every candidate of a no-good that starts before `place` was taken. A single one that is
// left is forbidden as such, so that states merge whichever partner forbids it.
void Run::AddBan(int32_t no_good, int32_t place) {
  const auto& members = region_.no_goods()[no_good];
  int32_t left = 0;
  for (auto it = members.rbegin(); it != members.rend(); ++it, ++left) {
    if (region_.candidates()[*it].first() < place) break;
    if (!IsOpen(*it, place)) return;
  }
  bans_.push_back(left == 1 ? members.back() * 2u : no_good * 2u + 1u);
}

// Fill bans_ after `candidate` (or none) was taken from state `from`; next_ is marked. False if a
// no-good forbids it.
bool Run::NextBans(int32_t from, int32_t candidate, int32_t place) {
  bans_.clear();
  const State& s = states_[from];
  for (int32_t i = 0; i < s.bans; ++i) {
    uint32_t word = keys_[s.key + s.covered + i];
    int32_t id = static_cast<int32_t>(word >> 1);
    if ((word & 1) == 0) {
      if (id == candidate) return false;
      if (IsOpen(id, place)) bans_.push_back(word);
      continue;
    }
    // Every member before the old place was taken; any between it and the new one must be, too.
    bool alive = true;
    for (int32_t c : region_.no_goods()[id]) {
      int32_t first = region_.candidates()[c].first();
      if (first >= s.place && first < place && c != candidate) alive = false;
    }
    if (alive) AddBan(id, place);
  }
  if (candidate >= 0) {
    for (int32_t g : region_.no_goods_from(candidate)) {
      const auto& members = region_.no_goods()[g];
      bool alive = region_.candidates()[members[1]].first() >= place;
      if (alive) AddBan(g, place);
    }
  }
  std::sort(bans_.begin(), bans_.end());
  bans_.erase(std::unique(bans_.begin(), bans_.end()), bans_.end());
  return true;
}

// Of two ways of equal value to one state: does the new one hold the earlier candidates?
bool Run::IsPreferred(int32_t parent, int32_t candidate, const State& old) const {
  std::vector<int32_t> ours, theirs;
  if (candidate >= 0) ours.push_back(candidate);
  if (old.candidate >= 0) theirs.push_back(old.candidate);
  int32_t a = parent, b = old.parent;
  while (a != b) {
    const State &x = states_[a], &y = states_[b];
    // Parents stand at smaller places: step back from the later one until both meet.
    bool step_a = x.place >= y.place, step_b = y.place >= x.place;
    if (step_a) {
      if (x.candidate >= 0) ours.push_back(x.candidate);
      a = x.parent;
    }
    if (step_b) {
      if (y.candidate >= 0) theirs.push_back(y.candidate);
      b = y.parent;
    }
  }
  std::sort(ours.begin(), ours.end());
  std::sort(theirs.begin(), theirs.end());
  return ours < theirs;
}

// Take a candidate (or give up the operator at hand) and record the state that this leads to.
void Run::Reach(int32_t from, int32_t candidate) {
  const State s = states_[from];
  next_.assign(keys_.begin() + s.key, keys_.begin() + s.key + s.covered);
  int64_t value = s.value, rest = s.rest - prices_[s.place];
  if (candidate >= 0) {
    const LocalCandidate& c = region_.candidates()[candidate];
    value += c.saving;
    size_t middle = next_.size();
    for (size_t i = 1; i < c.places.size(); ++i) {
      next_.push_back(static_cast<uint32_t>(c.places[i]));
      rest -= prices_[c.places[i]];
    }
    std::inplace_merge(next_.begin(), next_.begin() + static_cast<int64_t>(middle), next_.end());
  }
  int32_t place = s.place + 1;
  size_t passed = 0;
  while (passed < next_.size() && next_[passed] == static_cast<uint32_t>(place)) {
    ++passed;
    ++place;
  }
  next_.erase(next_.begin(), next_.begin() + static_cast<int64_t>(passed));
  if (s.bans > 0 || (candidate >= 0 && !region_.no_goods_from(candidate).empty())) {
    Mark(next_.data(), static_cast<int32_t>(next_.size()));
    if (!NextBans(from, candidate, place)) return;
  } else {
    bans_.clear();
  }
  State made{place,
             from,
             candidate,
             static_cast<uint32_t>(keys_.size()),
             static_cast<int32_t>(next_.size()),
             static_cast<int32_t>(bans_.size()),
             value,
             rest};
  keys_.insert(keys_.end(), next_.begin(), next_.end());
  keys_.insert(keys_.end(), bans_.begin(), bans_.end());
  int32_t* slot = Slot(place, Hash(made));
  if (*slot >= 0) {
    keys_.resize(made.key);
    State& old = states_[*slot];
    if (value > old.value || (value == old.value && IsPreferred(from, candidate, old))) {
      old.value = value;
      old.parent = from;
      old.candidate = candidate;
    }
    return;
  }
  *slot = static_cast<int32_t>(states_.size());
  states_.push_back(made);
  at_[place].push_back(*slot);
  if (states_.size() * 2 > table_.size()) Grow();
}

void Run::Expand(int32_t s) {
  const int32_t place = states_[s].place;
  const int64_t bound = states_[s].value + states_[s].rest;
  if (bound < known_) return;
  if (bound - prices_[place] >= known_) Reach(s, -1);
  std::vector<uint32_t> covered(keys_.begin() + states_[s].key,
                                keys_.begin() + states_[s].key + states_[s].covered);
  Mark(covered.data(), static_cast<int32_t>(covered.size()));
  uint32_t mark = mark_;
  for (int32_t c : region_.starting_at(place)) {
    ++work_;
    if (bound - slack_[c] < known_) continue;
    if (mark_ != mark) {
      Mark(covered.data(), static_cast<int32_t>(covered.size()));
      mark = mark_;
    }
    if (IsOpen(c, place)) Reach(s, c);
  }
}

// Drop all but the `width` most promising states of a place.
void Run::Cut(int32_t place, int64_t width) {
  std::vector<int32_t>& here = at_[place];
  if (static_cast<int64_t>(here.size()) <= width) return;
  auto better = [&](int32_t a, int32_t b) {
    int64_t x = states_[a].value + states_[a].rest, y = states_[b].value + states_[b].rest;
    return x != y ? x > y : a < b;
  };
  std::nth_element(here.begin(), here.begin() + width, here.end(), better);
  for (size_t i = width; i < here.size(); ++i) {
    dropped_bound_ = std::max(dropped_bound_, states_[here[i]].value + states_[here[i]].rest);
  }
  here.resize(width);
  std::sort(here.begin(), here.end());
}

bool Run::Go(int64_t max_states, int64_t width) {
  table_.assign(1024, -1);
  at_.assign(region_.size() + 1, {});
  states_.push_back({0, -1, -1, 0, 0, 0, 0, suffix_[0]});
  next_.clear();
  bans_.clear();
  *Slot(0, Hash(states_[0])) = 0;
  at_[0].push_back(0);
  for (int32_t place = 0; place < region_.size(); ++place) {
    if (width > 0) {
      // What is left of the budget, shared among the places to come.
      int64_t left = std::max<int64_t>(max_states - num_states(), 0);
      int64_t fan = 1 + static_cast<int64_t>(region_.starting_at(place).size());
      Cut(place, std::clamp<int64_t>(left / (region_.size() - place) / fan, 1, width));
    }
    for (size_t i = 0; i < at_[place].size(); ++i) {
      Expand(at_[place][i]);
      if (width == 0 && (num_states() > max_states || work_ > max_states * kWorkPerState)) {
        return false;
      }
    }
    std::vector<int32_t>().swap(at_[place]);
  }
  const auto& ends = at_[region_.size()];
  if (!ends.empty()) last_ = ends[0];
  return true;
}

std::vector<int32_t> Run::Chosen() const {
  std::vector<int32_t> chosen;
  for (int32_t s = last_; s >= 0; s = states_[s].parent) {
    if (states_[s].candidate >= 0) chosen.push_back(states_[s].candidate);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// The best set so far and what is known of the optimum.
class Best {
 public:
  explicit Best(const Region& region) : region_(region), chosen_(region.Greedy()) {
    for (int32_t c : chosen_) saving_ += region.candidates()[c].saving;
  }

  int64_t saving() const { return saving_; }

  // Take in a run that ended; true if it settles the optimum.
  bool Note(const Run& run) {
    states_ += run.num_states();
    if (run.found()) {
      std::vector<int32_t> chosen = run.Chosen();
      if (run.best() > saving_ || (run.best() == saving_ && chosen < chosen_)) {
        saving_ = run.best();
        chosen_ = std::move(chosen);
      }
    }
    upper_ = std::min({upper_, run.root_bound(), std::max(saving_, run.dropped_bound())});
    return run.dropped_bound() < saving_;
  }
  void NoteStates(const Run& run) { states_ += run.num_states(); }

  RegionResult Result() const {
    RegionResult result{{}, saving_, std::max(upper_, saving_), states_};
    for (int32_t c : chosen_) result.chosen.push_back(region_.candidates()[c].id);
    return result;
  }

 private:
  const Region& region_;
  std::vector<int32_t> chosen_;
  int64_t saving_ = 0;
  int64_t upper_ = std::numeric_limits<int64_t>::max();
  int64_t states_ = 0;
};

}  // namespace

RegionResult SolveRegion(const CandidateSets& sets, const std::vector<int32_t>& candidates,
                         const std::vector<NoGood>& no_goods, const std::vector<int32_t>& position,
                         int64_t max_states) {
  Region region(sets, candidates, no_goods, position);
  Best best(region);
  std::vector<int64_t> prices = region.QuickPrices();
  Run narrow(region, prices, best.saving());
  narrow.Go(max_states, kFirstWidth);
  if (best.Note(narrow)) return best.Result();

  prices = region.TightPrices(best.saving());
  Run whole(region, prices, best.saving());
  if (whole.Go(max_states, 0)) {
    best.Note(whole);
    return best.Result();
  }
  best.NoteStates(whole);
  Run wide(region, prices, best.saving());
  wide.Go(max_states, max_states);
  best.Note(wide);
  return best.Result();
}

}  // namespace tvm_fusion
