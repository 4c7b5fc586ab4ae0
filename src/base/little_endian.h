// Little-endian integers of the library's files, at any alignment.
#pragma once

#include <cstdint>

namespace kvasir {

inline uint32_t load32(const uint8_t* p) {
  return uint32_t{p[0]} | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24;
}
inline uint64_t load64(const uint8_t* p) { return load32(p) | uint64_t{load32(p + 4)} << 32; }

inline void store32(uint8_t* p, uint32_t value) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(value >> (8 * i));
}
inline void store64(uint8_t* p, uint64_t value) {
  store32(p, static_cast<uint32_t>(value));
  store32(p + 4, static_cast<uint32_t>(value >> 32));
}

}  // namespace kvasir
