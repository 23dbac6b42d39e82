#include "candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kakeya {
namespace {

constexpr std::size_t kSortedAtOnce = 48;
constexpr int kBuckets = 256;

}  // namespace

void Candidates::clear() {
  ids_.clear();
  scores_.clear();
  weights_.clear();
}

void Candidates::merge(std::vector<std::pair<std::int32_t, double>>& others) {
  std::size_t from = ids_.size(), other = others.size(), to = from + other;
  ids_.resize(to);
  scores_.resize(to);
  while (other > 0) {
    const bool is_other = from == 0 || ids_[from - 1] < others[other - 1].first;
    --to;
    ids_[to] = is_other ? others[other - 1].first : ids_[from - 1];
    scores_[to] = is_other ? others[other - 1].second : scores_[from - 1];
    --(is_other ? other : from);
  }
}

void Candidates::weigh(const ChoiceOps& ops) {
  weights_.assign((scores_.size() + 7) / 8 * 8, 0.0);
  std::copy(scores_.begin(), scores_.end(), weights_.begin());
  ops.exponentials(weights_.data(), static_cast<std::int64_t>(weights_.size()));
}

double Candidates::total() const {
  return std::accumulate(weights_.begin(), weights_.begin() + static_cast<std::ptrdiff_t>(size()), 0.0);
}

template <class Keep>
void Candidates::compact(const Keep& keep) {
  std::size_t to = 0;
  for (std::size_t i = 0; i < size(); ++i) {
    if (!keep(i)) continue;
    ids_[to] = ids_[i];
    scores_[to] = scores_[i];
    weights_[to] = weights_[i];
    ++to;
  }
  ids_.resize(to);
  scores_.resize(to);
  weights_.resize(to);
}

void Candidates::keep_at_least(double score) {
  compact([&](std::size_t i) { return scores_[i] >= score; });
}

void Candidates::keep_leaders(Measure measure, double target) {
  kept_.assign(size(), 0);
  undecided_.resize(size());
  std::iota(undecided_.begin(), undecided_.end(), 0);
  while (undecided_.size() > kSortedAtOnce && narrow(measure, target)) {
  }
  double least, most;
  if (range_of_undecided(least, most)) {
    std::sort(undecided_.begin(), undecided_.end(), [&](std::int32_t a, std::int32_t b) {
      return scores_[a] != scores_[b] ? scores_[a] > scores_[b] : a < b;
    });
  }
  double running = 0.0;
  for (const std::int32_t i : undecided_) {
    kept_[i] = 1;
    running += measure == Measure::kCount ? 1.0 : weights_[i];
    if (running >= target) break;
  }
  compact([&](std::size_t i) { return kept_[i] != 0; });
}

// False where all that are undecided have the same score.
bool Candidates::range_of_undecided(double& least, double& most) const {
  least = std::numeric_limits<double>::infinity();
  most = -least;
  for (const std::int32_t i : undecided_) {
    least = std::min(least, scores_[i]);
    most = std::max(most, scores_[i]);
  }
  return least < most;
}

// Sorts the undecided into buckets by score: those above the bucket where the target is reached are kept, those
// below are not, and the bucket's own stay undecided. False where scores are too close together for that.
bool Candidates::narrow(Measure measure, double& target) {
  double least, most;
  if (!range_of_undecided(least, most)) return false;
  const double scale = (kBuckets - 1) / (most - least);
  if (!std::isfinite(scale)) return false;
  double sums[kBuckets] = {};
  buckets_.resize(undecided_.size());
  for (std::size_t u = 0; u < undecided_.size(); ++u) {
    const std::int32_t i = undecided_[u];
    const int bucket = static_cast<int>((most - scores_[i]) * scale);
    buckets_[u] = static_cast<std::uint8_t>(bucket);
    sums[bucket] += measure == Measure::kCount ? 1.0 : weights_[i];
  }
  int crossing = 0;
  double above = 0.0;
  for (; crossing < kBuckets - 1 && above + sums[crossing] < target; ++crossing) above += sums[crossing];
  target -= above;
  std::size_t left = 0;
  for (std::size_t u = 0; u < undecided_.size(); ++u) {
    kept_[undecided_[u]] = buckets_[u] < crossing;
    if (buckets_[u] == crossing) undecided_[left++] = undecided_[u];
  }
  undecided_.resize(left);
  return true;
}

std::int64_t Candidates::draw(double number) const {
  const double whole = total();
  // Kept below the total, whatever the rounding, so that the token found has weight.
  const double target = std::min(number * whole, std::nextafter(whole, 0.0));
  double running = 0.0;
  std::size_t i = 0;
  for (; i + 1 < size(); ++i) {
    running += weights_[i];
    if (running > target) break;
  }
  return ids_[i];
}

}  // namespace kakeya
