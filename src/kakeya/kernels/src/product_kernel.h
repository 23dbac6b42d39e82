// Quantized products, in the lanes of the including namespace: a lane for each of a tile's sixteen outputs.
//
// Products of codes and 8-bit activations are summed as integers, over 32 columns or over a super-block with its
// integer scales; each such sum is then added to a float32 in the order of the columns. Integers are exact, so a
// row's bits depend neither on the other rows nor on the way the loops are cut.

// Weights come once and in order, but each byte is worked on for so long that a processor looks only some hundred
// bytes ahead, and its own prefetching stops at the end of a page.
KAKEYA_INLINE void fetch_ahead(const std::uint8_t* bytes, int count) {
  constexpr int kAheadBytes = 2048;
  KAKEYA_UNROLL
  for (int line = 0; line < count; line += 64) __builtin_prefetch(bytes + kAheadBytes + line, 0, 3);
}

KAKEYA_INLINE F16 load_powers_of_two(const std::uint8_t* exponents) {
  std::uint32_t bits[kTileRows];
  for (int i = 0; i < kTileRows; ++i) bits[i] = power_of_two_bits(exponents[i]);
  float lanes[kTileRows];
  __builtin_memcpy(lanes, bits, sizeof lanes);
  return load(lanes);
}

// Where the weights of some columns of a tile come from: unpacked as they are asked for, or held in a Panel.
template <Format kFormat>
struct Tile {
  static constexpr Layout kLayout = layout_of(kFormat);
  const std::uint8_t* bytes;

  const std::uint8_t* unit(int index) const {
    if constexpr (kLayout.super) return bytes + super_header_bytes(kFormat) + index * unit_bytes(kFormat);
    return bytes + index * tile_bytes(kFormat) + small_header_bytes(kFormat);
  }
  UnitLines lines(int index) const {
    fetch_ahead(unit(index), unit_bytes(kFormat));
    return unpack_unit<kFormat>(unit(index));
  }

  // A 32-column format's scale and minimum of one unit; wide codes were made signed.
  F16 scale(int index) const {
    const std::uint8_t* at = bytes + index * tile_bytes(kFormat);
    if constexpr (scale_bytes(kFormat) == 1) return load_powers_of_two(at);
    return load_half(at);
  }
  F16 minimum(int index) const {
    const F16 factor = scale(index);
    if constexpr (!kLayout.own_minimum) return factor * splat(static_cast<float>(-kLayout.zero));
    const F16 own = load_half(bytes + index * tile_bytes(kFormat) + 2 * kTileRows);
    return kLayout.wide ? fma(factor, splat(128.0f), own) : own;
  }

  // A super-block's.
  F16 super_scale() const { return load_half(bytes); }
  F16 super_minimum() const { return load_half(bytes + 2 * kTileRows); }
  Pairs scale_pairs(int pair) const {
    const std::uint8_t* at = bytes + 2 * kTileRows * (kLayout.own_minimum ? 2 : 1) + 2 * kTileRows * pair;
    if constexpr (factors_share_bytes(kFormat)) return low_nibble_pairs(at);
    return signed_pairs(at);
  }
  Pairs minimum_pairs(int pair) const {
    if constexpr (factors_share_bytes(kFormat)) return high_nibble_pairs(bytes + 4 * kTileRows + 2 * kTileRows * pair);
    if constexpr (!kLayout.own_minimum) return scale_pairs(pair);
    return signed_pairs(bytes + 4 * kTileRows + factor_bytes(kFormat) + 2 * kTileRows * pair);
  }
};

// The same, unpacked once for many rows.
template <Format kFormat>
struct Panel {
  static constexpr Layout kLayout = layout_of(kFormat);
  static constexpr int kPairs = kChunk / kLayout.group / 2;
  UnitLines held_lines[kUnits];
  F16 held_scales[kLayout.super ? 1 : kUnits], held_minima[kLayout.super ? 1 : kUnits];
  Pairs held_scale_pairs[kLayout.super ? kPairs : 1], held_minimum_pairs[kLayout.super ? kPairs : 1];

  void fill(const Tile<kFormat>& tile, int units) {
    for (int u = 0; u < units; ++u) held_lines[u] = tile.lines(u);
    if constexpr (kLayout.super) {
      held_scales[0] = tile.super_scale();
      if constexpr (kLayout.own_minimum) held_minima[0] = tile.super_minimum();
      for (int p = 0; p < kPairs; ++p) {
        held_scale_pairs[p] = tile.scale_pairs(p);
        held_minimum_pairs[p] = tile.minimum_pairs(p);
      }
    } else {
      for (int u = 0; u < units; ++u) {
        held_scales[u] = tile.scale(u);
        held_minima[u] = tile.minimum(u);
      }
    }
  }
  // By reference: a copy would pass through memory in pieces that the processor cannot join again.
  const UnitLines& lines(int index) const { return held_lines[index]; }
  const F16& scale(int index) const { return held_scales[index]; }
  const F16& minimum(int index) const { return held_minima[index]; }
  const F16& super_scale() const { return held_scales[0]; }
  const F16& super_minimum() const { return held_minima[0]; }
  const Pairs& scale_pairs(int pair) const { return held_scale_pairs[pair]; }
  const Pairs& minimum_pairs(int pair) const { return held_minimum_pairs[pair]; }
};

