// Choosing disjoint, jointly acyclic groups of largest total saving.
#ifndef TVM_FUSION_CSRC_SEARCH_H_
#define TVM_FUSION_CSRC_SEARCH_H_

#include <cstdint>
#include <vector>

#include "reachability.h"
#include "region_search.h"

namespace tvm_fusion {

struct SearchResult {
  std::vector<int32_t> chosen;  // ascending
  int64_t saving = 0;
  int64_t upper_bound = 0;
  int64_t regions = 0;
  int64_t exact_regions = 0;
  int64_t states = 0;
};

// Choose among convex candidates; see search.cc for the method.
//
// Candidates are taken as valid: members in range, distinct and ascending, savings positive, sums
// of savings far inside int64.
SearchResult ChooseGroups(const ReachabilityObj& graph, const CandidateSets& sets,
                          int64_t max_states);

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_SEARCH_H_
