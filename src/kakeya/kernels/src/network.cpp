#include "network.h"

#include <algorithm>

#include "scratch.h"

namespace kakeya {
namespace {

// Rows between the operations of a layer, kept from step to step.
struct Buffers {
  Scratch normed_memory, qkv_memory, attended_memory, gate_up_memory, gated_memory, block_memory;
  float *normed, *qkv, *attended, *gate_up, *gated, *block;

  void reserve(const NetworkShape& shape, std::int64_t rows) {
    const std::int64_t query = static_cast<std::int64_t>(shape.heads) * shape.head_dim;
    const std::int64_t kv = static_cast<std::int64_t>(shape.kv_heads) * shape.head_dim;
    normed = normed_memory.array<float>(rows * shape.hidden);
    qkv = qkv_memory.array<float>(rows * (query + 2 * kv));
    attended = attended_memory.array<float>(rows * query);
    gate_up = gate_up_memory.array<float>(rows * 2 * shape.inner);
    gated = gated_memory.array<float>(rows * shape.inner);
    block = block_memory.array<float>(rows * shape.hidden);
  }
};

class Step {
 public:
  Step(const Network& network, Attention attention, std::int64_t rows, float* hidden, Buffers& buffers)
      : shape_(network.shape), attention_(attention), rows_(rows), hidden_(hidden), buffers_(buffers) {
    const std::int64_t query = static_cast<std::int64_t>(shape_.heads) * shape_.head_dim;
    const std::int64_t kv = static_cast<std::int64_t>(shape_.kv_heads) * shape_.head_dim;
    qkv_width_ = query + 2 * kv;
    attention_.queries = {buffers_.qkv, qkv_width_};
    attention_.keys = {buffers_.qkv + query, qkv_width_};
    attention_.values = {buffers_.qkv + query + kv, qkv_width_};
    attention_.output = buffers_.attended;
  }

  void run(const NetworkLayer& layer, std::int64_t index, const RotaryTables& tables) {
    multiply(layer.qkv, normed(layer.input_norm), shape_.hidden, nullptr, buffers_.qkv);
    norm_heads(layer.query_norm, attention_.queries, shape_.heads);
    norm_heads(layer.key_norm, attention_.keys, shape_.kv_heads);
    attend_layer(layer, index, tables);
    const std::int64_t query = static_cast<std::int64_t>(shape_.heads) * shape_.head_dim;
    add_block(layer.output, buffers_.attended, query, layer.post_attention_norm);
    multiply(layer.gate_up, normed(layer.mlp_norm), shape_.hidden, nullptr, buffers_.gate_up);
    gated(buffers_.gate_up, rows_, shape_.inner, shape_.activation, buffers_.gated);
    add_block(layer.down, buffers_.gated, shape_.inner, layer.post_mlp_norm);
  }

 private:
  const float* normed(const float* weight) {
    if (weight == nullptr) return hidden_;
    rms_norm(hidden_, shape_.hidden, rows_, shape_.hidden, weight, shape_.eps, buffers_.normed);
    return buffers_.normed;
  }

  void multiply(const Projection& by, const float* x, std::int64_t columns, const float* residual, float* y) {
    linear(by.matrix, x, columns, rows_, by.bias, residual, y);
  }

  // In place: a row of a norm is read before it is written.
  void norm_heads(const float* weight, const Heads& heads, int count) {
    if (weight == nullptr) return;
    const std::int64_t width = shape_.norms_span_heads ? static_cast<std::int64_t>(count) * shape_.head_dim
                                                       : shape_.head_dim;
    float* first = const_cast<float*>(heads.rows);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t norms = count * shape_.head_dim / width;
      rms_norm(first + row * heads.stride, width, norms, width, weight, shape_.eps, first + row * heads.stride);
    }
  }

  void attend_layer(const NetworkLayer& layer, std::int64_t index, const RotaryTables& tables) {
    attention_.cos = tables[0];
    attention_.sin = tables[1];
    attention_.sink_cos = tables[2];
    attention_.sink_sin = tables[3];
    attention_.layer = index;
    attention_.local_window = layer.local_window;
    attend(attention_);
  }

  // hidden += x * matrix^T + bias, normed first where there is a norm for it.
  void add_block(const Projection& by, const float* x, std::int64_t columns, const float* norm) {
    if (norm == nullptr) return multiply(by, x, columns, hidden_, hidden_);
    multiply(by, x, columns, nullptr, buffers_.block);
    rms_norm(buffers_.block, shape_.hidden, rows_, shape_.hidden, norm, shape_.eps, buffers_.block);
    for (std::int64_t i = 0; i < rows_ * shape_.hidden; ++i) hidden_[i] = buffers_.block[i] + hidden_[i];
  }

  const NetworkShape& shape_;
  Attention attention_;
  std::int64_t rows_, qkv_width_;
  float* hidden_;
  Buffers& buffers_;
};

}  // namespace

void run_network(const Network& network, Attention attention, std::int64_t first,
                 const std::vector<RotaryTables>& tables, std::int64_t rows, float* hidden) {
  static thread_local Buffers buffers;
  buffers.reserve(network.shape, rows);
  attention.row_count = rows;
  Step step(network, attention, rows, hidden, buffers);
  std::int64_t index = first;
  for (const RotaryTables& table : tables) {
    step.run(network.layers[static_cast<std::size_t>(index)], index, table);
    ++index;
  }
}

}  // namespace kakeya
