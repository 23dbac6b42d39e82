// Norms, gated activations and the exponential, in the lanes of the including namespace.

// Relative error about 1e-7: x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor polynomial of degree 7 in r.
// Below -87.3 the result is 0, above 88.3 it stays where it is; a NaN stays a NaN.
KAKEYA_INLINE F16 exponential(F16 x) {
  constexpr float kLowest = -87.3f, kHighest = 88.3f;
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const F16 clamped = smaller(splat(kHighest), larger(splat(kLowest), x));
  const F16 shifted = fma(clamped, splat(kLog2E), splat(kRoundingShift));
  const F16 n = shifted - splat(kRoundingShift);
  const F16 r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), clamped));
  F16 p = splat(1.0f / 5040.0f);
  p = fma(p, r, splat(1.0f / 720.0f));
  p = fma(p, r, splat(1.0f / 120.0f));
  p = fma(p, r, splat(1.0f / 24.0f));
  p = fma(p, r, splat(1.0f / 6.0f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_where_below(p * power_of_two(shifted), x, kLowest);
}

// x / (1 + exp(-x))
KAKEYA_INLINE F16 silu(F16 x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3)
KAKEYA_INLINE F16 gelu_tanh(F16 x) {
  constexpr float kMinusTwoRootTwoOverPi = -1.59576912f;
  const F16 cubic = fma(x * x * x, splat(0.044715f), x);
  return x / (splat(1.0f) + exponential(cubic * splat(kMinusTwoRootTwoOverPi)));
}

// 1 - 2 / (exp(2 x) + 1)
KAKEYA_INLINE F16 hyperbolic_tangent(F16 x) {
  return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
}

inline void rms_norm_row(const float* x, const float* weight, float eps, int columns, float* y) {
  const F16 zero = splat(0.0f);
  F16 squares[4] = {zero, zero, zero, zero};  // vector i of the row adds to squares[i % 4]
  int i = 0;
  for (; i + 64 <= columns; i += 64) {
    KAKEYA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const F16 part = load(x + i + 16 * j);
      squares[j] = fma(part, part, squares[j]);
    }
  }
  for (int j = 0; i + 16 * j < columns; ++j) {
    const F16 part = load_some(x + i + 16 * j, at_most(columns - i - 16 * j, 16), zero);
    squares[j] = fma(part, part, squares[j]);
  }
  const float total = sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const F16 factor = splat(1.0f / __builtin_sqrtf(total / static_cast<float>(columns) + eps));
  for (i = 0; i + 16 <= columns; i += 16) store(y + i, load(x + i) * factor * load(weight + i));
  if (i < columns) {
    const int n = columns - i;
    store_some(y + i, n, load_some(x + i, n, zero) * factor * load_some(weight + i, n, zero));
  }
}

inline void gated_row(const float* gate, const float* up, Activation activation, int columns, float* y) {
  const F16 zero = splat(0.0f);
  for (int i = 0; i < columns; i += 16) {
    const int n = at_most(columns - i, 16);
    const F16 g = load_some(gate + i, n, zero);
    const F16 active = activation == Activation::kSilu ? silu(g) : gelu_tanh(g);
    store_some(y + i, n, active * load_some(up + i, n, zero));
  }
}
