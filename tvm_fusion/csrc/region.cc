#include "region.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace tvm_fusion {

namespace {

// Beyond this many pairs of operators that share a candidate the topological order is taken as is.
constexpr int64_t kMaxPairs = int64_t{1} << 25;
// Operators of the frontier that are considered for the next place.
constexpr size_t kMaxLookahead = 48;
constexpr int kSubgradientSteps = 120;

// Estimated number of states of an order: subsets of the frontier, summed over places.
double EstimateStates(const std::vector<int32_t>& order,
                      const std::vector<std::vector<int32_t>>& candidates) {
  std::vector<int32_t> place(order.size());
  for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<int32_t>(i);
  // An operator is in the frontier from the first place of a candidate that covers it to its own.
  std::vector<int32_t> enters(order.size());
  std::iota(enters.begin(), enters.end(), 0);
  for (const auto& members : candidates) {
    int32_t first = std::numeric_limits<int32_t>::max();
    for (int32_t o : members) first = std::min(first, place[o]);
    for (int32_t o : members) enters[place[o]] = std::min(enters[place[o]], first);
  }
  std::vector<int32_t> change(order.size() + 1, 0);
  for (size_t i = 0; i < order.size(); ++i) {
    ++change[enters[i]];
    --change[i];
  }
  double total = 0;
  int32_t frontier = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    frontier += change[i];
    total += std::ldexp(1.0, std::min(frontier, 60));
  }
  return total;
}

// Order that takes next the operator of the frontier that adds the fewest operators to it.
std::vector<int32_t> FrontierOrder(const std::vector<std::vector<int32_t>>& candidates,
                                   int32_t size) {
  std::vector<std::vector<int32_t>> covering(size), near(size);
  for (size_t c = 0; c < candidates.size(); ++c) {
    for (int32_t o : candidates[c]) covering[o].push_back(static_cast<int32_t>(c));
  }
  std::vector<int32_t> seen(size, -1);
  for (int32_t o = 0; o < size; ++o) {
    for (int32_t c : covering[o]) {
      for (int32_t other : candidates[c]) {
        if (seen[other] != o && other != o) near[o].push_back(other);
        seen[other] = o;
      }
    }
  }
  std::vector<int32_t> order, frontier;
  std::vector<char> known(size, 0);  // in the order or in the frontier
  for (int32_t start = 0; start < size; ++start) {
    if (known[start]) continue;
    known[start] = 1;
    frontier.push_back(start);
    while (!frontier.empty()) {
      size_t best = 0;
      int64_t fewest = std::numeric_limits<int64_t>::max();
      for (size_t i = 0; i < std::min(frontier.size(), kMaxLookahead) && fewest > 0; ++i) {
        int64_t added = 0;
        for (int32_t other : near[frontier[i]]) added += !known[other];
        if (added < fewest) {
          fewest = added;
          best = i;
        }
      }
      int32_t next = frontier[best];
      frontier.erase(frontier.begin() + static_cast<int64_t>(best));
      order.push_back(next);
      std::vector<int32_t> joining;
      for (int32_t other : near[next]) {
        if (!known[other]) joining.push_back(other);
        known[other] = 1;
      }
      std::sort(joining.begin(), joining.end());
      frontier.insert(frontier.end(), joining.begin(), joining.end());
    }
  }
  return order;
}

std::vector<int32_t> ChooseOrder(const std::vector<std::vector<int32_t>>& candidates,
                                 int32_t size) {
  std::vector<int32_t> topological(size);
  std::iota(topological.begin(), topological.end(), 0);
  int64_t pairs = 0;
  for (const auto& members : candidates) {
    pairs += static_cast<int64_t>(members.size()) * static_cast<int64_t>(members.size());
  }
  if (pairs > kMaxPairs) return topological;
  std::vector<int32_t> narrow = FrontierOrder(candidates, size);
  bool better = EstimateStates(narrow, candidates) < EstimateStates(topological, candidates);
  return better ? narrow : topological;
}

int64_t Total(const std::vector<int64_t>& prices, const LocalCandidate& candidate) {
  int64_t total = 0;
  for (int32_t place : candidate.places) total += prices[place];
  return total;
}

}  // namespace

Region::Region(const CandidateSets& sets, const std::vector<int32_t>& candidates,
               const std::vector<NoGood>& no_goods, const std::vector<int32_t>& position) {
  // Operators in topological order first, then in the order of places.
  std::vector<int32_t> operators;
  for (int32_t c : candidates) operators.insert(operators.end(), sets.begin(c), sets.end(c));
  auto earlier = [&](int32_t a, int32_t b) { return position[a] < position[b]; };
  std::sort(operators.begin(), operators.end(), earlier);
  operators.erase(std::unique(operators.begin(), operators.end()), operators.end());
  num_places_ = static_cast<int32_t>(operators.size());
  std::unordered_map<int32_t, int32_t> local;
  local.reserve(operators.size());
  for (int32_t i = 0; i < num_places_; ++i) local[operators[i]] = i;

  std::vector<std::vector<int32_t>> members(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    for (const int32_t* o = sets.begin(candidates[i]); o != sets.end(candidates[i]); ++o) {
      members[i].push_back(local[*o]);
    }
  }
  std::vector<int32_t> order = ChooseOrder(members, num_places_), place(num_places_);
  for (int32_t i = 0; i < num_places_; ++i) place[order[i]] = i;

  starting_at_.resize(num_places_);
  covering_.resize(num_places_);
  std::unordered_map<int32_t, int32_t> local_candidate;
  for (size_t i = 0; i < candidates.size(); ++i) {
    int32_t c = static_cast<int32_t>(i);
    for (int32_t& o : members[i]) o = place[o];
    std::sort(members[i].begin(), members[i].end());
    for (int32_t p : members[i]) covering_[p].push_back(c);
    starting_at_[members[i].front()].push_back(c);
    local_candidate[candidates[i]] = c;
    candidates_.push_back({candidates[i], sets.savings[candidates[i]], std::move(members[i])});
  }
  no_goods_from_.resize(candidates.size());
  for (const NoGood& no_good : no_goods) {
    std::vector<int32_t> inside;
    for (int32_t c : no_good) inside.push_back(local_candidate.at(c));
    std::sort(inside.begin(), inside.end(), [&](int32_t a, int32_t b) {
      return candidates_[a].first() < candidates_[b].first();
    });
    no_goods_from_[inside.front()].push_back(static_cast<int32_t>(no_goods_.size()));
    no_goods_.push_back(std::move(inside));
  }
}

