// Checks the kernels of one instruction set without Python: for machines that only an emulator stands for.
//
//   instruction_sets NAME             exits with 0 when every operation gives what it should
//   instruction_sets NAME THREADS...  also shows how fast products are with so many threads
//
// Products are compared with sums in double over what the formats define, and bit by bit between one row and many;
// norms, gates, attention and the choice of tokens with the kernels for any processor.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "blocks.h"
#include "choice.h"
#include "operations.h"
#include "thread_pool.h"

using namespace kakeya;

namespace {

constexpr const char* kNames[kFormats] = {"Q4_1", "AFFINE8", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL",
                                          "MXFP4", "Q2_K",   "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"};

std::mt19937 random_bits(7);
int failures = 0;

void expect(bool right, const char* what, const char* name) {
  if (right) return;
  std::printf("wrong: %s of %s\n", what, name);
  ++failures;
}

std::vector<float> normal(std::size_t count) {
  std::normal_distribution<float> draw;
  std::vector<float> x(count);
  for (float& each : x) each = draw(random_bits);
  return x;
}

// Where the float16 numbers of a block are.
std::vector<int> halves_of(Format format) {
  switch (format) {
    case Format::kMXFP4: return {};
    case Format::kQ2_K: return {80, 82};
    case Format::kQ3_K: return {108};
    case Format::kQ6_K: return {208};
    default: return layout_of(format).own_minimum ? std::vector<int>{0, 2} : std::vector<int>{0};
  }
}

std::vector<std::uint8_t> random_blocks(Format format, std::int64_t rows, std::int64_t columns) {
  const std::int64_t bytes = block_bytes(format), blocks = rows * (columns / block_columns(format));
  std::vector<std::uint8_t> raw(static_cast<std::size_t>(blocks * bytes));
  for (std::uint8_t& byte : raw) byte = static_cast<std::uint8_t>(random_bits());
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::uint8_t* at = raw.data() + block * bytes;
    if (format == Format::kMXFP4) at[0] = static_cast<std::uint8_t>(116 + random_bits() % 8);
    for (int offset : halves_of(format)) at[offset + 1] = static_cast<std::uint8_t>(0x20 + random_bits() % 8);
  }
  return raw;
}

struct Case {
  Format format;
  std::int64_t outputs, columns;
  std::vector<std::uint8_t> raw, tiles;

  Case(Format format, std::int64_t outputs, std::int64_t columns)
      : format(format), outputs(outputs), columns(columns), raw(random_blocks(format, outputs, columns)) {
    tiles.resize(static_cast<std::size_t>(packed_bytes(format, outputs, columns)));
    if (!pack_blocks(format, outputs, columns, raw.data(), tiles.data())) ++failures;
  }
  std::vector<float> times(const std::vector<float>& x, std::int64_t rows) const {
    std::vector<float> y(static_cast<std::size_t>(rows * outputs));
    linear({{{tiles.data(), format, outputs}}, columns}, x.data(), columns, rows, nullptr, nullptr, y.data());
    return y;
  }
  std::vector<float> weights() const {
    std::vector<float> w(static_cast<std::size_t>(outputs * columns));
    for (std::size_t block = 0; block * static_cast<std::size_t>(block_columns(format)) < w.size(); ++block) {
      DecodedBlock decoded;
      decode_block(format, raw.data() + block * static_cast<std::size_t>(block_bytes(format)), decoded);
      dequantize_block(format, decoded, w.data() + block * static_cast<std::size_t>(block_columns(format)));
    }
    return w;
  }
};

std::vector<double> rounded(const std::vector<float>& x, std::size_t group) {
  std::vector<double> values;
  for (std::size_t first = 0; first < x.size(); first += group) {
    float most = 0.0f;
    for (std::size_t i = 0; i < group; ++i) most = std::fmax(most, std::fabs(x[first + i]));
    for (std::size_t i = 0; i < group; ++i) {
      values.push_back(std::nearbyint(x[first + i] * (127.0f / most)) * static_cast<double>(most / 127.0f));
    }
  }
  return values;
}

