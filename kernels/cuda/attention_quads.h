// Where the keys and values of a quad are, and copies of them.
#pragma once

#include "attention_common.h"

namespace kvasir::cuda {

// The addresses of a quad's keys and values, and of the scales of both.
struct Quad {
  const uint8_t *keys = nullptr, *values = nullptr, *scales = nullptr, *value_scales = nullptr;

  __device__ Quad() {}
  // In the layout of DeviceHotQuads.
  __device__ Quad(const uint8_t* bytes, uint32_t dim)
      : keys(bytes), values(keys + 4 * dim), scales(keys + 8 * dim), value_scales(scales + 8) {}
  // In its page.
  __device__ Quad(const DeviceKv& kv, uint32_t head, uint32_t quad, uint32_t dim) {
    const uint32_t page_tokens = page_size / 2 / dim, page_quads = page_tokens / 4,
                   page = quad / page_quads, in_page = quad % page_quads;
    const uint32_t in_extent = head * extent_pages + page % extent_pages;
    keys = reinterpret_cast<const uint8_t*>(kv.pages_at[page / extent_pages] + kv.pages_offset) +
           std::size_t{in_extent} * page_size + in_page * 4 * dim;
    values = keys + page_size / 2;
    scales =
        reinterpret_cast<const uint8_t*>(kv.scales_at[page / extent_pages] + kv.scales_offset) +
        (std::size_t{in_extent} * 2 * page_tokens + in_page * 4) * 2;
    value_scales = scales + page_tokens * 2;
  }
};

// Copies a quad by a warp into the layout of DeviceHotQuads; words: of 16 bytes, of its keys.
__device__ inline void copy_quad(const Quad& from_quad, uint32_t words, uint32_t lane,
                                 uint8_t* place) {
  auto* const to = reinterpret_cast<uint4*>(place);
  for (uint32_t i = lane; i < words; i += warp)
    to[i] = __ldcs(reinterpret_cast<const uint4*>(from_quad.keys) + i),
    to[words + i] = __ldcs(reinterpret_cast<const uint4*>(from_quad.values) + i);
  if (lane < 2)
    reinterpret_cast<uint2*>(to + 2 * words)[lane] = __ldcs(
        reinterpret_cast<const uint2*>(lane == 0 ? from_quad.scales : from_quad.value_scales));
}

__device__ inline uint8_t* hot_quad(const DeviceHotQuads& hot, uint32_t head, uint32_t place) {
  return hot.quads + (std::size_t{head} * hot.room + place) * hot.quad_bytes;
}

}  // namespace kvasir::cuda
