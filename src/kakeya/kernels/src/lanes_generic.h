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
KAKEYA_INLINE float largest_magnitude(F16 a, F16 b) {
  float lanes[32];
  store(lanes, a);
  store(lanes + 16, b);
  std::uint32_t most = 0;
  for (int i = 0; i < 32; ++i) {
    const std::uint32_t bits = bits_from_float(lanes[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return float_from_bits(most);
}

// Rounds 32 lanes to the nearest int8 (ties to even), stores them and returns their sum.
// Adding 1.5 * 2^23 leaves the rounded number in the low bits.
KAKEYA_INLINE int store_rounded(std::int8_t* out, F16 a, F16 b) {
  float lanes[32];
  store(lanes, a + splat(kRoundingShift));
  store(lanes + 16, b + splat(kRoundingShift));
  int sum = 0;
  for (int i = 0; i < 32; ++i) {
    out[i] = static_cast<std::int8_t>(bits_from_float(lanes[i]) & 0xffu);
    sum += out[i];
  }
  return sum;
}

// Integer vectors of the same size. Shifts of Words are logical, of Integers arithmetic.
typedef std::uint32_t Words __attribute__((vector_size(16)));
typedef std::int32_t Integers __attribute__((vector_size(16)));
typedef std::int16_t Shorts __attribute__((vector_size(16)));
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first column of a lane is its lowest byte");

// The 16 x 32 weights of one tile, a byte each: a 32-bit lane for each output row, a byte in it for each column.
struct TileWeights {
  Words line[8][4];
};
template <int kBits>
KAKEYA_INLINE TileWeights unpack_tile(const std::uint8_t* bytes) {
  TileWeights w;
  __builtin_memcpy(&w, bytes, kTileRows * kGroup * kBits / 8);
  if constexpr (kBits == 4) {
    for (int c = 0; c < 4; ++c) {
      for (int v = 0; v < 4; ++v) {
        w.line[c + 4][v] = w.line[c][v] >> 4 & 0x0f0f0f0fu;
        w.line[c][v] &= 0x0f0f0f0fu;
      }
    }
  }
  return w;
}

// Two columns in the halves of every 32-bit lane.
KAKEYA_INLINE Shorts both_halves(std::int8_t low, std::int8_t high) {
  const std::uint32_t pair = static_cast<std::uint16_t>(low) | static_cast<std::uint32_t>(high) << 16;
  return reinterpret_cast<Shorts>(Words{pair, pair, pair, pair});
}
KAKEYA_INLINE Integers add_halves(Shorts pairs) {
  const Integers lanes = reinterpret_cast<Integers>(pairs);
  return (lanes << 16 >> 16) + (lanes >> 16);
}
// Products fit 16 bits: 255 * 127 one at a time, 15 * 127 sixteen at a time.
template <int kBits>
KAKEYA_INLINE F16 dot_tile(const TileWeights& w, const std::int8_t* x) {
  Integers total[4] = {};
  Shorts sum[4] = {};
  for (int c = 0; c < 8; ++c, x += 4) {
    const Shorts even = both_halves(x[0], x[2]), odd = both_halves(x[1], x[3]);
    for (int v = 0; v < 4; ++v) {
      const Shorts first = reinterpret_cast<Shorts>(w.line[c][v] & 0x00ff00ffu) * even;
      const Shorts second = reinterpret_cast<Shorts>(w.line[c][v] >> 8 & 0x00ff00ffu) * odd;
      if constexpr (kBits == 4) {
        sum[v] += first + second;
      } else {
        total[v] += add_halves(first) + add_halves(second);
      }
    }
  }
  F16 dot;
  for (int v = 0; v < 4; ++v) dot.v[v] = __builtin_convertvector(total[v] + add_halves(sum[v]), F16::Vec);
  return dot;
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
