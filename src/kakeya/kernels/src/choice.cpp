// The choice of tokens: one pass finds the greatest logit of every block, and what follows looks only at blocks
// that can matter. Weights are summed over a whole row only where its total is needed.
#include "choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "candidates.h"
#include "ops.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kMaskBytes = kChoiceBlock / 8;

// One row of logits under penalties, bias and a mask. The logits that these change are -infinity in a copy of their
// block; adjusted values, which need a double, are kept beside it. Memory stays for the thread's next row.
class LogitRow {
 public:
  void open(const float* logits, std::int64_t vocab);
  double best() const { return best_; }

  // kNotAToken leaves the id in `token`.
  ChoiceStatus adjust(const ChoiceRequest& request, std::int64_t& token);

  // The lowest id with the best logit.
  std::int64_t first_best() const;
  // The sum of exp((logit - best) * factor), kept block by block.
  double weigh(double factor);
  std::int64_t draw_from_all(double number, double factor);

  // Tokens whose score (logit - best) / temperature is at least `floor` and finite, weighed.
  Candidates& collect(double floor, double temperature);
  // A score that at least `count` tokens reach; -infinity if the blocks do not tell.
  double score_of(std::int64_t count, double temperature);

 private:
  static constexpr std::int64_t start_of(std::size_t block) { return static_cast<std::int64_t>(block) * kChoiceBlock; }
  float* copy_of(std::size_t block);
  void refresh(std::size_t block) { ops_->maxima(blocks_[block], 1, &maxima_[block]); }
  void note_best();
  std::int32_t& adjusted(std::int64_t token);
  void penalize(const ChoiceRequest& request);
  void add_bias(const ChoiceRequest& request);
  void take_out_adjusted();
  void apply_mask(const ChoiceRequest& request);
  bool outside(std::int64_t token) const { return token < 0 || token >= vocab_; }

  const ChoiceOps* ops_ = nullptr;
  const float* logits_ = nullptr;
  std::int64_t vocab_ = 0;
  double best_ = 0.0;
  std::vector<const float*> blocks_;
  std::vector<float> maxima_;
  std::vector<float> copies_;
  std::vector<double> sums_;  // weights of each block

  std::vector<std::int32_t> ids_;      // of the adjusted tokens
  std::vector<double> values_;         // their logits, adjusted
  std::vector<std::int32_t> counts_;   // how often each is among the recent ones
  std::vector<std::int32_t> places_;   // 1 + index into these for each token of the vocabulary; 0 between rows
  std::vector<double> weights_, order_;
  std::vector<std::pair<std::int32_t, double>> apart_;
  Candidates candidates_;
};

void LogitRow::open(const float* logits, std::int64_t vocab) {
  ops_ = &active_ops().choice;
  logits_ = logits;
  vocab_ = vocab;
  const std::size_t whole = static_cast<std::size_t>(vocab / kChoiceBlock);
  const std::size_t rest = static_cast<std::size_t>(vocab % kChoiceBlock);
  const std::size_t blocks = whole + (rest != 0);
  ids_.clear();
  values_.clear();
  counts_.clear();
  blocks_.resize(blocks);
  maxima_.resize(blocks);
  sums_.resize(blocks);
  if (copies_.size() < blocks * kChoiceBlock) copies_.resize(blocks * kChoiceBlock);
  for (std::size_t b = 0; b < blocks; ++b) blocks_[b] = logits + start_of(b);
  ops_->maxima(logits, static_cast<int>(whole), maxima_.data());
  if (rest != 0) {
    float* last = copies_.data() + start_of(whole);
    std::copy(logits + start_of(whole), logits + vocab, last);
    std::fill(last + rest, last + kChoiceBlock, -std::numeric_limits<float>::infinity());
    blocks_[whole] = last;
    refresh(whole);
  }
  note_best();
}

void LogitRow::note_best() {
  best_ = -kInfinity;
  for (const float most : maxima_) {
    if (most > best_ || std::isnan(most)) best_ = most;
    if (std::isnan(best_)) return;
  }
  for (const double value : values_) best_ = std::max(best_, value);
}

float* LogitRow::copy_of(std::size_t block) {
  float* copy = copies_.data() + start_of(block);
  if (blocks_[block] != copy) {
    std::memcpy(copy, blocks_[block], sizeof(float) * kChoiceBlock);
    blocks_[block] = copy;
  }
  return copy;
}

