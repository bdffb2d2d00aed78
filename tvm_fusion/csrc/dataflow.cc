#include "dataflow.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <set>

#include "wire.h"

namespace tvm_fusion {

using tvm::ffi::Bytes;

namespace {

void CheckSize(const std::vector<int64_t>& values, size_t size, const char* what) {
  if (values.size() != size) {
    TVM_FFI_THROW(ValueError) << what << " has " << values.size() << " entries, not " << size;
  }
}

// Is a set convex that grows by one node at a time?
class GrowingConvexity {
 public:
  explicit GrowingConvexity(const ReachabilityObj& graph)
      : graph_(graph),
        words_(graph.descendants().words()),
        below_(words_, 0),
        above_(words_, 0),
        inside_(words_, 0) {}

  void Add(int64_t node) {
    const uint64_t *d = graph_.descendants().row(node), *a = graph_.ancestors().row(node);
    for (int64_t w = 0; w < words_; ++w) {
      below_[w] |= d[w];
      above_[w] |= a[w];
    }
    inside_[node >> 6] |= uint64_t{1} << (node & 63);
  }

  bool IsConvexWith(int64_t node) const {
    const uint64_t *d = graph_.descendants().row(node), *a = graph_.ancestors().row(node);
    for (int64_t w = 0; w < words_; ++w) {
      uint64_t between = (below_[w] | d[w]) & (above_[w] | a[w]) & ~inside_[w];
      if (w == node >> 6) between &= ~(uint64_t{1} << (node & 63));
      if (between) return false;
    }
    return true;
  }

