// Bounds of sizes, lengths and counts that a file claims. A claim is compared with the largest
// plausible value for what is known before anything is allocated, read or repeated by it.
//
//   uint32_t n;
//   if (!take_claim(load64(p), claim_product({tokens, heads}), &n)) return corrupt(...);
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

namespace kvasir {

// Sums and products for bounds: UINT64_MAX where the exact result does not fit, so that a bound
// never wraps to a small one.
[[nodiscard]] constexpr uint64_t claim_sum(std::initializer_list<uint64_t> terms) {
  uint64_t sum = 0;
  for (const uint64_t term : terms)
    if (__builtin_add_overflow(sum, term, &sum)) return std::numeric_limits<uint64_t>::max();
  return sum;
}

[[nodiscard]] constexpr uint64_t claim_product(std::initializer_list<uint64_t> factors) {
  uint64_t product = 1;
  bool fits = true;
  for (const uint64_t factor : factors) {
    if (factor == 0) return 0;
    if (fits) fits = !__builtin_mul_overflow(product, factor, &product);
  }
  return fits ? product : std::numeric_limits<uint64_t>::max();
}

// *out = claimed where it is at max `max` and fits the type; otherwise returns false and leaves
// *out.
template <class T>
[[nodiscard]] constexpr bool take_claim(uint64_t claimed, uint64_t max, T* out) {
  static_assert(std::is_unsigned_v<T>);
  if (claimed > max || claimed > std::numeric_limits<T>::max()) return false;
  *out = static_cast<T>(claimed);
  return true;
}

static_assert(claim_product({uint64_t{1} << 32, uint64_t{1} << 32}) == UINT64_MAX &&
              claim_product({uint64_t{1} << 63, 4, 0}) == 0);

}  // namespace kvasir
