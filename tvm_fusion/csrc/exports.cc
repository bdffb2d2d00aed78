// What Python sees of the native core, through tvm-ffi.
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>

#include "dataflow.h"
#include "reachability.h"
#include "search.h"
#include "wire.h"

namespace tvm_fusion {

namespace {

using tvm::ffi::Bytes;

// Keeps sums of savings, and of prices derived from them, far inside int64.
constexpr int64_t kMaxTotalSaving = int64_t{1} << 60;
constexpr int64_t kMaxStates = 50000000;

// One set in the packed form.
bool IsConvex(const ReachabilityObj* graph, const Bytes& nodes) {
  std::vector<int32_t> checked;
  for (int64_t node : Unpack(nodes)) checked.push_back(static_cast<int32_t>(graph->Checked(node)));
  return graph->IsConvex(checked.data(), checked.data() + checked.size());
}

// Check candidates and choose among those that save anything.
//
// `lengths` and `members` give the candidates, `savings` what each saves. The answer is saving,
// upper bound, regions, exact regions, states, then the chosen candidates, ascending.
Bytes Choose(const ReachabilityObj* graph, const Bytes& lengths, const Bytes& members,
             const Bytes& savings, int64_t max_states) {
  std::vector<int64_t> flat = Unpack(members), saved = Unpack(savings), counts = Unpack(lengths);
  std::vector<int64_t> offsets = Offsets(counts, flat.size());
  if (saved.size() != counts.size()) {
    TVM_FFI_THROW(ValueError) << counts.size() << " candidates have " << saved.size() << " savings";
  }
  if (max_states < 1 || max_states > kMaxStates) {
    TVM_FFI_THROW(ValueError) << "max_states must be 1 to " << kMaxStates << ", not " << max_states;
  }
  CandidateSets sets;
  std::vector<int64_t> original;
  std::vector<int32_t> group;
  int64_t total = 0;
  for (size_t c = 0; c < saved.size(); ++c) {
    group.clear();
    for (int64_t i = offsets[c]; i < offsets[c + 1]; ++i) {
      group.push_back(static_cast<int32_t>(graph->Checked(flat[i])));
    }
    if (group.empty()) TVM_FFI_THROW(ValueError) << "candidate " << c << " has no operators";
    std::sort(group.begin(), group.end());
    if (std::adjacent_find(group.begin(), group.end()) != group.end()) {
      TVM_FFI_THROW(ValueError) << "candidate " << c << " names an operator twice";
    }
    if (saved[c] <= 0) continue;
    if (saved[c] > kMaxTotalSaving - total) {
      TVM_FFI_THROW(ValueError) << "the savings add up to more than 2**60; use a coarser unit";
    }
    total += saved[c];
    if (group.size() > 1 && !graph->IsConvex(group.data(), group.data() + group.size())) {
      TVM_FFI_THROW(ValueError) << "candidate " << c
                                << " is not convex: a path leaves it and comes "
                                << "back";
    }
    sets.members.insert(sets.members.end(), group.begin(), group.end());
    sets.offsets.push_back(static_cast<int64_t>(sets.members.size()));
    sets.savings.push_back(saved[c]);
    original.push_back(static_cast<int64_t>(c));
  }
  SearchResult found = ChooseGroups(*graph, sets, max_states);
  std::vector<int64_t> out{found.saving, found.upper_bound, found.regions, found.exact_regions,
                           found.states};
  for (int32_t c : found.chosen) out.push_back(original[c]);
  return Pack(out);
}

}  // namespace

}  // namespace tvm_fusion

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  using tvm::ffi::Array;
  using tvm::ffi::Bytes;
  using tvm_fusion::DataflowObj;
  using tvm_fusion::ReachabilityObj;
  refl::ObjectDef<ReachabilityObj>()
      .def(refl::init<int64_t, Array<int64_t>>())
      .def("num_nodes", &ReachabilityObj::NumNodes)
      .def("reaches", &ReachabilityObj::Reaches)
      .def("is_convex", &tvm_fusion::IsConvex)
      .def("is_acyclic_contracted", &ReachabilityObj::IsAcyclicContracted)
      .def("choose", &tvm_fusion::Choose);
  refl::ObjectDef<DataflowObj>()
      .def(refl::init<tvm_fusion::Reachability, Bytes, Bytes, Bytes, Bytes, Bytes, Bytes, Bytes,
                      Bytes, Bytes>())
      .def("grow_epilogue", &DataflowObj::GrowEpilogue)
      .def("grow_prologue", &DataflowObj::GrowPrologue)
      .def("external_inputs", &DataflowObj::ExternalInputs)
      .def("external_outputs", &DataflowObj::ExternalOutputs)
      .def("traffic", &DataflowObj::Traffic)
      .def("depth", &DataflowObj::Depth);
}
