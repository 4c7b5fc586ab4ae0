#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <new>

namespace kvasir {

uint64_t checksum(const void* data, std::size_t size, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, size, seed);
}

static_assert(sizeof(XXH3_state_t) <= 576 && alignof(XXH3_state_t) <= 64);

RunningChecksum::RunningChecksum(uint64_t seed) noexcept {
  auto* state = new (state_) XXH3_state_t;
  XXH3_INITSTATE(state);
  XXH3_64bits_reset_withSeed(state, seed);
}

void RunningChecksum::add(const void* data, std::size_t size) noexcept {
  XXH3_64bits_update(std::launder(reinterpret_cast<XXH3_state_t*>(state_)), data, size);
}

uint64_t RunningChecksum::value() const noexcept {
  return XXH3_64bits_digest(std::launder(reinterpret_cast<const XXH3_state_t*>(state_)));
}

}  // namespace kvasir
