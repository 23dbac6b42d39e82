// What each instruction set implements: single-threaded pieces of the operations.
// The drivers (linear.cpp, rowwise.cpp, attend.cpp) cut the work into these pieces.
#pragma once

#include <cstdint>

#include "choice_ops.h"
#include "formats.h"

namespace kakeya {

constexpr int kMaxHeadDim = 1024;
constexpr int kRowsPerTask = 128;  // of a product: their activations stay in the second-level cache

// 256 columns of one row of activations, rounded to eight bits: x = values * scale. Fields that a format does not
// read are not filled: formats of 32 columns have a scale for each group, super-blocks one for all.
struct alignas(64) RoundedBlock {
  std::int8_t values[kChunk];
  float scales[kUnits];            // super-blocks: the first
  float sums[kUnits];              // scale times the sum of 32 values
  std::int16_t sums_of_32[kUnits];
  std::int16_t sums_of_16[2 * kUnits];
};

// Rows of activations: block b of row r is blocks[b * rows + r].
struct RoundedRows {
  RoundedBlock* blocks;
  std::int64_t rows;
  std::int64_t columns;
};

// Some outputs of a product: a matrix of one format.
struct Product {
  const std::uint8_t* tiles;
  Format format;
  std::int64_t columns;
  std::int64_t outputs;
  RoundedRows x;
  std::int64_t y_stride;
  const float* bias;      // [outputs] or null
  const float* residual;  // [rows, y_stride] from its own first output on, or null
  float* y;               // likewise
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
  // One row in groups of 32, or in super-blocks; its blocks lie `stride` apart.
  void (*round_groups)(const float* x, int columns, RoundedBlock* blocks, std::int64_t stride);
  void (*round_super)(const float* x, int columns, RoundedBlock* blocks, std::int64_t stride);
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
