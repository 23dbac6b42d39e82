// Sixteen lanes in plain C++: four vectors of four, which compilers map to SSE2, NEON or scalars.
// Included inside a namespace; needs nothing beyond the platform's baseline.

struct F16 {
  typedef float Vec __attribute__((vector_size(16)));
  Vec v[4];
};

KAKEYA_INLINE F16 load(const float* p) {
  F16 r;
  __builtin_memcpy(&r, p, sizeof r);
  return r;
}
KAKEYA_INLINE void store(float* p, F16 a) { __builtin_memcpy(p, &a, sizeof a); }
KAKEYA_INLINE F16 load_some(const float* p, int n, F16 rest) {
  float lanes[16];
  store(lanes, rest);
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
KAKEYA_INLINE void store_some(float* p, int n, F16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
KAKEYA_INLINE F16 splat(float x) {
  const F16::Vec v = {x, x, x, x};
  return {{v, v, v, v}};
}

KAKEYA_INLINE F16 load(const std::uint16_t* bf16) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = float_from_bits(static_cast<std::uint32_t>(bf16[i]) << 16);
  return load(lanes);
}
// Rounds to nearest even; a NaN becomes the quiet NaN 0x7fc0.
KAKEYA_INLINE void store(std::uint16_t* bf16, F16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t bits = bits_from_float(lanes[i]);
    const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    bf16[i] = static_cast<std::uint16_t>(lanes[i] == lanes[i] ? rounded : 0x7fc0u);
  }
}
// Finite float16 only. Shifting the exponent field into place leaves the value 2^112 too small.
KAKEYA_INLINE F16 load_half(const std::uint8_t* f16) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t half = static_cast<std::uint32_t>(f16[2 * i]) | static_cast<std::uint32_t>(f16[2 * i + 1]) << 8;
    const float magnitude = float_from_bits((half & 0x7fffu) << 13) * 0x1p112f;
    lanes[i] = float_from_bits(bits_from_float(magnitude) | (half & 0x8000u) << 16);
  }
  return load(lanes);
}

KAKEYA_INLINE F16 operator+(F16 a, F16 b) {
  return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}};
}
KAKEYA_INLINE F16 operator-(F16 a, F16 b) {
  return {{a.v[0] - b.v[0], a.v[1] - b.v[1], a.v[2] - b.v[2], a.v[3] - b.v[3]}};
}
KAKEYA_INLINE F16 operator*(F16 a, F16 b) {
  return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}};
}
KAKEYA_INLINE F16 operator/(F16 a, F16 b) {
  return {{a.v[0] / b.v[0], a.v[1] / b.v[1], a.v[2] / b.v[2], a.v[3] / b.v[3]}};
}
// Two roundings: not every baseline has the fused instruction, and every generic build should give the same bits.
KAKEYA_INLINE F16 fma(F16 a, F16 b, F16 c) { return a * b + c; }

template <class Choose>
KAKEYA_INLINE F16 lane_by_lane(F16 a, F16 b, Choose choose) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  for (int i = 0; i < 16; ++i) x[i] = choose(x[i], y[i]);
  return load(x);
}
// The second operand when either is NaN.
KAKEYA_INLINE F16 larger(F16 a, F16 b) {
  return lane_by_lane(a, b, [](float x, float y) { return x > y ? x : y; });
}
KAKEYA_INLINE F16 smaller(F16 a, F16 b) {
  return lane_by_lane(a, b, [](float x, float y) { return x < y ? x : y; });
}
KAKEYA_INLINE F16 zero_where_below(F16 a, F16 x, float limit) {
  return lane_by_lane(a, x, [limit](float value, float key) { return key < limit ? 0.0f : value; });
}
// 2^n for n = shifted - 1.5 * 2^23, a whole number in [-126, 127].
KAKEYA_INLINE F16 power_of_two(F16 shifted) {
  return lane_by_lane(shifted, shifted, [](float z, float) {
    return float_from_bits((bits_from_float(z) << 23) + 0x3f800000u);
  });
}

KAKEYA_INLINE F16 in_register(F16 a) { return a; }

