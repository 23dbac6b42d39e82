// The choice of tokens. One pass finds the greatest logit of every block; what follows looks only at blocks that can
// matter. Where the weight of a whole row is needed, float32 gives it first, and the same decision is made in
// float64 only if float32 leaves it in doubt: what is chosen never depends on which of them chose.
#include "choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "candidates.h"
#include "ops.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
constexpr int kMaskBytes = kChoiceBlock / 8;
constexpr std::size_t kPadding = 8;  // weights are computed in eights
constexpr double kFloorStep = 2.0;
constexpr double kNearly = 0.8;  // of what is looked for: from there on the floor goes down by less
constexpr double kFlat = 200.0;  // times the weight of the best: so close together, float32 seldom decides
constexpr double kLargestRoughFactor = 1e30;  // beyond it float32 overflows

enum class Precision { kRough, kExact };

constexpr int kPowers = 64;

// k for a weight, at most 1, from 2^-k up to below 2^(1-k); the last power has all that are less.
int power_of(double weight) {
  std::uint64_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return static_cast<int>(std::min<std::uint64_t>(1023 - (bits >> 52), kPowers - 1));
}

// One row of logits under penalties, bias and a mask. The logits that penalties and bias change are -infinity in the row
// until `close`; adjusted values, which need a double, are kept beside it. A mask changes copies of blocks. Memory stays
// for the thread's next row.
class LogitRow {
 public:
  void open(float* logits, std::int64_t vocab);
  // Leaves the logits as they were.
  void close();
  double best() const { return best_; }

  // kNotAToken leaves the id in `token`.
  ChoiceStatus adjust(const ChoiceRequest& request, std::int64_t& token);

  // The lowest id with the best logit.
  std::int64_t first_best() const;
  // The sum of exp((logit - best) * factor), kept block by block.
  double weigh(double factor, Precision precision);
  // The token where the running weight of the whole row passes `number` of it. False where weights by kRoughness
  // lower or higher could lead to another one and are no better known.
  bool draw_from_all(double number, double factor, Precision precision, std::int64_t& token);

  // Tokens whose score (logit - best) / temperature is at least `floor` and finite, weighed.
  Candidates& collect(double floor, double temperature);
  // The same for a floor so low, `lowest` at least, that their measure reaches `target`.
  Candidates& collect_enough(Measure measure, double target, double lowest, double temperature);
  // A score that at least `count` tokens reach; -infinity where the greatest of the blocks do not tell.
  double score_of(std::int64_t count, double temperature);

 private:
  struct Adjusted {
    std::int32_t id;
    std::int32_t count;  // how often it is among the recent ones
    float original;
    double logit;
  };
  static constexpr std::int64_t start_of(std::size_t block) { return static_cast<std::int64_t>(block) * kChoiceBlock; }
  static std::size_t block_of(std::int64_t token) { return static_cast<std::size_t>(token / kChoiceBlock); }
  // Nothing but -infinity is left of it.
  bool is_empty(std::size_t block) const { return maxima_[block] == -kFloatInfinity; }
  void refresh(std::size_t block) { ops_->maxima(blocks_[block], 1, &maxima_[block]); }
  void note_best();
  Adjusted& adjusted(std::int64_t token);
  void penalize(const ChoiceRequest& request);
  void add_bias(const ChoiceRequest& request);
  void take_out_adjusted();
  void apply_mask(const ChoiceRequest& request);
  // The weight below which blocks are left out of a rough sum, by the weight of their heaviest token.
  double least_that_counts(double factor);
  void weigh_block(std::size_t block, double factor, double* weights) const;
  bool all_inside(const std::int32_t* tokens, std::int64_t count) const;

  const ChoiceOps* ops_ = nullptr;
  float* logits_ = nullptr;
  std::int64_t vocab_ = 0;
  double best_ = 0.0;
  float greatest_ = 0.0f;  // of those that were not adjusted
  std::vector<float*> blocks_;
  std::vector<float> maxima_;
  std::vector<float> copies_;
  std::vector<double> sums_;  // weights of each block
  std::vector<double> heaviest_;  // the greatest weight in each block

  std::vector<Adjusted> adjusted_;
  std::vector<std::int32_t> places_;  // 1 + index into `adjusted_` for each token of the vocabulary; 0 between rows
  std::vector<double> weights_, order_;
  std::vector<std::pair<std::int32_t, double>> apart_;
  Candidates candidates_;
};

