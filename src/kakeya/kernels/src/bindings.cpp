// The Python module kakeya.kernels._native. Tensors arrive as addresses: the Python door has checked them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "choice.h"
#include "network.h"
#include "operations.h"
#include "thread_pool.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void set_isa(const std::string& name) {
  if (!kakeya::select_ops(name.c_str())) throw std::invalid_argument("this machine cannot run the kernels for " + name);
}

void set_threads(int threads) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1, got " + std::to_string(threads));
  kakeya::ThreadPool::shared().resize(threads);
}

kakeya::Format format_at(int index) {
  if (index < 0 || index >= kakeya::kFormats) throw std::invalid_argument("there is no format " + std::to_string(index));
  return static_cast<kakeya::Format>(index);
}

std::int64_t packed_bytes(int format, std::int64_t outputs, std::int64_t columns) {
  return kakeya::packed_bytes(format_at(format), outputs, columns);
}

void pack_codes(int format, std::int64_t outputs, std::int64_t columns, Address q, Address scales, Address minima,
                Address out) {
  kakeya::pack_codes(format_at(format), outputs, columns, at<std::uint8_t>(q), at<std::uint16_t>(scales),
                     at<std::uint16_t>(minima), at<std::uint8_t>(out));
}

bool pack_blocks(int format, std::int64_t outputs, std::int64_t columns, Address blocks, Address out) {
  return kakeya::pack_blocks(format_at(format), outputs, columns, at<std::uint8_t>(blocks), at<std::uint8_t>(out));
}

void dequantize_rows(int format, std::int64_t columns, Address tiles, Address ids, std::int64_t count, Address y) {
  kakeya::dequantize_rows(format_at(format), columns, at<std::uint8_t>(tiles), at<std::int64_t>(ids), count,
                          at<float>(y));
}

// Parts as (address of the tiles, format, outputs).
kakeya::Matrix matrix(const std::vector<std::tuple<Address, int, std::int64_t>>& parts, std::int64_t columns) {
  kakeya::Matrix made{{}, columns};
  for (const auto& [tiles, format, outputs] : parts) {
    made.parts.push_back({at<std::uint8_t>(tiles), format_at(format), outputs});
  }
  return made;
}

void linear(const kakeya::Matrix& matrix, Address x, std::int64_t x_stride, std::int64_t rows, Address bias,
            Address residual, Address y) {
  kakeya::linear(matrix, at<float>(x), x_stride, rows, at<float>(bias), at<float>(residual), at<float>(y));
}

// Letting go of the interpreter costs more than a few rows: another thread may keep it for milliseconds.
constexpr std::int64_t kElementsWorthReleasing = 64 * 1024;

