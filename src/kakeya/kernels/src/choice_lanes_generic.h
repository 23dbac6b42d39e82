// What the choice of tokens needs beside lanes_generic.h: eight doubles in four vectors of two, and lanes as bits.

struct D8 {
  typedef double Vec __attribute__((vector_size(16)));
  Vec v[4];
};

KAKEYA_INLINE D8 splat(double x) {
  const D8::Vec v = {x, x};
  return {{v, v, v, v}};
}
KAKEYA_INLINE D8 load(const double* p) {
  D8 r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
KAKEYA_INLINE void store(double* p, D8 a) { __builtin_memcpy(p, &a, sizeof a); }
KAKEYA_INLINE D8 widen(const float* p) {
  double lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = p[i];
  return load(lanes);
}

KAKEYA_INLINE D8 operator+(D8 a, D8 b) {
  return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}};
}
KAKEYA_INLINE D8 operator-(D8 a, D8 b) {
  return {{a.v[0] - b.v[0], a.v[1] - b.v[1], a.v[2] - b.v[2], a.v[3] - b.v[3]}};
}
KAKEYA_INLINE D8 operator*(D8 a, D8 b) {
  return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}};
}
// Two roundings, as for floats: not every baseline has the fused instruction.
KAKEYA_INLINE D8 fma(D8 a, D8 b, D8 c) { return a * b + c; }

template <class Choose>
KAKEYA_INLINE D8 lane_by_lane(D8 a, D8 b, Choose choose) {
  double x[8], y[8];
  store(x, a);
  store(y, b);
  for (int i = 0; i < 8; ++i) x[i] = choose(x[i], y[i]);
  return load(x);
}
KAKEYA_INLINE D8 larger(D8 a, D8 b) {
  return lane_by_lane(a, b, [](double x, double y) { return x > y ? x : y; });
}
KAKEYA_INLINE D8 zero_where_below(D8 a, D8 x, double limit) {
  return lane_by_lane(a, x, [limit](double kept, double judged) { return judged < limit ? 0.0 : kept; });
}
// 2^n for n = shifted - 1.5 * 2^52, a whole number in [-1022, 1023].
KAKEYA_INLINE D8 power_of_two(D8 shifted) {
  return lane_by_lane(shifted, shifted, [](double z, double) {
    std::uint64_t bits;
    __builtin_memcpy(&bits, &z, sizeof bits);
    bits = (bits << 52) + 0x3ff0000000000000u;
    __builtin_memcpy(&z, &bits, sizeof z);
    return z;
  });
}

// Bit i tells whether lane i is at least `limit`.
KAKEYA_INLINE std::uint32_t lanes_at_least(F16 a, float limit) {
  float lanes[16];
  store(lanes, a);
  std::uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<std::uint32_t>(lanes[i] >= limit) << i;
  return bits;
}
// Lane i of `a` where bit i is set, elsewhere -infinity.
KAKEYA_INLINE F16 lanes_of_bits(F16 a, std::uint32_t bits) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) lanes[i] = (bits >> i & 1u) != 0 ? lanes[i] : -__builtin_inff();
  return load(lanes);
}
