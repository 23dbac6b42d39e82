// Quantized products, in the lanes of the including namespace.
//
// Each output is sum over groups of  scale * x_scale * (integer dot product)  +  minimum * x_sum,
// accumulated in group order with the same instructions whatever the number of rows, so a row's
// bits do not depend on the other rows.

inline void quantize_row(const float* x, int groups, std::int8_t* values, float* scales, float* sums) {
  constexpr float kTiniest = 1e-30f;  // below this 127 / most would overflow: such a group counts as zero
  for (int g = 0; g < groups; ++g) {
    const F16 low = load(x + kGroup * g), high = load(x + kGroup * g + 16);
    const float most = largest_magnitude(low, high);
    const F16 inverse = splat(most < kTiniest ? 0.0f : 127.0f / most);
    const float scale = most / 127.0f;
    const int sum = store_rounded(values + kGroup * g, low * inverse, high * inverse);
    scales[g] = scale;
    sums[g] = scale * static_cast<float>(sum);
  }
}

template <int kBits, int kRows>
inline void product_rows(const Product& call, int tile, int first_row) {
  // With few rows the processor's own prefetching keeps up, and is only disturbed by ours.
  constexpr bool kFetchAhead = kRows > 4;
  constexpr int kAheadBytes = 4096;
  const std::int64_t groups = call.groups;
  const std::uint8_t* bytes = call.tiles + tile * groups * tile_bytes(kBits);
  const std::int8_t* values = call.x.values + first_row * groups * kGroup;
  const float* scales = call.x.scales + first_row * groups;
  const float* sums = call.x.sums + first_row * groups;
  F16 y[kRows];
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) y[r] = splat(0.0f);
  for (std::int64_t g = 0; g < groups; ++g, bytes += tile_bytes(kBits)) {
    const F16 scale = load_half(bytes), minimum = load_half(bytes + 2 * kTileRows);
    const TileWeights weights = unpack_tile<kBits>(bytes + kTileHeaderBytes);
    if constexpr (kFetchAhead) {
      for (int line = 0; line < tile_bytes(kBits); line += 64) __builtin_prefetch(bytes + kAheadBytes + line);
    }
    KAKEYA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F16 dot = dot_tile<kBits>(weights, values + (r * groups + g) * kGroup);
      y[r] = fma(scale * splat(scales[r * groups + g]), dot, y[r]);
      y[r] = fma(minimum, splat(sums[r * groups + g]), y[r]);
    }
  }
  const std::int64_t first_output = static_cast<std::int64_t>(tile) * kTileRows;
  const int outputs = at_most(static_cast<int>(call.outputs - first_output), kTileRows);
  const F16 zero = splat(0.0f);
  const F16 bias = call.bias ? load_some(call.bias + first_output, outputs, zero) : zero;
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t at = (first_row + r) * call.outputs + first_output;
    F16 result = y[r] + bias;
    if (call.residual) result = load_some(call.residual + at, outputs, zero) + result;
    store_some(call.y + at, outputs, result);
  }
}

template <int kBits, int kRows>
inline void product_tile(const Product& call, int tile, int row, int last_row) {
  for (; row + kRows <= last_row; row += kRows) product_rows<kBits, kRows>(call, tile, row);
  if constexpr (kRows > 1) product_tile<kBits, kRows - 1>(call, tile, row, last_row);
}

inline void product(const Product& call, int first_tile, int last_tile, int first_row, int last_row) {
  for (int tile = first_tile; tile < last_tile; ++tile) {
    if (call.bits == 4) {
      product_tile<4, kRowBlock>(call, tile, first_row, last_row);
    } else {
      product_tile<8, kRowBlock>(call, tile, first_row, last_row);
    }
  }
}
