// Regions are solved one by one without regard to cycles. Where the chosen groups, contracted, form
// a cycle, the groups on it become a no-good: they must not all be chosen. The regions that they
// come from are joined and solved again, until no cycle is left. Every relaxed optimum bounds the
// true one from above, so the first acyclic one is optimal, and it keeps the preference among
// equals.
#include "search.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "cycles.h"

namespace tvm_fusion {

namespace {

constexpr int kMaxRounds = 200;
// States that a region may cost over all rounds, per state that one search of it may create.
constexpr int64_t kMaxRepeats = 16;
// Pairs that are tested for further no-goods of the kind of one that was found.
constexpr size_t kMaxRelatives = size_t{1} << 16;
// Candidates that are tried when a set that could not be freed of cycles is filled up again.
constexpr int kMaxRefills = 1000;

struct Cluster {
  std::vector<int32_t> candidates;  // ascending; empty if joined to another cluster
  std::set<NoGood> no_goods;
  RegionResult result;
  int64_t states = 0;
  bool stale = true;
};

class Search {
 public:
  Search(const ReachabilityObj& graph, const CandidateSets& sets, int64_t max_states)
      : graph_(graph), sets_(sets), max_states_(max_states), covering_(graph.NumNodes()) {
    for (int32_t c = 0; c < sets.size(); ++c) {
      for (const int32_t* o = sets.begin(c); o != sets.end(c); ++o) covering_[*o].push_back(c);
    }
    Split();
  }

  SearchResult Go() {
    for (int round = 0;; ++round) {
      bool spent = round >= kMaxRounds;
      for (Cluster& cluster : clusters_) {
        if (cluster.stale) Solve(&cluster);
        spent |= cluster.states > max_states_ * kMaxRepeats;
      }
      std::vector<int32_t> chosen = Chosen();
      std::vector<NoGood> cycles = FindCycles(graph_, sets_, chosen);
      if (cycles.empty()) return Result(chosen);
      if (spent) return Result(Repaired(std::move(chosen)));
      for (const NoGood& cycle : cycles) Forbid(cycle);
    }
  }

 private:
  // Connected components of candidates that share operators.
  void Split() {
    std::vector<int32_t> parent(sets_.size());
    std::iota(parent.begin(), parent.end(), 0);
    auto find = [&](int32_t i) {
      while (parent[i] != i) i = parent[i] = parent[parent[i]];
      return i;
    };
    for (const auto& covering : covering_) {
      for (int32_t c : covering) {
        int32_t a = find(c), b = find(covering.front());
        parent[std::max(a, b)] = std::min(a, b);
      }
    }
    cluster_of_.resize(sets_.size());
    for (int32_t c = 0; c < sets_.size(); ++c) {
      int32_t root = find(c);
      if (root == c) {
        cluster_of_[c] = static_cast<int32_t>(clusters_.size());
        clusters_.emplace_back();
      }
      cluster_of_[c] = cluster_of_[root];
      clusters_[cluster_of_[c]].candidates.push_back(c);
    }
  }

  void Solve(Cluster* cluster) {
    cluster->stale = false;
    if (cluster->candidates.empty()) return;
    std::vector<NoGood> no_goods(cluster->no_goods.begin(), cluster->no_goods.end());
    cluster->result =
        SolveRegion(sets_, cluster->candidates, no_goods, graph_.position(), max_states_);
    cluster->states += cluster->result.states;
  }

