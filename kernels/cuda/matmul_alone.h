// Products of quantised weights with up to max_alone inputs, each with the bits that multiply_row()
// of matmul_row.h gives it. There lane l of a warp adds the units l, l + 32, ..., then the lanes'
// sums are added in pairs 16, 8, 4, 2 and 1 lanes apart. Here warp w of a block has the units of
// lanes 4 w to 4 w + 3, and tensor cores multiply them with all inputs: a row alone would need n
// times its size of inputs. A warp waits for no other: it has its own ring of steps.
#pragma once

#include "backend/device_inputs.h"
#include "matmul_few.h"

namespace kvasir::cuda {

using Warp = Team<32, alone_units>;
static_assert(max_alone <= max_alone_inputs && warps * alone_units == 32);

// Adds a unit to four sums: of rows g and g + 8, and two inputs. The operations are those of
// add_product() in matmul_row.h.
template <TensorType type>
__device__ inline void add_unit_alone(float (&total)[4], const uint32_t (&a)[4],
                                      const float2 (&scale_offsets)[2][2], const uint32_t (&b)[2],
                                      float2 scales, [[maybe_unused]] const short2 (&sums)[2]) {
  using F = Format<type>;
  int low[4], high[4];
  if constexpr (F::two_scales) {
    multiply_16_from(low, as_float, a[0], a[1], b[0]);
    multiply_16_from(high, as_float, a[2], a[3], b[1]);
  } else {
    multiply_32_from(low, as_float, a, b);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {  // row c / 2 * 8, input c % 2
    const float2(&s)[2] = scale_offsets[c / 2];
    float part = __fmul_rn(s[0].x, __int_as_float(low[c]) - as_float_value);
    if constexpr (F::two_scales)
      part = __fmaf_rn(s[1].x, __int_as_float(high[c]) - as_float_value, part);
    if constexpr (F::has_offset && F::two_scales) {
      part = __fmaf_rn(s[0].y, static_cast<float>(sums[c % 2].x), part);
      part = __fmaf_rn(s[1].y, static_cast<float>(sums[c % 2].y), part);
    } else if constexpr (F::has_offset) {
      part = __fmaf_rn(s[0].y, static_cast<float>(sums[c % 2].x + sums[c % 2].y), part);
    }
    total[c] = __fmaf_rn(part, c % 2 ? scales.y : scales.x, total[c]);
  }
}

// Units [at, at + alone_units) at `memory`, or as many as exist. total: of each unit.
template <TensorType type>
__device__ inline void multiply_step_alone(float (&total)[alone_units][4], const uint8_t* memory,
                                           const Step<type, Warp>& step, const Part& part,
                                           uint32_t at) {
  using F = Format<type>;
  using S = Step<type, Warp>;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (uint32_t k = 0; k < alone_units; ++k) {
    if (at + k >= part.units) break;
    const uint8_t* const input = memory + step.inputs + g * S::input_pitch + k * 32 + t * 4;
    const uint32_t b[2] = {*reinterpret_cast<const uint32_t*>(input),
                           *reinterpret_cast<const uint32_t*>(input + 16)};
    const uint32_t word = (k * max_alone_inputs + 2 * t) * 4;
    const float2 scales = *reinterpret_cast<const float2*>(memory + step.input_scales + word);
    short2 sums[2] = {};
    if constexpr (F::has_offset) {
      const short2* const both = reinterpret_cast<const short2*>(memory + step.sums + word);
      sums[0] = both[0], sums[1] = both[1];
    }
    uint32_t a[4];
    if constexpr (F::low == 8)
      load_matrices(a, shared_address(memory + lane % 16 * S::low_pitch + k * 32 + lane / 16 * 16));
    else
      load_weights<type, S::low_pitch, S::high_pitch>(
          a, memory + g * S::low_pitch + k * (F::low * 4),
          memory + step.high + g * S::high_pitch + k * (F::high * 4), t);
    float2 scale_offsets[2][2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
      load_scales(scale_offsets[i], memory, step, part, g + i * 8, at, k);
    add_unit_alone<type>(total[k], a, scale_offsets, b, scales, sums);
  }
}

template <TensorType type>
__device__ inline void multiply_alone(const Rows& block, uint32_t units, uint32_t n,
                                      const int8_t* q, const float* scale, const int16_t* sums,
                                      uint32_t steps) {
  using F = Format<type>;
  extern __shared__ __align__(128) uint8_t memory[];
  constexpr uint32_t rows = alone_rows, stride = warps * alone_units,
                     bytes = few_step_bytes(type, rows, max_alone_inputs, alone_units);
  const Product& product = block.product;
  const Planes& w = product.w;
  const Part part{block.first_weights * units, min(rows, product.rows - block.first), units, n};
  const Step<type, Warp> step(rows, max_alone_inputs);
  const uint32_t own = threadIdx.x / 32, lane = threadIdx.x % 32, first = own * alone_units;
  // While the previous kernel works.
  for (uint32_t s = 0, at = first; s < steps && at < units && lane < part.rows; ++s, at += stride)
    prefetch(w.low + (part.first + std::size_t{lane} * units + at) * (F::low * 4));
  after_previous();
  float total[alone_units][4] = {};
  for_each_step(w, part, step, q, scale, sums, memory + own * steps * bytes, bytes, steps, first,
                stride, [&](const uint8_t* from, uint32_t at) {
                  multiply_step_alone<type>(total, from, step, part, at);
                });
  // [warps][alone_units][32], where the rings were
  float4* const totals = reinterpret_cast<float4*>(memory);
  constexpr uint32_t of_warp = alone_units * 32;
  static_assert(of_warp * sizeof(float4) <= 2 * bytes);
  __syncthreads();
#pragma unroll
  for (uint32_t k = 0; k < alone_units; ++k)
    totals[own * of_warp + k * 32 + lane] =
        make_float4(total[k][0], total[k][1], total[k][2], total[k][3]);
  __syncthreads();
  if (threadIdx.x >= rows * max_alone_inputs) return;
  // Lane and number of the sums of row g + 8 half and an input.
  const uint32_t input = threadIdx.x % 8, in_block = threadIdx.x / 8, g = in_block % 8,
                 half = in_block / 8, row = block.first + in_block;
  if (row >= product.rows || input >= n) return;
  const float* const its =
      reinterpret_cast<const float*>(totals + g * 4 + input / 2) + half * 2 + input % 2;
  float sum[alone_units];
#pragma unroll
  for (uint32_t k = 0; k < alone_units; ++k) {
    const auto of = [&](uint32_t warp) { return its[(warp * of_warp + k * 32) * 4]; };
    sum[k] = ((of(0) + of(4)) + (of(2) + of(6))) + ((of(1) + of(5)) + (of(3) + of(7)));
  }
  put(block.add, product, input, row, (sum[0] + sum[2]) + (sum[1] + sum[3]));
}

}  // namespace kvasir::cuda
