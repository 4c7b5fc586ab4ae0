// Arguments of a GPU's search for the keys with the largest scores, for one KV head. Plain data:
// kernels take it by value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

constexpr uint32_t nearest_dims[] = {64, 128};

// All pointers device, the byte arrays at multiples of 16.
struct DeviceNearest {
  uint32_t rows, items;      // queries, keys
  uint32_t dim;              // one of nearest_dims
  uint32_t k;                // keys per query, at most max_nearest
  const int8_t* queries;     // [rows][dim]
  const float* query_scale;  // [rows]
  const int8_t* keys;        // [items][dim]
  const float* key_scale;    // [items]
  uint32_t groups;           // nearest_groups(items)
  // [rows][groups] the largest score of each eight neighbouring keys; at a multiple of 8 bytes
  float* group_best;
  // [rows][k] items, the largest score first; with fewer items than k only the first `items`
  uint32_t* nearest;
};
// rows and items: of a thread block at a time
constexpr uint32_t max_nearest = 512, nearest_group = 8, nearest_rows = 256, nearest_items = 64;

constexpr uint32_t nearest_groups(uint32_t items) {
  return (items + nearest_items - 1) / nearest_items * (nearest_items / nearest_group);
}

}  // namespace kvasir
