// The tokens of one row that may still be chosen, and how filters narrow them down.
#pragma once

#include <cstdint>
#include <vector>

#include "choice_ops.h"

namespace kakeya {

// What each token adds up to the target of `keep_leaders`.
enum class Measure { kCount, kWeight };

// Ids ascending; scores are logarithms of weights, relative to the best token's, which is 0.
class Candidates {
 public:
  void clear();
  void add(std::int32_t id, double score) {
    ids_.push_back(id);
    scores_.push_back(score);
  }
  // Tokens that were not added in order, ids ascending.
  void merge(std::vector<std::pair<std::int32_t, double>>& others);
  // To be called once all are there, before weights are asked for.
  void weigh(const ChoiceOps& ops);

  std::size_t size() const { return ids_.size(); }
  std::int32_t id(std::size_t i) const { return ids_[i]; }
  double score(std::size_t i) const { return scores_[i]; }
  double total() const;

  // The best, of equal scores the lower ids, just enough for their measure to reach `target`.
  void keep_leaders(Measure measure, double target);
  void keep_at_least(double score);
  // The token where the running weight passes `number` of the whole.
  std::int64_t draw(double number) const;

 private:
  bool narrow(Measure measure, double& target);
  bool range_of_undecided(double& least, double& most) const;
  template <class Keep>
  void compact(const Keep& keep);

  std::vector<std::int32_t> ids_;
  std::vector<double> scores_, weights_;
  std::vector<std::int32_t> undecided_;  // indices, ascending
  std::vector<std::uint8_t> kept_, buckets_;
};

}  // namespace kakeya
