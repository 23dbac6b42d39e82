// Pieces of the choice of tokens, in the lanes of the including namespace.

// exp(x) for x <= 0, within two units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and the polynomial of
// degree 11 through exp at Chebyshev's points of that interval (1.7e-17 from it at most). Exactly 1 at 0; below
// -708, where a double begins to lose bits, it is 0.
KAKEYA_INLINE D8 exponential(D8 x) {
  constexpr double kLowest = -708.0, kShift = 6755399441055744.0;  // 1.5 * 2^52 rounds to a whole number
  constexpr double kLog2E = 1.4426950408889634, kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  const D8 clamped = larger(splat(kLowest), x);
  const D8 shifted = fma(clamped, splat(kLog2E), splat(kShift));
  const D8 n = shifted - splat(kShift);
  const D8 r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), clamped));
  D8 p = splat(0x1.af631d0059becp-26);
  p = fma(p, r, splat(0x1.28b4057f44145p-22));
  p = fma(p, r, splat(0x1.71ddf5749d126p-19));
  p = fma(p, r, splat(0x1.a01991ac8730ap-16));
  p = fma(p, r, splat(0x1.a01a01b14378fp-13));
  p = fma(p, r, splat(0x1.6c16c187fbe02p-10));
  p = fma(p, r, splat(0x1.111111110f225p-7));
  p = fma(p, r, splat(0x1.555555554f0cfp-5));
  p = fma(p, r, splat(0x1.555555555555ap-3));
  p = fma(p, r, splat(0x1.0000000000011p-1));
  p = fma(p, r, splat(1.0));
  p = fma(p, r, splat(1.0));
  return zero_where_below(p * power_of_two(shifted), x, kLowest);
}

// Lane by lane, so that every instruction set sums in the same order.
KAKEYA_INLINE double sum_lanes(D8 a) {
  double x[8];
  store(x, a);
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// The first NaN of a block; 0 where it has none.
inline float not_a_number_of(const float* block) {
  for (int i = 0; i < kChoiceBlock; ++i) {
    if (block[i] != block[i]) return block[i];
  }
  return 0.0f;
}

inline void maxima(const float* logits, int blocks, float* maxima) {
  F16 unclean = splat(0.0f);
  for (int b = 0; b < blocks; ++b) {
    F16 most = splat(-__builtin_inff());
    for (int i = 0; i < kChoiceBlock; i += 16) {
      const F16 part = load(logits + b * kChoiceBlock + i);
      most = larger(part, most);  // leaves out a NaN ...
      unclean = fma(part, splat(0.0f), unclean);  // ... which this does not, nor an infinity
    }
    maxima[b] = largest_lane(most);
  }
  if (const float trace = sum_lanes(unclean); trace == trace) return;
  for (int b = 0; b < blocks; ++b) {
    if (const float found = not_a_number_of(logits + b * kChoiceBlock); found != found) maxima[b] = found;
  }
}

inline double weight_sum(const float* block, double best, double factor) {
  D8 sums[2] = {splat(0.0), splat(0.0)};
  for (int i = 0; i < kChoiceBlock; i += 16) {
    KAKEYA_UNROLL
    for (int j = 0; j < 2; ++j) {
      sums[j] = sums[j] + exponential((widen(block + i + 8 * j) - splat(best)) * splat(factor));
    }
  }
  return sum_lanes(sums[0] + sums[1]);
}

// 2^x for x <= 0, within 3e-7 of it: x = n + r with |r| <= 1/2, and the polynomial of degree 5 through 2^r at
// Chebyshev's points. Below -126 it stays 2^-126, which no sum of weights sees.
KAKEYA_INLINE F16 rough_power(F16 x) {
  const F16 clamped = larger(splat(-126.0f), x);
  const F16 shifted = clamped + splat(kRoundingShift);
  const F16 r = clamped - (shifted - splat(kRoundingShift));
  F16 p = splat(0x1.5f0890p-10f);
  p = fma(p, r, splat(0x1.3d1070p-7f));
  p = fma(p, r, splat(0x1.c6af6cp-5f));
  p = fma(p, r, splat(0x1.ebf906p-3f));
  p = fma(p, r, splat(0x1.62e430p-1f));
  p = fma(p, r, splat(0x1.000002p+0f));
  return p * power_of_two(shifted);
}

inline float rough_weight_sum(const float* block, float best, float factor) {
  constexpr float kLog2E = 1.44269504f;
  const F16 scale = splat(factor * kLog2E);
  F16 sums[2] = {splat(0.0f), splat(0.0f)};
  for (int i = 0; i < kChoiceBlock; i += 32) {
    KAKEYA_UNROLL
    for (int j = 0; j < 2; ++j) {
      sums[j] = sums[j] + rough_power((load(block + i + 16 * j) - splat(best)) * scale);
    }
  }
  return sum_lanes(sums[0] + sums[1]);
}

inline void exponentials(const double* scores, std::int64_t count, double* weights) {
  for (std::int64_t i = 0; i < count; i += 8) store(weights + i, exponential(load(scores + i)));
}

inline int find_at_least(const float* block, float limit, int* places) {
  int found = 0;
  for (int i = 0; i < kChoiceBlock; i += 16) {
    for (std::uint32_t lanes = lanes_at_least(load(block + i), limit); lanes != 0; lanes &= lanes - 1) {
      places[found++] = i + __builtin_ctz(lanes);
    }
  }
  return found;
}

inline void mask(const float* block, const std::uint8_t* bits, float* masked) {
  for (int i = 0; i < kChoiceBlock; i += 16) {
    const std::uint32_t sixteen = bits[i / 8] | static_cast<std::uint32_t>(bits[i / 8 + 1]) << 8;
    store(masked + i, lanes_of_bits(load(block + i), sixteen));
  }
}

constexpr ChoiceOps choice_ops = {maxima, weight_sum, rough_weight_sum, exponentials, find_at_least, mask};