ChoiceStatus LogitRow::adjust(const ChoiceRequest& request, std::int64_t& token) {
  if (request.recent_count > 0) {
    const auto [least, most] = std::minmax_element(request.recent, request.recent + request.recent_count);
    token = outside(*least) ? *least : *most;
    if (outside(token)) return ChoiceStatus::kNotAToken;
  }
  for (std::int64_t i = 0; i < request.bias_count; ++i) {
    token = request.bias_ids[i];
    if (outside(token)) return ChoiceStatus::kNotAToken;
  }
  penalize(request);
  add_bias(request);
  take_out_adjusted();
  if (request.mask != nullptr) apply_mask(request);
  note_best();
  return best_ == -kInfinity ? ChoiceStatus::kNoToken : ChoiceStatus::kChosen;
}

// The place of a token among the adjusted ones; it becomes one with its own logit.
std::int32_t& LogitRow::adjusted(std::int64_t token) {
  std::int32_t& place = places_[static_cast<std::size_t>(token)];
  if (place == 0) {
    ids_.push_back(static_cast<std::int32_t>(token));
    values_.push_back(logits_[token]);
    counts_.push_back(0);
    place = static_cast<std::int32_t>(ids_.size());
  }
  return place;
}

void LogitRow::penalize(const ChoiceRequest& request) {
  if (request.recent_count + request.bias_count > 0 && places_.size() < static_cast<std::size_t>(vocab_)) {
    places_.resize(static_cast<std::size_t>(vocab_), 0);
  }
  for (std::int64_t i = 0; i < request.recent_count; ++i) {
    ++counts_[static_cast<std::size_t>(adjusted(request.recent[i]) - 1)];
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    double& value = values_[i];
    value = value > 0.0 ? value / request.repetition : value * request.repetition;
    value = value - request.presence - request.frequency * counts_[i];
  }
}

void LogitRow::add_bias(const ChoiceRequest& request) {
  for (std::int64_t i = 0; i < request.bias_count; ++i) {
    values_[static_cast<std::size_t>(adjusted(request.bias_ids[i]) - 1)] += request.bias_values[i];
  }
}

void LogitRow::take_out_adjusted() {
  for (const std::int32_t id : ids_) {
    places_[static_cast<std::size_t>(id)] = 0;
    const std::size_t block = static_cast<std::size_t>(id / kChoiceBlock);
    float& logit = copy_of(block)[id % kChoiceBlock];
    const bool was_greatest = logit == maxima_[block];
    logit = -std::numeric_limits<float>::infinity();
    if (was_greatest) refresh(block);
  }
}

void LogitRow::apply_mask(const ChoiceRequest& request) {
  const auto allows = [&](std::int64_t id) {
    return id / 8 < request.mask_bytes && (request.mask[id / 8] >> (id % 8) & 1) != 0;
  };
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (!allows(ids_[i])) values_[i] = -kInfinity;
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    std::uint8_t bits[kMaskBytes] = {};
    const std::int64_t first = start_of(b) / 8;
    const std::int64_t there = std::clamp<std::int64_t>(request.mask_bytes - first, 0, kMaskBytes);
    std::copy(request.mask + first, request.mask + first + there, bits);
    if (std::all_of(bits, bits + kMaskBytes, [](std::uint8_t byte) { return byte == 0xff; })) continue;
    if (std::all_of(bits, bits + kMaskBytes, [](std::uint8_t byte) { return byte == 0; })) {
      maxima_[b] = -std::numeric_limits<float>::infinity();  // so that nothing looks at it again
      continue;
    }
    ops_->mask(blocks_[b], bits, copies_.data() + start_of(b));
    blocks_[b] = copies_.data() + start_of(b);
    refresh(b);
  }
}

std::int64_t LogitRow::first_best() const {
  std::int64_t token = vocab_;
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (values_[i] == best_) token = std::min<std::int64_t>(token, ids_[i]);
  }
  for (std::size_t b = 0; b < blocks_.size() && start_of(b) < token; ++b) {
    if (static_cast<double>(maxima_[b]) != best_) continue;
    const float* found = std::find(blocks_[b], blocks_[b] + kChoiceBlock, maxima_[b]);
    return std::min(token, start_of(b) + (found - blocks_[b]));
  }
  return token;
}