// Some rows times 32 columns of a format whose groups stand alone.
template <Format kFormat, int kRows, class Weights>
KAKEYA_INLINE void add_unit(const Weights& weights, int unit, const RoundedBlock* x, F16 y[kRows]) {
  constexpr Layout kLayout = layout_of(kFormat);
  Sums dots[kRows];
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) dots[r] = no_sums();
  const UnitLines& lines = weights.lines(unit);
  add_dots<kLayout.wide, kLayout.summed, 0, kLines, kRows>(lines, x, unit, unit_factors(), dots);
  const F16& scale = weights.scale(unit);
  constexpr bool kMinimum = kLayout.own_minimum || kLayout.zero != 0;
  F16 minimum = splat(0.0f);
  if constexpr (kMinimum) minimum = weights.minimum(unit);
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    y[r] = fma(scale * splat(x[r].scales[unit]), to_floats(dots[r]), y[r]);
    if constexpr (kMinimum) y[r] = fma(minimum, splat(x[r].sums[unit]), y[r]);
  }
}

// Some rows times the two units, or the two halves of one unit, whose scales are a pair.
template <Format kFormat, int kRows, class Weights>
KAKEYA_INLINE void add_pair(const Weights& weights, int pair, const RoundedBlock* x, Sums dots[kRows],
                            Sums offsets[kRows]) {
  constexpr Layout kLayout = layout_of(kFormat);
  const Pairs& scales = weights.scale_pairs(pair);
  if constexpr (kLayout.group == kGroup) {
    add_dots<kLayout.wide, kLayout.summed, 0, kLines, kRows>(weights.lines(2 * pair), x, 2 * pair,
                                                              first_factors(scales), dots);
    add_dots<kLayout.wide, kLayout.summed, 0, kLines, kRows>(weights.lines(2 * pair + 1), x, 2 * pair + 1,
                                                              second_factors(scales), dots);
  } else {
    const UnitLines& lines = weights.lines(pair);
    add_dots<kLayout.wide, kLayout.summed, 0, kLines / 2, kRows>(lines, x, pair, first_factors(scales), dots);
    add_dots<kLayout.wide, kLayout.summed, kLines / 2, kLines, kRows>(lines, x, pair, second_factors(scales), dots);
  }
  if constexpr (kLayout.own_minimum || kLayout.zero != 0) {
    const Pairs& minima = weights.minimum_pairs(pair);
    KAKEYA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const std::int16_t* sums = kLayout.group == kGroup ? x[r].sums_of_32 : x[r].sums_of_16;
      offsets[r] = add_products(offsets[r], minima, sums + 2 * pair);
    }
  }
}

// Some rows times a super-block: scales and minima are integers until its end.
template <Format kFormat, int kRows, class Weights>
KAKEYA_INLINE void add_super_block(const Weights& weights, const RoundedBlock* x, F16 y[kRows]) {
  constexpr Layout kLayout = layout_of(kFormat);
  Sums dots[kRows], offsets[kRows];
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) dots[r] = offsets[r] = no_sums();
  for (int pair = 0; pair < kChunk / kLayout.group / 2; ++pair) {
    add_pair<kFormat, kRows>(weights, pair, x, dots, offsets);
  }
  const F16& scale = weights.super_scale();
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kLayout.zero != 0) dots[r] = subtract_times<kLayout.zero>(dots[r], offsets[r]);
    const F16 x_scale = splat(x[r].scales[0]);
    y[r] = fma(scale * x_scale, to_floats(dots[r]), y[r]);
    if constexpr (kLayout.own_minimum) {
      y[r] = fma(weights.super_minimum() * x_scale, splat(0.0f) - to_floats(offsets[r]), y[r]);
    }
  }
}

// Some rows times up to 256 columns.
template <Format kFormat, int kRows, class Weights>
KAKEYA_INLINE void add_chunk(const Weights& weights, int units, const RoundedBlock* x, F16 y[kRows]) {
  if constexpr (layout_of(kFormat).super) {
    add_super_block<kFormat, kRows>(weights, x, y);
  } else {
    for (int unit = 0; unit < units; ++unit) add_unit<kFormat, kRows>(weights, unit, x, y);
  }
}

