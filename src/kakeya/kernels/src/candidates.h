// The tokens of one row that may still be chosen, and how filters narrow them down.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "choice_ops.h"

namespace kakeya {

// What each token adds towards the target of `keep_leaders`.
enum class Measure { kCount, kWeight };

// Ids ascending; scores are logarithms of weights, relative to the best token's, which is 0.
class Candidates {
 public:
  void clear() { size_ = 0; }
  // Those of a block, at `places` of it, whose scores are at least `floor` and finite.
  void add(std::int64_t start, const int* places, const double* scores, int count, double floor);
  // Tokens that could not be added in order; their ids ascend.
  void merge(const std::vector<std::pair<std::int32_t, double>>& others);
  // To be called once all are there, before weights are asked for.
  void weigh(const ChoiceOps& ops) { ops.exponentials(scores_.data(), static_cast<std::int64_t>(size_), weights_.data()); }

  std::size_t size() const { return size_; }
  std::int32_t id(std::size_t i) const { return ids_[i]; }
  double score(std::size_t i) const { return scores_[i]; }
  double total() const;

  // The best, of equal scores the lower ids, just enough for their measure to reach `target`. False, and nothing
  // is changed, where a target by up to `doubt` lower or higher would be reached by other tokens.
  bool keep_leaders(Measure measure, double target, double doubt = 0.0);
  void keep_at_least(double score);
  // The token where the running weight passes `number` of the whole.
  std::int64_t draw(double number);

 private:
  struct Range {
    double least, most;
  };
  void reserve(std::size_t more);
  bool narrow(Measure measure, double& target);
  Range range_of_undecided() const;
  template <class Keep>
  void compact(const Keep& keep);

  std::size_t size_ = 0;
  std::vector<std::int32_t> ids_;  // this and the next two have room for a few more than `size_`
  std::vector<double> scores_, weights_;
  std::vector<std::int32_t> undecided_;  // indices, ascending
  std::vector<std::uint8_t> kept_, buckets_;
  std::vector<double> running_;
};

}  // namespace kakeya
