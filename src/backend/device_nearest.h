// What the search of a GPU for the keys nearest to queries reads and writes, of one KV head. Plain
// data: the kernels take it by value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

// All pointers device, the byte arrays at multiples of 16.
struct DeviceNearest {
  // queries, keys; dim: one of attended_dims; k: of each query, at most max_nearest
  uint32_t rows, items, dim, k;
  const int8_t* queries;     // [rows][dim]
  const float* query_scale;  // [rows]
  const int8_t* keys;        // [items][dim]
  const float* key_scale;    // [items]
  uint32_t groups;           // nearest_groups(items)
  // [rows][groups] of each eight keys that follow one another the largest score, on the way; at a
  // multiple of 8 bytes
  float* group_best;
  // [rows][k] items, the nearest first; of fewer items than k the first so many
  uint32_t* nearest;
};
// rows and items: of a block at a time
constexpr uint32_t max_nearest = 512, nearest_group = 8, nearest_rows = 256, nearest_items = 64;

constexpr uint32_t nearest_groups(uint32_t items) {
  return (items + nearest_items - 1) / nearest_items * (nearest_items / nearest_group);
}

}  // namespace kvasir
