// Tests for values that are finite and not too large.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <span>

namespace kvasir {

// Whether every magnitude is less than `limit` > 0; false for a NaN. Compares bits, whose order is
// that of magnitudes: differences of integers, none of which may be negative, vectorise on any CPU;
// a search for the first bad float does not.
inline bool all_below(std::span<const float> values, float limit) {
  const uint32_t largest = std::bit_cast<uint32_t>(limit) - 1;
  uint32_t over = 0;
  for (const float x : values) over |= largest - (std::bit_cast<uint32_t>(x) & 0x7fffffffu);
  return over >> 31 == 0;
}

inline bool all_finite(std::span<const float> values) {
  return all_below(values, std::numeric_limits<float>::infinity());
}

}  // namespace kvasir
