// Whether numbers are ones to go on with.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>

namespace kvasir {

// Every magnitude is less than `limit` > 0; a NaN's is not. By bits, whose order is that of magnitudes: a maximum of integers is
// found many at a time, a search for the first float that fails is not.
inline bool all_below(std::span<const float> values, float limit) {
  uint32_t largest = 0;
  for (const float x : values) largest = std::max(largest, std::bit_cast<uint32_t>(x) & 0x7fffffffu);
  return largest < std::bit_cast<uint32_t>(limit);
}

inline bool all_finite(std::span<const float> values) { return all_below(values, std::numeric_limits<float>::infinity()); }

}  // namespace kvasir
