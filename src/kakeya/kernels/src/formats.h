// The weight formats, and how sixteen rows of each lie in memory.
#pragma once

#include <cstdint>

namespace kakeya {

constexpr int kTileRows = 16;  // output rows of one tile, and lanes of one vector
constexpr int kGroup = 32;     // columns of a small block, and what is unpacked at a time: eight lines of four
constexpr int kChunk = 256;    // columns of a super-block
constexpr int kLines = kGroup / 4;
constexpr int kLineBytes = 4 * kTileRows;
constexpr int kUnits = kChunk / kGroup;

// Affine formats come from our own quantization and from Q4_1; the others have the names their files give them.
enum class Format {
  kAffine4,
  kAffine8,
  kQ4_0,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kIQ4_NL,
  kMXFP4,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_XS,
};
constexpr int kFormats = 14;

// A weight is scale * (code - zero) - minimum. Codes are looked up in a table first where there is one.
struct Layout {
  int bits;          // of a stored code
  int group;         // columns that share a scale
  bool super;        // scales are integers times one float16 for 256 columns, and activations share theirs too
  bool own_minimum;  // a minimum beside each scale
  int zero;          // the code that stands for 0
  bool wide;         // eight signed bits: pairs of products need all of 16 bits
  bool table;        // codes are places in a table of sixteen
  int summed;        // lines whose products can be added in 16 bits, AVX2's intermediate sums
};

constexpr Layout layout_of(Format format) {
  switch (format) {
    case Format::kAffine4: return {4, 32, false, true, 0, false, false, 8};
    case Format::kAffine8: return {8, 32, false, true, 0, true, false, 1};
    case Format::kQ4_0: return {4, 32, false, false, 8, false, false, 8};
    case Format::kQ5_0: return {5, 32, false, false, 16, false, false, 4};
    case Format::kQ5_1: return {5, 32, false, true, 0, false, false, 4};
    case Format::kQ8_0: return {8, 32, false, false, 0, true, false, 1};
    case Format::kIQ4_NL: return {4, 32, false, false, 0, true, true, 1};
    case Format::kMXFP4: return {4, 32, false, false, 12, false, true, 4};
    case Format::kQ2_K: return {2, 16, true, true, 0, false, false, 4};
    case Format::kQ3_K: return {3, 16, true, false, 4, false, false, 4};
    case Format::kQ4_K: return {4, 32, true, true, 0, false, false, 8};
    case Format::kQ5_K: return {5, 32, true, true, 0, false, false, 4};
    case Format::kQ6_K: return {6, 16, true, false, 32, false, false, 2};
    case Format::kIQ4_XS: return {4, 32, true, false, 0, true, true, 1};
  }
  return {};
}

// The lines of a unit (16 rows x 32 columns) hold column 4 * c + j of row r in byte 4 * r + j of line c. They are
// stored in bit planes of 64 bytes: of four bits first, line c beside line c + 4; of two, lines c .. c + 3 or
// c + 4 .. c + 7 in one; of one, all eight in one. A code of five bits is a plane of four and one of one, and so on.
constexpr int unit_bytes(Format format) { return kLineBytes * layout_of(format).bits; }

// A tile of a 32-column format: scales, minima where it has its own, one unit.
// Scales are float16; MXFP4's are powers of two, of which there is the exponent.
constexpr int scale_bytes(Format format) { return format == Format::kMXFP4 ? 1 : 2; }
constexpr int small_header_bytes(Format format) {
  return kTileRows * (scale_bytes(format) + (layout_of(format).own_minimum ? 2 : 0));
}

// A tile of a super-block: the float16 for scales, the one for minima where there are any, the scales as bytes
// [pair of groups][row][2], the minima alike, eight units. Q2_K's scales and minima are four bits each, in one byte.
constexpr int factor_bytes(Format format) { return kTileRows * kChunk / layout_of(format).group; }
constexpr bool factors_share_bytes(Format format) { return format == Format::kQ2_K; }
constexpr int super_header_bytes(Format format) {
  const bool minima = layout_of(format).own_minimum;
  return 2 * kTileRows * (minima ? 2 : 1) + factor_bytes(format) * (minima && !factors_share_bytes(format) ? 2 : 1);
}

// Bytes of a tile, and the columns it covers.
constexpr int tile_columns(Format format) { return layout_of(format).super ? kChunk : kGroup; }
constexpr int tile_bytes(Format format) {
  return layout_of(format).super ? super_header_bytes(format) + kUnits * unit_bytes(format)
                                 : small_header_bytes(format) + unit_bytes(format);
}

// MXFP4's scale 2^(e - 128) as the bits of a float32. Its values are kept doubled.
constexpr std::uint32_t power_of_two_bits(std::uint32_t e) { return e < 2 ? 0x00200000u << e : (e - 1u) << 23; }

// What the codes of a table stand for. IQ4's are signed bytes; MXFP4's are twice its numbers plus 12.
constexpr std::uint8_t kIQ4Values[16] = {0x81, 0x98, 0xad, 0xbf, 0xcf, 0xdd, 0xea, 0xf6,
                                         0x01, 0x0d, 0x19, 0x26, 0x35, 0x45, 0x59, 0x71};
constexpr std::uint8_t kMXFP4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace kakeya
