// Sixteen lanes in four registers: the NEON words that the shared kernels are written in.
// Included inside a namespace whose functions are compiled for AArch64 with the dot product instructions.

struct F16 {
  float32x4_t v[4];
};

template <class Make>
KAKEYA_INLINE F16 each_quarter(Make make) {
  return {{make(0), make(1), make(2), make(3)}};
}

KAKEYA_INLINE F16 splat(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {{all, all, all, all}};
}
KAKEYA_INLINE F16 load(const float* p) {
  return each_quarter([&](int i) { return vld1q_f32(p + 4 * i); });
}
KAKEYA_INLINE void store(float* p, F16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
KAKEYA_INLINE F16 load_some(const float* p, int n, F16 rest) {
  if (n == 16) return load(p);
  float lanes[16];
  store(lanes, rest);
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
KAKEYA_INLINE void store_some(float* p, int n, F16 a) {
  if (n == 16) return store(p, a);
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

KAKEYA_INLINE float32x4_t widen_bf16(uint16x4_t halves) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
KAKEYA_INLINE F16 load(const std::uint16_t* bf16) {
  return each_quarter([&](int i) { return widen_bf16(vld1_u16(bf16 + 4 * i)); });
}
// Rounds to nearest even; a NaN becomes the quiet NaN 0x7fc0.
KAKEYA_INLINE uint16x4_t narrow_bf16(float32x4_t a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  return vmovn_u32(vbslq_u32(vceqq_f32(a, a), rounded, vdupq_n_u32(0x7fc0)));
}
KAKEYA_INLINE void store(std::uint16_t* bf16, F16 a) {
  for (int i = 0; i < 4; ++i) vst1_u16(bf16 + 4 * i, narrow_bf16(a.v[i]));
}
KAKEYA_INLINE F16 load_half(const std::uint8_t* f16) {
  return each_quarter([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(f16 + 8 * i))); });
}

KAKEYA_INLINE F16 operator+(F16 a, F16 b) {
  return each_quarter([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
KAKEYA_INLINE F16 operator-(F16 a, F16 b) {
  return each_quarter([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
KAKEYA_INLINE F16 operator*(F16 a, F16 b) {
  return each_quarter([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
KAKEYA_INLINE F16 operator/(F16 a, F16 b) {
  return each_quarter([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
KAKEYA_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return each_quarter([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// The second operand when either is NaN.
KAKEYA_INLINE F16 larger(F16 a, F16 b) {
  return each_quarter([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
KAKEYA_INLINE F16 smaller(F16 a, F16 b) {
  return each_quarter([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
KAKEYA_INLINE F16 zero_where_below(F16 a, F16 x, float limit) {
  const float32x4_t least = vdupq_n_f32(limit), zero = vdupq_n_f32(0.0f);
  return each_quarter([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], least), zero, a.v[i]); });
}
// 2^n for n = shifted - 1.5 * 2^23, a whole number in [-126, 127].
KAKEYA_INLINE F16 power_of_two(F16 shifted) {
  const uint32x4_t one = vdupq_n_u32(0x3f800000u);
  return each_quarter([&](int i) {
    return vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(shifted.v[i]), 23), one));
  });
}

// Keeps the compiler from loading a value again at each of its uses.
KAKEYA_INLINE F16 in_register(F16 a) {
  asm("" : "+w"(a.v[0]), "+w"(a.v[1]), "+w"(a.v[2]), "+w"(a.v[3]));
  return a;
}

// Halves are added to halves, so that every instruction set sums in the same order.
KAKEYA_INLINE float sum_lanes(F16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
KAKEYA_INLINE float largest_lane(F16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}

// Magnitudes are compared as integers: exact, and a NaN wins over every number.
KAKEYA_INLINE F16 largest_magnitude(F16 a, F16 b) {
  const uint32x4_t sign = vdupq_n_u32(0x7fffffffu);
  const auto magnitude = [&](float32x4_t x) { return vandq_u32(vreinterpretq_u32_f32(x), sign); };
  return each_quarter([&](int i) { return vreinterpretq_f32_u32(vmaxq_u32(magnitude(a.v[i]), magnitude(b.v[i]))); });
}
KAKEYA_INLINE float largest_of_magnitudes(F16 a) {
  const auto bits = [&](int i) { return vreinterpretq_u32_f32(a.v[i]); };
  return float_from_bits(vmaxvq_u32(vmaxq_u32(vmaxq_u32(bits(0), bits(1)), vmaxq_u32(bits(2), bits(3)))));
}

// Rounds to the nearest int8 (ties to even), stores the lanes and returns their sum.
KAKEYA_INLINE int store_rounded(std::int8_t* out, F16 a) {
  const auto narrow = [&](int i) { return vqmovn_s32(vcvtnq_s32_f32(a.v[i])); };
  const int16x8_t low = vcombine_s16(narrow(0), narrow(1)), high = vcombine_s16(narrow(2), narrow(3));
  const int8x16_t bytes = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
  vst1q_s8(out, bytes);
  return vaddlvq_s8(bytes);
}

// One line of a unit: four columns of each row.
struct Bytes {
  uint8x16_t v[4];
};
struct UnitLines {
  Bytes line[kLines];
};
template <class Make>
KAKEYA_INLINE Bytes each_sixteen(Make make) {
  return {{make(0), make(1), make(2), make(3)}};
}
KAKEYA_INLINE Bytes load_bytes(const std::uint8_t* p) {
  return each_sixteen([&](int i) { return vld1q_u8(p + 16 * i); });
}
KAKEYA_INLINE Bytes splat_byte(int x) {
  const uint8x16_t all = vdupq_n_u8(static_cast<std::uint8_t>(x));
  return {{all, all, all, all}};
}
KAKEYA_INLINE Bytes operator&(Bytes a, Bytes b) {
  return each_sixteen([&](int i) { return vandq_u8(a.v[i], b.v[i]); });
}
KAKEYA_INLINE Bytes operator|(Bytes a, Bytes b) {
  return each_sixteen([&](int i) { return vorrq_u8(a.v[i], b.v[i]); });
}
KAKEYA_INLINE Bytes operator^(Bytes a, Bytes b) {
  return each_sixteen([&](int i) { return veorq_u8(a.v[i], b.v[i]); });
}
KAKEYA_INLINE Bytes shift_left(Bytes a, int n) {
  const int8x16_t by = vdupq_n_s8(static_cast<std::int8_t>(n));
  return each_sixteen([&](int i) { return vshlq_u8(a.v[i], by); });
}
KAKEYA_INLINE Bytes shift_right(Bytes a, int n) { return shift_left(a, -n); }
using Table = uint8x16_t;
KAKEYA_INLINE Table load_table(const std::uint8_t* values) { return vld1q_u8(values); }
KAKEYA_INLINE Bytes look_up(Table table, Bytes codes) {
  return each_sixteen([&](int i) { return vqtbl1q_u8(table, codes.v[i]); });
}
constexpr bool kWantsSignedBytes = true;

// Sixteen 32-bit integers.
struct Sums {
  int32x4_t v[4];
};
KAKEYA_INLINE Sums no_sums() {
  const int32x4_t zero = vdupq_n_s32(0);
  return {{zero, zero, zero, zero}};
}
KAKEYA_INLINE F16 to_floats(Sums a) {
  return each_quarter([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
template <int kTimes>
KAKEYA_INLINE Sums subtract_times(Sums a, Sums b) {
  for (int i = 0; i < 4; ++i) a.v[i] = vmlsq_n_s32(a.v[i], b.v[i], kTimes);
  return a;
}

// What two neighbouring groups of each row are scaled by.
struct Pairs {
  Sums first, second;
};
KAKEYA_INLINE Sums widened(int8x16_t bytes) {
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
KAKEYA_INLINE Pairs signed_pairs(const std::uint8_t* p) {
  const uint8x16x2_t parted = vld2q_u8(p);
  return {widened(vreinterpretq_s8_u8(parted.val[0])), widened(vreinterpretq_s8_u8(parted.val[1]))};
}
KAKEYA_INLINE Pairs low_nibble_pairs(const std::uint8_t* p) {
  const uint8x16x2_t parted = vld2q_u8(p);
  const uint8x16_t nibble = vdupq_n_u8(0x0f);
  return {widened(vreinterpretq_s8_u8(vandq_u8(parted.val[0], nibble))),
          widened(vreinterpretq_s8_u8(vandq_u8(parted.val[1], nibble)))};
}
KAKEYA_INLINE Pairs high_nibble_pairs(const std::uint8_t* p) {
  const uint8x16x2_t parted = vld2q_u8(p);
  return {widened(vreinterpretq_s8_u8(vshrq_n_u8(parted.val[0], 4))),
          widened(vreinterpretq_s8_u8(vshrq_n_u8(parted.val[1], 4)))};
}
// sums + first * x[0] + second * x[1]
KAKEYA_INLINE Sums add_products(Sums sums, const Pairs& pairs, const std::int16_t* x) {
  for (int i = 0; i < 4; ++i) {
    sums.v[i] = vmlaq_n_s32(vmlaq_n_s32(sums.v[i], pairs.first.v[i], x[0]), pairs.second.v[i], x[1]);
  }
  return sums;
}

// What the products of a group are multiplied by.
using Factors = Sums;
struct UnitFactors {};
KAKEYA_INLINE UnitFactors unit_factors() { return {}; }
KAKEYA_INLINE const Factors& first_factors(const Pairs& pairs) { return pairs.first; }
KAKEYA_INLINE const Factors& second_factors(const Pairs& pairs) { return pairs.second; }
KAKEYA_INLINE int32x4_t add_scaled(int32x4_t sum, int32x4_t dot, UnitFactors, int) { return vaddq_s32(sum, dot); }
KAKEYA_INLINE int32x4_t add_scaled(int32x4_t sum, int32x4_t dot, const Factors& factors, int quarter) {
  return vmlaq_s32(sum, dot, factors.v[quarter]);
}

// dots += factors * (lines [kFirst, kLast) of a unit . the same columns of each row of x)
// Codes are signed bytes or below 128.
template <bool kWide, int kSummed, int kFirst, int kLast, int kRows, class AnyFactors>
KAKEYA_INLINE void add_dots(const UnitLines& unit, const RoundedBlock* x, int index, const AnyFactors& factors,
                            Sums dots[kRows]) {
  Sums sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = no_sums();
  KAKEYA_UNROLL
  for (int c = kFirst; c < kLast; ++c) {
    KAKEYA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int word = int_from_bytes(x[r].values + kGroup * index + 4 * c);
      const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(word));
      KAKEYA_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[r].v[i] = vdotq_s32(sums[r].v[i], vreinterpretq_s8_u8(unit.line[c].v[i]), four);
      }
    }
  }
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    KAKEYA_UNROLL
    for (int i = 0; i < 4; ++i) dots[r].v[i] = add_scaled(dots[r].v[i], sums[r].v[i], factors, i);
  }
}

// Eight neighbouring columns of sixteen rows.
KAKEYA_INLINE float32x4_t four_columns(const float* p) { return vld1q_f32(p); }
KAKEYA_INLINE float32x4_t four_columns(const std::uint16_t* p) { return widen_bf16(vld1_u16(p)); }
KAKEYA_INLINE void transpose_quad(const float32x4_t in[4], float32x4_t out[4]) {
  const float32x4x2_t low = vtrnq_f32(in[0], in[1]), high = vtrnq_f32(in[2], in[3]);
  out[0] = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
  out[1] = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
  out[2] = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
  out[3] = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}
template <class Element>
KAKEYA_INLINE void load_columns(const Element* rows, std::int64_t head_dim, F16 out[8]) {
  for (int quarter = 0; quarter < 4; ++quarter) {
    for (int d = 0; d < 8; d += 4) {
      float32x4_t in[4], columns[4];
      for (int i = 0; i < 4; ++i) in[i] = four_columns(rows + (4 * quarter + i) * head_dim + d);
      transpose_quad(in, columns);
      for (int i = 0; i < 4; ++i) out[d + i].v[quarter] = columns[i];
    }
  }
}

// Register blocks: 32 registers of four lanes.
constexpr int kRowBlock = 4;
constexpr int kQueryBlock = 4;
constexpr int kKeyTiles = 1;
constexpr int kFewQueries = 0;
constexpr int kHeadBlock = 4;
constexpr int kValueVectors = 1;
