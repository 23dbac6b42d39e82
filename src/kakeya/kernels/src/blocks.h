// Quantized blocks as model files hold them, one row after another.
#pragma once

#include <cstdint>

#include "formats.h"

namespace kakeya {

// One block taken apart: 32 columns, or 256 of a super-block.
struct DecodedBlock {
  std::uint8_t codes[kChunk];
  std::int8_t scales[16];      // of a super-block's groups
  std::uint8_t minima[16];     // likewise
  std::uint16_t scale_bits;    // float16
  std::uint16_t minimum_bits;  // float16
  std::uint8_t exponent;       // MXFP4's scale
};

// Columns and bytes of one block in a file. There are no files of our affine formats but Q4_1's, read as kAffine4.
int block_columns(Format format);
int block_bytes(Format format);

void decode_block(Format format, const std::uint8_t* block, DecodedBlock& out);

// Looks at the block's floats alone.
bool has_finite_weights(Format format, const DecodedBlock& block);

// The block's weights: exactly what its format defines, in float32.
void dequantize_block(Format format, const DecodedBlock& block, float* weights);

}  // namespace kakeya