double LogitRow::weigh(double factor) {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const bool matters = maxima_[b] != -std::numeric_limits<float>::infinity();
    sums_[b] = matters ? ops_->weight_sum(blocks_[b], best_, factor) : 0.0;
  }
  weights_.assign((ids_.size() + 7) / 8 * 8, 0.0);
  for (std::size_t i = 0; i < ids_.size(); ++i) weights_[i] = (values_[i] - best_) * factor;
  ops_->exponentials(weights_.data(), static_cast<std::int64_t>(weights_.size()));
  for (std::size_t i = 0; i < ids_.size(); ++i) sums_[static_cast<std::size_t>(ids_[i] / kChoiceBlock)] += weights_[i];
  double total = 0.0;
  for (const double sum : sums_) total += sum;
  return total;
}

std::int64_t LogitRow::draw_from_all(double number, double factor) {
  const double total = weigh(factor);
  // Kept below the total, whatever the rounding, so that the block found has weight.
  const double target = std::min(number * total, std::nextafter(total, 0.0));
  double before = 0.0;
  std::size_t block = 0;
  for (; before + sums_[block] <= target; ++block) before += sums_[block];

  double weights[kChoiceBlock];
  for (int i = 0; i < kChoiceBlock; ++i) {
    const bool matters = maxima_[block] != -std::numeric_limits<float>::infinity();
    weights[i] = matters ? (static_cast<double>(blocks_[block][i]) - best_) * factor : -kInfinity;
  }
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (static_cast<std::size_t>(ids_[i] / kChoiceBlock) == block) {
      weights[ids_[i] % kChoiceBlock] = (values_[i] - best_) * factor;
    }
  }
  ops_->exponentials(weights, kChoiceBlock);
  int chosen = 0;
  for (int i = 0; i < kChoiceBlock; ++i) {
    if (weights[i] <= 0.0) continue;
    chosen = i;  // the last with weight, should rounding leave the block's sum short of the target
    before += weights[i];
    if (before > target) break;
  }
  return start_of(block) + chosen;
}

double LogitRow::score_of(std::int64_t count, double temperature) {
  order_.assign(maxima_.begin(), maxima_.end());
  order_.insert(order_.end(), values_.begin(), values_.end());
  if (count > static_cast<std::int64_t>(order_.size())) return -kInfinity;
  const auto last = order_.begin() + (count - 1);
  std::nth_element(order_.begin(), last, order_.end(), [](double a, double b) { return a > b; });
  return (*last - best_) / temperature;
}

Candidates& LogitRow::collect(double floor, double temperature) {
  candidates_.clear();
  // What rounding may have moved across the floor is looked at, too.
  const double distance = floor * temperature;
  const double limit = best_ + distance - 4e-15 * (std::abs(best_) + std::abs(distance)) - 1e-300;
  float float_limit = static_cast<float>(limit);
  if (float_limit > limit) float_limit = std::nextafter(float_limit, -std::numeric_limits<float>::infinity());
  const auto passes = [floor](double score) { return score >= floor && score > -kInfinity; };
  int found[kChoiceBlock];
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    if (maxima_[b] < float_limit || maxima_[b] == -std::numeric_limits<float>::infinity()) continue;
    const int count = ops_->find_at_least(blocks_[b], float_limit, found);
    for (int i = 0; i < count; ++i) {
      const double score = (static_cast<double>(blocks_[b][found[i]]) - best_) / temperature;
      if (passes(score)) candidates_.add(static_cast<std::int32_t>(start_of(b) + found[i]), score);
    }
  }
  apart_.clear();
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    const double score = (values_[i] - best_) / temperature;
    if (passes(score)) apart_.emplace_back(ids_[i], score);
  }
  std::sort(apart_.begin(), apart_.end());
  candidates_.merge(apart_);
  candidates_.weigh(*ops_);
  return candidates_;
}

// 1 / temperature; a temperature too small for that sends everything but the best to where there is no weight.
double factor_of(double temperature) { return std::min(1.0 / temperature, std::numeric_limits<double>::max()); }

