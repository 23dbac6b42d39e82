// All layers of a decoder in one call: what Python would call one by one, with the same bits.
#pragma once

#include <array>
#include <vector>

#include "operations.h"

namespace kakeya {

struct Projection {
  Matrix matrix;
  const float* bias;  // [outputs] or null
};

// Norm weights are null where a family has no such norm. Those of queries and keys cover one head, or all of a row.
struct NetworkLayer {
  const float* input_norm;
  Projection qkv;
  const float *query_norm, *key_norm;
  Projection output;
  const float* post_attention_norm;
  const float* mlp_norm;
  Projection gate_up, down;
  const float* post_mlp_norm;
  std::int64_t local_window;  // 0: none
};

struct NetworkShape {
  std::int64_t hidden, inner;
  int heads, kv_heads, head_dim;
  bool norms_span_heads;  // those of queries and keys
  float eps;
  Activation activation;
};

struct Network {
  NetworkShape shape;
  std::vector<NetworkLayer> layers;
};

// The rows' cos, sin, and cos, sin towards the sinks, [rows, head_dim / 2] each.
using RotaryTables = std::array<const float*, 4>;

// The layers from `first` on, one for each entry of `tables`: hidden [rows, shape.hidden], in place. `attention` says
// everything but the layer, its queries, keys, values and result.
void run_network(const Network& network, Attention attention, std::int64_t first,
                 const std::vector<RotaryTables>& tables, std::int64_t rows, float* hidden);

}  // namespace kakeya