void LogitRow::open(float* logits, std::int64_t vocab) {
  ops_ = &active_ops().choice;
  logits_ = logits;
  vocab_ = vocab;
  const std::size_t whole = static_cast<std::size_t>(vocab / kChoiceBlock);
  const std::size_t rest = static_cast<std::size_t>(vocab % kChoiceBlock);
  const std::size_t blocks = whole + (rest != 0);
  adjusted_.clear();
  blocks_.resize(blocks);
  maxima_.resize(blocks);
  sums_.resize(blocks);
  if (copies_.size() < blocks * kChoiceBlock) copies_.resize(blocks * kChoiceBlock);
  for (std::size_t b = 0; b < blocks; ++b) blocks_[b] = logits + start_of(b);
  ops_->maxima(logits, static_cast<int>(whole), maxima_.data());
  if (rest != 0) {
    float* last = copies_.data() + start_of(whole);
    std::copy(logits + start_of(whole), logits + vocab, last);
    std::fill(last + rest, last + kChoiceBlock, -kFloatInfinity);
    blocks_[whole] = last;
    refresh(whole);
  }
  note_best();
}

void LogitRow::note_best() {
  greatest_ = -kFloatInfinity;
  for (const float most : maxima_) {
    if (most > greatest_ || std::isnan(most)) greatest_ = most;
    if (std::isnan(greatest_)) break;
  }
  best_ = greatest_;
  for (const Adjusted& each : adjusted_) best_ = std::max(best_, each.logit);
}

void LogitRow::close() {
  for (const Adjusted& each : adjusted_) logits_[each.id] = each.original;
}

ChoiceStatus LogitRow::adjust(const ChoiceRequest& request, std::int64_t& token) {
  if (!all_inside(request.recent, request.recent_count)) {
    const auto [least, most] = std::minmax_element(request.recent, request.recent + request.recent_count);
    token = *least < 0 ? *least : *most;
    return ChoiceStatus::kNotAToken;
  }
  for (std::int64_t i = 0; i < request.bias_count; ++i) {
    token = request.bias_ids[i];
    if (token < 0 || token >= vocab_) return ChoiceStatus::kNotAToken;
  }
  if (request.recent_count + request.bias_count > 0) {
    if (places_.size() < static_cast<std::size_t>(vocab_)) places_.resize(static_cast<std::size_t>(vocab_), 0);
    penalize(request);
    add_bias(request);
    take_out_adjusted();
  }
  if (request.mask != nullptr) apply_mask(request);
  note_best();
  return best_ == -kInfinity ? ChoiceStatus::kNoToken : ChoiceStatus::kChosen;
}

bool LogitRow::all_inside(const std::int32_t* tokens, std::int64_t count) const {
  std::uint32_t outside = 0;
  for (std::int64_t i = 0; i < count; ++i) outside |= static_cast<std::uint32_t>(tokens[i]) >= vocab_;
  return outside == 0;
}

// A token that becomes one of the adjusted ones, with its own logit, unless it is one.
LogitRow::Adjusted& LogitRow::adjusted(std::int64_t token) {
  std::int32_t& place = places_[static_cast<std::size_t>(token)];
  if (place == 0) {
    adjusted_.push_back({static_cast<std::int32_t>(token), 0, logits_[token], logits_[token]});
    place = static_cast<std::int32_t>(adjusted_.size());
  }
  return adjusted_[static_cast<std::size_t>(place - 1)];
}

void LogitRow::penalize(const ChoiceRequest& request) {
  for (std::int64_t i = 0; i < request.recent_count; ++i) {  // they lie far apart, and the row is large
    __builtin_prefetch(&places_[static_cast<std::size_t>(request.recent[i])], 1);
    __builtin_prefetch(&logits_[request.recent[i]], 1);
  }
  for (std::int64_t i = 0; i < request.recent_count; ++i) ++adjusted(request.recent[i]).count;
  for (Adjusted& each : adjusted_) {
    each.logit = each.logit > 0.0 ? each.logit / request.repetition : each.logit * request.repetition;
    each.logit = each.logit - request.presence - request.frequency * each.count;
  }
}

