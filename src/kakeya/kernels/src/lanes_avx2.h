// Sixteen lanes in two registers: the AVX2 words that the shared kernels are written in.
// Included inside a namespace whose functions are compiled for AVX2, FMA and F16C.

struct F16 {
  __m256 lo, hi;
};

KAKEYA_INLINE __m256i load_bytes_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

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
KAKEYA_INLINE F16 largest_magnitude(F16 a, F16 b) {
  const __m256i sign = _mm256_set1_epi32(0x7fffffff);
  const auto larger_of = [&](__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(x), sign),
                                                _mm256_and_si256(_mm256_castps_si256(y), sign)));
  };
  return {larger_of(a.lo, b.lo), larger_of(a.hi, b.hi)};
}
KAKEYA_INLINE float largest_of_magnitudes(F16 a) {
  const __m256i eight = _mm256_max_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return float_from_bits(static_cast<std::uint32_t>(_mm_cvtsi128_si32(four)));
}

// Rounds to the nearest int8 (ties to even), stores the lanes and returns their sum.
KAKEYA_INLINE int store_rounded(std::int8_t* out, F16 a) {
  // The pack works within 128-bit halves; the permutation puts its quarters back in order.
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i words = _mm256_permute4x64_epi64(packed, 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(low, high));
  __m128i four = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// One line of a unit, 64 bytes: four columns of rows 0..7 and of rows 8..15.
struct Bytes {
  __m256i lo, hi;
};
struct UnitLines {
  Bytes line[kLines];
};
KAKEYA_INLINE Bytes load_bytes(const std::uint8_t* p) { return {load_bytes_256(p), load_bytes_256(p + 32)}; }
KAKEYA_INLINE Bytes splat_byte(int x) {
  const __m256i all = _mm256_set1_epi8(static_cast<char>(x));
  return {all, all};
}
KAKEYA_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
KAKEYA_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
KAKEYA_INLINE Bytes operator^(Bytes a, Bytes b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
// Within words of 16 bits: what comes over from a neighbouring byte is to be masked off.
KAKEYA_INLINE Bytes shift_left(Bytes a, int n) { return {_mm256_slli_epi16(a.lo, n), _mm256_slli_epi16(a.hi, n)}; }
KAKEYA_INLINE Bytes shift_right(Bytes a, int n) { return {_mm256_srli_epi16(a.lo, n), _mm256_srli_epi16(a.hi, n)}; }
using Table = __m256i;
KAKEYA_INLINE Table load_table(const std::uint8_t* values) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}
KAKEYA_INLINE Bytes look_up(Table table, Bytes codes) {
  return {_mm256_shuffle_epi8(table, codes.lo), _mm256_shuffle_epi8(table, codes.hi)};
}
constexpr bool kWantsSignedBytes = true;

// Sixteen 32-bit integers.
struct Sums {
  __m256i lo, hi;
};
KAKEYA_INLINE Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
KAKEYA_INLINE F16 to_floats(Sums a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
template <int kPowerOfTwo>
KAKEYA_INLINE Sums subtract_times(Sums a, Sums b) {
  constexpr int kShift = __builtin_ctz(kPowerOfTwo);
  return {_mm256_sub_epi32(a.lo, _mm256_slli_epi32(b.lo, kShift)), _mm256_sub_epi32(a.hi, _mm256_slli_epi32(b.hi, kShift))};
}

// Sixteen pairs of 16-bit integers: what two neighbouring groups of each row are scaled by.
struct Pairs {
  __m256i lo, hi;
};
KAKEYA_INLINE __m128i sixteen_bytes(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
KAKEYA_INLINE Pairs signed_pairs(const std::uint8_t* p) {
  return {_mm256_cvtepi8_epi16(sixteen_bytes(p)), _mm256_cvtepi8_epi16(sixteen_bytes(p + 16))};
}
KAKEYA_INLINE Pairs low_nibble_pairs(const std::uint8_t* p) {
  const Pairs both = signed_pairs(p);
  const __m256i nibble = _mm256_set1_epi16(0x0f);
  return {_mm256_and_si256(both.lo, nibble), _mm256_and_si256(both.hi, nibble)};
}
KAKEYA_INLINE Pairs high_nibble_pairs(const std::uint8_t* p) {
  const Pairs both = signed_pairs(p);
  const __m256i nibble = _mm256_set1_epi16(0x0f);
  return {_mm256_and_si256(_mm256_srli_epi16(both.lo, 4), nibble), _mm256_and_si256(_mm256_srli_epi16(both.hi, 4), nibble)};
}
// sums + first * x[0] + second * x[1]
KAKEYA_INLINE Sums add_products(Sums sums, const Pairs& pairs, const std::int16_t* x) {
  const __m256i both = _mm256_set1_epi32(int_from_bytes(x));
  return {_mm256_add_epi32(sums.lo, _mm256_madd_epi16(pairs.lo, both)),
          _mm256_add_epi32(sums.hi, _mm256_madd_epi16(pairs.hi, both))};
}

// What the products of a group are multiplied by while pairs of them are added: the same number twice in each lane.
struct Factors {
  __m256i lo, hi;
};
KAKEYA_INLINE Factors unit_factors() { return {_mm256_set1_epi16(1), _mm256_set1_epi16(1)}; }
KAKEYA_INLINE Factors first_factors(const Pairs& pairs) {
  constexpr long long kLow = 0x0504050401000100, kHigh = 0x0d0c0d0c09080908;
  const __m256i order = _mm256_setr_epi64x(kLow, kHigh, kLow, kHigh);
  return {_mm256_shuffle_epi8(pairs.lo, order), _mm256_shuffle_epi8(pairs.hi, order)};
}
KAKEYA_INLINE Factors second_factors(const Pairs& pairs) {
  constexpr long long kLow = 0x0706070603020302, kHigh = 0x0f0e0f0e0b0a0b0a;
  const __m256i order = _mm256_setr_epi64x(kLow, kHigh, kLow, kHigh);
  return {_mm256_shuffle_epi8(pairs.lo, order), _mm256_shuffle_epi8(pairs.hi, order)};
}

// Integer sums may be taken in any order, and a compiler left to choose forms all products first, in memory.
KAKEYA_INLINE void add_in_this_order(__m256i& lo, __m256i& hi) { asm("" : "+x"(lo), "+x"(hi)); }

// Sums of two neighbouring products, 16 bits each.
struct PairSums {
  __m256i lo, hi;
};
template <bool kWide>
KAKEYA_INLINE PairSums pair_sums(const Bytes& line, const std::int8_t* x) {
  const __m256i four = _mm256_set1_epi32(int_from_bytes(x));
  if constexpr (kWide) {  // |w| times x with the sign of w: 2 * 128 * 127 fits
    return {_mm256_maddubs_epi16(_mm256_abs_epi8(line.lo), _mm256_sign_epi8(four, line.lo)),
            _mm256_maddubs_epi16(_mm256_abs_epi8(line.hi), _mm256_sign_epi8(four, line.hi))};
  }
  return {_mm256_maddubs_epi16(line.lo, four), _mm256_maddubs_epi16(line.hi, four)};
}
KAKEYA_INLINE PairSums operator+(PairSums a, PairSums b) {
  return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
}
KAKEYA_INLINE Sums operator+(Sums a, Sums b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
KAKEYA_INLINE Sums times(const PairSums& sums, const Factors& factors) {
  return {_mm256_madd_epi16(sums.lo, factors.lo), _mm256_madd_epi16(sums.hi, factors.hi)};
}

// dots += factors * (lines [kFirst, kLast) of a unit . the same columns of each row of x)
template <bool kWide, int kSummed, int kFirst, int kLast, int kRows>
KAKEYA_INLINE void add_dots(const UnitLines& unit, const RoundedBlock* x, int index, const Factors& factors, Sums dots[kRows]) {
  KAKEYA_UNROLL
  for (int first = kFirst; first < kLast; first += kSummed) {
    if constexpr (kSummed <= 2) {  // few lines stay in registers beside the dots, so each row is finished at once
      KAKEYA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const std::int8_t* values = x[r].values + kGroup * index + 4 * first;
        PairSums sums = pair_sums<kWide>(unit.line[first], values);
        if constexpr (kSummed == 2) sums = sums + pair_sums<kWide>(unit.line[first + 1], values + 4);
        dots[r] = dots[r] + times(sums, factors);
        add_in_this_order(dots[r].lo, dots[r].hi);
      }
    } else {
      PairSums sums[kRows];
      KAKEYA_UNROLL
      for (int c = first; c < first + kSummed; ++c) {
        const Bytes line = unit.line[c];
        KAKEYA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const PairSums products = pair_sums<kWide>(line, x[r].values + kGroup * index + 4 * c);
          sums[r] = c == first ? products : sums[r] + products;
          add_in_this_order(sums[r].lo, sums[r].hi);
        }
      }
      KAKEYA_UNROLL
      for (int r = 0; r < kRows; ++r) dots[r] = dots[r] + times(sums[r], factors);
    }
  }
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
