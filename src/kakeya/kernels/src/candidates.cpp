#include "candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kakeya {
namespace {

constexpr std::size_t kSortedAtOnce = 48;
constexpr int kBuckets = 256;
constexpr std::size_t kPadding = 8;  // weights are computed in eights

}  // namespace

void Candidates::reserve(std::size_t more) {
  const std::size_t needed = size_ + more + kPadding;
  if (needed <= ids_.size()) return;
  ids_.resize(2 * needed);
  scores_.resize(2 * needed);
  weights_.resize(2 * needed);
}

void Candidates::add(std::int64_t start, const int* places, const double* scores, int count, double floor) {
  reserve(static_cast<std::size_t>(count));
  std::size_t to = size_;
  for (int i = 0; i < count; ++i) {
    ids_[to] = static_cast<std::int32_t>(start + places[i]);
    scores_[to] = scores[i];
    to += scores[i] >= floor && scores[i] > -std::numeric_limits<double>::infinity();
  }
  size_ = to;
}

void Candidates::merge(const std::vector<std::pair<std::int32_t, double>>& others) {
  reserve(others.size());
  std::size_t from = size_, other = others.size(), to = from + other;
  size_ = to;
  while (other > 0) {
    const bool is_other = from == 0 || ids_[from - 1] < others[other - 1].first;
    --to;
    ids_[to] = is_other ? others[other - 1].first : ids_[from - 1];
    scores_[to] = is_other ? others[other - 1].second : scores_[from - 1];
    --(is_other ? other : from);
  }
}

double Candidates::total() const {
  double sums[8] = {};  // independent of each other, so that one addition does not wait for the last
  std::size_t i = 0;
  for (; i + 8 <= size_; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sums[j] += weights_[i + j];
  }
  for (; i < size_; ++i) sums[i % 8] += weights_[i];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

template <class Keep>
void Candidates::compact(const Keep& keep) {
  std::int32_t* ids = ids_.data();
  double *scores = scores_.data(), *weights = weights_.data();
  std::size_t to = 0;
  for (std::size_t i = 0; i < size_; ++i) {
    const bool stays = keep(i);  // no branch: half of them are mispredicted
    ids[to] = ids[i];
    scores[to] = scores[i];
    weights[to] = weights[i];
    to += stays;
  }
  size_ = to;
}

void Candidates::keep_at_least(double score) {
  compact([&](std::size_t i) { return scores_[i] >= score; });
}

bool Candidates::keep_leaders(Measure measure, double target, double doubt) {
  kept_.assign(size_, 0);
  undecided_.resize(size_);
  std::iota(undecided_.begin(), undecided_.end(), 0);
  while (undecided_.size() > kSortedAtOnce && narrow(measure, target)) {
  }
  if (const Range range = range_of_undecided(); range.least < range.most) {
    std::sort(undecided_.begin(), undecided_.end(), [&](std::int32_t a, std::int32_t b) {
      return scores_[a] != scores_[b] ? scores_[a] > scores_[b] : a < b;
    });
  }
  double before = 0.0, running = 0.0;
  for (const std::int32_t i : undecided_) {
    kept_[i] = 1;
    before = running;
    running += measure == Measure::kCount ? 1.0 : weights_[i];
    if (running >= target) break;
  }
  if (doubt > 0.0 && (target - before < doubt || running - target < doubt)) return false;
  compact([&](std::size_t i) { return kept_[i] != 0; });
  return true;
}

Candidates::Range Candidates::range_of_undecided() const {
  constexpr std::size_t kChains = 4;  // independent of each other, as in `total`
  double least[kChains], most[kChains];
  std::fill(least, least + kChains, std::numeric_limits<double>::infinity());
  std::fill(most, most + kChains, -std::numeric_limits<double>::infinity());
  const auto look = [&](std::size_t u, std::size_t chain) {
    const double score = scores_[undecided_[u]];
    least[chain] = score < least[chain] ? score : least[chain];
    most[chain] = score > most[chain] ? score : most[chain];
  };
  std::size_t u = 0;
  for (; u + kChains <= undecided_.size(); u += kChains) {
    for (std::size_t chain = 0; chain < kChains; ++chain) look(u + chain, chain);
  }
  for (; u < undecided_.size(); ++u) look(u, 0);
  return {*std::min_element(least, least + kChains), *std::max_element(most, most + kChains)};
}

// Sorts the undecided into buckets by score: those above the bucket where the target is reached are kept, those
// below are not, and the bucket's own stay undecided. False where scores are too close together for that.
bool Candidates::narrow(Measure measure, double& target) {
  const Range range = range_of_undecided();
  const double scale = (kBuckets - 1) / (range.most - range.least);
  if (!std::isfinite(scale)) return false;
  // Locals: the compiler must assume that bytes written here could be any member.
  const std::size_t count = undecided_.size();
  buckets_.resize(count);
  std::int32_t* undecided = undecided_.data();
  std::uint8_t *buckets = buckets_.data(), *kept = kept_.data();
  const double *scores = scores_.data(), *weights = weights_.data();
  double sums[2][kBuckets] = {};  // two, so that equal neighbours do not wait for each other
  for (std::size_t u = 0; u < count; ++u) {
    const std::int32_t i = undecided[u];
    const int bucket = static_cast<int>((range.most - scores[i]) * scale);
    buckets[u] = static_cast<std::uint8_t>(bucket);
    sums[u % 2][bucket] += measure == Measure::kCount ? 1.0 : weights[i];
  }
  int crossing = 0;
  double above = 0.0;
  for (; crossing < kBuckets - 1; ++crossing) {
    const double sum = sums[0][crossing] + sums[1][crossing];
    if (above + sum >= target) break;
    above += sum;
  }
  target -= above;
  std::size_t left = 0;
  for (std::size_t u = 0; u < count; ++u) {
    const std::int32_t i = undecided[u];
    kept[i] = buckets[u] < crossing;
    undecided[left] = i;
    left += buckets[u] == crossing;
  }
  undecided_.resize(left);
  return true;
}

std::int64_t Candidates::draw(double number) {
  running_.resize(size_);
  double running = 0.0;
  for (std::size_t i = 0; i < size_; ++i) running_[i] = running += weights_[i];
  // Kept below the total, whatever the rounding, so that the token found has weight.
  const double target = std::min(number * running, std::nextafter(running, 0.0));
  return ids_[static_cast<std::size_t>(std::upper_bound(running_.begin(), running_.end(), target) - running_.begin())];
}

}  // namespace kakeya