class ReleaseForLarge {
 public:
  explicit ReleaseForLarge(std::int64_t elements) {
    if (elements >= kElementsWorthReleasing) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

void rms_norm(Address x, std::int64_t x_stride, std::int64_t rows, std::int64_t columns, Address weight, float eps,
              Address y) {
  const ReleaseForLarge release(rows * columns);
  kakeya::rms_norm(at<float>(x), x_stride, rows, columns, at<float>(weight), eps, at<float>(y));
}

void gated(Address gate_up, std::int64_t rows, std::int64_t columns, bool gelu, Address y) {
  const ReleaseForLarge release(rows * columns);
  kakeya::gated(at<float>(gate_up), rows, columns, gelu ? kakeya::Activation::kGeluTanh : kakeya::Activation::kSilu,
                at<float>(y));
}

void attend(Address q, std::int64_t q_stride, Address k, std::int64_t k_stride, Address v, std::int64_t v_stride,
            std::int64_t rows, int heads, int kv_heads, int head_dim, Address cos, Address sin, Address sink_cos,
            Address sink_sin, Address pool, bool bf16, std::int64_t slabs, std::int64_t layers, std::int64_t slots,
            std::int64_t layer, Address segments, Address sinks, std::int64_t segment_count, std::int64_t capacity,
            float scale, float softcap, std::int64_t local_window, Address output) {
  kakeya::attend({{at<float>(q), q_stride},
                  {at<float>(k), k_stride},
                  {at<float>(v), v_stride},
                  heads,
                  kv_heads,
                  head_dim,
                  at<float>(cos),
                  at<float>(sin),
                  at<float>(sink_cos),
                  at<float>(sink_sin),
                  at<void>(pool),
                  bf16,
                  slabs,
                  layers,
                  slots,
                  layer,
                  at<kakeya::Segment>(segments),
                  at<std::int64_t>(sinks),
                  segment_count,
                  rows,
                  capacity,
                  scale,
                  softcap,
                  local_window,
                  at<float>(output)});
}

// A request as Python has it: a tuple in the order below. Its buffers stay where they are while it is held.
class HeldRequest {
 public:
  explicit HeldRequest(const py::tuple& fields) {
    request_.temperature = fields[0].cast<double>();
    request_.top_k = fields[1].cast<std::int64_t>();
    request_.top_p = fields[2].cast<double>();
    request_.least_score = fields[3].cast<double>();
    request_.repetition = fields[4].cast<double>();
    request_.presence = fields[5].cast<double>();
    request_.frequency = fields[6].cast<double>();
    request_.number = fields[7].cast<double>();
    request_.recent = hold<std::int32_t>(fields[8], request_.recent_count);
    request_.bias_ids = hold<std::int64_t>(fields[9], request_.bias_count);
    std::int64_t bias_values = 0;
    request_.bias_values = hold<double>(fields[10], bias_values);
    if (bias_values != request_.bias_count) throw std::invalid_argument("as many bias values as ids are needed");
    request_.mask = hold<std::uint8_t>(fields[11], request_.mask_bytes);
    request_.top_logprobs = fields[12].cast<int>();
  }
  const kakeya::ChoiceRequest& request() const { return request_; }

 private:
  template <class T>
  const T* hold(const py::object& values, std::int64_t& count) {
    if (values.is_none()) return nullptr;
    buffers_.push_back(values.cast<py::buffer>().request());
    const py::buffer_info& held = buffers_.back();
    if (held.itemsize != sizeof(T)) throw std::invalid_argument("a buffer has elements of " + held.format);
    count = held.size;
    return static_cast<const T*>(held.ptr);
  }

  kakeya::ChoiceRequest request_;
  std::vector<py::buffer_info> buffers_;
};

py::tuple told(const kakeya::Choice& choice) {
  py::list top;
  for (const kakeya::TokenScore& each : choice.top) top.append(py::make_tuple(each.token, each.logprob));
  return py::make_tuple(static_cast<int>(choice.status), choice.token, choice.best, choice.logprob, top);
}

py::list choose(Address logits, std::int64_t stride, std::int64_t vocab, const std::vector<py::tuple>& requests) {
  std::vector<HeldRequest> held(requests.begin(), requests.end());
  std::vector<kakeya::ChoiceRequest> plain;
  for (const HeldRequest& each : held) plain.push_back(each.request());
  const std::int64_t rows = static_cast<std::int64_t>(requests.size());
  std::vector<kakeya::Choice> choices(requests.size());
  {
    const ReleaseForLarge release(rows * vocab);
    kakeya::choose(at<float>(logits), stride, rows, vocab, plain.data(), choices.data());
  }
  py::list results;
  for (const kakeya::Choice& choice : choices) results.append(told(choice));
  return results;
}

// (matrix, address of the bias)
using ProjectionArguments = std::tuple<const kakeya::Matrix&, Address>;
kakeya::Projection projection(const ProjectionArguments& arguments) {
  return {std::get<0>(arguments), at<float>(std::get<1>(arguments))};
}

kakeya::Network network(std::int64_t hidden, std::int64_t inner, int heads, int kv_heads, int head_dim,
                        bool norms_span_heads, float eps, bool gelu) {
  const auto activation = gelu ? kakeya::Activation::kGeluTanh : kakeya::Activation::kSilu;
  return {{hidden, inner, heads, kv_heads, head_dim, norms_span_heads, eps, activation}, {}};
}

// Norms in the order of a layer: input, queries, keys, after attention, before the MLP, after it.
void add_layer(kakeya::Network& network, const std::array<Address, 6>& norms, const ProjectionArguments& qkv,
               const ProjectionArguments& output, const ProjectionArguments& gate_up, const ProjectionArguments& down,
               std::int64_t local_window) {
  network.layers.push_back({at<float>(norms[0]), projection(qkv), at<float>(norms[1]), at<float>(norms[2]),
                            projection(output), at<float>(norms[3]), at<float>(norms[4]), projection(gate_up),
                            projection(down), at<float>(norms[5]), local_window});
}

void run_network(const kakeya::Network& network, std::int64_t first, const std::vector<std::array<Address, 4>>& tables,
                 Address pool, bool bf16, std::int64_t slabs, std::int64_t layers, std::int64_t slots,
                 Address segments, Address sinks, std::int64_t segment_count, std::int64_t capacity, float scale,
                 float softcap, std::int64_t rows, Address hidden) {
  kakeya::Attention attention = {};
  attention.heads = network.shape.heads;
  attention.kv_heads = network.shape.kv_heads;
  attention.head_dim = network.shape.head_dim;
  attention.pool = at<void>(pool);
  attention.bf16 = bf16;
  attention.slabs = slabs;
  attention.layers = layers;
  attention.slots = slots;
  attention.segments = at<kakeya::Segment>(segments);
  attention.sinks = at<std::int64_t>(sinks);
  attention.segment_count = segment_count;
  attention.capacity = capacity;
  attention.scale = scale;
  attention.softcap = softcap;
  std::vector<kakeya::RotaryTables> rotary;
  for (const auto& four : tables) {
    rotary.push_back({at<float>(four[0]), at<float>(four[1]), at<float>(four[2]), at<float>(four[3])});
  }
  kakeya::run_network(network, attention, first, rotary, rows, at<float>(hidden));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("isa", [] { return std::string(kakeya::active_ops().name); });
  m.def("set_isa", &set_isa);
  m.def("threads", [] { return kakeya::ThreadPool::shared().size(); });
  m.def("set_threads", &set_threads, NoGil());
  m.def("max_head_dim", [] { return kakeya::kMaxHeadDim; });
  py::class_<kakeya::Matrix>(m, "Matrix").def(py::init(&matrix));
  m.def("packed_bytes", &packed_bytes);
  m.def("pack_codes", &pack_codes, NoGil());
  m.def("pack_blocks", &pack_blocks, NoGil());
  m.def("dequantize_rows", &dequantize_rows, NoGil());
  m.def("linear", &linear, NoGil());
  m.def("rms_norm", &rms_norm);
  m.def("gated", &gated);
  m.def("attend", &attend, NoGil());
  py::class_<kakeya::Network>(m, "Network").def(py::init(&network)).def("add_layer", &add_layer);
  m.def("run_network", &run_network, NoGil());
  m.def("uniform", &kakeya::uniform);
  m.def("choose", &choose);
}
