#include "reachability.h"

#include <tvm/ffi/error.h>

#include <limits>

namespace tvm_fusion {

using tvm::ffi::Array;

namespace {

// The bound keeps 2 * n * n / 8 bytes near 2.5 GB and every index product far inside int64.
constexpr int64_t kMaxNodes = 100000;

// Kahn's order of the graph in compressed form; shorter than `n` if there is a cycle.
std::vector<int64_t> TopologicalOrder(int64_t n, const std::vector<int64_t>& offsets,
                                      const std::vector<int64_t>& targets) {
  std::vector<int64_t> waiting(n, 0);
  for (int64_t target : targets) ++waiting[target];
  std::vector<int64_t> order;
  order.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    if (waiting[i] == 0) order.push_back(i);
  }
  for (size_t head = 0; head < order.size(); ++head) {
    int64_t node = order[head];
    for (int64_t e = offsets[node]; e < offsets[node + 1]; ++e) {
      if (--waiting[targets[e]] == 0) order.push_back(targets[e]);
    }
  }
  return order;
}

}  // namespace

void Compress(int64_t n, const std::vector<int64_t>& from, const std::vector<int64_t>& to,
              std::vector<int64_t>* offsets, std::vector<int64_t>* targets) {
  offsets->assign(n + 1, 0);
  for (int64_t f : from) ++(*offsets)[f + 1];
  for (int64_t i = 0; i < n; ++i) (*offsets)[i + 1] += (*offsets)[i];
  std::vector<int64_t> next(offsets->begin(), offsets->end() - 1);
  targets->resize(to.size());
  for (size_t e = 0; e < from.size(); ++e) (*targets)[next[from[e]]++] = to[e];
}

void BitRows::merge(int64_t into, int64_t from) {
  uint64_t* a = bits_.data() + into * words_;
  const uint64_t* b = row(from);
  for (int64_t w = 0; w < words_; ++w) a[w] |= b[w];
}

int64_t ReachabilityObj::Checked(int64_t node) const {
  if (node < 0 || node >= num_nodes_) {
    TVM_FFI_THROW(ValueError) << "node " << node << " is not in the graph, whose nodes are 0 to "
                              << num_nodes_ - 1;
  }
  return node;
}

ReachabilityObj::ReachabilityObj(int64_t num_nodes, const Array<int64_t>& edges)
    : num_nodes_(num_nodes) {
  if (num_nodes < 0 || num_nodes > kMaxNodes) {
    TVM_FFI_THROW(ValueError) << "a graph has 0 to " << kMaxNodes << " nodes, not " << num_nodes;
  }
  if (edges.size() % 2 != 0) {
    TVM_FFI_THROW(ValueError) << "edges are pairs of nodes, but there are " << edges.size()
                              << " numbers";
  }
  std::vector<int64_t> from, to;
  from.reserve(edges.size() / 2);
  to.reserve(edges.size() / 2);
  bool even = true;
  for (int64_t node : edges) {
    (even ? from : to).push_back(Checked(node));
    even = !even;
  }
  Compress(num_nodes, from, to, &offsets_, &targets_);
  std::vector<int64_t> order = TopologicalOrder(num_nodes, offsets_, targets_);
  if (static_cast<int64_t>(order.size()) != num_nodes) {
    TVM_FFI_THROW(ValueError) << "the edges form a cycle; reachability needs an acyclic graph";
  }
  descendants_ = BitRows(num_nodes);
  ancestors_ = BitRows(num_nodes);
  position_.resize(num_nodes);
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    for (int64_t e = offsets_[*it]; e < offsets_[*it + 1]; ++e) {
      descendants_.set(*it, targets_[e]);
      descendants_.merge(*it, targets_[e]);
    }
  }
  bool numbered = true;  // are the numbers themselves a topological order?
  for (size_t e = 0; e < from.size(); ++e) numbered &= from[e] < to[e];
  for (int64_t i = 0; i < num_nodes; ++i) {
    position_[numbered ? i : order[i]] = static_cast<int32_t>(i);
  }
  for (int64_t node : order) {
    for (int64_t e = offsets_[node]; e < offsets_[node + 1]; ++e) {
      ancestors_.set(targets_[e], node);
      ancestors_.merge(targets_[e], node);
    }
  }
}

bool ReachabilityObj::Reaches(int64_t from, int64_t to) const {
  return descendants_.test(Checked(from), Checked(to));
}

bool ReachabilityObj::IsConvex(const int32_t* begin, const int32_t* end) const {
  // A node outside breaks convexity exactly if it is below one member and above another.
  const int64_t words = descendants_.words();
  std::vector<uint64_t> below(words, 0), above(words, 0), inside(words, 0);
  for (const int32_t* it = begin; it != end; ++it) {
    int32_t node = *it;
    inside[node >> 6] |= uint64_t{1} << (node & 63);
    const uint64_t* d = descendants_.row(node);
    const uint64_t* a = ancestors_.row(node);
    for (int64_t w = 0; w < words; ++w) {
      below[w] |= d[w];
      above[w] |= a[w];
    }
  }
  for (int64_t w = 0; w < words; ++w) {
    if (below[w] & above[w] & ~inside[w]) return false;
  }
  return true;
}

bool ReachabilityObj::IsAcyclicContracted(const Array<Array<int64_t>>& groups) const {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> unit(num_nodes_, kNone);
  int64_t units = 0;
  for (const Array<int64_t>& group : groups) {
    for (int64_t node : group) {
      if (unit[Checked(node)] != kNone && unit[node] != units) {
        TVM_FFI_THROW(ValueError) << "node " << node
                                  << " is in two groups; contracted groups must be disjoint";
      }
      unit[node] = units;
    }
    ++units;
  }
  for (int64_t& u : unit) {
    if (u == kNone) u = units++;
  }
  std::vector<int64_t> from, to, offsets, targets;
  for (int64_t node = 0; node < num_nodes_; ++node) {
    for (int64_t e = offsets_[node]; e < offsets_[node + 1]; ++e) {
      if (unit[node] != unit[targets_[e]]) {
        from.push_back(unit[node]);
        to.push_back(unit[targets_[e]]);
      }
    }
  }
  Compress(units, from, to, &offsets, &targets);
  return static_cast<int64_t>(TopologicalOrder(units, offsets, targets).size()) == units;
}

}  // namespace tvm_fusion