  std::vector<int32_t> Chosen() const {
    std::vector<int32_t> chosen;
    for (const Cluster& cluster : clusters_) {
      if (cluster.candidates.empty()) continue;
      chosen.insert(chosen.end(), cluster.result.chosen.begin(), cluster.result.chosen.end());
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

  // Candidates that share an operator with one, itself included; ascending.
  std::vector<int32_t> Relatives(int32_t c) const {
    std::vector<int32_t> found;
    for (const int32_t* o = sets_.begin(c); o != sets_.end(c); ++o) {
      found.insert(found.end(), covering_[*o].begin(), covering_[*o].end());
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  // Record a cycle of groups, and the cycles that their relatives form in the same way: otherwise
  // the next solution would only swap one group for a neighbour.
  void Forbid(const NoGood& cycle) {
    Add(cycle);
    if (cycle.size() == 2) {
      std::vector<int32_t> left = Relatives(cycle[0]), right = Relatives(cycle[1]);
      if (left.size() * right.size() <= kMaxRelatives) {
        for (int32_t a : left) {
          for (int32_t b : right) AddIfCycle({a, b});
        }
        return;
      }
    }
    for (size_t i = 0; i < cycle.size(); ++i) {
      for (int32_t other : Relatives(cycle[i])) {
        NoGood changed = cycle;
        changed[i] = other;
        AddIfCycle(changed);
      }
    }
  }

  // `groups` are in the order of the cycle.
  void AddIfCycle(const NoGood& groups) {
    for (size_t i = 0; i < groups.size(); ++i) {
      if (!Reaches(graph_, sets_, groups[i], groups[(i + 1) % groups.size()])) return;
      for (size_t j = 0; j < i; ++j) {
        if (Overlap(sets_, groups[i], groups[j])) return;
      }
    }
    Add(groups);
  }

  void Add(NoGood groups) {
    int32_t into = cluster_of_[groups.front()];
    for (int32_t c : groups) Join(into, cluster_of_[c]);
    std::sort(groups.begin(), groups.end());
    if (clusters_[into].no_goods.insert(std::move(groups)).second) clusters_[into].stale = true;
  }

  void Join(int32_t into, int32_t from) {
    if (into == from) return;
    Cluster &a = clusters_[into], &b = clusters_[from];
    for (int32_t c : b.candidates) cluster_of_[c] = into;
    std::vector<int32_t> both;
    std::merge(a.candidates.begin(), a.candidates.end(), b.candidates.begin(), b.candidates.end(),
               std::back_inserter(both));
    a.candidates = std::move(both);
    a.no_goods.merge(b.no_goods);
    a.states += b.states;
    a.stale = true;
    b = Cluster();
  }

  // Give up groups until no cycle is left, then take what still fits.
  std::vector<int32_t> Repaired(std::vector<int32_t> chosen) const {
    auto erase = [&](int32_t c) { chosen.erase(std::find(chosen.begin(), chosen.end(), c)); };
    for (;;) {
      std::vector<NoGood> cycles = FindCycles(graph_, sets_, chosen);
      if (cycles.empty()) break;
      // On a tie the later candidate goes.
      erase(*std::min_element(cycles[0].begin(), cycles[0].end(), [&](int32_t a, int32_t b) {
        return sets_.savings[a] != sets_.savings[b] ? sets_.savings[a] < sets_.savings[b] : a > b;
      }));
    }
    std::vector<char> covered(graph_.NumNodes(), 0);
    auto cover = [&](int32_t c) {
      for (const int32_t* o = sets_.begin(c); o != sets_.end(c); ++o) covered[*o] = 1;
    };
    for (int32_t c : chosen) cover(c);
    std::vector<int32_t> ranked(sets_.size());
    std::iota(ranked.begin(), ranked.end(), 0);
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](int32_t a, int32_t b) { return sets_.savings[a] > sets_.savings[b]; });
    int tried = 0;
    for (int32_t c : ranked) {
      if (std::any_of(sets_.begin(c), sets_.end(c), [&](int32_t o) { return covered[o] != 0; })) {
        continue;
      }
      if (++tried > kMaxRefills) break;
      chosen.push_back(c);
      if (FindCycles(graph_, sets_, chosen).empty()) {
        cover(c);
      } else {
        chosen.pop_back();
      }
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

  SearchResult Result(std::vector<int32_t> chosen) const {
    std::vector<int64_t> saving(clusters_.size(), 0);
    for (int32_t c : chosen) saving[cluster_of_[c]] += sets_.savings[c];
    SearchResult result;
    for (size_t i = 0; i < clusters_.size(); ++i) {
      const Cluster& cluster = clusters_[i];
      if (cluster.candidates.empty()) continue;
      ++result.regions;
      result.exact_regions += saving[i] == cluster.result.upper_bound;
      result.saving += saving[i];
      result.upper_bound += cluster.result.upper_bound;
      result.states += cluster.states;
    }
    result.chosen = std::move(chosen);
    return result;
  }

  const ReachabilityObj& graph_;
  const CandidateSets& sets_;
  const int64_t max_states_;
  std::vector<std::vector<int32_t>> covering_;  // candidates that cover each operator
  std::vector<int32_t> cluster_of_;
  std::vector<Cluster> clusters_;
};

}  // namespace

SearchResult ChooseGroups(const ReachabilityObj& graph, const CandidateSets& sets,
                          int64_t max_states) {
  return Search(graph, sets, max_states).Go();
}

}  // namespace tvm_fusion
