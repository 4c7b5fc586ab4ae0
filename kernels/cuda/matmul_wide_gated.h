// The end of a tile of products in pairs: the input of a network's last matrix, in place of two
// arrays of floats that another kernel reads.
#pragma once

#include "activated.h"
#include "matmul_wide.h"
#include "rounding.h"

namespace kvasir::cuda {
namespace {

constexpr uint32_t gated_inputs = wide_inputs / 2;  // at a time

// A group's block of 32 numbers of each input.
struct GatedRoom {
  float4 largest[gated_inputs];  // of each warp
  float factor[gated_inputs];
  uint4 rounded[gated_inputs][2];
};

__device__ inline void wait_for_group(uint32_t group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

__device__ inline int sum_of_bytes(const uint4& x) {
  constexpr int ones = 0x01010101;
  return __dp4a(
      static_cast<int>(x.x), ones,
      __dp4a(static_cast<int>(x.y), ones,
             __dp4a(static_cast<int>(x.z), ones, __dp4a(static_cast<int>(x.w), ones, 0))));
}

// d: as write_products() has it; of a warp, the first eight rows are of the first product and the
// others of the second. Rounds with the arithmetic of round_inputs().
template <Activation f>
__device__ inline void write_gated(const Products& products, const WideGated& gated,
                                   const WideSlice& slice, uint32_t tile, uint32_t first_input,
                                   uint32_t group, float (&d)[2][64], const float* scales,
                                   GatedRoom* room) {
  const Product &gate = products.list[0], &up = products.list[1];
  const DeviceActivations& out = gated.out;
  const uint32_t own = threadIdx.x % 128, lane = own % 32, warp = own / 32,
                 block = (slice.first + tile) * 2 + group;
  if (first_input + wide_inputs > slice.n) {  // nothing writes a tile beyond the last input
#pragma unroll
    for (uint32_t i = 0; i < 128; ++i) {
      const uint32_t input = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (first_input + input >= slice.n) d[i / 64][i % 64] = 0;
    }
  }
  bool bad = false;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t first = first_input + half * gated_inputs;
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t at = i / 2 * 4 + i % 2, input = i / 2 * 8 + lane % 4 * 2 + i % 2;
      const float scale = scales[half * gated_inputs + input];
      const float a = __fmul_rn(d[half][at] * scale, gate.scale),
                  b = __fmul_rn(d[half][at + 2] * scale, up.scale);
      const float x = activated(f, a, b);  // 0 beyond the last row
      d[half][at] = x;
      bad |= !(fabsf(x) < gated.check.limit);
      float largest = fabsf(x);
#pragma unroll
      for (int step = 16; step >= 4; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      if (lane < 4) reinterpret_cast<float*>(&room->largest[input])[warp] = largest;
    }
    wait_for_group(group);
    const bool is_there = first + own < slice.n && block * 32 < gate.rows;
    const std::size_t begin = std::size_t{first} + own;
    {
      const float4 l = room->largest[own];
      const float largest = fmaxf(fmaxf(l.x, l.y), fmaxf(l.z, l.w));
      const bool none = !(largest > 0x1p-100f);
      room->factor[own] = none ? 0.0f : 127.0f / largest;
      if (is_there) out.scale[begin * (out.cols / 32) + block] = none ? 0.0f : largest / 127.0f;
    }
    wait_for_group(group);
#pragma unroll
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t input = i / 2 * 8 + lane % 4 * 2 + i % 2;
      const float x = d[half][i / 2 * 4 + i % 2] * room->factor[input];
      // -127 for a NaN.
      reinterpret_cast<int8_t*>(room->rounded[input])[own / 4] =
          static_cast<int8_t>(__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f)));
    }
    wait_for_group(group);
    if (is_there) {
      const uint4 low = room->rounded[own][0], high = room->rounded[own][1];
      uint4* const q = reinterpret_cast<uint4*>(out.q + begin * out.cols + block * 32);
      q[0] = low, q[1] = high;
      int16_t* const sums = out.sums + begin * (out.cols / 16) + block * 2;
      sums[0] = static_cast<int16_t>(sum_of_bytes(low));
      sums[1] = static_cast<int16_t>(sum_of_bytes(high));
    }
  }
  report(bad, gated.check);
}

}  // namespace
}  // namespace kvasir::cuda
