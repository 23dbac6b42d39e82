// Activations rounded to eight bits, in the lanes of the including namespace.

constexpr float kTiniest = 1e-30f;  // below this 127 / most would overflow: such a group counts as zero

struct Rounding {
  float scale;
  F16 inverse;
  explicit Rounding(float most) : scale(most / 127.0f), inverse(splat(most < kTiniest ? 0.0f : 127.0f / most)) {}
};

inline void round_groups(const float* x, int columns, RoundedBlock* blocks, std::int64_t stride) {
  for (int at = 0; at < columns; at += kGroup) {
    RoundedBlock& block = blocks[at / kChunk * stride];
    const int unit = at / kGroup % kUnits;
    const F16 low = load(x + at), high = load(x + at + 16);
    const Rounding rounding(largest_of_magnitudes(largest_magnitude(low, high)));
    std::int8_t* values = block.values + kGroup * unit;
    const int sum = store_rounded(values, low * rounding.inverse) + store_rounded(values + 16, high * rounding.inverse);
    block.scales[unit] = rounding.scale;
    block.sums[unit] = rounding.scale * static_cast<float>(sum);
    block.sums_of_32[unit] = static_cast<std::int16_t>(sum);
  }
}

inline void round_super(const float* x, int columns, RoundedBlock* blocks, std::int64_t stride) {
  for (int first = 0; first < columns; first += kChunk, x += kChunk) {
    RoundedBlock& block = blocks[first / kChunk * stride];
    F16 most = splat(0.0f);
    for (int at = 0; at < kChunk; at += 16) most = largest_magnitude(most, load(x + at));
    const Rounding rounding(largest_of_magnitudes(most));
    block.scales[0] = rounding.scale;
    for (int at = 0; at < kChunk; at += 16) {
      const int sum = store_rounded(block.values + at, load(x + at) * rounding.inverse);
      block.sums_of_16[at / 16] = static_cast<std::int16_t>(sum);
    }
    for (int unit = 0; unit < kUnits; ++unit) {
      block.sums_of_32[unit] = static_cast<std::int16_t>(block.sums_of_16[2 * unit] + block.sums_of_16[2 * unit + 1]);
    }
  }
}