// Halves are added to halves, so that every instruction set sums in the same order.
KAKEYA_INLINE float sum_lanes(F16 a) {
  const F16::Vec four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
KAKEYA_INLINE float largest_lane(F16 a) {
  float lanes[16];
  store(lanes, a);
  float most = lanes[0];
  for (int i = 1; i < 16; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// Magnitudes are compared as integers: exact, and a NaN wins over every number.
KAKEYA_INLINE F16 largest_magnitude(F16 a, F16 b) {
  return lane_by_lane(a, b, [](float x, float y) {
    const std::uint32_t first = bits_from_float(x) & 0x7fffffffu, second = bits_from_float(y) & 0x7fffffffu;
    return float_from_bits(first > second ? first : second);
  });
}
KAKEYA_INLINE float largest_of_magnitudes(F16 a) {
  float lanes[16];
  store(lanes, a);
  std::uint32_t most = 0;
  for (int i = 0; i < 16; ++i) most = bits_from_float(lanes[i]) > most ? bits_from_float(lanes[i]) : most;
  return float_from_bits(most);
}

// Rounds to the nearest int8 (ties to even), stores the lanes and returns their sum.
// Adding 1.5 * 2^23 leaves the rounded number in the low bits.
KAKEYA_INLINE int store_rounded(std::int8_t* out, F16 a) {
  float lanes[16];
  store(lanes, a + splat(kRoundingShift));
  int sum = 0;
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<std::int8_t>(bits_from_float(lanes[i]) & 0xffu);
    sum += out[i];
  }
  return sum;
}

// Integer vectors of the same size. Shifts of Words are logical, of the others arithmetic.
typedef std::uint8_t Octets __attribute__((vector_size(16)));
typedef std::uint16_t Words __attribute__((vector_size(16)));
typedef std::int16_t Shorts __attribute__((vector_size(16)));
typedef std::int32_t Integers __attribute__((vector_size(16)));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first column of a lane is its lowest byte");

// One line of a unit: four columns of each row.
struct Bytes {
  Octets v[4];
};
struct UnitLines {
  Bytes line[kLines];
};
template <class Make>
KAKEYA_INLINE Bytes each_quarter(Make make) {
  return {{make(0), make(1), make(2), make(3)}};
}
KAKEYA_INLINE Bytes load_bytes(const std::uint8_t* p) {
  Bytes bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return bytes;
}
KAKEYA_INLINE Bytes splat_byte(int x) {
  const Octets all = Octets{} + static_cast<std::uint8_t>(x);
  return {{all, all, all, all}};
}
KAKEYA_INLINE Bytes operator&(Bytes a, Bytes b) {
  return each_quarter([&](int i) { return a.v[i] & b.v[i]; });
}
KAKEYA_INLINE Bytes operator|(Bytes a, Bytes b) {
  return each_quarter([&](int i) { return a.v[i] | b.v[i]; });
}
KAKEYA_INLINE Bytes operator^(Bytes a, Bytes b) {
  return each_quarter([&](int i) { return a.v[i] ^ b.v[i]; });
}
// Within words of 16 bits: what comes over from a neighbouring byte is to be masked off.
KAKEYA_INLINE Bytes shift_left(Bytes a, int n) {
  return each_quarter([&](int i) { return reinterpret_cast<Octets>(reinterpret_cast<Words>(a.v[i]) << n); });
}
KAKEYA_INLINE Bytes shift_right(Bytes a, int n) {
  return each_quarter([&](int i) { return reinterpret_cast<Octets>(reinterpret_cast<Words>(a.v[i]) >> n); });
}
using Table = const std::uint8_t*;
KAKEYA_INLINE Table load_table(const std::uint8_t* values) { return values; }
KAKEYA_INLINE Bytes look_up(Table table, Bytes codes) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 16; ++j) codes.v[i][j] = table[codes.v[i][j]];
  }
  return codes;
}
constexpr bool kWantsSignedBytes = true;

// Sixteen 32-bit integers.
struct Sums {
  Integers v[4];
};
KAKEYA_INLINE Sums no_sums() { return {}; }
KAKEYA_INLINE F16 to_floats(Sums a) {
  F16 floats;
  for (int i = 0; i < 4; ++i) floats.v[i] = __builtin_convertvector(a.v[i], F16::Vec);
  return floats;
}
template <int kTimes>
KAKEYA_INLINE Sums subtract_times(Sums a, Sums b) {
  for (int i = 0; i < 4; ++i) a.v[i] -= b.v[i] * kTimes;
  return a;
}

