// Norms and gated activations, row by row.
#include <algorithm>

#include "operations.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

constexpr std::int64_t kElementsPerTask = 8 * 1024;
constexpr std::int64_t kElementCost = 8;  // in multiplications

template <class Row>
void each_row(std::int64_t rows, std::int64_t columns, const Row& row) {
  const std::int64_t per_task = std::max<std::int64_t>(1, kElementsPerTask / std::max<std::int64_t>(1, columns));
  const int tasks = static_cast<int>((rows + per_task - 1) / per_task);
  ThreadPool::shared().run(tasks, rows * columns * kElementCost, [&](int task) {
    const std::int64_t last = std::min(rows, (task + 1) * per_task);
    for (std::int64_t r = task * per_task; r < last; ++r) row(r);
  });
}

}  // namespace

void rms_norm(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t columns, const float* weight,
              float eps, float* y) {
  const Ops& ops = active_ops();
  each_row(rows, columns, [&](std::int64_t r) {
    ops.rms_norm_row(x + r * x_stride, weight, eps, static_cast<int>(columns), y + r * columns);
  });
}

void gated(const float* gate_up, std::int64_t rows, std::int64_t columns, Activation activation, float* y) {
  const Ops& ops = active_ops();
  each_row(rows, columns, [&](std::int64_t r) {
    const float* gate = gate_up + 2 * r * columns;
    ops.gated_row(gate, gate + columns, activation, static_cast<int>(columns), y + r * columns);
  });
}

}  // namespace kakeya
