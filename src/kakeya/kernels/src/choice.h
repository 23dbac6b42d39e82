// Choosing the next token of each row of logits, as kakeya.engine.sampler defines it.
#pragma once

#include <cstdint>
#include <vector>

namespace kakeya {

// How one row's token is chosen. Penalties that change nothing and an empty `recent` mean the same.
struct ChoiceRequest {
  double temperature = 0.0;  // 0: the best
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;
  double least_score;  // the logarithm of min-p; -infinity for none
  double repetition = 1.0, presence = 0.0, frequency = 0.0;
  double number = 0.0;  // uniform in [0, 1)
  const std::int32_t* recent = nullptr;
  std::int64_t recent_count = 0;
  const std::int64_t* bias_ids = nullptr;  // no two the same
  const double* bias_values = nullptr;
  std::int64_t bias_count = 0;
  const std::uint8_t* mask = nullptr;  // a bit for each token that may be chosen, lowest id first; null: all may
  std::int64_t mask_bytes = 0;
  int top_logprobs = -1;  // -1: no log-probabilities at all
};

enum class ChoiceStatus { kChosen, kNotFinite, kNoToken, kNotAToken };

struct TokenScore {
  std::int64_t token;
  double logprob;
};

struct Choice {
  ChoiceStatus status = ChoiceStatus::kChosen;
  std::int64_t token = 0;  // with kNotAToken the id that is none
  float best = 0.0f;       // the greatest logit as the model gave it
  double logprob = 0.0;
  std::vector<TokenScore> top;  // best first, of equal ones the lower id first
};

// One choice for each row. A row's choice depends on that row and its request alone. Rows must not overlap: what is
// looked at is changed meanwhile, and left as it was.
void choose(float* logits, std::int64_t stride, std::int64_t rows, std::int64_t vocab,
            const ChoiceRequest* requests, Choice* choices);

// A number in [0, 1) with 53 random bits: Philox4x64-10 with the seed as key and the position as counter.
double uniform(std::uint64_t seed, std::uint64_t position);

}  // namespace kakeya
