// Products with one input, a warp per row, bound by reading the weights; and those of float weights
// with more inputs.
#pragma once

#include <cuda_bf16.h>

#include "dependent.h"
#include "formats.h"
#include "products.h"

namespace kvasir::cuda {

__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// sum of u[k] . x[k] over four words
__device__ inline int dot_words(const uint32_t* u, uint4 x) {
  int sum = __dp4a(static_cast<int>(u[0]), static_cast<int>(x.x), 0);
  sum = __dp4a(static_cast<int>(u[1]), static_cast<int>(x.y), sum);
  sum = __dp4a(static_cast<int>(u[2]), static_cast<int>(x.z), sum);
  return __dp4a(static_cast<int>(u[3]), static_cast<int>(x.w), sum);
}

// The product of a unit of weights and inputs, without the scale of the inputs.
template <TensorType type>
__device__ inline float unit_product(const Planes& w, std::size_t unit, uint4 low_inputs,
                                     uint4 high_inputs, short2 sum) {
  using F = Format<type>;
  uint32_t u[8];
  load_quants<type>(w, unit, u);
  float2 scales[2];
  F::scales(w, unit, scales);
  const int low = dot_words(u, low_inputs), high = dot_words(u + 4, high_inputs);
  float part;
  if constexpr (F::two_scales)
    part = scales[0].x * static_cast<float>(low) + scales[1].x * static_cast<float>(high);
  else part = scales[0].x * static_cast<float>(low + high);
  if constexpr (F::has_offset) {
    if constexpr (F::two_scales)
      part += scales[0].y * static_cast<float>(sum.x) + scales[1].y * static_cast<float>(sum.y);
    else part += scales[0].y * static_cast<float>(sum.x + sum.y);
  }
  return part;
}

// A warp has one row, and its loop is left to the compiler: many warps hide memory latency better
// than few warps with many loads in flight. Two rows per warp, or four units at a time, use the
// registers of other warps: a tenth to a sixth slower with formats of 4 bits (H200). So is a loop
// that, for lack of registers, waits for one load before it has issued all: check the compiler's
// output. Bytes of float weights that are prefetched while the previous kernel works.
constexpr uint32_t early_bytes = 4096;

template <TensorType type>
__device__ inline void multiply_row(const Rows& block, uint32_t units, const int8_t* q,
                                    const float* scale, const int16_t* sums) {
  using F = Format<type>;
  const Product& product = block.product;
  const Planes& w = product.w;
  const uint32_t row = block.first + threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::size_t first = (block.first_weights + threadIdx.x / 32) * units;
  if (row < product.rows && lane < units) prefetch(w.low + (first + lane) * (F::low * 4));
  after_previous();
  if (row >= product.rows) return;
  float total = 0;
  for (uint32_t i = lane; i < units; i += 32) {
    const uint4* x = reinterpret_cast<const uint4*>(q) + 2 * i;
    const uint4 low = x[0], high = x[1];
    const short2 sum = F::has_offset ? reinterpret_cast<const short2*>(sums)[i] : short2{};
    total += unit_product<type>(w, first + i, low, high, sum) * scale[i];
  }
  total = warp_sum(total);
  if (lane == 0) put(block.add, product, 0, row, total);
}

template <class T>
__device__ inline float to_float(T x) {
  if constexpr (sizeof(T) == 4) return x;
  else return static_cast<float>(x);
}

// vector: weights per load; cols is a multiple of it.
template <class T, int vector>
__device__ inline void multiply_float_row(const Rows& block, uint32_t cols, const float* x) {
  struct alignas(sizeof(T) * vector) Weights {
    T values[vector];
  };
  struct alignas(vector > 1 ? 16 : 4) Inputs {
    float values[vector];
  };
  const auto& [planes, rows, begin, bias, y, scale] = block.product;
  const uint32_t row = block.first + threadIdx.x / 32;
  const T* w =
      reinterpret_cast<const T*>(planes.low) + (block.first_weights + threadIdx.x / 32) * cols;
  if (vector > 1 && threadIdx.x % 32 == 0 && row < rows)
    prefetch_range(w, min(cols * uint32_t{sizeof(T)}, early_bytes));
  after_previous();
  if (row >= rows) return;
  const float before = block.add ? y[row] : 0.0f;
  float total = 0;
#pragma unroll 4
  for (uint32_t c = threadIdx.x % 32 * vector; c < cols; c += 32 * vector) {
    const Weights some = *reinterpret_cast<const Weights*>(w + c);
    const Inputs inputs = *reinterpret_cast<const Inputs*>(x + c);
#pragma unroll
    for (int i = 0; i < vector; ++i) total += to_float(some.values[i]) * inputs.values[i];
  }
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0)
    y[row] = before + (__fmul_rn(total, scale) + (bias ? bias[row] : 0.0f));
}

// Floats: tiles of 64 by 64, 8 rows and 4 inputs per thread.
template <class T>
__device__ inline void multiply_float_tile(const Rows& block, uint32_t cols, uint32_t n,
                                           const float* x, uint32_t first_input) {
  constexpr int depth = 16;
  __shared__ float weights[depth][tile_rows + 1], inputs[depth][tile_inputs + 1];
  const Product& product = block.product;
  const uint32_t first_row = block.first;
  const uint32_t rows = product.rows;
  const T* w = reinterpret_cast<const T*>(product.w.low);
  after_previous();
  const int thread = static_cast<int>(threadIdx.x), row = thread % 8 * 8, input = thread / 8 * 4;
  float total[8][4] = {};
  for (uint32_t at = 0; at < cols; at += depth) {
    __syncthreads();
    for (int i = thread; i < tile_rows * depth; i += tile_threads) {
      const int r = i / depth, c = i % depth;
      const bool there = at + c < cols;
      weights[c][r] = there && first_row + r < rows
                          ? to_float(w[(block.first_weights + r) * cols + at + c])
                          : 0.0f;
      inputs[c][r] =
          there && first_input + r < n ? x[std::size_t{first_input + r} * cols + at + c] : 0.0f;
    }
    __syncthreads();
    for (int c = 0; c < depth; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][j] += weights[c][row + i] * inputs[c][input + j];
      }
    }
  }
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 4; ++j) {
      const uint32_t r = first_row + row + i, t = first_input + input + j;
      if (r < rows && t < n) put(block.add, product, t, r, total[i][j]);
    }
  }
}

}  // namespace kvasir::cuda
