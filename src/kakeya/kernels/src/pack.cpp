// Weights into tiles of sixteen rows, in the order in which the products read them.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "blocks.h"
#include "operations.h"
#include "thread_pool.h"

namespace kakeya {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

using Lines = std::uint8_t[kLines][kLineBytes];

// Lines beside each other in one plane: the first in the lowest bits.
void store_plane(const Lines& lines, int first, int step, int count, int shift, int bits, std::uint8_t* plane) {
  const int mask = (1 << bits) - 1;
  for (int at = 0; at < kLineBytes; ++at) {
    int byte = 0;
    for (int i = 0; i < count; ++i) byte |= (lines[first + i * step][at] >> shift & mask) << bits * i;
    plane[at] = static_cast<std::uint8_t>(byte);
  }
}

// The planes of a unit, as formats.h describes them.
void store_unit(const Lines& lines, int bits, std::uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, lines, sizeof lines);
    return;
  }
  int shift = 0;
  if (bits >= 4) {
    for (int c = 0; c < 4; ++c, out += kLineBytes) store_plane(lines, c, 4, 2, 0, 4, out);
    shift = 4;
  }
  if ((bits - shift) & 2) {
    for (int c = 0; c < kLines; c += 4, out += kLineBytes) store_plane(lines, c, 1, 4, shift, 2, out);
    shift += 2;
  }
  if ((bits - shift) & 1) store_plane(lines, 0, 1, 8, shift, 1, out);
}

// Columns 32 * unit and on of sixteen rows of codes.
void gather_unit(const DecodedBlock* rows, int unit, Lines& lines) {
  for (int row = 0; row < kTileRows; ++row) {
    for (int c = 0; c < kLines; ++c) std::memcpy(&lines[c][4 * row], &rows[row].codes[kGroup * unit + 4 * c], 4);
  }
}

void store_small_header(Format format, const DecodedBlock* rows, std::uint8_t* out) {
  for (int row = 0; row < kTileRows; ++row) {
    if (scale_bytes(format) == 1) {
      out[row] = rows[row].exponent;
    } else {
      std::memcpy(out + 2 * row, &rows[row].scale_bits, 2);
    }
    if (layout_of(format).own_minimum) std::memcpy(out + 2 * (kTileRows + row), &rows[row].minimum_bits, 2);
  }
}

void store_super_header(Format format, const DecodedBlock* rows, std::uint8_t* out) {
  const bool minima = layout_of(format).own_minimum;
  std::uint8_t* factors = out + 2 * kTileRows * (minima ? 2 : 1);
  for (int row = 0; row < kTileRows; ++row) {
    std::memcpy(out + 2 * row, &rows[row].scale_bits, 2);
    if (minima) std::memcpy(out + 2 * (kTileRows + row), &rows[row].minimum_bits, 2);
    for (int group = 0; group < kChunk / layout_of(format).group; ++group) {
      const int at = 2 * kTileRows * (group / 2) + 2 * row + group % 2;
      const auto scale = static_cast<std::uint8_t>(rows[row].scales[group]);
      if (factors_share_bytes(format)) {
        factors[at] = static_cast<std::uint8_t>(scale | rows[row].minima[group] << 4);
      } else {
        factors[at] = scale;
        if (minima) factors[factor_bytes(format) + at] = rows[row].minima[group];
      }
    }
  }
}

void store_tile(Format format, const DecodedBlock* rows, std::uint8_t* out) {
  const bool super = layout_of(format).super;
  if (super) {
    store_super_header(format, rows, out);
  } else {
    store_small_header(format, rows, out);
  }
  out += super ? super_header_bytes(format) : small_header_bytes(format);
  Lines lines;
  for (int unit = 0; unit < (super ? kUnits : 1); ++unit, out += unit_bytes(format)) {
    gather_unit(rows, unit, lines);
    store_unit(lines, layout_of(format).bits, out);
  }
}