 private:
  const ReachabilityObj& graph_;
  const int64_t words_;
  std::vector<uint64_t> below_, above_, inside_;
};

}  // namespace

DataflowObj::DataflowObj(Reachability reachability, const Bytes& tensor_bytes,
                         const Bytes& tensor_sizes, const Bytes& tensor_shapes,
                         const Bytes& tensor_flags, const Bytes& operator_flags,
                         const Bytes& read_counts, const Bytes& reads, const Bytes& write_counts,
                         const Bytes& writes)
    : reachability_(std::move(reachability)),
      tensor_bytes_(Unpack(tensor_bytes)),
      tensor_sizes_(Unpack(tensor_sizes)),
      tensor_shapes_(Unpack(tensor_shapes)),
      tensor_flags_(Unpack(tensor_flags)),
      flags_(Unpack(operator_flags)) {
  const size_t tensors = tensor_bytes_.size(), operators = flags_.size();
  CheckSize(tensor_sizes_, tensors, "the list of sizes");
  CheckSize(tensor_shapes_, tensors, "the list of shapes");
  CheckSize(tensor_flags_, tensors, "the list of tensor flags");
  if (reachability_->NumNodes() != num_operators()) {
    TVM_FFI_THROW(ValueError) << "the graph has " << reachability_->NumNodes() << " nodes, not "
                              << operators << " operators";
  }
  for (const auto& [lists, counts, values] :
       {std::tuple(&reads_, &read_counts, &reads), std::tuple(&writes_, &write_counts, &writes)}) {
    lists->values = Unpack(*values);
    std::vector<int64_t> lengths = Unpack(*counts);
    CheckSize(lengths, operators, "the list of operand counts");
    lists->offsets = Offsets(lengths, lists->values.size());
    for (int64_t t : lists->values) {
      if (t < 0 || t >= static_cast<int64_t>(tensors)) {
        TVM_FFI_THROW(ValueError) << "tensor " << t << " is not among the " << tensors;
      }
    }
  }
  producer_.assign(tensors, -1);
  std::vector<int64_t> from, to;
  for (int64_t o = 0; o < num_operators(); ++o) {
    for (const int64_t* t = reads_.begin(o); t != reads_.end(o); ++t) {
      // A tensor that is read twice has one consumer.
      if (std::find(reads_.begin(o), t, *t) != t) continue;
      from.push_back(*t);
      to.push_back(o);
    }
    for (const int64_t* t = writes_.begin(o); t != writes_.end(o); ++t) {
      if (producer_[*t] >= 0) TVM_FFI_THROW(ValueError) << "tensor " << *t << " is written twice";
      producer_[*t] = o;
    }
  }
  for (size_t i = 0; i < from.size(); ++i) {
    if (producer_[from[i]] >= to[i]) {
      TVM_FFI_THROW(ValueError) << "operator " << to[i] << " reads what operator "
                                << producer_[from[i]] << " writes; the order is not topological";
    }
  }
  Compress(static_cast<int64_t>(tensors), from, to, &consumers_.offsets, &consumers_.values);
}

std::vector<int64_t> DataflowObj::Sorted(const int64_t* begin, const int64_t* end) const {
  std::vector<int64_t> out(begin, end);
  for (int64_t o : out) reachability_->Checked(o);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

bool DataflowObj::IsExternal(int64_t tensor, const Marks& inside) const {
  return (tensor_flags_[tensor] & kGraphResult) != 0 ||
         std::any_of(consumers_.begin(tensor), consumers_.end(tensor),
                     [&](int64_t c) { return !inside.has(c); });
}

bool DataflowObj::Ask(const Allowed& allowed, int64_t operator_) {
  return !allowed.has_value() || allowed.value()(operator_).cast<bool>();
}

Bytes DataflowObj::GrowEpilogue(const Bytes& seed, int64_t max_operators,
                                const Allowed& allowed) const {
  std::vector<int64_t> given = Unpack(seed);
  std::vector<int64_t> current = Sorted(given.data(), given.data() + given.size());
  Marks inside(num_operators()), refused(num_operators());
  GrowingConvexity convexity(*reachability_.get());
  std::set<int64_t> waiting;  // consumers of the set outside it
  std::set<int64_t> results;
  auto add = [&](int64_t o) {
    inside.add(o);
    convexity.Add(o);
    waiting.erase(o);
    for (const int64_t* t = writes_.begin(o); t != writes_.end(o); ++t) {
      if (IsExternal(*t, inside)) results.insert(*t);
      for (const int64_t* c = consumers_.begin(*t); c != consumers_.end(*t); ++c) {
        if (!inside.has(*c) && !refused.has(*c)) waiting.insert(*c);
      }
    }
    for (const int64_t* t = reads_.begin(o); t != reads_.end(o); ++t) {
      if (!IsExternal(*t, inside)) results.erase(*t);
    }
  };
  for (int64_t o : current) add(o);
  std::vector<int64_t> joined;
  if (results.size() != 1) return Pack(joined);
  const int64_t shape = tensor_shapes_[*results.begin()];
  int64_t count = static_cast<int64_t>(given.size());
  while (count < max_operators && !waiting.empty()) {
    int64_t next = *waiting.begin();
    bool fits = (flags_[next] & kPointwise) != 0 && writes_.size(next) == 1 &&
                tensor_shapes_[*writes_.begin(next)] == shape && Ask(allowed, next) &&
                convexity.IsConvexWith(next);
    if (!fits) {
      refused.add(next);
      waiting.erase(next);
      continue;
    }
    add(next);
    ++count;
    joined.push_back(2 * next + (results.size() == 1));
  }
  return Pack(joined);
}

bool DataflowObj::IsPrologue(int64_t operator_, const Marks& inside) const {
  if ((flags_[operator_] & kPointwise) == 0 || writes_.size(operator_) != 1) return false;
  const int64_t result = *writes_.begin(operator_);
  if (IsExternal(result, inside)) return false;
  int64_t largest = 0;
  for (const int64_t* t = reads_.begin(operator_); t != reads_.end(operator_); ++t) {
    if ((tensor_flags_[*t] & kConstant) == 0) largest = std::max(largest, tensor_sizes_[*t]);
  }
  return tensor_sizes_[result] <= largest;
}

Bytes DataflowObj::GrowPrologue(int64_t anchor, int64_t max_operators,
                                const Allowed& allowed) const {
  Marks inside(num_operators());
  std::set<int64_t> producers;  // of the set, outside it
  std::vector<int64_t> joined;
  int64_t next = reachability_->Checked(anchor);
  for (;;) {
    inside.add(next);
    producers.erase(next);
    for (const int64_t* t = reads_.begin(next); t != reads_.end(next); ++t) {
      if (producer_[*t] >= 0 && !inside.has(producer_[*t])) producers.insert(producer_[*t]);
    }
    if (static_cast<int64_t>(joined.size()) >= max_operators) break;
    auto fits = [&](int64_t o) { return IsPrologue(o, inside) && Ask(allowed, o); };
    auto found = std::find_if(producers.rbegin(), producers.rend(), fits);
    if (found == producers.rend()) break;
    next = *found;
    joined.push_back(next);
  }
  return Pack(joined);
}

std::vector<int64_t> DataflowObj::ReadsOf(const std::vector<int64_t>& sorted, const Marks& inside,
                                          Marks* seen) const {
  std::vector<int64_t> out;
  for (int64_t o : sorted) {
    for (const int64_t* t = reads_.begin(o); t != reads_.end(o); ++t) {
      bool made = producer_[*t] >= 0 && inside.has(producer_[*t]);
      if (made || seen->has(*t)) continue;
      seen->add(*t);
      out.push_back(*t);
    }
  }
  seen->remove(out);
  return out;
}

std::vector<int64_t> DataflowObj::WritesOf(const std::vector<int64_t>& sorted,
                                           const Marks& inside) const {
  std::vector<int64_t> out;
  for (int64_t o : sorted) {
    for (const int64_t* t = writes_.begin(o); t != writes_.end(o); ++t) {
      if (IsExternal(*t, inside)) out.push_back(*t);
    }
  }
  return out;
}

Bytes DataflowObj::ExternalInputs(const Bytes& operators) const {
  std::vector<int64_t> given = Unpack(operators);
  std::vector<int64_t> sorted = Sorted(given.data(), given.data() + given.size());
  Marks inside(num_operators()), seen(num_tensors());
  inside.add(sorted);
  return Pack(ReadsOf(sorted, inside, &seen));
}

Bytes DataflowObj::ExternalOutputs(const Bytes& operators) const {
  std::vector<int64_t> given = Unpack(operators);
  std::vector<int64_t> sorted = Sorted(given.data(), given.data() + given.size());
  Marks inside(num_operators());
  inside.add(sorted);
  return Pack(WritesOf(sorted, inside));
}

Bytes DataflowObj::Traffic(const Bytes& lengths, const Bytes& operators) const {
  std::vector<int64_t> flat = Unpack(operators), out;
  std::vector<int64_t> offsets = Offsets(Unpack(lengths), flat.size());
  Marks inside(num_operators()), seen(num_tensors());
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    std::vector<int64_t> sorted = Sorted(flat.data() + offsets[i], flat.data() + offsets[i + 1]);
    inside.add(sorted);
    for (const auto& tensors : {ReadsOf(sorted, inside, &seen), WritesOf(sorted, inside)}) {
      int64_t total = 0;
      for (int64_t t : tensors) total += tensor_bytes_[t];
      out.push_back(total);
    }
    inside.remove(sorted);
  }
  return Pack(out);
}

Bytes DataflowObj::Depth(const Bytes& lengths, const Bytes& operators) const {
  std::vector<int64_t> flat = Unpack(operators), out, depth;
  std::vector<int64_t> offsets = Offsets(Unpack(lengths), flat.size());
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    std::vector<int64_t> sorted = Sorted(flat.data() + offsets[i], flat.data() + offsets[i + 1]);
    depth.clear();
    for (int64_t o : sorted) {
      int64_t before = 0;
      for (const int64_t* t = reads_.begin(o); t != reads_.end(o); ++t) {
        auto at = std::lower_bound(sorted.begin(), sorted.end(), producer_[*t]);
        if (at == sorted.end() || *at != producer_[*t]) continue;
        before = std::max(before, depth[at - sorted.begin()]);
      }
      depth.push_back(before + ((flags_[o] & kWorks) != 0));
    }
    out.push_back(depth.empty() ? 0 : *std::max_element(depth.begin(), depth.end()));
  }
  return Pack(out);
}

}  // namespace tvm_fusion
