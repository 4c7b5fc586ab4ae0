// Weights of tiles in shared memory, as tensor cores take them.
#pragma once

#include "formats.h"

namespace kvasir::cuda {

// Words t and 4 + t of a unit's numbers, of rows r and r + 8, in the order of a product of 16 rows.
// low, high: a unit of row r of these planes. Pitches: bytes from row to row.
template <TensorType type, uint32_t low_pitch, uint32_t high_pitch>
__device__ inline void load_weights(uint32_t (&a)[4], const uint8_t* low, const uint8_t* high,
                                    uint32_t t) {
  using F = Format<type>;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t *row_bits = low + i * 8 * low_pitch, *high_bits = high + i * 8 * high_pitch;
    if constexpr (F::low == 4) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(row_bits + t * 4);
      a[i] = both & 0x0f0f0f0f, a[i + 2] = both >> 4 & 0x0f0f0f0f;
    } else {
      const uint2 both = *reinterpret_cast<const uint2*>(row_bits);
      a[i] = both.x >> 2 * t & 0x03030303, a[i + 2] = both.y >> 2 * t & 0x03030303;
    }
    if constexpr (F::high == 1) {
      const uint32_t h = *reinterpret_cast<const uint32_t*>(high_bits) >> t;
      a[i] |= (h & 0x01010101) << F::low, a[i + 2] |= (h >> 4 & 0x01010101) << F::low;
    } else if constexpr (F::high == 2) {
      const uint2 h = *reinterpret_cast<const uint2*>(high_bits);
      a[i] |= (h.x >> 2 * t & 0x03030303) << F::low, a[i + 2] |= (h.y >> 2 * t & 0x03030303)
                                                                 << F::low;
    }
    a[i] = numbers_of<type>(a[i]), a[i + 2] = numbers_of<type>(a[i + 2]);
  }
}

}  // namespace kvasir::cuda
