// The bit planes of a unit (formats.h) to a byte for each weight, in the lanes of the including namespace.

// Bits [2 * index, 2 * index + 2) of each byte, moved to bit `kTo`.
template <int kTo>
KAKEYA_INLINE Bytes two_bits(Bytes plane, int index) {
  const int from = 2 * index;
  return (from <= kTo ? shift_left(plane, kTo - from) : shift_right(plane, from - kTo)) & splat_byte(3 << kTo);
}
template <int kTo>
KAKEYA_INLINE Bytes one_bit(Bytes plane, int index) {
  return (index <= kTo ? shift_left(plane, kTo - index) : shift_right(plane, index - kTo)) & splat_byte(1 << kTo);
}

template <Format kFormat>
KAKEYA_INLINE UnitLines unpack_unit(const std::uint8_t* planes) {
  constexpr int kBits = layout_of(kFormat).bits;
  UnitLines unit;
  if constexpr (kBits == 8) {
    KAKEYA_UNROLL
    for (int c = 0; c < kLines; ++c) unit.line[c] = load_bytes(planes + kLineBytes * c);
  } else if constexpr (kBits >= 4) {
    KAKEYA_UNROLL
    for (int c = 0; c < 4; ++c) {
      const Bytes packed = load_bytes(planes + kLineBytes * c);
      unit.line[c] = packed & splat_byte(0x0f);
      unit.line[c + 4] = shift_right(packed, 4) & splat_byte(0x0f);
    }
  } else {
    const Bytes halves[2] = {load_bytes(planes), load_bytes(planes + kLineBytes)};
    KAKEYA_UNROLL
    for (int c = 0; c < kLines; ++c) unit.line[c] = two_bits<0>(halves[c / 4], c % 4);
  }
  if constexpr (kBits == 6) {
    const Bytes halves[2] = {load_bytes(planes + 4 * kLineBytes), load_bytes(planes + 5 * kLineBytes)};
    KAKEYA_UNROLL
    for (int c = 0; c < kLines; ++c) unit.line[c] = unit.line[c] | two_bits<4>(halves[c / 4], c % 4);
  }
  if constexpr (kBits == 5 || kBits == 3) {
    const Bytes plane = load_bytes(planes + (kBits - 1) * kLineBytes);
    KAKEYA_UNROLL
    for (int c = 0; c < kLines; ++c) unit.line[c] = unit.line[c] | one_bit<kBits - 1>(plane, c);
  }
  if constexpr (layout_of(kFormat).table) {
    const Table table = load_table(kFormat == Format::kMXFP4 ? kMXFP4Values : kIQ4Values);
    KAKEYA_UNROLL
    for (int c = 0; c < kLines; ++c) unit.line[c] = look_up(table, unit.line[c]);
  }
  if constexpr (layout_of(kFormat).wide) {
    // Files have signed bytes, our own quantization unsigned ones, and each instruction set wants its own kind.
    constexpr bool kStoredSigned = kFormat != Format::kAffine8;
    if constexpr (kStoredSigned != kWantsSignedBytes) {
      KAKEYA_UNROLL
      for (int c = 0; c < kLines; ++c) unit.line[c] = unit.line[c] ^ splat_byte(0x80);
    }
  }
  return unit;
}
