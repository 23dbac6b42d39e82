// Packing weights and multiplying by them.
#include <algorithm>
#include <cstring>

#include "operations.h"
#include "scratch.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

constexpr std::int64_t kRowsPerTask = 128;             // their quantized values stay in the second-level cache
constexpr std::int64_t kTasksPerThread = 4;            // evens out threads that are disturbed
constexpr std::int64_t kQuantizedPerTask = 16 * 1024;  // elements
constexpr std::int64_t kQuantizeCost = 8;              // one element, in multiplications

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct QuantizedBuffer {
  Scratch values, scales, sums;
  QuantizedRows reserve(std::int64_t rows, std::int64_t groups) {
    return {values.array<std::int8_t>(rows * groups * kGroup), scales.array<float>(rows * groups),
            sums.array<float>(rows * groups)};
  }
};

void quantize(const float* x, std::int64_t stride, std::int64_t rows, std::int64_t groups, const QuantizedRows& out) {
  const Ops& ops = active_ops();
  const auto one_row = [&](std::int64_t row) {
    ops.quantize_row(x + row * stride, static_cast<int>(groups), out.values + row * groups * kGroup,
                     out.scales + row * groups, out.sums + row * groups);
  };
  const std::int64_t rows_per_task = std::max<std::int64_t>(1, kQuantizedPerTask / (groups * kGroup));
  const int tasks = static_cast<int>(divide_up(rows, rows_per_task));
  ThreadPool::shared().run(tasks, rows * groups * kGroup * kQuantizeCost, [&](int task) {
    const std::int64_t last = std::min(rows, (task + 1) * rows_per_task);
    for (std::int64_t row = task * rows_per_task; row < last; ++row) one_row(row);
  });
}

void multiply(const Product& call, std::int64_t rows) {
  const Ops& ops = active_ops();
  ThreadPool& pool = ThreadPool::shared();
  const std::int64_t tiles = divide_up(call.outputs, kTileRows);
  const std::int64_t tiles_per_task = divide_up(tiles, kTasksPerThread * pool.size());
  const std::int64_t tasks_across = divide_up(tiles, tiles_per_task);
  const std::int64_t tasks_down = divide_up(rows, kRowsPerTask);
  const std::int64_t work = rows * call.outputs * call.groups * kGroup;
  pool.run(static_cast<int>(tasks_across * tasks_down), work, [&](int task) {
    const std::int64_t tile = task % tasks_across * tiles_per_task;
    const std::int64_t row = task / tasks_across * kRowsPerTask;
    ops.product(call, static_cast<int>(tile), static_cast<int>(std::min(tiles, tile + tiles_per_task)),
                static_cast<int>(row), static_cast<int>(std::min(rows, row + kRowsPerTask)));
  });
}

// One row of one tile: 32 weights to byte 4 * row + j of each line.
void pack_row(const std::uint8_t* q, int bits, int row, std::uint8_t* lines) {
  for (int column = 0; column < kGroup; ++column) {
    const int line = column / 4, at = 4 * row + column % 4;
    if (bits == 8) {
      lines[64 * line + at] = q[column];
    } else if (line < 4) {
      lines[64 * line + at] = static_cast<std::uint8_t>(lines[64 * line + at] | (q[column] & 0x0f));
    } else {
      lines[64 * (line - 4) + at] = static_cast<std::uint8_t>(lines[64 * (line - 4) + at] | q[column] << 4);
    }
  }
}

}  // namespace

std::int64_t packed_bytes(int bits, std::int64_t outputs, std::int64_t columns) {
  return divide_up(outputs, kTileRows) * (columns / kGroup) * tile_bytes(bits);
}

void pack(const Matrix& shape, const std::uint8_t* q, const std::uint16_t* scales, const std::uint16_t* minima,
          std::uint8_t* tiles) {
  const std::int64_t groups = shape.columns / kGroup, bytes = tile_bytes(shape.bits);
  std::memset(tiles, 0, static_cast<std::size_t>(packed_bytes(shape.bits, shape.outputs, shape.columns)));
  const int tile_count = static_cast<int>(divide_up(shape.outputs, kTileRows));
  ThreadPool::shared().run(tile_count, shape.outputs * shape.columns, [&](int tile) {
    const std::int64_t first = static_cast<std::int64_t>(tile) * kTileRows;
    const int rows = static_cast<int>(std::min<std::int64_t>(kTileRows, shape.outputs - first));
    for (std::int64_t g = 0; g < groups; ++g) {
      std::uint8_t* out = tiles + (tile * groups + g) * bytes;
      for (int row = 0; row < rows; ++row) {
        const std::int64_t at = (first + row) * groups + g;
        std::memcpy(out + 2 * row, scales + at, 2);
        std::memcpy(out + 2 * (kTileRows + row), minima + at, 2);
        pack_row(q + at * kGroup, shape.bits, row, out + kTileHeaderBytes);
      }
    }
  });
}

void linear(const Matrix& matrix, const float* x, std::int64_t x_stride, std::int64_t rows, const float* bias,
            const float* residual, float* y) {
  static thread_local QuantizedBuffer buffer;
  const std::int64_t groups = matrix.columns / kGroup;
  const QuantizedRows quantized = buffer.reserve(rows, groups);
  quantize(x, x_stride, rows, groups, quantized);
  multiply({matrix.tiles, matrix.bits, static_cast<int>(groups), matrix.outputs, quantized, bias, residual, y}, rows);
}

}  // namespace kakeya
