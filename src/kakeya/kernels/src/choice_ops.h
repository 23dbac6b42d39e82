// What each instruction set implements of the choice of tokens: single-threaded pieces over one row of logits.
// A row comes in blocks, the last one filled up with -infinity. choice.cpp says what is chosen.
#pragma once

#include <cstdint>

namespace kakeya {

constexpr int kChoiceBlock = 128;

struct ChoiceOps {
  // The greatest logit of each of `blocks` consecutive blocks; a NaN where a block has one.
  void (*maxima)(const float* logits, int blocks, float* maxima);
  // The sum of exp((logit - best) * factor) over one block.
  double (*weight_sum)(const float* block, double best, double factor);
  // exp of each, in place; `count` is rounded up to a multiple of 8. None may be positive.
  void (*exponentials)(double* scores, std::int64_t count);
  // The places in one block, ascending, whose logits are at least `limit`; returns how many.
  int (*find_at_least)(const float* block, float limit, int* places);
  // One block with -infinity where the bits are clear, the lowest place first.
  void (*mask)(const float* block, const std::uint8_t* bits, float* masked);
};

}  // namespace kakeya
