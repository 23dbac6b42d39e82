// Rotary, cache rows and attention over a slab in place, in the lanes of the including namespace.
//
// Every number of a row is made in an order that depends on the row's position alone: a score adds its
// products dimension by dimension, the softmax sums sixteen lanes along the row's own slots, and values
// are added slot by slot in increasing order. How rows are cut into blocks leaves no trace.

// Pairs (i, i + head_dim / 2) turn by the row's angles. Not fused, so that cached keys are the bits torch gives.
KAKEYA_INLINE void rotate(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
  const int half = head_dim / 2;
  const F16 zero = splat(0.0f);
  for (int i = 0; i < half; i += 16) {
    const int n = at_most(half - i, 16);
    const F16 a = load_some(x + i, n, zero), b = load_some(x + half + i, n, zero);
    const F16 c = load_some(cos + i, n, zero), s = load_some(sin + i, n, zero);
    store_some(out + i, n, a * c - b * s);
    store_some(out + half + i, n, b * c + a * s);
  }
}

template <class Element>
KAKEYA_INLINE void store_row(const float* x, int head_dim, void* slot) {
  for (int d = 0; d < head_dim; d += 16) store(static_cast<Element*>(slot) + d, load(x + d));
}

inline void store_kv(const KvRow& row, int head_dim, bool bf16, void* key_slot, void* value_slot) {
  float key[kMaxHeadDim];
  rotate(row.key, row.cos, row.sin, head_dim, key);
  if (bf16) {
    store_row<std::uint16_t>(key, head_dim, key_slot);
    store_row<std::uint16_t>(row.value, head_dim, value_slot);
  } else {
    store_row<float>(key, head_dim, key_slot);
    store_row<float>(row.value, head_dim, value_slot);
  }
}

// kQueries queries against kTiles tiles of 16 slots; keys are [tile, head_dim, 16].
template <int kQueries, int kTiles>
inline void score_tiles(const float* keys, const float* queries, std::int64_t head_dim, float scale, float* scores,
                        std::int64_t stride) {
  F16 sum[kQueries][kTiles];
  KAKEYA_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    KAKEYA_UNROLL
    for (int t = 0; t < kTiles; ++t) sum[q][t] = splat(0.0f);
  }
  for (std::int64_t d = 0; d < head_dim; ++d) {
    F16 key[kTiles];
    KAKEYA_UNROLL
    for (int t = 0; t < kTiles; ++t) key[t] = load(keys + (t * head_dim + d) * 16);
    KAKEYA_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const F16 query = splat(queries[q * head_dim + d]);
      KAKEYA_UNROLL
      for (int t = 0; t < kTiles; ++t) sum[q][t] = fma(query, key[t], sum[q][t]);
    }
  }
  KAKEYA_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    KAKEYA_UNROLL
    for (int t = 0; t < kTiles; ++t) store(scores + q * stride + 16 * t, sum[q][t] * splat(scale));
  }
}

template <int kQueries, int kTiles>
inline void score_queries(const float* keys, const float* queries, int count, std::int64_t head_dim, float scale,
                          float* scores, std::int64_t stride) {
  for (; count >= kQueries; count -= kQueries) {
    score_tiles<kQueries, kTiles>(keys, queries, head_dim, scale, scores, stride);
    queries += kQueries * head_dim;
    scores += kQueries * stride;
  }
  if constexpr (kQueries > 1) {
    score_queries<kQueries - 1, kTiles>(keys, queries, count, head_dim, scale, scores, stride);
  }
}

template <class Element>
KAKEYA_INLINE void transpose_tile(const Element* keys, std::int64_t head_dim, float* tile) {
  for (std::int64_t d = 0; d < head_dim; d += 8) {
    F16 columns[8];
    load_columns(keys + d, head_dim, columns);
    KAKEYA_UNROLL
    for (int c = 0; c < 8; ++c) store(tile + 16 * (d + c), columns[c]);
  }
}

// Sixteen slots from `keys` on, transposed. Where fewer are left the other lanes are zero, and nobody reads them.
template <class Element>
inline void load_tile(const Element* keys, int slots, std::int64_t head_dim, float* tile) {
  if (slots >= 16) {
    transpose_tile(keys, head_dim, tile);
    return;
  }
  Element rows[16 * kMaxHeadDim];
  __builtin_memset(rows, 0, 16 * head_dim * sizeof(Element));
  __builtin_memcpy(rows, keys, slots * head_dim * sizeof(Element));
  transpose_tile(rows, head_dim, tile);
}

