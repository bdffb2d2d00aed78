// Reachability queries over a directed acyclic graph: the closure is kept as bit rows.
#ifndef TVM_FUSION_CSRC_REACHABILITY_H_
#define TVM_FUSION_CSRC_REACHABILITY_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/object.h>

#include <cstdint>
#include <vector>

namespace tvm_fusion {

// Compressed adjacency of edges from[i] -> to[i] over `n` nodes, by counting sort.
void Compress(int64_t n, const std::vector<int64_t>& from, const std::vector<int64_t>& to,
              std::vector<int64_t>* offsets, std::vector<int64_t>* targets);

// A square bit matrix; row i holds one bit for every node.
class BitRows {
 public:
  BitRows() = default;
  explicit BitRows(int64_t n) : words_((n + 63) / 64), bits_(n * words_, 0) {}

  int64_t words() const { return words_; }
  const uint64_t* row(int64_t i) const { return bits_.data() + i * words_; }
  bool test(int64_t i, int64_t j) const { return (row(i)[j >> 6] >> (j & 63)) & 1; }
  void set(int64_t i, int64_t j) { bits_[i * words_ + (j >> 6)] |= uint64_t{1} << (j & 63); }
  void merge(int64_t into, int64_t from);

 private:
  int64_t words_ = 0;
  std::vector<uint64_t> bits_;
};

// The transitive closure of a DAG in both directions, 2 * n * n / 8 bytes.
//
// Nodes are 0..num_nodes-1. Indices out of range and cyclic input throw ValueError.
class ReachabilityObj : public tvm::ffi::Object {
 public:
  // `edges` is flat: from0, to0, from1, to1, ... Repeated edges are allowed.
  ReachabilityObj(int64_t num_nodes, const tvm::ffi::Array<int64_t>& edges);

  int64_t NumNodes() const { return num_nodes_; }
  // Is there a path of at least one edge from `from` to `to`?
  bool Reaches(int64_t from, int64_t to) const;
  // Does every path between two nodes of a range stay inside it? The nodes must exist.
  bool IsConvex(const int32_t* begin, const int32_t* end) const;
  // Is the graph still acyclic when each of these disjoint groups becomes one node?
  bool IsAcyclicContracted(const tvm::ffi::Array<tvm::ffi::Array<int64_t>>& groups) const;

  // For other parts of the core.
  const BitRows& descendants() const { return descendants_; }
  const BitRows& ancestors() const { return ancestors_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  const std::vector<int64_t>& targets() const { return targets_; }
  // Place of each node in a topological order that keeps to the numbering where it can.
  const std::vector<int32_t>& position() const { return position_; }
  int64_t Checked(int64_t node) const;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_fusion.Reachability", ReachabilityObj, tvm::ffi::Object);

 private:
  int64_t num_nodes_;
  // Compressed adjacency: successors of i are targets_[offsets_[i]] .. targets_[offsets_[i + 1]].
  std::vector<int64_t> offsets_;
  std::vector<int64_t> targets_;
  BitRows descendants_;
  BitRows ancestors_;
  std::vector<int32_t> position_;
};

// A reference that is never null.
class Reachability : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Reachability, tvm::ffi::ObjectRef, ReachabilityObj);
};

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_REACHABILITY_H_
