// Search for the best disjoint candidates of one region, by dynamic programming over its operators.
#ifndef TVM_FUSION_CSRC_REGION_SEARCH_H_
#define TVM_FUSION_CSRC_REGION_SEARCH_H_

#include <cstdint>
#include <vector>

namespace tvm_fusion {

// Candidate groups in compressed form; the members of each are ascending and distinct.
struct CandidateSets {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> members;
  std::vector<int64_t> savings;

  int32_t size() const { return static_cast<int32_t>(savings.size()); }
  const int32_t* begin(int32_t c) const { return members.data() + offsets[c]; }
  const int32_t* end(int32_t c) const { return members.data() + offsets[c + 1]; }
};

// Disjoint candidates, ascending, that must not all be chosen: together they close a cycle.
using NoGood = std::vector<int32_t>;

struct RegionResult {
  std::vector<int32_t> chosen;  // ascending
  int64_t saving = 0;
  int64_t upper_bound = 0;  // no set of candidates without a no-good saves more
  int64_t states = 0;
};

// Choose disjoint candidates of largest total saving that contain no no-good.
//
// `candidates` are ascending, `position` gives the topological position of every operator. Where
// the result is exact (saving equals upper_bound and no state was dropped), it is, among the sets
// of largest saving, the one whose ascending candidate numbers are lexicographically smallest.
//
// Positions are the region's operators in an order with a small frontier. A state is the first
// operator that is neither covered nor given up, with the later operators that are covered already
// and the candidates that no-goods forbid from there on; two partial solutions that reach one state
// have the same futures, so the better one is kept. Prices of operators that are feasible for the
// dual of the set-packing program bound what a state can still save. Beyond `max_states` states the
// search is repeated as a beam.
RegionResult SolveRegion(const CandidateSets& sets, const std::vector<int32_t>& candidates,
                         const std::vector<NoGood>& no_goods, const std::vector<int32_t>& position,
                         int64_t max_states);

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_REGION_SEARCH_H_
