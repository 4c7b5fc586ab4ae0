// Arithmetic on sizes that come from files. Every such size is a uint64_t and goes through here:
// a result that does not fit is reported, never wrapped.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvasir {

[[nodiscard]] inline bool checked_add(uint64_t a, uint64_t b, uint64_t* out) {
  return !__builtin_add_overflow(a, b, out);
}

[[nodiscard]] inline bool checked_mul(uint64_t a, uint64_t b, uint64_t* out) {
  return !__builtin_mul_overflow(a, b, out);
}

// True when [offset, offset + size) lies within [0, limit).
[[nodiscard]] inline bool range_fits(uint64_t offset, uint64_t size, uint64_t limit) {
  return offset <= limit && size <= limit - offset;
}

// Rounds up to a multiple of `align` (a power of two); false on overflow.
[[nodiscard]] inline bool checked_align(uint64_t value, uint64_t align, uint64_t* out) {
  if (!checked_add(value, align - 1, out)) return false;
  *out &= ~(align - 1);
  return true;
}

// For values known to fit: rounds up without a check.
constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

// Converts to a narrower unsigned type; false when the value does not fit.
template <class To>
[[nodiscard]] bool checked_cast(uint64_t value, To* out) {
  static_assert(std::is_unsigned_v<To>);
  if (value > std::numeric_limits<To>::max()) return false;
  *out = static_cast<To>(value);
  return true;
}

}  // namespace kvasir