// Asks for memory that the next tile needs, as much as a step of eight columns reads of this one: sixteen rows that lie
// far apart are nothing that the processor foresees.
template <class Element>
KAKEYA_INLINE void fetch_next_tile(const Element* keys, std::int64_t head_dim, std::int64_t column) {
  constexpr int kLine = 64 / sizeof(Element), kStep = 16 * 8;
  const Element* next = keys + 16 * head_dim + 16 * column;
  KAKEYA_UNROLL
  for (int i = 0; i < kStep; i += kLine) __builtin_prefetch(next + i);
}

// Exactly kQueries queries against one whole tile: the transposed keys are used where they are made.
template <class Element, int kQueries>
inline void score_directly(const Element* keys, const float* queries, std::int64_t head_dim, float scale, float* scores,
                           std::int64_t stride) {
  F16 sum[kQueries];
  KAKEYA_UNROLL
  for (int q = 0; q < kQueries; ++q) sum[q] = splat(0.0f);
  for (std::int64_t d = 0; d < head_dim; d += 8) {
    F16 key[8];
    load_columns(keys + d, head_dim, key);
    fetch_next_tile(keys, head_dim, d);
    KAKEYA_UNROLL
    for (int c = 0; c < 8; ++c) {
      KAKEYA_UNROLL
      for (int q = 0; q < kQueries; ++q) sum[q] = fma(splat(queries[q * head_dim + d + c]), key[c], sum[q]);
    }
  }
  KAKEYA_UNROLL
  for (int q = 0; q < kQueries; ++q) store(scores + q * stride, sum[q] * splat(scale));
}

// All the whole tiles, where `count` queries are at most kQueries; returns the slots done.
template <class Element, int kQueries>
inline int score_few(const Element* keys, int slots, int count, const float* queries, std::int64_t head_dim,
                     float scale, float* scores, std::int64_t stride) {
  if constexpr (kQueries == 0) {
    return 0;
  } else {
    if (count != kQueries) {
      return score_few<Element, kQueries - 1>(keys, slots, count, queries, head_dim, scale, scores, stride);
    }
    int slot = 0;
    for (; slot + 16 <= slots; slot += 16) {
      score_directly<Element, kQueries>(keys + slot * head_dim, queries, head_dim, scale, scores + slot, stride);
    }
    return slot;
  }
}

// Scores of every query for the slots of one range, kKeyTiles tiles at a time while there are as many.
template <class Element>
inline void score_range(const AttentionBlock& block, SlotRange range, const float* queries, float* tiles,
                        float* scores, std::int64_t stride) {
  const std::int64_t head_dim = block.head_dim;
  const Element* keys = static_cast<const Element*>(block.keys) + range.first * head_dim;
  const int count = block.rows * block.heads;
  int slot = score_few<Element, kFewQueries>(keys, range.count, count, queries, head_dim, block.scale, scores, stride);
  int step = 0;
  for (; slot < range.count; slot += 16 * step) {
    step = range.count - slot > 16 * (kKeyTiles - 1) ? kKeyTiles : 1;
    for (int t = 0; t < step; ++t) {
      const int first = slot + 16 * t;
      load_tile(keys + first * head_dim, range.count - first, head_dim, tiles + t * 16 * head_dim);
    }
    if (step == kKeyTiles) {
      score_queries<kQueryBlock, kKeyTiles>(tiles, queries, count, head_dim, block.scale, scores + slot, stride);
    } else {
      score_queries<kQueryBlock, 1>(tiles, queries, count, head_dim, block.scale, scores + slot, stride);
    }
  }
}

KAKEYA_INLINE void cap_scores(float* scores, int count, float softcap) {
  const F16 cap = splat(softcap);
  for (int i = 0; i < count; i += 16) {
    const int n = at_most(count - i, 16);
    store_some(scores + i, n, cap * hyperbolic_tangent(load_some(scores + i, n, cap) / cap));
  }
}

KAKEYA_INLINE F16 largest_of(const float* scores, int count, F16 most) {
  int i = 0;
  for (; i + 16 <= count; i += 16) most = larger(most, load(scores + i));
  return i < count ? larger(most, load_some(scores + i, count - i, most)) : most;
}