void LogitRow::add_bias(const ChoiceRequest& request) {
  for (std::int64_t i = 0; i < request.bias_count; ++i) adjusted(request.bias_ids[i]).logit += request.bias_values[i];
}

void LogitRow::take_out_adjusted() {
  for (const Adjusted& each : adjusted_) {
    places_[static_cast<std::size_t>(each.id)] = 0;
    const std::size_t block = block_of(each.id);
    float& logit = blocks_[block][each.id % kChoiceBlock];
    const bool was_greatest = logit == maxima_[block];
    logit = -kFloatInfinity;
    if (was_greatest) refresh(block);
  }
}

void LogitRow::apply_mask(const ChoiceRequest& request) {
  const auto allows = [&](std::int64_t id) {
    return id / 8 < request.mask_bytes && (request.mask[id / 8] >> (id % 8) & 1) != 0;
  };
  for (Adjusted& each : adjusted_) {
    if (!allows(each.id)) each.logit = -kInfinity;
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    std::uint8_t bits[kMaskBytes] = {};
    const std::int64_t first = start_of(b) / 8;
    const std::int64_t there = std::clamp<std::int64_t>(request.mask_bytes - first, 0, kMaskBytes);
    std::copy(request.mask + first, request.mask + first + there, bits);
    if (std::all_of(bits, bits + kMaskBytes, [](std::uint8_t byte) { return byte == 0xff; })) continue;
    if (std::all_of(bits, bits + kMaskBytes, [](std::uint8_t byte) { return byte == 0; })) {
      maxima_[b] = -kFloatInfinity;  // so that nothing looks at it again
      continue;
    }
    ops_->mask(blocks_[b], bits, copies_.data() + start_of(b));
    blocks_[b] = copies_.data() + start_of(b);
    refresh(b);
  }
}

std::int64_t LogitRow::first_best() const {
  std::int64_t token = vocab_;
  for (const Adjusted& each : adjusted_) {
    if (each.logit == best_) token = std::min<std::int64_t>(token, each.id);
  }
  for (std::size_t b = 0; b < blocks_.size() && start_of(b) < token; ++b) {
    if (static_cast<double>(maxima_[b]) != best_) continue;
    const float* found = std::find(blocks_[b], blocks_[b] + kChoiceBlock, maxima_[b]);
    return std::min(token, start_of(b) + (found - blocks_[b]));
  }
  return token;
}

double LogitRow::weigh(double factor, Precision precision) {
  const bool is_rough = precision == Precision::kRough && factor < kLargestRoughFactor;
  // Adjusted logits need not be numbers that float32 has: its scores are relative to the best of the others.
  const double scale = std::exp((static_cast<double>(greatest_) - best_) * factor);
  const double least = is_rough ? least_that_counts(factor) : 0.0;
  double total = 0.0;
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    if (is_empty(b) || (is_rough && heaviest_[b] < least)) {
      sums_[b] = 0.0;
      continue;
    }
    if (is_rough) {
      sums_[b] = scale * ops_->rough_weight_sum(blocks_[b], greatest_, static_cast<float>(factor));
    } else {
      sums_[b] = ops_->weight_sum(blocks_[b], best_, factor);
    }
    total += sums_[b];
  }
  weights_.assign(adjusted_.size() + kPadding, 0.0);
  for (std::size_t i = 0; i < adjusted_.size(); ++i) weights_[i] = (adjusted_[i].logit - best_) * factor;
  ops_->exponentials(weights_.data(), static_cast<std::int64_t>(adjusted_.size()), weights_.data());
  for (std::size_t i = 0; i < adjusted_.size(); ++i) sums_[block_of(adjusted_[i].id)] += weights_[i];
  // Always summed block by block: what is drawn is looked for in the same order.
  return adjusted_.empty() ? total : std::accumulate(sums_.begin(), sums_.end(), 0.0);
}

double LogitRow::least_that_counts(double factor) {
  if (greatest_ == -kFloatInfinity) return 0.0;
  const std::size_t blocks = maxima_.size();
  heaviest_.resize(blocks + kPadding);
  for (std::size_t b = 0; b < blocks; ++b) heaviest_[b] = (static_cast<double>(maxima_[b]) - greatest_) * factor;
  ops_->exponentials(heaviest_.data(), static_cast<std::int64_t>(blocks), heaviest_.data());
  double total = 0.0, sums[kPowers] = {};
  for (std::size_t b = 0; b < blocks; ++b) {
    total += heaviest_[b];
    sums[power_of(heaviest_[b])] += heaviest_[b];
  }
  int counts = kPowers - 1;
  for (double out = sums[counts]; counts > 0 && out * kChoiceBlock <= kLeftOut * total; out += sums[counts]) --counts;
  return counts == kPowers - 1 ? 0.0 : std::ldexp(1.0, -counts);
}

