#include "cycles.h"

#include <algorithm>
#include <limits>

namespace tvm_fusion {

namespace {

// Directed graph in compressed form.
struct Edges {
  std::vector<int64_t> offsets;
  std::vector<int64_t> targets;
};

// Shortest path of at least one edge from `start` back to it over nodes that are `alive`, without
// the return to `start`; empty if there is none.
std::vector<int64_t> ShortestCycle(const Edges& edges, const std::vector<char>& alive,
                                   int64_t start) {
  std::vector<int64_t> from(alive.size(), -1), queue{start};
  for (size_t head = 0; head < queue.size(); ++head) {
    int64_t node = queue[head];
    for (int64_t e = edges.offsets[node]; e < edges.offsets[node + 1]; ++e) {
      int64_t next = edges.targets[e];
      if (next == start) {
        std::vector<int64_t> path;
        for (int64_t at = node; at != start; at = from[at]) path.push_back(at);
        path.push_back(start);
        std::reverse(path.begin(), path.end());
        return path;
      }
      if (alive[next] && from[next] < 0) {
        from[next] = node;
        queue.push_back(next);
      }
    }
  }
  return {};
}

// Leave alive only nodes that lie on a cycle or between two.
void Peel(const Edges& edges, const Edges& reverse, std::vector<char>* alive) {
  for (const auto& [ahead, behind] : {std::pair(&edges, &reverse), std::pair(&reverse, &edges)}) {
    std::vector<int64_t> waiting(alive->size(), 0), ready;
    for (size_t node = 0; node < alive->size(); ++node) {
      if (!(*alive)[node]) continue;
      for (int64_t e = behind->offsets[node]; e < behind->offsets[node + 1]; ++e) {
        waiting[node] += (*alive)[behind->targets[e]];
      }
      if (waiting[node] == 0) ready.push_back(static_cast<int64_t>(node));
    }
    while (!ready.empty()) {
      int64_t node = ready.back();
      ready.pop_back();
      (*alive)[node] = 0;
      for (int64_t e = ahead->offsets[node]; e < ahead->offsets[node + 1]; ++e) {
        int64_t next = ahead->targets[e];
        if ((*alive)[next] && --waiting[next] == 0) ready.push_back(next);
      }
    }
  }
}

// Shortest cycle of the relation "a path leads from one to the other" among the groups of a cycle.
NoGood Shorten(const ReachabilityObj& graph, const CandidateSets& sets, const NoGood& groups) {
  Edges edges;
  edges.offsets.push_back(0);
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < groups.size(); ++j) {
      if (i != j && Reaches(graph, sets, groups[i], groups[j])) {
        edges.targets.push_back(static_cast<int64_t>(j));
      }
    }
    edges.offsets.push_back(static_cast<int64_t>(edges.targets.size()));
  }
  std::vector<char> alive(groups.size(), 1);
  std::vector<int64_t> best;
  for (size_t i = 0; i < groups.size() && best.size() != 2; ++i) {
    std::vector<int64_t> path = ShortestCycle(edges, alive, static_cast<int64_t>(i));
    if (!path.empty() && (best.empty() || path.size() < best.size())) best = path;
  }
  NoGood out;
  for (int64_t i : best) out.push_back(groups[i]);
  return out;
}

}  // namespace

bool Reaches(const ReachabilityObj& graph, const CandidateSets& sets, int32_t a, int32_t b) {
  for (const int32_t* x = sets.begin(a); x != sets.end(a); ++x) {
    for (const int32_t* y = sets.begin(b); y != sets.end(b); ++y) {
      if (graph.descendants().test(*x, *y)) return true;
    }
  }
  return false;
}

bool Overlap(const CandidateSets& sets, int32_t a, int32_t b) {
  const int32_t *x = sets.begin(a), *y = sets.begin(b);
  while (x != sets.end(a) && y != sets.end(b)) {
    if (*x == *y) return true;
    *x < *y ? ++x : ++y;
  }
  return false;
}

std::vector<NoGood> FindCycles(const ReachabilityObj& graph, const CandidateSets& sets,
                               const std::vector<int32_t>& chosen) {
  std::vector<int64_t> unit(graph.NumNodes(), -1);
  for (size_t i = 0; i < chosen.size(); ++i) {
    for (const int32_t* o = sets.begin(chosen[i]); o != sets.end(chosen[i]); ++o) {
      unit[*o] = static_cast<int64_t>(i);
    }
  }
  int64_t units = static_cast<int64_t>(chosen.size());
  for (int64_t& u : unit) {
    if (u < 0) u = units++;
  }
  std::vector<int64_t> from, to;
  for (int64_t node = 0; node < graph.NumNodes(); ++node) {
    for (int64_t e = graph.offsets()[node]; e < graph.offsets()[node + 1]; ++e) {
      int64_t target = graph.targets()[e];
      if (unit[node] == unit[target]) continue;
      from.push_back(unit[node]);
      to.push_back(unit[target]);
    }
  }
  Edges edges, reverse;
  Compress(units, from, to, &edges.offsets, &edges.targets);
  Compress(units, to, from, &reverse.offsets, &reverse.targets);
  std::vector<char> alive(units, 1);
  Peel(edges, reverse, &alive);

  std::vector<NoGood> found;
  std::vector<char> done(chosen.size(), 0);  // on a cycle that was found
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (!alive[i] || done[i]) continue;
    NoGood cycle;
    for (int64_t u : ShortestCycle(edges, alive, static_cast<int64_t>(i))) {
      if (u >= static_cast<int64_t>(chosen.size())) continue;
      done[u] = 1;
      cycle.push_back(chosen[u]);
    }
    if (!cycle.empty()) found.push_back(Shorten(graph, sets, cycle));
  }
  return found;
}

}  // namespace tvm_fusion
