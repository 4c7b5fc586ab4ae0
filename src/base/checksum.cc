#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvasir {

uint64_t checksum(const void* data, std::size_t size, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, size, seed);
}

}  // namespace kvasir