void check_products(Format format, const char* name) {
  const Case it(format, 37, 512);
  constexpr std::int64_t kRows = 21;
  const std::vector<float> x = normal(kRows * 512), w = it.weights(), y = it.times(x, kRows);
  const std::vector<double> values = rounded(x, static_cast<std::size_t>(tile_columns(format)));
  double worst = 0.0, most = 0.0;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t out = 0; out < it.outputs; ++out) {
      double sum = 0.0;
      for (std::int64_t c = 0; c < 512; ++c) {
        sum += values[row * 512 + c] * static_cast<double>(w[out * 512 + c]);
      }
      worst = std::fmax(worst, std::fabs(sum - y[row * it.outputs + out]));
      most = std::fmax(most, std::fabs(sum));
    }
  }
  expect(worst <= 1e-5 * most, "product", name);
  for (std::int64_t rows : {1, 2, 3, 5, 8, 12}) {
    const std::vector<float> some = it.times(std::vector<float>(x.begin() + 4 * 512, x.end()), rows);
    expect(std::memcmp(some.data(), y.data() + 4 * it.outputs, some.size() * 4) == 0, "rows alone", name);
  }
}

bool close(const std::vector<float>& a, const std::vector<float>& b) {
  float worst = 0.0f, most = 0.0f;
  for (std::size_t i = 0; i < a.size(); ++i) {
    worst = std::fmax(worst, std::fabs(a[i] - b[i]));
    most = std::fmax(most, std::fabs(b[i]));
  }
  return worst <= 2e-5f * most;
}

std::vector<float> rowwise() {
  std::mt19937 kept = random_bits;
  const std::vector<float> x = normal(3 * 200), weight = normal(100);
  random_bits = kept;
  std::vector<float> y(3 * 100 + 2 * 3 * 100);
  rms_norm(x.data(), 200, 3, 100, weight.data(), 1e-5f, y.data());
  gated(x.data(), 3, 100, Activation::kSilu, y.data() + 300);
  gated(x.data(), 3, 100, Activation::kGeluTanh, y.data() + 600);
  return y;
}

std::vector<float> attended(bool bf16) {
  constexpr int kRows = 40, kHeads = 4, kDim = 48, kSlots = 32;
  std::mt19937 kept = random_bits;
  const std::vector<float> q = normal(kRows * kHeads * kDim), k = normal(kRows * 2 * kDim), v = normal(kRows * 2 * kDim);
  const std::vector<float> cos = normal(kRows * kDim / 2), sin = normal(kRows * kDim / 2);
  random_bits = kept;
  std::vector<float> pool(2 * 2 * kSlots * kDim), y(kRows * kHeads * kDim);
  const Segment segment = {0, 0, kRows, 0};
  const std::int64_t sinks = 4;
  attend({{q.data(), kHeads * kDim}, {k.data(), 2 * kDim}, {v.data(), 2 * kDim}, kHeads, 2, kDim, cos.data(),
          sin.data(), cos.data(), sin.data(), pool.data(), bf16, 1, 1, kSlots, 0, &segment, &sinks, 1, kRows, 28, 0.2f,
          5.0f, 0, y.data()});
  return y;
}

void check_others(const char* name) {
  const std::vector<float> rows = rowwise(), wide = attended(false), narrow = attended(true);
  select_ops("generic");
  expect(close(rows, rowwise()), "norms and gates", name);
  expect(close(wide, attended(false)), "attention", name);
  expect(close(narrow, attended(true)), "attention over bf16", name);
  select_ops(name);
}

// Rows of logits, and for each a way to choose from it.
struct Choosing {
  std::int64_t vocab;
  std::vector<float> logits;
  std::vector<ChoiceRequest> requests;
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> recent;

