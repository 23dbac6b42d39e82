// Sixteen lanes in one register: the AVX-512 words that the shared kernels are written in.
// Included inside a namespace whose functions are compiled for AVX-512 (F, BW, VL, DQ, VNNI).

struct F16 {
  __m512 v;
};

KAKEYA_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

KAKEYA_INLINE F16 splat(float x) { return {_mm512_set1_ps(x)}; }
KAKEYA_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
KAKEYA_INLINE F16 load_some(const float* p, int n, F16 rest) {
  return {_mm512_mask_loadu_ps(rest.v, first_lanes(n), p)};
}
KAKEYA_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
KAKEYA_INLINE void store_some(float* p, int n, F16 a) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

KAKEYA_INLINE F16 widen_bf16(__m512i low_halves) { return {_mm512_castsi512_ps(_mm512_slli_epi32(low_halves, 16))}; }
KAKEYA_INLINE F16 load(const std::uint16_t* bf16) {
  return widen_bf16(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16))));
}
// Rounds to nearest even; a NaN becomes the quiet NaN 0x7fc0.
KAKEYA_INLINE void store(std::uint16_t* bf16, F16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i halves = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bf16), _mm512_cvtepi32_epi16(halves));
}
KAKEYA_INLINE F16 load_half(const std::uint8_t* f16) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(f16)))};
}

KAKEYA_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
KAKEYA_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
KAKEYA_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
KAKEYA_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
KAKEYA_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand when either is NaN.
KAKEYA_INLINE F16 larger(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
KAKEYA_INLINE F16 smaller(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
KAKEYA_INLINE F16 zero_where_below(F16 a, F16 x, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}
// 2^n for n = shifted - 1.5 * 2^23, a whole number in [-126, 127].
KAKEYA_INLINE F16 power_of_two(F16 shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)))};
}

// Keeps the compiler from loading a value again at each of its uses.
KAKEYA_INLINE F16 in_register(F16 a) {
  asm("" : "+v"(a.v));
  return a;
}

// Halves are added to halves, so that every instruction set sums in the same order.
KAKEYA_INLINE float sum_lanes(F16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
KAKEYA_INLINE float largest_lane(F16 a) { return _mm512_reduce_max_ps(a.v); }

// Magnitudes are compared as integers: exact, and a NaN wins over every number.
KAKEYA_INLINE F16 largest_magnitude(F16 a, F16 b) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), sign),
                                               _mm512_and_si512(_mm512_castps_si512(b.v), sign)))};
}
KAKEYA_INLINE float largest_of_magnitudes(F16 a) {
  return float_from_bits(static_cast<std::uint32_t>(_mm512_reduce_max_epi32(_mm512_castps_si512(a.v))));
}

// Rounds to the nearest int8 (ties to even), stores the lanes and returns their sum.
KAKEYA_INLINE int store_rounded(std::int8_t* out, F16 a) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), bytes);
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// One line of a unit: four columns of each row.
struct Bytes {
  __m512i v;
};
struct UnitLines {
  Bytes line[kLines];
};
KAKEYA_INLINE Bytes load_bytes(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
KAKEYA_INLINE Bytes splat_byte(int x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
KAKEYA_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
KAKEYA_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
KAKEYA_INLINE Bytes operator^(Bytes a, Bytes b) { return {_mm512_xor_si512(a.v, b.v)}; }
// Within words of 16 bits: what comes over from a neighbouring byte is to be masked off.
KAKEYA_INLINE Bytes shift_left(Bytes a, int n) { return {_mm512_slli_epi16(a.v, static_cast<unsigned>(n))}; }
KAKEYA_INLINE Bytes shift_right(Bytes a, int n) { return {_mm512_srli_epi16(a.v, static_cast<unsigned>(n))}; }
using Table = __m512i;
KAKEYA_INLINE Table load_table(const std::uint8_t* values) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}
KAKEYA_INLINE Bytes look_up(Table table, Bytes codes) { return {_mm512_shuffle_epi8(table, codes.v)}; }
constexpr bool kWantsSignedBytes = false;

// Sixteen 32-bit integers.
struct Sums {
  __m512i v;
};
KAKEYA_INLINE Sums no_sums() { return {_mm512_setzero_si512()}; }
KAKEYA_INLINE F16 to_floats(Sums a) { return {_mm512_cvtepi32_ps(a.v)}; }
template <int kPowerOfTwo>
KAKEYA_INLINE Sums subtract_times(Sums a, Sums b) {
  return {_mm512_sub_epi32(a.v, _mm512_slli_epi32(b.v, __builtin_ctz(kPowerOfTwo)))};
}

// Sixteen pairs of 16-bit integers: what two neighbouring groups of each row are scaled by.
struct Pairs {
  __m512i v;
};
KAKEYA_INLINE Pairs signed_pairs(const std::uint8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
KAKEYA_INLINE Pairs low_nibble_pairs(const std::uint8_t* p) {
  return {_mm512_and_si512(signed_pairs(p).v, _mm512_set1_epi16(0x0f))};
}
KAKEYA_INLINE Pairs high_nibble_pairs(const std::uint8_t* p) {
  return {_mm512_and_si512(_mm512_srli_epi16(signed_pairs(p).v, 4), _mm512_set1_epi16(0x0f))};
}
// sums + first * x[0] + second * x[1]
KAKEYA_INLINE Sums add_products(Sums sums, Pairs pairs, const std::int16_t* x) {
  return {_mm512_dpwssd_epi32(sums.v, pairs.v, _mm512_set1_epi32(int_from_bytes(x)))};
}

// What the products of a group are multiplied by.
struct Factors {
  __m512i v;
};
struct UnitFactors {};
KAKEYA_INLINE UnitFactors unit_factors() { return {}; }
KAKEYA_INLINE Factors first_factors(Pairs pairs) { return {_mm512_srai_epi32(_mm512_slli_epi32(pairs.v, 16), 16)}; }
KAKEYA_INLINE Factors second_factors(Pairs pairs) { return {_mm512_srai_epi32(pairs.v, 16)}; }
KAKEYA_INLINE __m512i add_scaled(__m512i sum, __m512i dot, UnitFactors) { return _mm512_add_epi32(sum, dot); }
KAKEYA_INLINE __m512i add_scaled(__m512i sum, __m512i dot, Factors factors) {
  return _mm512_add_epi32(sum, _mm512_mullo_epi32(dot, factors.v));
}

// dots += factors * (lines [kFirst, kLast) of a unit . the same columns of each row of x)
template <bool kWide, int kSummed, int kFirst, int kLast, int kRows, class AnyFactors>
KAKEYA_INLINE void add_dots(const UnitLines& unit, const RoundedBlock* x, int index, AnyFactors factors,
                            Sums dots[kRows]) {
  __m512i sums[kRows];
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    // Wide codes are 128 too large here: the instruction takes unsigned ones.
    sums[r] = kWide ? _mm512_set1_epi32(-128 * x[r].sums_of_32[index]) : _mm512_setzero_si512();
  }
  KAKEYA_UNROLL
  for (int c = kFirst; c < kLast; ++c) {
    KAKEYA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const __m512i four = _mm512_set1_epi32(int_from_bytes(x[r].values + kGroup * index + 4 * c));
      sums[r] = _mm512_dpbusd_epi32(sums[r], unit.line[c].v, four);
    }
  }
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) dots[r].v = add_scaled(dots[r].v, sums[r], factors);
}