// What two neighbouring groups of each row are scaled by.
struct Pairs {
  Sums first, second;
};
template <class Read>
KAKEYA_INLINE Pairs read_pairs(const std::uint8_t* p, Read read) {
  Pairs pairs;
  for (int row = 0; row < kTileRows; ++row) {
    pairs.first.v[row / 4][row % 4] = read(p[2 * row]);
    pairs.second.v[row / 4][row % 4] = read(p[2 * row + 1]);
  }
  return pairs;
}
KAKEYA_INLINE Pairs signed_pairs(const std::uint8_t* p) {
  return read_pairs(p, [](std::uint8_t byte) { return static_cast<std::int8_t>(byte); });
}
KAKEYA_INLINE Pairs low_nibble_pairs(const std::uint8_t* p) {
  return read_pairs(p, [](std::uint8_t byte) { return byte & 0x0f; });
}
KAKEYA_INLINE Pairs high_nibble_pairs(const std::uint8_t* p) {
  return read_pairs(p, [](std::uint8_t byte) { return byte >> 4; });
}
// sums + first * x[0] + second * x[1]
KAKEYA_INLINE Sums add_products(Sums sums, const Pairs& pairs, const std::int16_t* x) {
  for (int i = 0; i < 4; ++i) sums.v[i] += pairs.first.v[i] * x[0] + pairs.second.v[i] * x[1];
  return sums;
}

// What the products of a group are multiplied by.
using Factors = Sums;
struct UnitFactors {};
KAKEYA_INLINE UnitFactors unit_factors() { return {}; }
KAKEYA_INLINE Factors first_factors(const Pairs& pairs) { return pairs.first; }
KAKEYA_INLINE Factors second_factors(const Pairs& pairs) { return pairs.second; }
KAKEYA_INLINE Integers scaled(Integers dot, UnitFactors, int) { return dot; }
KAKEYA_INLINE Integers scaled(Integers dot, const Factors& factors, int quarter) { return dot * factors.v[quarter]; }

// Two columns in the halves of every 32-bit lane.
KAKEYA_INLINE Shorts both_halves(std::int8_t low, std::int8_t high) {
  return Shorts{low, high, low, high, low, high, low, high};
}
KAKEYA_INLINE Integers add_halves(Shorts pairs) {
  const Integers lanes = reinterpret_cast<Integers>(pairs);
  return (lanes << 16 >> 16) + (lanes >> 16);
}
// dots += factors * (lines [kFirst, kLast) of a unit . the same columns of each row of x)
// Codes are signed bytes or below 128; one product of two columns at a time fits 16 bits.
template <bool kWide, int kSummed, int kFirst, int kLast, int kRows, class AnyFactors>
KAKEYA_INLINE void add_dots(const UnitLines& unit, const RoundedBlock* x, int index, const AnyFactors& factors,
                            Sums dots[kRows]) {
  for (int r = 0; r < kRows; ++r) {
    Integers sums[4] = {};
    for (int c = kFirst; c < kLast; ++c) {
      const std::int8_t* four = x[r].values + kGroup * index + 4 * c;
      const Shorts even = both_halves(four[0], four[2]), odd = both_halves(four[1], four[3]);
      for (int i = 0; i < 4; ++i) {
        const Shorts codes = reinterpret_cast<Shorts>(unit.line[c].v[i]);
        sums[i] += add_halves((codes << 8 >> 8) * even) + add_halves((codes >> 8) * odd);
      }
    }
    for (int i = 0; i < 4; ++i) dots[r].v[i] += scaled(sums[i], factors, i);
  }
}

// Eight neighbouring columns of sixteen rows.
KAKEYA_INLINE float widen(float x) { return x; }
KAKEYA_INLINE float widen(std::uint16_t bf16) { return float_from_bits(static_cast<std::uint32_t>(bf16) << 16); }
template <class Element>
KAKEYA_INLINE void load_columns(const Element* rows, std::int64_t head_dim, F16 out[8]) {
  float columns[8][16];
  for (int i = 0; i < 16; ++i) {
    for (int c = 0; c < 8; ++c) columns[c][i] = widen(rows[i * head_dim + c]);
  }
  for (int c = 0; c < 8; ++c) out[c] = load(columns[c]);
}

// Register blocks, for sixteen to thirty-two registers of four lanes.
constexpr int kRowBlock = 4;
constexpr int kQueryBlock = 3;
constexpr int kKeyTiles = 1;
constexpr int kFewQueries = 0;
constexpr int kHeadBlock = 3;
constexpr int kValueVectors = 1;