bool LogitRow::draw_from_all(double number, double factor, Precision precision, std::int64_t& token) {
  const double total = weigh(factor, precision);
  const double doubt = precision == Precision::kRough ? 2 * kRoughness * total : 0.0;
  // Kept below the total, whatever the rounding, so that the block found has weight.
  const double target = std::min(number * total, std::nextafter(total, 0.0));
  double running = 0.0;
  std::size_t block = 0;
  for (; running + sums_[block] <= target; ++block) running += sums_[block];
  double weights[kChoiceBlock];
  weigh_block(block, factor, weights);
  double before = running;
  for (int i = 0; i < kChoiceBlock && running <= target; ++i) {
    if (weights[i] <= 0.0) continue;
    token = start_of(block) + i;  // the last with weight, should rounding leave the block short of the target
    before = running;
    running += weights[i];
  }
  return doubt == 0.0 || (target - before >= doubt && running - target >= doubt);
}

void LogitRow::weigh_block(std::size_t block, double factor, double* weights) const {
  for (int i = 0; i < kChoiceBlock; ++i) {
    weights[i] = is_empty(block) ? -kInfinity : (static_cast<double>(blocks_[block][i]) - best_) * factor;
  }
  for (const Adjusted& each : adjusted_) {
    if (block_of(each.id) == block) weights[each.id % kChoiceBlock] = (each.logit - best_) * factor;
  }
  ops_->exponentials(weights, kChoiceBlock, weights);
}

double LogitRow::score_of(std::int64_t count, double temperature) {
  order_.assign(maxima_.begin(), maxima_.end());
  for (const Adjusted& each : adjusted_) order_.push_back(each.logit);
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
  if (float_limit > limit) float_limit = std::nextafter(float_limit, -kFloatInfinity);
  int places[kChoiceBlock];
  double scores[kChoiceBlock];
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    if (maxima_[b] < float_limit || is_empty(b)) continue;
    const int count = ops_->find_at_least(blocks_[b], float_limit, places);
    for (int i = 0; i < count; ++i) scores[i] = static_cast<double>(blocks_[b][places[i]]) - best_;
    for (int i = 0; i < count; ++i) scores[i] /= temperature;
    candidates_.add(start_of(b), places, scores, count, floor);
  }
  apart_.clear();
  for (const Adjusted& each : adjusted_) {
    const double score = (each.logit - best_) / temperature;
    if (score >= floor && score > -kInfinity) apart_.emplace_back(each.id, score);
  }
  std::sort(apart_.begin(), apart_.end());
  candidates_.merge(apart_);
  candidates_.weigh(*ops_);
  return candidates_;
}

Candidates& LogitRow::collect_enough(Measure measure, double target, double lowest, double temperature) {
  constexpr double kLastTried = -30.0;  // hardly anything has weight so far down: then everything at once
  for (double floor = -kFloorStep; floor > std::max(lowest, kLastTried);) {
    Candidates& found = collect(floor, temperature);
    const double reached = measure == Measure::kCount ? static_cast<double>(found.size()) : found.total();
    if (reached >= target) return found;
    floor -= reached < kNearly * target ? kFloorStep : kFloorStep / 2;
  }
  return collect(lowest, temperature);
}

// 1 / temperature; a temperature too small for that sends everything but the best to where there is no weight.
double factor_of(double temperature) { return std::min(1.0 / temperature, std::numeric_limits<double>::max()); }

std::int64_t draw_from_all(LogitRow& row, const ChoiceRequest& request) {
  std::int64_t token = 0;
  const double factor = factor_of(request.temperature);
  if (!row.draw_from_all(request.number, factor, Precision::kRough, token)) {
    row.draw_from_all(request.number, factor, Precision::kExact, token);
  }
  return token;
}