  explicit Choosing(std::int64_t vocab) : vocab(vocab), mask(static_cast<std::size_t>(vocab + 7) / 8) {
    std::uniform_real_distribution<double> draw;
    for (std::uint8_t& byte : mask) byte = static_cast<std::uint8_t>(random_bits() | 1u);
    for (int i = 0; i < 20; ++i) recent.push_back(static_cast<std::int32_t>(random_bits() % vocab));
    for (int row = 0; row < 48; ++row) {
      for (float x : normal(static_cast<std::size_t>(vocab))) logits.push_back(3.0f * x);
      ChoiceRequest request;
      request.temperature = row % 4 ? 0.3 + draw(random_bits) : 0.0;
      request.top_k = row % 3 == 1 ? 1 + random_bits() % 50 : 0;
      request.top_p = row % 5 < 3 ? 0.5 + 0.5 * draw(random_bits) : 1.0;
      request.least_score = row % 7 == 2 ? -4.0 : -INFINITY;
      request.number = draw(random_bits);
      request.top_logprobs = row % 6 == 5 ? 4 : -1;
      if (row % 2) {
        request.repetition = 1.3;
        request.frequency = 0.2;
        request.recent = recent.data();
        request.recent_count = static_cast<std::int64_t>(recent.size());
      }
      if (row % 8 == 6) {
        request.mask = mask.data();
        request.mask_bytes = static_cast<std::int64_t>(mask.size());
      }
      requests.push_back(request);
    }
  }
  std::vector<Choice> chosen() {
    std::vector<Choice> choices(requests.size());
    choose(logits.data(), vocab, static_cast<std::int64_t>(requests.size()), vocab, requests.data(), choices.data());
    return choices;
  }
};

bool alike(const Choice& a, const Choice& b) {
  if (a.status != b.status || a.token != b.token || a.top.size() != b.top.size()) return false;
  for (std::size_t i = 0; i < a.top.size(); ++i) {
    if (a.top[i].token != b.top[i].token || std::fabs(a.top[i].logprob - b.top[i].logprob) > 1e-12) return false;
  }
  return std::fabs(a.logprob - b.logprob) <= 1e-12;
}

void check_choices(const char* name) {
  for (std::int64_t vocab : {1, 100, 5000, 49152}) {
    Choosing it(vocab);
    const std::vector<Choice> own = it.chosen();
    select_ops("generic");
    const std::vector<Choice> other = it.chosen();
    select_ops(name);
    for (std::size_t row = 0; row < own.size(); ++row) expect(alike(own[row], other[row]), "choice", name);
  }
}

double best_seconds(const Case& it, std::int64_t rows) {
  const std::vector<float> x = normal(static_cast<std::size_t>(rows * it.columns));
  double best = 1e9;
  for (int turn = 0; turn < 12; ++turn) {
    const auto began = std::chrono::steady_clock::now();
    it.times(x, rows);
    best = std::fmin(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return best;
}

void show_speed(const Case& it, const char* name, int threads) {
  ThreadPool::shared().resize(threads);
  const double bytes = static_cast<double>(it.tiles.size()), products = static_cast<double>(it.outputs * it.columns);
  std::printf("%-7s %2d threads, one row %6.1f GB/s; G products/s:", name, threads, bytes / best_seconds(it, 1) / 1e9);
  for (std::int64_t rows : {2, 4, 8, 16, 128}) {
    std::printf("  %lld rows %6.1f", static_cast<long long>(rows),
                static_cast<double>(rows) * products / best_seconds(it, rows) / 1e9);
  }
  std::printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  const char* name = count > 1 ? arguments[1] : "generic";
  if (!select_ops(name)) {
    std::printf("this machine cannot run the kernels for %s\n", name);
    return 2;
  }
  ThreadPool::shared().resize(2);
  for (int index = 0; index < kFormats; ++index) {
    const Format format = static_cast<Format>(index);
    if (format == Format::kAffine8) continue;  // no file has it
    check_products(format, kNames[index]);
    if (count == 2) continue;
    const Case large(format, 16384, 4096);  // more than the caches hold
    for (int i = 2; i < count; ++i) show_speed(large, kNames[index], std::atoi(arguments[i]));
    ThreadPool::shared().resize(2);
  }
  check_others(name);
  check_choices(name);
  std::printf("%s: %d wrong\n", name, failures);
  return failures != 0;
}
