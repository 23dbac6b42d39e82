// Multiplying by packed weights.
#include <algorithm>
#include <numeric>

#include "operations.h"
#include "scratch.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

constexpr std::int64_t kTasksPerThread = 4;          // evens out threads that are disturbed
constexpr std::int64_t kRoundedPerTask = 16 * 1024;  // elements
constexpr std::int64_t kRoundingCost = 8;            // one element, in multiplications

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t tiles_of(const MatrixPart& part) { return divide_up(part.outputs, kTileRows); }

using RoundRow = decltype(Ops::round_groups);

RoundedRows rounded(RoundRow round_row, const float* x, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                    Scratch& memory) {
  RoundedBlock* blocks = memory.array<RoundedBlock>(rows * divide_up(columns, kChunk));
  const std::int64_t rows_per_task = std::max<std::int64_t>(1, kRoundedPerTask / columns);
  const int tasks = static_cast<int>(divide_up(rows, rows_per_task));
  ThreadPool::shared().run(tasks, rows * columns * kRoundingCost, [&](int task) {
    const std::int64_t last = std::min(rows, (task + 1) * rows_per_task);
    for (std::int64_t row = task * rows_per_task; row < last; ++row) {
      round_row(x + row * stride, static_cast<int>(columns), blocks + row, rows);
    }
  });
  return {blocks, rows, columns};
}

// Activations in the one or two ways that the parts of a matrix read them.
struct Rounded {
  RoundedRows groups = {}, super = {};

  Rounded(const Matrix& matrix, const float* x, std::int64_t stride, std::int64_t rows) {
    static thread_local Scratch group_memory, super_memory;
    const auto any = [&](bool super) {
      return std::any_of(matrix.parts.begin(), matrix.parts.end(),
                         [&](const MatrixPart& part) { return layout_of(part.format).super == super; });
    };
    const Ops& ops = active_ops();
    if (any(false)) groups = rounded(ops.round_groups, x, stride, rows, matrix.columns, group_memory);
    if (any(true)) super = rounded(ops.round_super, x, stride, rows, matrix.columns, super_memory);
  }
};

// Tiles [first, last) of all parts, counted through.
void multiply_tiles(const std::vector<Product>& parts, std::int64_t first, std::int64_t last, std::int64_t first_row,
                    std::int64_t last_row) {
  const Ops& ops = active_ops();
  std::int64_t passed = 0;
  for (const Product& part : parts) {
    const std::int64_t tiles = divide_up(part.outputs, kTileRows);
    const std::int64_t from = std::max<std::int64_t>(0, first - passed), until = std::min(tiles, last - passed);
    if (from < until) {
      ops.product(part, static_cast<int>(from), static_cast<int>(until), static_cast<int>(first_row),
                  static_cast<int>(last_row));
    }
    passed += tiles;
  }
}

}  // namespace

std::int64_t Matrix::outputs() const {
  return std::accumulate(parts.begin(), parts.end(), std::int64_t{0},
                         [](std::int64_t sum, const MatrixPart& part) { return sum + part.outputs; });
}

void linear(const Matrix& matrix, const float* x, std::int64_t x_stride, std::int64_t rows, const float* bias,
            const float* residual, float* y) {
  const Rounded activations(matrix, x, x_stride, rows);
  const std::int64_t outputs = matrix.outputs();
  std::vector<Product> products;
  std::int64_t first = 0, tiles = 0;
  for (const MatrixPart& part : matrix.parts) {
    const RoundedRows& own = layout_of(part.format).super ? activations.super : activations.groups;
    products.push_back({part.tiles, part.format, matrix.columns, part.outputs, own, outputs,
                        bias ? bias + first : nullptr, residual ? residual + first : nullptr, y + first});
    first += part.outputs;
    tiles += tiles_of(part);
  }
  ThreadPool& pool = ThreadPool::shared();
  const std::int64_t tiles_per_task = divide_up(tiles, kTasksPerThread * pool.size());
  const std::int64_t tasks_across = divide_up(tiles, tiles_per_task);
  const std::int64_t tasks_down = divide_up(rows, kRowsPerTask);
  pool.run(static_cast<int>(tasks_across * tasks_down), rows * outputs * matrix.columns, [&](int task) {
    const std::int64_t tile = task % tasks_across * tiles_per_task;
    const std::int64_t row = task / tasks_across * kRowsPerTask;
    multiply_tiles(products, tile, std::min(tiles, tile + tiles_per_task), row, std::min(rows, row + kRowsPerTask));
  });
}

}  // namespace kakeya