// The smallest set of best tokens that holds top-p of the whole row.
Candidates& nucleus(LogitRow& row, const ChoiceRequest& request, std::int64_t vocab) {
  const double factor = factor_of(request.temperature);
  double total = row.weigh(factor, Precision::kRough);
  const bool is_rough = total < kFlat;
  if (!is_rough) total = row.weigh(factor, Precision::kExact);
  const double target = request.top_p * total, doubt = is_rough ? kRoughness * total : 0.0;
  // All tokens below this floor together weigh less than what the nucleus leaves out.
  const double lowest = std::log((1.0 - request.top_p) * total / static_cast<double>(vocab)) - 1e-3;
  Candidates& candidates = row.collect_enough(Measure::kWeight, target + doubt, lowest, request.temperature);
  if (!candidates.keep_leaders(Measure::kWeight, target, doubt)) {
    candidates.keep_leaders(Measure::kWeight, request.top_p * row.weigh(factor, Precision::kExact));
  }
  return candidates;
}

Candidates& best_few(LogitRow& row, const ChoiceRequest& request) {
  const double count = static_cast<double>(request.top_k);
  const double floor = row.score_of(request.top_k, request.temperature);
  Candidates& candidates = floor > -kInfinity
                               ? row.collect(floor, request.temperature)
                               : row.collect_enough(Measure::kCount, count, -kInfinity, request.temperature);
  candidates.keep_leaders(Measure::kCount, count);
  if (request.top_p < 1.0) candidates.keep_leaders(Measure::kWeight, request.top_p * candidates.total());
  return candidates;
}

std::int64_t draw(LogitRow& row, const ChoiceRequest& request, std::int64_t vocab) {
  const bool is_few = request.top_k > 0 && request.top_k < vocab;
  const bool is_likely = request.least_score > -kInfinity;
  if (!is_few && !is_likely && request.top_p == 1.0) return draw_from_all(row, request);
  Candidates& candidates = is_few                ? best_few(row, request)
                           : request.top_p < 1.0 ? nucleus(row, request, vocab)
                                                 : row.collect(request.least_score, request.temperature);
  if (is_likely) candidates.keep_at_least(request.least_score);
  return candidates.draw(request.number);
}

// The most probable tokens of the row as the model gave it. Impossible ones fill the list if there are no others.
std::vector<TokenScore> top_of(LogitRow& row, const float* logits, std::int64_t vocab, int count, double log_total) {
  std::vector<TokenScore> top;
  if (count == 0) return top;
  Candidates& candidates = row.collect(row.score_of(count, 1.0), 1.0);
  candidates.keep_leaders(Measure::kCount, count);
  for (std::size_t i = 0; i < candidates.size(); ++i) top.push_back({candidates.id(i), candidates.score(i)});
  std::stable_sort(top.begin(), top.end(), [](auto& a, auto& b) { return a.logprob > b.logprob; });
  for (TokenScore& each : top) each.logprob -= log_total;
  for (std::int64_t id = 0; id < vocab && top.size() < static_cast<std::size_t>(count); ++id) {
    if (logits[id] == -kFloatInfinity) top.push_back({id, -kInfinity});
  }
  return top;
}

// Not inlined: its address would be looked up again at every use.
__attribute__((noinline)) LogitRow& row_of_this_thread() {
  static thread_local LogitRow row;
  return row;
}

void choose_row(float* logits, std::int64_t vocab, const ChoiceRequest& request, Choice& choice) {
  LogitRow& row = row_of_this_thread();
  row.open(logits, vocab);
  const double best = row.best();
  choice.best = static_cast<float>(best);
  if (!std::isfinite(best)) {
    choice.status = ChoiceStatus::kNotFinite;
    return;
  }
  double log_total = 0.0;
  if (request.top_logprobs >= 0) {
    log_total = std::log(row.weigh(1.0, Precision::kExact));
    choice.top = top_of(row, logits, vocab, request.top_logprobs, log_total);
  }
  choice.status = row.adjust(request, choice.token);
  if (choice.status == ChoiceStatus::kChosen) {
    choice.token = request.temperature == 0.0 ? row.first_best() : draw(row, request, vocab);
  }
  row.close();
  if (choice.status == ChoiceStatus::kChosen && request.top_logprobs >= 0) choice.logprob = static_cast<double>(logits[choice.token]) - best - log_total;
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

void choose(float* logits, std::int64_t stride, std::int64_t rows, std::int64_t vocab,
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
