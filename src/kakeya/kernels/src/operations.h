// The operations Python calls: arguments are checked there, work is cut into tasks here.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"

namespace kakeya {

std::int64_t packed_bytes(Format format, std::int64_t outputs, std::int64_t columns);

// q is [outputs, columns], one weight per byte; scales and minima are float16 [outputs, columns / 32].
void pack_codes(Format format, std::int64_t outputs, std::int64_t columns, const std::uint8_t* q,
                const std::uint16_t* scales, const std::uint16_t* minima, std::uint8_t* tiles);

// Blocks as a file holds them, one row after another. False when a weight is not a finite number.
bool pack_blocks(Format format, std::int64_t outputs, std::int64_t columns, const std::uint8_t* blocks,
                 std::uint8_t* tiles);

// y [count, columns]: the rows `ids` of a packed matrix, in float32, exactly as their format defines them.
void dequantize_rows(Format format, std::int64_t columns, const std::uint8_t* tiles, const std::int64_t* ids,
                     std::int64_t count, float* y);

// A matrix in parts of different formats, one below the other.
struct MatrixPart {
  const std::uint8_t* tiles;  // packed
  Format format;
  std::int64_t outputs;
};
struct Matrix {
  std::vector<MatrixPart> parts;
  std::int64_t columns;
  std::int64_t outputs() const;
};

// y [rows, outputs] = residual + x [rows, columns] * matrix^T + bias; bias and residual may be null.
void linear(const Matrix& matrix, const float* x, std::int64_t x_stride, std::int64_t rows, const float* bias,
            const float* residual, float* y);

void rms_norm(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t columns, const float* weight,
              float eps, float* y);

// gate_up is [rows, 2 * columns]: gate first, up second.
void gated(const float* gate_up, std::int64_t rows, std::int64_t columns, Activation activation, float* y);

struct Heads {
  const float* rows;    // row r starts at rows + r * stride: [heads, head_dim]
  std::int64_t stride;
};

struct Segment {
  std::int64_t slab, first_row, rows, start;  // as in the caller's int64 [n, 4] tensor
};

// Rotary, cache write and bounded attention for the rows of several sessions in one layer.
struct Attention {
  Heads queries, keys, values;
  int heads, kv_heads, head_dim;
  const float *cos, *sin, *sink_cos, *sink_sin;  // [rows, head_dim / 2]
  void* pool;  // [slabs, layers, 2, kv_heads, slots, head_dim]
  bool bf16;
  std::int64_t slabs, layers, slots, layer;
  const Segment* segments;
  const std::int64_t* sinks;  // one per segment
  std::int64_t segment_count, row_count;
  std::int64_t capacity;
  float scale, softcap;
  std::int64_t local_window;  // 0: none
  float* output;              // [row_count, heads * head_dim]
};

// Throws std::invalid_argument before anything is written when a segment does not fit.
void attend(const Attention& call);

}  // namespace kakeya
