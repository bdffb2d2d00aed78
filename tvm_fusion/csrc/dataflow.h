// Operators and tensors of a graph as numbers: growing sets of operators, traffic and depth of
// sets.
#ifndef TVM_FUSION_CSRC_DATAFLOW_H_
#define TVM_FUSION_CSRC_DATAFLOW_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <vector>

#include "reachability.h"

namespace tvm_fusion {

// Arrays cross as bytes of int64 (wire.h). Operators are numbered in topological order; numbers out
// of range throw ValueError.
class DataflowObj : public tvm::ffi::Object {
 public:
  using Bytes = tvm::ffi::Bytes;
  // Whether an operator, by number, may join.
  using Allowed = tvm::ffi::Optional<tvm::ffi::Function>;

  // Tensors: bytes, elements, a number that equal shapes share, and flags (1 a result of the graph,
  // 2 constant). Operators: flags (1 pointwise, 2 does work), how many tensors each reads and
  // writes, and these tensors one after another. Throws ValueError if lengths do not fit, a tensor
  // is written twice, or an operator reads what a later one writes.
  DataflowObj(Reachability reachability, const Bytes& tensor_bytes, const Bytes& tensor_sizes,
              const Bytes& tensor_shapes, const Bytes& tensor_flags, const Bytes& operator_flags,
              const Bytes& read_counts, const Bytes& reads, const Bytes& write_counts,
              const Bytes& writes);

  // Operators that join the seed, in the order in which they do: twice the number, plus 1 if the
  // set then has one result.
  Bytes GrowEpilogue(const Bytes& seed, int64_t max_operators, const Allowed& allowed) const;
  // Operators that join an anchor, which is not counted, in the order in which they do.
  Bytes GrowPrologue(int64_t anchor, int64_t max_operators, const Allowed& allowed) const;
  // Tensors that a set reads and does not write, in the order of first use.
  Bytes ExternalInputs(const Bytes& operators) const;
  // Tensors that a set writes and that are read outside it or are results of the graph.
  Bytes ExternalOutputs(const Bytes& operators) const;
  // Bytes read and bytes written by one kernel for each set, each distinct outside tensor once.
  Bytes Traffic(const Bytes& lengths, const Bytes& operators) const;
  // Operators that do work on the longest path inside each set.
  Bytes Depth(const Bytes& lengths, const Bytes& operators) const;

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_fusion.Dataflow", DataflowObj, tvm::ffi::Object);

 private:
  static constexpr int64_t kGraphResult = 1, kConstant = 2;  // tensor flags
  static constexpr int64_t kPointwise = 1, kWorks = 2;       // operator flags

  // Lists of numbers, one for each operator or tensor.
  struct Lists {
    std::vector<int64_t> offsets, values;
    const int64_t* begin(int64_t i) const { return values.data() + offsets[i]; }
    const int64_t* end(int64_t i) const { return values.data() + offsets[i + 1]; }
    int64_t size(int64_t i) const { return offsets[i + 1] - offsets[i]; }
  };

  // A set of numbers, as bits.
  class Marks {
   public:
    explicit Marks(int64_t size) : bits_((size + 63) / 64, 0) {}
    void add(int64_t i) { bits_[i >> 6] |= uint64_t{1} << (i & 63); }
    void add(const std::vector<int64_t>& all) {
      for (int64_t i : all) add(i);
    }
    void remove(const std::vector<int64_t>& all) {
      for (int64_t i : all) bits_[i >> 6] &= ~(uint64_t{1} << (i & 63));
    }
    bool has(int64_t i) const { return (bits_[i >> 6] >> (i & 63)) & 1; }

   private:
    std::vector<uint64_t> bits_;
  };

  int64_t num_operators() const { return static_cast<int64_t>(flags_.size()); }
  int64_t num_tensors() const { return static_cast<int64_t>(tensor_bytes_.size()); }
  // Checked, ascending, distinct.
  std::vector<int64_t> Sorted(const int64_t* begin, const int64_t* end) const;
  bool IsExternal(int64_t tensor, const Marks& inside) const;
  bool IsPrologue(int64_t operator_, const Marks& inside) const;
  // External inputs of a set whose marks are given; `seen` marks tensors and is left empty.
  std::vector<int64_t> ReadsOf(const std::vector<int64_t>& sorted, const Marks& inside,
                               Marks* seen) const;
  std::vector<int64_t> WritesOf(const std::vector<int64_t>& sorted, const Marks& inside) const;
  static bool Ask(const Allowed& allowed, int64_t operator_);

  Reachability reachability_;
  std::vector<int64_t> tensor_bytes_, tensor_sizes_, tensor_shapes_, tensor_flags_, flags_;
  Lists reads_, writes_, consumers_;
  std::vector<int64_t> producer_;  // -1 for inputs and constants
};

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_DATAFLOW_H_
