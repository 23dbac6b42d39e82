// What the choice of tokens needs beside lanes_avx2.h: eight doubles in two registers, and lanes as bits.

struct D8 {
  __m256d lo, hi;
};

KAKEYA_INLINE D8 splat(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
KAKEYA_INLINE D8 load(const double* p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
KAKEYA_INLINE void store(double* p, D8 a) {
  _mm256_storeu_pd(p, a.lo);
  _mm256_storeu_pd(p + 4, a.hi);
}
KAKEYA_INLINE D8 widen(const float* p) {
  return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
}

KAKEYA_INLINE D8 operator+(D8 a, D8 b) { return {_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
KAKEYA_INLINE D8 operator-(D8 a, D8 b) { return {_mm256_sub_pd(a.lo, b.lo), _mm256_sub_pd(a.hi, b.hi)}; }
KAKEYA_INLINE D8 operator*(D8 a, D8 b) { return {_mm256_mul_pd(a.lo, b.lo), _mm256_mul_pd(a.hi, b.hi)}; }
KAKEYA_INLINE D8 fma(D8 a, D8 b, D8 c) {
  return {_mm256_fmadd_pd(a.lo, b.lo, c.lo), _mm256_fmadd_pd(a.hi, b.hi, c.hi)};
}
KAKEYA_INLINE D8 larger(D8 a, D8 b) { return {_mm256_max_pd(a.lo, b.lo), _mm256_max_pd(a.hi, b.hi)}; }
KAKEYA_INLINE D8 zero_where_below(D8 a, D8 x, double limit) {
  const __m256d least = _mm256_set1_pd(limit);
  return {_mm256_and_pd(a.lo, _mm256_cmp_pd(x.lo, least, _CMP_NLT_UQ)),
          _mm256_and_pd(a.hi, _mm256_cmp_pd(x.hi, least, _CMP_NLT_UQ))};
}
// 2^n for n = shifted - 1.5 * 2^52, a whole number in [-1022, 1023].
KAKEYA_INLINE __m256d power_of_two(__m256d shifted) {
  const __m256i exponent = _mm256_slli_epi64(_mm256_castpd_si256(shifted), 52);
  return _mm256_castsi256_pd(_mm256_add_epi64(exponent, _mm256_set1_epi64x(0x3ff0000000000000)));
}
KAKEYA_INLINE D8 power_of_two(D8 shifted) { return {power_of_two(shifted.lo), power_of_two(shifted.hi)}; }

// Bit i tells whether lane i is at least `limit`.
KAKEYA_INLINE std::uint32_t lanes_at_least(F16 a, float limit) {
  const __m256 least = _mm256_set1_ps(limit);
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, least, _CMP_GE_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, least, _CMP_GE_OQ));
  return static_cast<std::uint32_t>(lo | hi << 8);
}
// Lane i of `a` where bit i is set, elsewhere -infinity.
KAKEYA_INLINE __m256 lanes_of_bits(__m256 a, __m256i bits, __m256i bit_of_lane) {
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(bits, bit_of_lane), bit_of_lane);
  return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), a, _mm256_castsi256_ps(set));
}
KAKEYA_INLINE F16 lanes_of_bits(F16 a, std::uint32_t bits) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return {lanes_of_bits(a.lo, all, lane), lanes_of_bits(a.hi, all, _mm256_slli_epi32(lane, 8))};
}