// Turns the scores of one range into exp(score - peak), and adds them to sixteen running sums.
KAKEYA_INLINE F16 exponentiate(float* scores, int count, F16 peak, F16 sum) {
  const F16 nothing = splat(-__builtin_inff());
  int i = 0;
  for (; i + 16 <= count; i += 16) {
    const F16 weight = exponential(load(scores + i) - peak);
    store(scores + i, weight);
    sum = sum + weight;
  }
  if (i < count) {
    const F16 weight = exponential(load_some(scores + i, count - i, nothing) - peak);
    store_some(scores + i, count - i, weight);
    sum = sum + weight;
  }
  return sum;
}

// Where slot `slot` of range `r` of the union lies in a line of scores.
KAKEYA_INLINE std::int64_t score_index(const Visible& all, int r, int slot) {
  std::int64_t offset = 0;
  for (int before = 0; before < r; ++before) offset += padded(all.ranges[before].count);
  return offset + slot - all.ranges[r].first;
}

// What a row sees of a part of the union.
KAKEYA_INLINE SlotRange overlap(const Visible& row, SlotRange part) {
  for (const SlotRange& range : row.ranges) {
    const int first = at_least(range.first, part.first);
    const int end = at_most(range.first + range.count, part.first + part.count);
    if (end > first) return {first, end - first};
  }
  return {part.first, 0};
}

// Softmax of one query, in place, without the division: returns what its values are to be multiplied by.
// The union's ranges cut the row's slots as the row's own ranges do: at the sinks and at the end of the ring.
inline float soften(const Visible& row, const Visible& all, float softcap, float* line) {
  float* at[kMaxRanges];
  int count[kMaxRanges];
  F16 most = splat(-__builtin_inff());
  for (int r = 0; r < kMaxRanges; ++r) {
    const SlotRange seen = overlap(row, all.ranges[r]);
    at[r] = line + score_index(all, r, seen.first);
    count[r] = seen.count;
    if (softcap > 0.0f) cap_scores(at[r], count[r], softcap);
    most = largest_of(at[r], count[r], most);
  }
  const F16 peak = splat(largest_lane(most));
  F16 sum = splat(0.0f);
  for (int r = 0; r < kMaxRanges; ++r) sum = exponentiate(at[r], count[r], peak, sum);
  return 1.0f / sum_lanes(sum);
}

// Values come from memory only as the slab has them: what was widened for several rows is in the cache.
template <int kColumns>
KAKEYA_INLINE void fetch_rows_ahead(const std::uint16_t* values, std::int64_t head_dim) {
  constexpr int kAheadRows = 16, kLine = 32;
  KAKEYA_UNROLL
  for (int i = 0; i < kColumns; i += kLine) __builtin_prefetch(values + kAheadRows * head_dim + i);
}

// Adds `count` rows of values to the sums of kHeads heads, over kVectors vectors of the dimension.
template <class Element, int kHeads, int kVectors>
KAKEYA_INLINE void weigh_vectors(const Element* values, int count, std::int64_t head_dim, const float* weights,
                                 std::int64_t stride, float* sums) {
  F16 sum[kHeads][kVectors];
  KAKEYA_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    KAKEYA_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[h][j] = load(sums + h * head_dim + 16 * j);
  }
  for (int i = 0; i < count; ++i, values += head_dim) {
    if constexpr (sizeof(Element) < sizeof(float)) fetch_rows_ahead<16 * kVectors>(values, head_dim);
    F16 part[kVectors];
    KAKEYA_UNROLL
    for (int j = 0; j < kVectors; ++j) part[j] = in_register(load(values + 16 * j));
    KAKEYA_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const F16 weight = splat(weights[h * stride + i]);
      KAKEYA_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[h][j] = fma(weight, part[j], sum[h][j]);
    }
  }
  KAKEYA_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    KAKEYA_UNROLL
    for (int j = 0; j < kVectors; ++j) store(sums + h * head_dim + 16 * j, sum[h][j]);
  }
}

