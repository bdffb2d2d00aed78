// Cycles that groups close when each is contracted to one node.
#ifndef TVM_FUSION_CSRC_CYCLES_H_
#define TVM_FUSION_CSRC_CYCLES_H_

#include <cstdint>
#include <vector>

#include "reachability.h"
#include "region_search.h"

namespace tvm_fusion {

// Does a path lead from a member of candidate `a` to a member of candidate `b`?
bool Reaches(const ReachabilityObj& graph, const CandidateSets& sets, int32_t a, int32_t b);

// Do two candidates share a member?
bool Overlap(const CandidateSets& sets, int32_t a, int32_t b);

// Shortest cycles through the disjoint convex candidates `chosen`, contracted: at least one for
// every strongly connected component, none if contraction leaves the graph acyclic. The candidates
// of each stand in the order of the cycle, each reaching the next.
std::vector<NoGood> FindCycles(const ReachabilityObj& graph, const CandidateSets& sets,
                               const std::vector<int32_t>& chosen);

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_CYCLES_H_
