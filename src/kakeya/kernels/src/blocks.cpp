#include "blocks.h"

#include <cstring>
#include <stdexcept>

namespace kakeya {
namespace {

std::uint16_t half_at(const std::uint8_t* p) { return static_cast<std::uint16_t>(p[0] | p[1] << 8); }

float float_from(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Finite float16 only. Shifting the exponent field into place leaves the value 2^112 too small.
float float_from_half(std::uint16_t half) {
  const float magnitude = float_from((half & 0x7fffu) << 13) * 0x1p112f;
  return half & 0x8000u ? -magnitude : magnitude;
}

void low_and_high_nibbles(const std::uint8_t* packed, int half, std::uint8_t* codes) {
  for (int i = 0; i < half; ++i) {
    codes[i] = packed[i] & 0x0f;
    codes[half + i] = packed[i] >> 4;
  }
}

void fifth_bits(const std::uint8_t* bits, std::uint8_t* codes) {
  std::uint32_t high;
  std::memcpy(&high, bits, sizeof high);
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<std::uint8_t>(codes[i] | (high >> i & 1u) << 4);
}

float scale_of(Format format, const DecodedBlock& block) {
  return format == Format::kMXFP4 ? float_from(power_of_two_bits(block.exponent)) : float_from_half(block.scale_bits);
}

void decode_q2_k(const std::uint8_t* block, DecodedBlock& out) {
  for (int i = 0; i < 16; ++i) {
    out.scales[i] = static_cast<std::int8_t>(block[i] & 0x0f);
    out.minima[i] = block[i] >> 4;
  }
  for (int i = 0; i < kChunk; ++i) out.codes[i] = block[16 + 32 * (i / 128) + i % 32] >> 2 * (i / 32 % 4) & 3;
  out.scale_bits = half_at(block + 80);
  out.minimum_bits = half_at(block + 82);
}

void decode_q3_k(const std::uint8_t* block, DecodedBlock& out) {
  const std::uint8_t *high = block, *low = block + 32, *scales = block + 96;
  for (int i = 0; i < kChunk; ++i) {
    const int two = low[32 * (i / 128) + i % 32] >> 2 * (i / 32 % 4) & 3, third = high[i % 32] >> i / 32 & 1;
    out.codes[i] = static_cast<std::uint8_t>(two | third << 2);
  }
  for (int i = 0; i < 16; ++i) {
    const int four = i < 8 ? scales[i] & 0x0f : scales[i - 8] >> 4, two = scales[8 + i % 4] >> 2 * (i / 4) & 3;
    out.scales[i] = static_cast<std::int8_t>((four | two << 4) - 32);
  }
  out.scale_bits = half_at(block + 108);
}

// Eight scales and eight minima of six bits in twelve bytes, as Q4_K and Q5_K have them.
void six_bit_factors(const std::uint8_t* packed, DecodedBlock& out) {
  for (int i = 0; i < 4; ++i) {
    out.scales[i] = static_cast<std::int8_t>(packed[i] & 63);
    out.minima[i] = packed[i + 4] & 63;
    out.scales[i + 4] = static_cast<std::int8_t>((packed[i + 8] & 0x0f) | packed[i] >> 6 << 4);
    out.minima[i + 4] = static_cast<std::uint8_t>(packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
  }
}

void decode_q4_k(const std::uint8_t* block, DecodedBlock& out) {
  out.scale_bits = half_at(block);
  out.minimum_bits = half_at(block + 2);
  six_bit_factors(block + 4, out);
  for (int i = 0; i < 4; ++i) low_and_high_nibbles(block + 16 + 32 * i, 32, out.codes + 64 * i);
}

void decode_q5_k(const std::uint8_t* block, DecodedBlock& out) {
  out.scale_bits = half_at(block);
  out.minimum_bits = half_at(block + 2);
  six_bit_factors(block + 4, out);
  const std::uint8_t *high = block + 16, *low = block + 48;
  for (int i = 0; i < 4; ++i) low_and_high_nibbles(low + 32 * i, 32, out.codes + 64 * i);
  for (int i = 0; i < kChunk; ++i) {
    out.codes[i] = static_cast<std::uint8_t>(out.codes[i] | (high[i % 32] >> i / 32 & 1) << 4);
  }
}

void decode_q6_k(const std::uint8_t* block, DecodedBlock& out) {
  const std::uint8_t *low = block, *high = block + 128;
  for (int half = 0; half < 2; ++half) {
    low_and_high_nibbles(low + 64 * half, 64, out.codes + 128 * half);
  }
  for (int i = 0; i < kChunk; ++i) {
    const int two = high[32 * (i / 128) + i % 32] >> 2 * (i / 32 % 4) & 3;
    out.codes[i] = static_cast<std::uint8_t>(out.codes[i] | two << 4);
  }
  std::memcpy(out.scales, block + 192, 16);
  out.scale_bits = half_at(block + 208);
}

void decode_iq4_xs(const std::uint8_t* block, DecodedBlock& out) {
  out.scale_bits = half_at(block);
  const int high = half_at(block + 2);
  for (int i = 0; i < kUnits; ++i) {
    const int four = block[4 + i / 2] >> 4 * (i % 2) & 0x0f, two = high >> 2 * i & 3;
    out.scales[i] = static_cast<std::int8_t>((four | two << 4) - 32);
    low_and_high_nibbles(block + 8 + 16 * i, 16, out.codes + 32 * i);
  }
}

float weight_of(Format format, std::uint8_t code) {
  switch (format) {
    case Format::kQ8_0: return static_cast<std::int8_t>(code);
    case Format::kIQ4_NL:
    case Format::kIQ4_XS: return static_cast<std::int8_t>(kIQ4Values[code]);
    case Format::kMXFP4: return static_cast<float>(kMXFP4Values[code] - layout_of(format).zero);
    default: return static_cast<float>(code - layout_of(format).zero);
  }
}

}  // namespace

int block_columns(Format format) { return tile_columns(format); }

int block_bytes(Format format) {
  switch (format) {
    case Format::kAffine4: return 20;
    case Format::kQ4_0: return 18;
    case Format::kQ5_0: return 22;
    case Format::kQ5_1: return 24;
    case Format::kQ8_0: return 34;
    case Format::kIQ4_NL: return 18;
    case Format::kMXFP4: return 17;
    case Format::kQ2_K: return 84;
    case Format::kQ3_K: return 110;
    case Format::kQ4_K: return 144;
    case Format::kQ5_K: return 176;
    case Format::kQ6_K: return 210;
    case Format::kIQ4_XS: return 136;
    case Format::kAffine8: break;
  }
  throw std::invalid_argument("no file has blocks of this format");
}

void decode_block(Format format, const std::uint8_t* block, DecodedBlock& out) {
  switch (format) {
    case Format::kAffine4:
      out.scale_bits = half_at(block);
      out.minimum_bits = half_at(block + 2);
      return low_and_high_nibbles(block + 4, 16, out.codes);
    case Format::kQ4_0:
    case Format::kIQ4_NL:
      out.scale_bits = half_at(block);
      return low_and_high_nibbles(block + 2, 16, out.codes);
    case Format::kQ5_0:
      out.scale_bits = half_at(block);
      low_and_high_nibbles(block + 6, 16, out.codes);
      return fifth_bits(block + 2, out.codes);
    case Format::kQ5_1:
      out.scale_bits = half_at(block);
      out.minimum_bits = half_at(block + 2);
      low_and_high_nibbles(block + 8, 16, out.codes);
      return fifth_bits(block + 4, out.codes);
    case Format::kQ8_0:
      out.scale_bits = half_at(block);
      std::memcpy(out.codes, block + 2, kGroup);
      return;
    case Format::kMXFP4:
      out.exponent = block[0];
      return low_and_high_nibbles(block + 1, 16, out.codes);
    case Format::kQ2_K: return decode_q2_k(block, out);
    case Format::kQ3_K: return decode_q3_k(block, out);
    case Format::kQ4_K: return decode_q4_k(block, out);
    case Format::kQ5_K: return decode_q5_k(block, out);
    case Format::kQ6_K: return decode_q6_k(block, out);
    case Format::kIQ4_XS: return decode_iq4_xs(block, out);
    case Format::kAffine8: break;
  }
  throw std::invalid_argument("no file has blocks of this format");
}

bool has_finite_weights(Format format, const DecodedBlock& block) {
  constexpr std::uint16_t kExponent = 0x7c00;  // all set in infinities and NaNs
  constexpr float kLargestMXFP4 = 0x1p124f;    // twelve of which are still a float32
  if (format == Format::kMXFP4) return scale_of(format, block) <= kLargestMXFP4;
  const bool has_minimum = layout_of(format).own_minimum;
  return (block.scale_bits & kExponent) != kExponent && (!has_minimum || (block.minimum_bits & kExponent) != kExponent);
}

void dequantize_block(Format format, const DecodedBlock& block, float* weights) {
  const Layout layout = layout_of(format);
  const float scale = scale_of(format, block);
  const float minimum = layout.own_minimum ? float_from_half(block.minimum_bits) : 0.0f;
  for (int i = 0; i < block_columns(format); ++i) {
    const float code = weight_of(format, block.codes[i]);
    if (!layout.super) {
      weights[i] = layout.own_minimum ? scale * code + minimum : scale * code;
      continue;
    }
    const int group = i / layout.group;
    const float scaled = scale * static_cast<float>(block.scales[group]) * code;
    weights[i] = layout.own_minimum ? scaled - minimum * static_cast<float>(block.minima[group]) : scaled;
  }
}

}  // namespace kakeya
