// Sixteen lanes in two registers: the AVX2 words that the shared kernels are written in.
// Included inside a namespace whose functions are compiled for AVX2, FMA and F16C.

struct F16 {
  __m256 lo, hi;
};

KAKEYA_INLINE __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

KAKEYA_INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KAKEYA_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KAKEYA_INLINE void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
// All ones in the lanes first .. first + 7 that lie below n.
KAKEYA_INLINE __m256i lanes_below(int n, int first) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - first), lane);
}
KAKEYA_INLINE F16 load_some(const float* p, int n, F16 rest) {
  const __m256i lo = lanes_below(n, 0), hi = lanes_below(n, 8);
  return {_mm256_blendv_ps(rest.lo, _mm256_maskload_ps(p, lo), _mm256_castsi256_ps(lo)),
          _mm256_blendv_ps(rest.hi, _mm256_maskload_ps(p + 8, hi), _mm256_castsi256_ps(hi))};
}
KAKEYA_INLINE void store_some(float* p, int n, F16 a) {
  _mm256_maskstore_ps(p, lanes_below(n, 0), a.lo);
  _mm256_maskstore_ps(p + 8, lanes_below(n, 8), a.hi);
}

KAKEYA_INLINE __m256 widen_bf16(const std::uint16_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
KAKEYA_INLINE F16 load(const std::uint16_t* bf16) { return {widen_bf16(bf16), widen_bf16(bf16 + 8)}; }
// Rounds to nearest even; a NaN becomes the quiet NaN 0x7fc0.
KAKEYA_INLINE __m256i narrow_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
}
KAKEYA_INLINE void store(std::uint16_t* bf16, F16 a) {
  // The pack works within 128-bit halves; the permutation puts its quarters back in order.
  const __m256i packed = _mm256_packus_epi32(narrow_bf16(a.lo), narrow_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bf16), _mm256_permute4x64_epi64(packed, 0xd8));
}
KAKEYA_INLINE F16 load_half(const std::uint8_t* f16) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(f16);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

KAKEYA_INLINE F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
KAKEYA_INLINE F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
KAKEYA_INLINE F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
KAKEYA_INLINE F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
KAKEYA_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// The second operand when either is NaN.
KAKEYA_INLINE F16 larger(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
KAKEYA_INLINE F16 smaller(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
KAKEYA_INLINE F16 zero_where_below(F16 a, F16 x, float limit) {
  const __m256 least = _mm256_set1_ps(limit);
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, least, _CMP_NLT_UQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, least, _CMP_NLT_UQ))};
}
// 2^n for n = shifted - 1.5 * 2^23, a whole number in [-126, 127].
KAKEYA_INLINE __m256 power_of_two(__m256 shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
}
KAKEYA_INLINE F16 power_of_two(F16 shifted) { return {power_of_two(shifted.lo), power_of_two(shifted.hi)}; }

// Keeps the compiler from loading a value again at each of its uses.
KAKEYA_INLINE F16 in_register(F16 a) {
  asm("" : "+x"(a.lo), "+x"(a.hi));
  return a;
}

// Halves are added to halves, so that every instruction set sums in the same order.
KAKEYA_INLINE float sum_lanes(F16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
KAKEYA_INLINE float largest_lane(F16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Magnitudes are compared as integers: exact, and a NaN wins over every number.
KAKEYA_INLINE float largest_magnitude(F16 a, F16 b) {
  const __m256i sign = _mm256_set1_epi32(0x7fffffff);
  const auto magnitude = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), sign); };
  const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(magnitude(a.lo), magnitude(a.hi)),
                                         _mm256_max_epi32(magnitude(b.lo), magnitude(b.hi)));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return float_from_bits(static_cast<std::uint32_t>(_mm_cvtsi128_si32(four)));
}

