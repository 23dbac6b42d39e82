// What each instruction set implements: single-threaded pieces of the operations.
// The drivers (linear.cpp, rowwise.cpp, attend.cpp) cut the work into these pieces.
#pragma once

#include <cstdint>

#include "choice_ops.h"

namespace kakeya {

constexpr int kGroup = 32;     // weights and activations share a scale along this many columns
constexpr int kMaxHeadDim = 1024;
constexpr int kTileRows = 16;  // output rows of one packed tile, and lanes of one vector

// One packed tile: 16 float16 scales, 16 float16 minima, then the quantized weights.
// Byte 4 * row + j of the c-th 64-byte line is the weight of column 4 * c + j;
// with 4 bits the low nibbles hold lines 0..3 and the high nibbles lines 4..7.
constexpr int kTileHeaderBytes = 2 * 2 * kTileRows;
constexpr int tile_bytes(int bits) { return kTileHeaderBytes + kTileRows * kGroup * bits / 8; }

// Activations, quantized row by row: x = values * scales, one scale per group.
struct QuantizedRows {
  std::int8_t* values;  // [rows, columns]
  float* scales;        // [rows, groups]
  float* sums;          // [rows, groups]: scale times the sum of the group's values
};

struct Product {
  const std::uint8_t* tiles;
  int bits;
  int groups;
  std::int64_t outputs;
  QuantizedRows x;
  const float* bias;      // [outputs] or null
  const float* residual;  // [rows, outputs] or null
  float* y;               // [rows, outputs]
};

enum class Activation { kSilu, kGeluTanh };

// Slots [first, first + count) of one slab.
struct SlotRange {
  int first;
  int count;
};

// What one row sees, in increasing slot order: sinks, then the ring cut where it wraps.
constexpr int kMaxRanges = 3;
struct Visible {
  SlotRange ranges[kMaxRanges];
};

// A few consecutive rows of one session and one kv head, attending over the slab in place.
struct AttentionBlock {
  const void* keys;    // [slots, head_dim]
  const void* values;  // [slots, head_dim]
  bool bf16;
  int head_dim;
  int heads;  // query heads that share this kv head
  int rows;
  const float* const* queries;  // per row: [heads, head_dim]
  const float* const* cos;      // per row: [head_dim / 2]
  const float* const* sin;
  const float* const* sink_cos;
  const float* const* sink_sin;
  float* const* outputs;   // per row: [heads, head_dim]
  const Visible* visible;  // per row
  Visible all;             // the union over the rows; its ranges contain theirs
  float scale;
  float softcap;
};

struct KvRow {
  const float* key;    // [head_dim], not rotated
  const float* value;  // [head_dim]
  const float* cos;    // [head_dim / 2]
  const float* sin;
};

struct Ops {
  const char* name;
  void (*quantize_row)(const float* x, int groups, std::int8_t* values, float* scales, float* sums);
  // Rows [first_row, last_row) times tiles [first_tile, last_tile).
  void (*product)(const Product& call, int first_tile, int last_tile, int first_row, int last_row);
  void (*rms_norm_row)(const float* x, const float* weight, float eps, int columns, float* y);
  void (*gated_row)(const float* gate, const float* up, Activation activation, int columns, float* y);
  void (*store_kv)(const KvRow& row, int head_dim, bool bf16, void* key_slot, void* value_slot);
  void (*attend)(const AttentionBlock& block, float* scratch);
  ChoiceOps choice;
};

// Each range of scores starts on a whole vector.
constexpr int padded(int count) { return (count + 15) / 16 * 16; }
inline std::int64_t score_stride(const AttentionBlock& block) {
  std::int64_t stride = 0;
  for (const SlotRange& range : block.all.ranges) stride += padded(range.count);
  return stride;
}
// Floats of scratch `Ops::attend` needs: queries twice, one part of the slab, a factor per query, scores.
constexpr int kPart = 64;  // slots whose keys or values are laid out in scratch at a time
inline std::int64_t attention_scratch(const AttentionBlock& block) {
  const std::int64_t queries = static_cast<std::int64_t>(block.rows) * block.heads;
  return (2 * queries + kPart) * block.head_dim + padded(static_cast<int>(queries)) + queries * score_stride(block);
}

// The table in use: the best the processor has, unless another was chosen by name.
const Ops& active_ops();
// False when this build or this processor has no such table.
bool select_ops(const char* name);

}  // namespace kakeya