// One row of a unit: what `gather_unit` and `store_unit` did, undone.
void load_unit_row(const std::uint8_t* unit, int bits, int row, std::uint8_t* codes) {
  for (int i = 0; i < kGroup; ++i) {
    const int c = i / 4;
    const std::uint8_t* plane = unit + 4 * row + i % 4;
    if (bits == 8) {
      codes[i] = plane[kLineBytes * c];
      continue;
    }
    int code = 0, shift = 0;
    if (bits >= 4) {
      code = plane[kLineBytes * (c % 4)] >> 4 * (c / 4) & 0x0f;
      plane += 4 * kLineBytes;
      shift = 4;
    }
    if ((bits - shift) & 2) {
      code |= (plane[kLineBytes * (c / 4)] >> 2 * (c % 4) & 3) << shift;
      plane += 2 * kLineBytes;
      shift += 2;
    }
    if ((bits - shift) & 1) code |= (plane[0] >> c & 1) << shift;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

void load_small_header(Format format, const std::uint8_t* tile, int row, DecodedBlock& out) {
  if (scale_bytes(format) == 1) {
    out.exponent = tile[row];
  } else {
    std::memcpy(&out.scale_bits, tile + 2 * row, 2);
  }
  if (layout_of(format).own_minimum) std::memcpy(&out.minimum_bits, tile + 2 * (kTileRows + row), 2);
}

void load_super_header(Format format, const std::uint8_t* tile, int row, DecodedBlock& out) {
  const bool minima = layout_of(format).own_minimum;
  const std::uint8_t* factors = tile + 2 * kTileRows * (minima ? 2 : 1);
  std::memcpy(&out.scale_bits, tile + 2 * row, 2);
  if (minima) std::memcpy(&out.minimum_bits, tile + 2 * (kTileRows + row), 2);
  for (int group = 0; group < kChunk / layout_of(format).group; ++group) {
    const int at = 2 * kTileRows * (group / 2) + 2 * row + group % 2;
    if (factors_share_bytes(format)) {
      out.scales[group] = static_cast<std::int8_t>(factors[at] & 0x0f);
      out.minima[group] = factors[at] >> 4;
    } else {
      out.scales[group] = static_cast<std::int8_t>(factors[at]);
      if (minima) out.minima[group] = factors[factor_bytes(format) + at];
    }
  }
}

// One row of a tile as the block it was packed from.
void load_row(Format format, const std::uint8_t* tile, int row, DecodedBlock& out) {
  const bool super = layout_of(format).super;
  if (super) {
    load_super_header(format, tile, row, out);
  } else {
    load_small_header(format, tile, row, out);
  }
  tile += super ? super_header_bytes(format) : small_header_bytes(format);
  for (int unit = 0; unit < (super ? kUnits : 1); ++unit, tile += unit_bytes(format)) {
    load_unit_row(tile, layout_of(format).bits, row, out.codes + kGroup * unit);
  }
}

// Calls read(row, tile column, block) for the rows of every tile, then stores it. Rows beyond the last are zero.
template <class Read>
void pack_tiles(Format format, std::int64_t outputs, std::int64_t columns, std::uint8_t* tiles, const Read& read) {
  const std::int64_t across = columns / tile_columns(format), bytes = tile_bytes(format);
  const int tile_count = static_cast<int>(divide_up(outputs, kTileRows));
  ThreadPool::shared().run(tile_count, outputs * columns, [&](int tile) {
    const std::int64_t first = static_cast<std::int64_t>(tile) * kTileRows;
    const int rows = static_cast<int>(std::min<std::int64_t>(kTileRows, outputs - first));
    DecodedBlock blocks[kTileRows] = {};
    for (std::int64_t at = 0; at < across; ++at) {
      for (int row = 0; row < rows; ++row) read(first + row, at, blocks[row]);
      store_tile(format, blocks, tiles + (tile * across + at) * bytes);
    }
  });
}

}  // namespace

std::int64_t packed_bytes(Format format, std::int64_t outputs, std::int64_t columns) {
  return divide_up(outputs, kTileRows) * (columns / tile_columns(format)) * tile_bytes(format);
}

void pack_codes(Format format, std::int64_t outputs, std::int64_t columns, const std::uint8_t* q,
                const std::uint16_t* scales, const std::uint16_t* minima, std::uint8_t* tiles) {
  const std::int64_t groups = columns / kGroup;
  pack_tiles(format, outputs, columns, tiles, [&](std::int64_t row, std::int64_t group, DecodedBlock& block) {
    const std::int64_t at = row * groups + group;
    std::memcpy(block.codes, q + at * kGroup, kGroup);
    block.scale_bits = scales[at];
    block.minimum_bits = minima[at];
  });
}

bool pack_blocks(Format format, std::int64_t outputs, std::int64_t columns, const std::uint8_t* blocks,
                 std::uint8_t* tiles) {
  const std::int64_t bytes = block_bytes(format), row_bytes = columns / block_columns(format) * bytes;
  std::atomic<bool> all_finite{true};
  pack_tiles(format, outputs, columns, tiles, [&](std::int64_t row, std::int64_t at, DecodedBlock& block) {
    decode_block(format, blocks + row * row_bytes + at * bytes, block);
    if (!has_finite_weights(format, block)) all_finite.store(false, std::memory_order_relaxed);
  });
  return all_finite.load();
}

void dequantize_rows(Format format, std::int64_t columns, const std::uint8_t* tiles, const std::int64_t* ids,
                     std::int64_t count, float* y) {
  const std::int64_t bytes = tile_bytes(format), width = tile_columns(format), across = columns / width;
  ThreadPool::shared().run(static_cast<int>(count), count * columns, [&](int task) {
    const std::uint8_t* tile = tiles + ids[task] / kTileRows * across * bytes;
    const int row = static_cast<int>(ids[task] % kTileRows);
    DecodedBlock block;
    for (std::int64_t at = 0; at < across; ++at) {
      load_row(format, tile + at * bytes, row, block);
      dequantize_block(format, block, y + task * columns + at * width);
    }
  });
}

}  // namespace kakeya