// Four 4 x 4 transposes at once: lane group g of in[i] holds row 4 g + i, four columns;
// out[c] then holds column c of the sixteen rows in order.
KAKEYA_INLINE void transpose_quads(const __m512 in[4], __m512 out[4]) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(in[0], in[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(in[2], in[3]));
  const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(in[0], in[1]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(in[2], in[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}
// Lane group g = the 16 bytes at p + 4 g strides; masked broadcasts load without using the shuffle unit.
KAKEYA_INLINE __m512 gather_quads(const char* p, std::int64_t stride) {
  const auto quad = [&](int row) { return _mm_loadu_ps(reinterpret_cast<const float*>(p + row * stride)); };
  __m512 quads = _mm512_castps128_ps512(quad(0));
  quads = _mm512_mask_broadcast_f32x4(quads, 0x00f0, quad(4));
  quads = _mm512_mask_broadcast_f32x4(quads, 0x0f00, quad(8));
  return _mm512_mask_broadcast_f32x4(quads, 0xf000, quad(12));
}
// Four 32-bit columns of sixteen rows.
KAKEYA_INLINE void gather_columns(const void* first, std::int64_t stride, __m512 columns[4]) {
  __m512 quads[4];
  KAKEYA_UNROLL
  for (int i = 0; i < 4; ++i) quads[i] = gather_quads(static_cast<const char*>(first) + i * stride, stride);
  transpose_quads(quads, columns);
}

// Eight neighbouring columns of sixteen rows.
KAKEYA_INLINE void load_columns(const float* rows, std::int64_t head_dim, F16 out[8]) {
  __m512 columns[8];
  gather_columns(rows, 4 * head_dim, columns);
  gather_columns(rows + 4, 4 * head_dim, columns + 4);
  KAKEYA_UNROLL
  for (int c = 0; c < 8; ++c) out[c] = {columns[c]};
}
// bf16 moves in pairs: each 32-bit word holds two neighbouring columns.
KAKEYA_INLINE void load_columns(const std::uint16_t* rows, std::int64_t head_dim, F16 out[8]) {
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  __m512 pairs[4];
  gather_columns(rows, 2 * head_dim, pairs);
  KAKEYA_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i pair = _mm512_castps_si512(pairs[c]);
    out[2 * c] = widen_bf16(pair);
    out[2 * c + 1] = {_mm512_castsi512_ps(_mm512_and_si512(pair, high_half))};
  }
}

// Register blocks: 32 registers of sixteen lanes.
constexpr int kRowBlock = 8;      // rows of a quantized product
constexpr int kQueryBlock = 6;    // queries scored together ...
constexpr int kKeyTiles = 4;      // ... against this many tiles of 16 slots
constexpr int kFewQueries = 4;    // up to this many, transposed keys stay in registers
constexpr int kHeadBlock = 4;     // heads whose values are summed together ...
constexpr int kValueVectors = 4;  // ... over this many vectors of the head's dimension
