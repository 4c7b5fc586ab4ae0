// Common code of the attention kernels.
#pragma once

#include <cmath>

#include "backend/device_attention.h"
#include "dependent.h"
#include "layout.h"

namespace kvasir::cuda {

constexpr unsigned warp = 32, all_lanes = ~0u;
constexpr uint32_t extent_pages = 16, page_size = 4096;

__device__ inline float warp_sum(float x, unsigned below = warp) {
  for (unsigned step = 1; step < below; step *= 2) x += __shfl_xor_sync(all_lanes, x, step);
  return x;
}
__device__ inline float warp_max(float x, unsigned below = warp) {
  for (unsigned step = 1; step < below; step *= 2)
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, step));
  return x;
}

// Prefetches by all threads of a block; for data that no kernel writes, or only its end.
__device__ inline void prefetch_all(const void* from, std::size_t bytes) {
  constexpr std::size_t line = 128;
  for (std::size_t at = threadIdx.x * line; at < bytes; at += blockDim.x * line)
    prefetch(static_cast<const char*>(from) + at);
}

__device__ inline float from_bf16(uint16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}

// Byte i of a word.
__device__ inline float signed_byte(uint32_t word, int i) {
  return static_cast<float>(static_cast<int8_t>(word >> 8 * i));
}

__device__ inline std::size_t state_at(const DeviceKv& kv, const DeviceAttention& a, uint32_t head,
                                       uint32_t token, uint32_t part, uint32_t row) {
  return (((std::size_t{head} * a.n + token) * attention_parts + part) * kv.group + row) *
         (kv.dim + state_sums);
}

// e^(m - most), 0 for an empty part.
__device__ inline float relative(float m, float max_score) {
  return m == -INFINITY ? 0.0f : __expf(m - max_score);
}

}  // namespace kvasir::cuda
