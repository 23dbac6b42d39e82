// What the choice of tokens needs beside lanes_avx512.h: eight doubles in one register, and lanes as bits.

struct D8 {
  __m512d v;
};

KAKEYA_INLINE D8 splat(double x) { return {_mm512_set1_pd(x)}; }
KAKEYA_INLINE D8 load(const double* p) { return {_mm512_loadu_pd(p)}; }
KAKEYA_INLINE void store(double* p, D8 a) { _mm512_storeu_pd(p, a.v); }
KAKEYA_INLINE D8 widen(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }

KAKEYA_INLINE D8 operator+(D8 a, D8 b) { return {_mm512_add_pd(a.v, b.v)}; }
KAKEYA_INLINE D8 operator-(D8 a, D8 b) { return {_mm512_sub_pd(a.v, b.v)}; }
KAKEYA_INLINE D8 operator*(D8 a, D8 b) { return {_mm512_mul_pd(a.v, b.v)}; }
KAKEYA_INLINE D8 fma(D8 a, D8 b, D8 c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
KAKEYA_INLINE D8 larger(D8 a, D8 b) { return {_mm512_max_pd(a.v, b.v)}; }
KAKEYA_INLINE D8 zero_where_below(D8 a, D8 x, double limit) {
  return {_mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x.v, _mm512_set1_pd(limit), _CMP_NLT_UQ), a.v)};
}
// 2^n for n = shifted - 1.5 * 2^52, a whole number in [-1022, 1023].
KAKEYA_INLINE D8 power_of_two(D8 shifted) {
  const __m512i exponent = _mm512_slli_epi64(_mm512_castpd_si512(shifted.v), 52);
  return {_mm512_castsi512_pd(_mm512_add_epi64(exponent, _mm512_set1_epi64(0x3ff0000000000000)))};
}

// Bit i tells whether lane i is at least `limit`.
KAKEYA_INLINE std::uint32_t lanes_at_least(F16 a, float limit) {
  return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_GE_OQ);
}
// Lane i of `a` where bit i is set, elsewhere -infinity.
KAKEYA_INLINE F16 lanes_of_bits(F16 a, std::uint32_t bits) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), static_cast<__mmask16>(bits), a.v)};
}
