// What each instruction set implements of the choice of tokens: single-threaded pieces over one row of logits.
// A row comes in blocks, the last one filled up with -infinity. choice.cpp says what is chosen.
#pragma once

#include <cstdint>

namespace kakeya {

constexpr int kChoiceBlock = 128;

// How far a row's rough sum of weights may be from the sum, as a part of it. A score s is off by 3e-7 |s| when it is
// computed in float32, its exponential by 3e-7 and the sum of a block by 8e-7; scores below -20 are too small to
// count, be there millions of them. Twice what that adds up to. Blocks are left out that together would weigh no more
// than kLeftOut of the row, were each of their tokens as heavy as the heaviest of its block.
constexpr double kLeftOut = 1e-5;
constexpr double kRoughness = 1e-5 + kLeftOut;

struct ChoiceOps {
  // The greatest logit of each of `blocks` consecutive blocks; a NaN where a block has one.
  void (*maxima)(const float* logits, int blocks, float* maxima);
  // The sum of exp((logit - best) * factor) over one block.
  double (*weight_sum)(const float* block, double best, double factor);
  // The same in float32, to be summed over the row: within kRoughness of the row's.
  float (*rough_weight_sum)(const float* block, float best, float factor);
  // exp of each score, none of them positive; `count` is rounded up to a multiple of 8.
  void (*exponentials)(const double* scores, std::int64_t count, double* weights);
  // The places in one block, ascending, whose logits are at least `limit`; returns how many.
  int (*find_at_least)(const float* block, float limit, int* places);
  // One block with -infinity where the bits are clear, the lowest place first.
  void (*mask)(const float* block, const std::uint8_t* bits, float* masked);
};

}  // namespace kakeya