// The same for `heads` heads over the whole dimension: blocks of kHeads heads, then what is left in smaller ones.
template <class Element, int kHeads>
inline void weigh_heads(const Element* values, int count, std::int64_t head_dim, int heads, const float* weights,
                        std::int64_t stride, float* sums) {
  for (; heads >= kHeads; heads -= kHeads) {
    std::int64_t d = 0;
    for (; d + 16 * kValueVectors <= head_dim; d += 16 * kValueVectors) {
      weigh_vectors<Element, kHeads, kValueVectors>(values + d, count, head_dim, weights, stride, sums + d);
    }
    for (; d < head_dim; d += 16) {
      weigh_vectors<Element, kHeads, 1>(values + d, count, head_dim, weights, stride, sums + d);
    }
    weights += kHeads * stride;
    sums += kHeads * head_dim;
  }
  if constexpr (kHeads > 1) weigh_heads<Element, kHeads - 1>(values, count, head_dim, heads, weights, stride, sums);
}

// Adds one part of the slab, at most kPart slots, to every row that sees any of it.
template <class Element>
inline void weigh_part(const AttentionBlock& block, SlotRange part, const Element* values, const float* weights,
                       std::int64_t stride) {
  for (int row = 0; row < block.rows; ++row) {
    const SlotRange seen = overlap(block.visible[row], part);
    const int skip = seen.first - part.first;
    weigh_heads<Element, kHeadBlock>(values + skip * block.head_dim, seen.count, block.head_dim, block.heads,
                                     weights + row * block.heads * stride + skip, stride, block.outputs[row]);
  }
}

// Values are read part by part; several rows share one widening to float32.
template <class Element>
inline void weigh_range(const AttentionBlock& block, SlotRange range, float* widened, const float* weights,
                        std::int64_t stride) {
  const std::int64_t head_dim = block.head_dim;
  const Element* values = static_cast<const Element*>(block.values) + range.first * head_dim;
  for (int slot = 0; slot < range.count; slot += kPart) {
    const SlotRange part = {range.first + slot, at_most(range.count - slot, kPart)};
    const Element* from = values + slot * head_dim;
    if (sizeof(Element) < sizeof(float) && block.rows > 1) {
      for (std::int64_t i = 0; i < part.count * head_dim; i += 16) store(widened + i, load(from + i));
      weigh_part(block, part, widened, weights + slot, stride);
    } else {
      weigh_part(block, part, from, weights + slot, stride);
    }
  }
}

template <class Element>
inline void attend_block(const AttentionBlock& block, float* scratch) {
  const std::int64_t head_dim = block.head_dim, queries = block.rows * block.heads;
  const std::int64_t stride = score_stride(block);
  float* windowed = scratch;                    // queries turned to their own position, for window columns
  float* sunk = windowed + queries * head_dim;  // queries turned to the cache-relative position, for sinks
  float* part = sunk + queries * head_dim;      // keys transposed, then values widened
  float* factors = part + kPart * head_dim;
  float* scores = factors + padded(static_cast<int>(queries));
  for (int q = 0; q < queries; ++q) {
    const int row = q / block.heads;
    const float* query = block.queries[row] + (q % block.heads) * head_dim;
    rotate(query, block.cos[row], block.sin[row], block.head_dim, windowed + q * head_dim);
    rotate(query, block.sink_cos[row], block.sink_sin[row], block.head_dim, sunk + q * head_dim);
  }
  for (int r = 0; r < kMaxRanges; ++r) {
    const SlotRange range = block.all.ranges[r];
    score_range<Element>(block, range, r == 0 ? sunk : windowed, part, scores + score_index(block.all, r, range.first),
                         stride);
  }
  for (int q = 0; q < queries; ++q) {
    factors[q] = soften(block.visible[q / block.heads], block.all, block.softcap, scores + q * stride);
  }
  for (int row = 0; row < block.rows; ++row) {
    __builtin_memset(block.outputs[row], 0, block.heads * head_dim * sizeof(float));
  }
  for (int r = 0; r < kMaxRanges; ++r) {
    const SlotRange range = block.all.ranges[r];
    weigh_range<Element>(block, range, part, scores + score_index(block.all, r, range.first), stride);
  }
  for (int q = 0; q < queries; ++q) {
    float* out = block.outputs[q / block.heads] + (q % block.heads) * head_dim;
    for (std::int64_t d = 0; d < head_dim; d += 16) store(out + d, load(out + d) * splat(factors[q]));
  }
}

inline void attend(const AttentionBlock& block, float* scratch) {
  if (block.bf16) {
    attend_block<std::uint16_t>(block, scratch);
  } else {
    attend_block<float>(block, scratch);
  }
}
