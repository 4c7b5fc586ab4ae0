// The configuration of AMX's tile registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvasir {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void load_config(const TileConfig& c) {
  // GCC before 12.4 and 13.3 takes only its first 8 bytes as read.
  __asm__ volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

}  // namespace
}  // namespace kvasir
