// XXH3, 64 bits: the checksum of every block of a cache file and the hash of a model's fingerprint.
// It guards against damage, not against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

uint64_t checksum(const void* data, std::size_t size, uint64_t seed) noexcept;

}  // namespace kvasir
