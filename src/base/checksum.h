// XXH3, 64 bits: the checksum of every block of a cache file and the hash of a model's fingerprint.
// It guards against damage, not against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

uint64_t checksum(const void* data, std::size_t size, uint64_t seed) noexcept;

// The checksum of bytes that arrive in pieces of any size.
class RunningChecksum {
 public:
  explicit RunningChecksum(uint64_t seed) noexcept;
  void add(const void* data, std::size_t size) noexcept;
  uint64_t value() const noexcept;  // of the bytes added so far

 private:
  alignas(64) std::byte state_[576];
};

}  // namespace kvasir