inline void store_outputs(const Product& call, int tile, std::int64_t row, F16 sum) {
  const std::int64_t first = static_cast<std::int64_t>(tile) * kTileRows;
  const int outputs = at_most(static_cast<int>(call.outputs - first), kTileRows);
  const std::int64_t at = row * call.y_stride + first;
  const F16 zero = splat(0.0f);
  F16 result = call.bias ? sum + load_some(call.bias + first, outputs, zero) : sum;
  if (call.residual) result = load_some(call.residual + at, outputs, zero) + result;
  store_some(call.y + at, outputs, result);
}

// The 256-column pieces of a tile row of weights.
template <Format kFormat>
struct Chunks {
  static constexpr int kTilesInChunk = kChunk / tile_columns(kFormat);
  const std::uint8_t* tiles;
  int columns;

  Chunks(const Product& call, int tile)
      : tiles(call.tiles + tile * (call.columns / tile_columns(kFormat)) * tile_bytes(kFormat)),
        columns(static_cast<int>(call.columns)) {}
  int count() const { return (columns + kChunk - 1) / kChunk; }
  int units(int chunk) const { return at_most(kUnits, (columns - chunk * kChunk) / kGroup); }
  Tile<kFormat> at(int chunk) const {
    return {tiles + static_cast<std::int64_t>(chunk) * kTilesInChunk * tile_bytes(kFormat)};
  }
};

// One or two rows: weights go from memory through registers.
template <Format kFormat, int kRows>
inline void multiply_few(const Product& call, int tile, int first_row) {
  const Chunks<kFormat> chunks(call, tile);
  F16 y[kRows];
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) y[r] = splat(0.0f);
  for (int chunk = 0; chunk < chunks.count(); ++chunk) {
    const RoundedBlock* x = call.x.blocks + chunk * call.x.rows + first_row;
    add_chunk<kFormat, kRows>(chunks.at(chunk), chunks.units(chunk), x, y);
  }
  KAKEYA_UNROLL
  for (int r = 0; r < kRows; ++r) store_outputs(call, tile, first_row + r, y[r]);
}

template <Format kFormat, int kRows>
inline void add_panel(const Panel<kFormat>& panel, int units, const RoundedBlock* x, int row, int rows, F16* y) {
  for (; row + kRows <= rows; row += kRows) {
    F16 sums[kRows];
    KAKEYA_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = y[row + r];
    add_chunk<kFormat, kRows>(panel, units, x + row, sums);
    KAKEYA_UNROLL
    for (int r = 0; r < kRows; ++r) y[row + r] = sums[r];
  }
  if constexpr (kRows > 1) add_panel<kFormat, kRows / 2>(panel, units, x, row, rows, y);
}

// Many rows: each chunk of weights is unpacked once, into the first-level cache.
template <Format kFormat>
inline void multiply_many(const Product& call, int tile, int first_row, int rows) {
  const Chunks<kFormat> chunks(call, tile);
  Panel<kFormat> panel;
  F16 y[kRowsPerTask];
  for (int r = 0; r < rows; ++r) y[r] = splat(0.0f);
  for (int chunk = 0; chunk < chunks.count(); ++chunk) {
    panel.fill(chunks.at(chunk), chunks.units(chunk));
    const RoundedBlock* x = call.x.blocks + chunk * call.x.rows + first_row;
    add_panel<kFormat, kRowBlock>(panel, chunks.units(chunk), x, 0, rows, y);
  }
  for (int r = 0; r < rows; ++r) store_outputs(call, tile, first_row + r, y[r]);
}

template <Format kFormat>
inline void multiply_format(const Product& call, int first_tile, int last_tile, int first_row, int last_row) {
  const int rows = last_row - first_row;
  for (int tile = first_tile; tile < last_tile; ++tile) {
    if (rows == 1) {
      multiply_few<kFormat, 1>(call, tile, first_row);
    } else if (rows == 2) {
      multiply_few<kFormat, 2>(call, tile, first_row);
    } else {
      multiply_many<kFormat>(call, tile, first_row, rows);
    }
  }
}

inline void product(const Product& call, int first_tile, int last_tile, int first_row, int last_row) {
  using Multiply = void (*)(const Product&, int, int, int, int);
  constexpr Multiply kMultiply[kFormats] = {
      multiply_format<Format::kAffine4>, multiply_format<Format::kAffine8>, multiply_format<Format::kQ4_0>,
      multiply_format<Format::kQ5_0>,    multiply_format<Format::kQ5_1>,    multiply_format<Format::kQ8_0>,
      multiply_format<Format::kIQ4_NL>,  multiply_format<Format::kMXFP4>,   multiply_format<Format::kQ2_K>,
      multiply_format<Format::kQ3_K>,    multiply_format<Format::kQ4_K>,    multiply_format<Format::kQ5_K>,
      multiply_format<Format::kQ6_K>,    multiply_format<Format::kIQ4_XS>};
  kMultiply[static_cast<int>(call.format)](call, first_tile, last_tile, first_row, last_row);
}