std::int64_t draw(LogitRow& row, const ChoiceRequest& request, std::int64_t vocab) {
  const double temperature = request.temperature;
  const bool few = request.top_k > 0 && request.top_k < vocab;
  const bool nucleus = request.top_p < 1.0;
  if (!few && !nucleus && request.least_score == -kInfinity) {
    return row.draw_from_all(request.number, factor_of(temperature));
  }
  double floor = request.least_score, total = 0.0;
  if (few) {
    floor = row.score_of(request.top_k, temperature);
  } else if (nucleus) {
    // All tokens below this floor together weigh less than what the nucleus leaves out.
    total = row.weigh(factor_of(temperature));
    floor = std::log((1.0 - request.top_p) * total / static_cast<double>(vocab)) - 1e-6;
  }
  Candidates& candidates = row.collect(floor, temperature);
  if (few) {
    candidates.keep_leaders(Measure::kCount, static_cast<double>(request.top_k));
    total = candidates.total();
  }
  if (nucleus) candidates.keep_leaders(Measure::kWeight, request.top_p * total);
  candidates.keep_at_least(request.least_score);
  return candidates.draw(request.number);
}

// The model's own log-probabilities: of the row as it was given.
std::vector<TokenScore> top_of(LogitRow& row, int count, double log_total) {
  std::vector<TokenScore> top;
  if (count == 0) return top;
  Candidates& candidates = row.collect(row.score_of(count, 1.0), 1.0);
  candidates.keep_leaders(Measure::kCount, count);
  for (std::size_t i = 0; i < candidates.size(); ++i) top.push_back({candidates.id(i), candidates.score(i)});
  std::stable_sort(top.begin(), top.end(), [](auto& a, auto& b) { return a.logprob > b.logprob; });
  for (TokenScore& each : top) each.logprob -= log_total;
  return top;
}

void choose_row(const float* logits, std::int64_t vocab, const ChoiceRequest& request, Choice& choice) {
  static thread_local LogitRow row;
  row.open(logits, vocab);
  const double best = row.best();
  choice.best = static_cast<float>(best);
  if (!std::isfinite(best)) {
    choice.status = ChoiceStatus::kNotFinite;
    return;
  }
  double log_total = 0.0;
  if (request.top_logprobs >= 0) {
    log_total = std::log(row.weigh(1.0));
    choice.top = top_of(row, request.top_logprobs, log_total);
  }
  choice.status = row.adjust(request, choice.token);
  if (choice.status != ChoiceStatus::kChosen) return;
  choice.token = request.temperature == 0.0 ? row.first_best() : draw(row, request, vocab);
  if (request.top_logprobs >= 0) choice.logprob = static_cast<double>(logits[choice.token]) - best - log_total;
}

constexpr std::uint64_t kLowHalf = 0xffffffffu;

// The high and the low word of a product.
std::pair<std::uint64_t, std::uint64_t> product(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t low = (a & kLowHalf) * (b & kLowHalf);
  const std::uint64_t cross = (a >> 32) * (b & kLowHalf) + (low >> 32);
  const std::uint64_t other = (a & kLowHalf) * (b >> 32) + (cross & kLowHalf);
  return {(a >> 32) * (b >> 32) + (cross >> 32) + (other >> 32), a * b};
}

constexpr std::int64_t kElementCost = 2;  // in multiplications

}  // namespace

void choose(const float* logits, std::int64_t stride, std::int64_t rows, std::int64_t vocab,
            const ChoiceRequest* requests, Choice* choices) {
  ThreadPool::shared().run(static_cast<int>(rows), rows * vocab * kElementCost, [&](int row) {
    choose_row(logits + row * stride, vocab, requests[row], choices[row]);
  });
}

double uniform(std::uint64_t seed, std::uint64_t position) {
  // The generator steps its counter before it gives the first word.
  std::uint64_t words[4] = {position + 1, position + 1 == 0, 0, 0};
  std::uint64_t keys[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const auto [high0, low0] = product(0xd2e7470ee14c6c93u, words[0]);
    const auto [high2, low2] = product(0xca5a826395121157u, words[2]);
    words[0] = high2 ^ words[1] ^ keys[0];
    words[1] = low2;
    words[2] = high0 ^ words[3] ^ keys[1];
    words[3] = low0;
    keys[0] += 0x9e3779b97f4a7c15u;
    keys[1] += 0xbb67ae8584caa73bu;
  }
  return static_cast<double>(words[0] >> 11) * 0x1p-53;
}

}  // namespace kakeya
