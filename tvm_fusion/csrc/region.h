// One region of the search in local numbers: operators by their place in an order of small
// frontier.
#ifndef TVM_FUSION_CSRC_REGION_H_
#define TVM_FUSION_CSRC_REGION_H_

#include <cstdint>
#include <vector>

#include "region_search.h"

namespace tvm_fusion {

// Members of a candidate as ascending places, and what it saves.
struct LocalCandidate {
  int32_t id;  // number among all candidates
  int64_t saving;
  std::vector<int32_t> places;

  int32_t first() const { return places.front(); }
};

class Region {
 public:
  Region(const CandidateSets& sets, const std::vector<int32_t>& candidates,
         const std::vector<NoGood>& no_goods, const std::vector<int32_t>& position);

  int32_t size() const { return num_places_; }  // operators
  const std::vector<LocalCandidate>& candidates() const { return candidates_; }
  // Candidates whose first place is this one.
  const std::vector<int32_t>& starting_at(int32_t place) const { return starting_at_[place]; }
  // No-goods in local candidate numbers, each in the order of its first places.
  const std::vector<std::vector<int32_t>>& no_goods() const { return no_goods_; }
  // No-goods of which the candidate is the first.
  const std::vector<int32_t>& no_goods_from(int32_t c) const { return no_goods_from_[c]; }

  // A price for each place such that no candidate saves more than its places cost together.
  std::vector<int64_t> QuickPrices() const;
  // The same, closer to the least total: subgradient steps towards the dual optimum, made feasible.
  std::vector<int64_t> TightPrices(int64_t known_saving) const;

  // Candidates taken in the order of falling saving where they fit (local numbers, ascending).
  std::vector<int32_t> Greedy() const;

 private:
  void MakeFeasible(std::vector<int64_t>* prices) const;
  void Lower(std::vector<int64_t>* prices) const;

  int32_t num_places_ = 0;
  std::vector<LocalCandidate> candidates_;
  std::vector<std::vector<int32_t>> starting_at_;
  std::vector<std::vector<int32_t>> covering_;  // candidates that cover each place
  std::vector<std::vector<int32_t>> no_goods_;
  std::vector<std::vector<int32_t>> no_goods_from_;
};

}  // namespace tvm_fusion

#endif  // TVM_FUSION_CSRC_REGION_H_