void Region::MakeFeasible(std::vector<int64_t>* prices) const {
  for (const LocalCandidate& c : candidates_) {
    int64_t size = static_cast<int64_t>(c.places.size());
    int64_t missing = c.saving - Total(*prices, c);
    if (missing <= 0) continue;
    for (int32_t place : c.places) (*prices)[place] += (missing + size - 1) / size;
  }
}

void Region::Lower(std::vector<int64_t>* prices) const {
  std::vector<int64_t> slack;
  for (const LocalCandidate& c : candidates_) slack.push_back(Total(*prices, c) - c.saving);
  for (int32_t place = 0; place < num_places_; ++place) {
    int64_t least = (*prices)[place];
    for (int32_t c : covering_[place]) least = std::min(least, slack[c]);
    (*prices)[place] -= least;
    for (int32_t c : covering_[place]) slack[c] -= least;
  }
}

std::vector<int64_t> Region::QuickPrices() const {
  std::vector<int64_t> prices(num_places_, 0);
  for (const LocalCandidate& c : candidates_) {
    int64_t size = static_cast<int64_t>(c.places.size());
    for (int32_t place : c.places) {
      prices[place] = std::max(prices[place], (c.saving + size - 1) / size);
    }
  }
  Lower(&prices);
  return prices;
}

std::vector<int64_t> Region::TightPrices(int64_t known_saving) const {
  std::vector<int64_t> start = QuickPrices(), best = start;
  std::vector<double> prices(start.begin(), start.end()), slope(num_places_), least = prices;
  double lowest = std::numeric_limits<double>::infinity(), scale = 1.0;
  int since_better = 0;
  for (int step = 0; step < kSubgradientSteps; ++step) {
    // The Lagrangian dual: sum of prices plus what candidates save beyond the price of their
    // places.
    double dual = std::accumulate(prices.begin(), prices.end(), 0.0);
    std::fill(slope.begin(), slope.end(), 1.0);
    for (const LocalCandidate& c : candidates_) {
      double excess = static_cast<double>(c.saving);
      for (int32_t place : c.places) excess -= prices[place];
      if (excess <= 0) continue;
      dual += excess;
      for (int32_t place : c.places) slope[place] -= 1.0;
    }
    if (dual < lowest * (1 - 1e-6)) {
      lowest = dual;
      least = prices;
      since_better = 0;
    } else if (++since_better == 6) {
      since_better = 0;
      scale *= 0.5;
    }
    double norm = 0;
    for (int32_t place = 0; place < num_places_; ++place) {
      if (prices[place] <= 0 && slope[place] > 0) slope[place] = 0;
      norm += slope[place] * slope[place];
    }
    double gap = dual - static_cast<double>(known_saving);
    if (norm == 0 || gap < 0.5) break;
    for (int32_t place = 0; place < num_places_; ++place) {
      prices[place] = std::max(0.0, prices[place] - scale * gap / norm * slope[place]);
    }
  }
  std::vector<int64_t> tight(num_places_);
  for (int32_t place = 0; place < num_places_; ++place) {
    tight[place] = static_cast<int64_t>(least[place]);
  }
  MakeFeasible(&tight);
  Lower(&tight);
  auto sum = [](const std::vector<int64_t>& p) {
    return std::accumulate(p.begin(), p.end(), int64_t{0});
  };
  return sum(tight) < sum(best) ? tight : best;
}

std::vector<int32_t> Region::Greedy() const {
  std::vector<int32_t> ranked(candidates_.size()), taken;
  std::iota(ranked.begin(), ranked.end(), 0);
  std::stable_sort(ranked.begin(), ranked.end(), [&](int32_t a, int32_t b) {
    return candidates_[a].saving > candidates_[b].saving;
  });
  std::vector<char> covered(num_places_, 0), chosen(candidates_.size(), 0);
  std::vector<std::vector<int32_t>> within(candidates_.size());
  for (size_t g = 0; g < no_goods_.size(); ++g) {
    for (int32_t c : no_goods_[g]) within[c].push_back(static_cast<int32_t>(g));
  }
  for (int32_t c : ranked) {
    const auto& places = candidates_[c].places;
    auto is_covered = [&](int32_t place) { return covered[place] != 0; };
    auto completes = [&](int32_t g) {
      return std::all_of(no_goods_[g].begin(), no_goods_[g].end(),
                         [&](int32_t other) { return other == c || chosen[other]; });
    };
    if (std::any_of(places.begin(), places.end(), is_covered) ||
        std::any_of(within[c].begin(), within[c].end(), completes)) {
      continue;
    }
    for (int32_t place : places) covered[place] = 1;
    chosen[c] = 1;
    taken.push_back(c);
  }
  std::sort(taken.begin(), taken.end());
  return taken;
}

}  // namespace tvm_fusion