// Rounds 32 lanes to the nearest int8 (ties to even), stores them and returns their sum.
KAKEYA_INLINE int store_rounded(std::int8_t* out, F16 a, F16 b) {
  const __m256i words_a = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i words_b = _mm256_packs_epi32(_mm256_cvtps_epi32(b.lo), _mm256_cvtps_epi32(b.hi));
  // The packs work within 128-bit halves; the permutation puts groups of four bytes back in order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_a, words_b), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  const __m256i eight = _mm256_madd_epi16(_mm256_add_epi16(words_a, words_b), _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// The 16 x 32 weights of one tile, a byte each: line 2 c holds rows 0..7 and line 2 c + 1 rows 8..15.
struct TileWeights {
  __m256i line[16];
};
template <int kBits>
KAKEYA_INLINE TileWeights unpack_tile(const std::uint8_t* bytes) {
  TileWeights w;
  if constexpr (kBits == 8) {
    // Unsigned products would overflow the 16-bit sums below: keep q - 128 and add 128 back in dot_tile.
    KAKEYA_UNROLL
    for (int c = 0; c < 16; ++c) w.line[c] = _mm256_xor_si256(load_bytes(bytes + 32 * c), _mm256_set1_epi8(-128));
  } else {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    KAKEYA_UNROLL
    for (int c = 0; c < 8; ++c) {
      const __m256i packed = load_bytes(bytes + 32 * c);
      w.line[c] = _mm256_and_si256(packed, nibble);
      w.line[c + 8] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
    }
  }
  return w;
}
// Four bits: eight sums of two products, 15 * 127 each at most, fit 16 bits.
template <int kBits, std::enable_if_t<kBits == 4, int> = 0>
KAKEYA_INLINE F16 dot_tile(const TileWeights& w, const std::int8_t* x) {
  __m256i lo = _mm256_setzero_si256(), hi = lo;
  KAKEYA_UNROLL
  for (int c = 0; c < 8; ++c) {
    const __m256i four = _mm256_set1_epi32(int_from_bytes(x + 4 * c));
    lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(w.line[2 * c], four));
    hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(w.line[2 * c + 1], four));
  }
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_cvtepi32_ps(_mm256_madd_epi16(lo, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(hi, ones))};
}
// Eight bits: |w| times x with the sign of w; two products of 128 * 127 at most fit 16 bits.
KAKEYA_INLINE __m256i dot_signed(__m256i sum, __m256i w, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int kBits, std::enable_if_t<kBits == 8, int> = 0>
KAKEYA_INLINE F16 dot_tile(const TileWeights& w, const std::int8_t* x) {
  // 128 times the sum of x, four bytes at a time: what q - 128 left out.
  __m256i lo = _mm256_setzero_si256(), hi = lo, offset = lo;
  const __m256i ones = _mm256_set1_epi16(1), bytes_of_one = _mm256_set1_epi8(1);
  KAKEYA_UNROLL
  for (int c = 0; c < 8; ++c) {
    const __m256i four = _mm256_set1_epi32(int_from_bytes(x + 4 * c));
    lo = dot_signed(lo, w.line[2 * c], four);
    hi = dot_signed(hi, w.line[2 * c + 1], four);
    offset = _mm256_add_epi16(offset, _mm256_maddubs_epi16(bytes_of_one, four));
  }
  offset = _mm256_slli_epi32(_mm256_madd_epi16(offset, ones), 7);
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(lo, offset)), _mm256_cvtepi32_ps(_mm256_add_epi32(hi, offset))};
}

// Two 4 x 4 transposes at once: half h of in[i] holds row 4 h + i, four columns.
KAKEYA_INLINE void transpose_quads(const __m256 in[4], __m256 out[4]) {
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(in[0], in[1]));
  const __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(in[2], in[3]));
  const __m256d c = _mm256_castps_pd(_mm256_unpackhi_ps(in[0], in[1]));
  const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(in[2], in[3]));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(c, d));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
}
KAKEYA_INLINE __m128 four_columns(const float* p) { return _mm_loadu_ps(p); }
KAKEYA_INLINE __m128 four_columns(const std::uint16_t* p) {
  const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
}

// Eight neighbouring columns of eight rows.
template <class Element>
KAKEYA_INLINE void load_half_columns(const Element* rows, std::int64_t head_dim, __m256 columns[8]) {
  for (int d = 0; d < 8; d += 4) {
    __m256 in[4];
    KAKEYA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Element* row = rows + i * head_dim + d;
      in[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(four_columns(row)), four_columns(row + 4 * head_dim), 1);
    }
    transpose_quads(in, columns + d);
  }
}
// Eight neighbouring columns of sixteen rows.
template <class Element>
KAKEYA_INLINE void load_columns(const Element* rows, std::int64_t head_dim, F16 out[8]) {
  __m256 lo[8], hi[8];
  load_half_columns(rows, head_dim, lo);
  load_half_columns(rows + 8 * head_dim, head_dim, hi);
  KAKEYA_UNROLL
  for (int c = 0; c < 8; ++c) out[c] = {lo[c], hi[c]};
}

// Register blocks: 16 registers of eight lanes.
constexpr int kRowBlock = 4;      // rows of a quantized product
constexpr int kQueryBlock = 4;    // queries scored together ...
constexpr int kKeyTiles = 1;      // ... against this many tiles of 16 slots
constexpr int kFewQueries = 0;    // transposed keys never fit the registers beside the sums
constexpr int kHeadBlock = 4;     // heads whose values are summed together ...
constexpr int kValueVectors = 1;  // ... over this many vectors of the head's dimension
