// What every instruction set's lanes build upon.
#pragma once

#include <cstdint>

#define KAKEYA_INLINE static inline __attribute__((always_inline))

// Small loops over registers must be unrolled, or the compiler keeps the registers in memory.
#if defined(__clang__)
#define KAKEYA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KAKEYA_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kakeya {

// Adding and subtracting this rounds a float of magnitude below 2^22 to a whole number.
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23

KAKEYA_INLINE float float_from_bits(std::uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
KAKEYA_INLINE std::uint32_t bits_from_float(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
KAKEYA_INLINE int int_from_bytes(const void* bytes) {
  int word;
  __builtin_memcpy(&word, bytes, sizeof word);
  return word;
}
KAKEYA_INLINE int at_least(int x, int limit) { return x > limit ? x : limit; }
KAKEYA_INLINE int at_most(int x, int limit) { return x < limit ? x : limit; }

}  // namespace kakeya
