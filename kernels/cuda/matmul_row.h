// Products with one input, a warp per row, bound by reading the weights; and those of float weights
// with more inputs.
#pragma once

#include <cuda_bf16.h>

#include "backend/device_inputs.h"
#include "dependent.h"
#include "formats.h"
#include "products.h"

namespace kvasir::cuda {

// Over so many neighbouring lanes.
__device__ inline float warp_sum(float x, uint32_t lanes = 32) {
  for (uint32_t step = lanes / 2; step > 0; step /= 2)
    x += __shfl_xor_sync(~0u, x, static_cast<int>(step));
  return x;
}

// sum of u[k] . x[k] over four words
__device__ inline int dot_words(const uint32_t* u, uint4 x) {
  int sum = __dp4a(static_cast<int>(u[0]), static_cast<int>(x.x), 0);
  sum = __dp4a(static_cast<int>(u[1]), static_cast<int>(x.y), sum);
  sum = __dp4a(static_cast<int>(u[2]), static_cast<int>(x.z), sum);
  return __dp4a(static_cast<int>(u[3]), static_cast<int>(x.w), sum);
}

// A unit of weights.
template <TensorType type>
struct Unit {
  uint32_t u[8];
  float2 scales[2];
  __device__ Unit(const Planes& w, std::size_t unit) {
    load_quants<type>(w, unit, u);
    Format<type>::scales(w, unit, scales);
  }
};

// total + the product of a unit of weights and inputs. The operations are fixed, not left to the
// compiler: one input and several have the same bits.
template <TensorType type>
__device__ inline float add_product(float total, const Unit<type>& w, const int8_t* q,
                                    const float* scale, const int16_t* sums, uint32_t unit) {
  using F = Format<type>;
  const uint4* x = reinterpret_cast<const uint4*>(q) + 2 * unit;
  const uint4 low_inputs = x[0], high_inputs = x[1];
  const short2 sum = F::has_offset ? reinterpret_cast<const short2*>(sums)[unit] : short2{};
  const int low = dot_words(w.u, low_inputs), high = dot_words(w.u + 4, high_inputs);
  float part;
  if constexpr (F::two_scales)
    part = __fmaf_rn(w.scales[1].x, static_cast<float>(high),
                     __fmul_rn(w.scales[0].x, static_cast<float>(low)));
  else part = __fmul_rn(w.scales[0].x, static_cast<float>(low + high));
  if constexpr (F::has_offset) {
    if constexpr (F::two_scales) {
      part = __fmaf_rn(w.scales[0].y, static_cast<float>(sum.x), part);
      part = __fmaf_rn(w.scales[1].y, static_cast<float>(sum.y), part);
    } else {
      part = __fmaf_rn(w.scales[0].y, static_cast<float>(sum.x + sum.y), part);
    }
  }
  return __fmaf_rn(part, scale[unit], total);
}

// A warp has one row, and its loop is left to the compiler: many warps hide memory latency better
// than few warps with many loads in flight. Two rows per warp, or four units at a time, use the
// registers of other warps: a tenth to a sixth slower with formats of 4 bits (H200). So is a loop
// that, for lack of registers, waits for one load before it has issued all: check the compiler's
// output. Bytes of float weights that are prefetched while the previous kernel works.
constexpr uint32_t early_bytes = 4096;

// lanes: of a row, 32, or fewer where it has few units.
template <TensorType type>
__device__ inline void multiply_row(const Rows& block, uint32_t units, const int8_t* q,
                                    const float* scale, const int16_t* sums, uint32_t lanes = 32) {
  using F = Format<type>;
  const Product& product = block.product;
  const Planes& w = product.w;
  const uint32_t row = block.first + threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const std::size_t first = (block.first_weights + threadIdx.x / lanes) * units;
  if (row < product.rows && lane < units) prefetch(w.low + (first + lane) * (F::low * 4));
  after_previous();
  float total = 0;
  for (uint32_t i = lane; i < units && row < product.rows; i += lanes)
    total = add_product<type>(total, Unit<type>(w, first + i), q, scale, sums, i);
  total = warp_sum(total, lanes);
  if (lane == 0 && row < product.rows) put(block.add, product, 0, row, total);
}

template <class T>
__device__ inline float to_float(T x) {
  if constexpr (sizeof(T) == 4) return x;
  else return static_cast<float>(x);
}

// vector: weights per load; cols is a multiple of it. Reads weights once for n inputs, `most` or
// fewer. warps: of a row; 1, or all that a block has. Matrices of 32-bit floats are routers and the
// like: a warp for each of so few rows would leave most of a device idle.
template <class T>
constexpr uint32_t float_row_warps = sizeof(T) == 4 ? row_warps : 1;

template <class T, int vector, uint32_t most, uint32_t warps = 1>
__device__ inline void multiply_float_row(const Rows& block, uint32_t cols, uint32_t n,
                                          const float* x) {
  struct alignas(sizeof(T) * vector) Weights {
    T values[vector];
  };
  struct alignas(vector > 1 ? 16 : 4) Inputs {
    float values[vector];
  };
  constexpr uint32_t threads = warps * 32;  // of a row
  const auto& [planes, rows, begin, bias, y, scale] = block.product;
  const uint32_t at = threadIdx.x / threads, thread = threadIdx.x % threads, row = block.first + at;
  const T* w = reinterpret_cast<const T*>(planes.low) + (block.first_weights + at) * cols;
  if (vector > 1 && thread == 0 && row < rows)
    prefetch_range(w, min(cols * uint32_t{sizeof(T)}, early_bytes * warps));
  after_previous();
  if (row >= rows) return;
  float before[most], total[most] = {};
#pragma unroll
  for (uint32_t k = 0; k < most; ++k)
    before[k] = block.add && k < n ? y[std::size_t{k} * rows + row] : 0.0f;
#pragma unroll(most > 1 ? 2 : warps > 1 ? 4 : 8)
  for (uint32_t c = thread * vector; c < cols; c += threads * vector) {
    const Weights some = *reinterpret_cast<const Weights*>(w + c);
#pragma unroll
    for (uint32_t k = 0; k < most; ++k) {
      if (k >= n) continue;
      const Inputs inputs = *reinterpret_cast<const Inputs*>(x + std::size_t{k} * cols + c);
#pragma unroll
      for (int i = 0; i < vector; ++i)
        total[k] = __fmaf_rn(to_float(some.values[i]), inputs.values[i], total[k]);
    }
  }
  __shared__ float parts[warps][most];
#pragma unroll
  for (uint32_t k = 0; k < most; ++k) {
    if (k >= n) continue;
    total[k] = warp_sum(total[k]);
    if (warps > 1 && thread % 32 == 0) parts[thread / 32][k] = total[k];
  }
  if (warps > 1) __syncthreads();  // all of the block have its row
#pragma unroll
  for (uint32_t k = 0; k < most; ++k) {
    if (k >= n || thread > 0) continue;
    float sum = total[k];
#pragma unroll
    for (uint32_t i = 1; i < warps; ++i) sum += parts[i][k];
    y[std::size_t{k} * rows + row] =
        before[k] + (__fmul_rn(sum, scale) + (bias ? bias[row] : 0.0f));
  }
}

// Floats: tiles of 32 rows and 32 inputs, 4 rows and 2 inputs per thread. The next columns are read
// while these are multiplied. A router's matrix is small: large tiles would leave most of a device
// idle. aligned: cols is a multiple of 4.
template <class T, bool aligned>
__device__ inline void multiply_float_tile(const Rows& block, uint32_t cols, uint32_t n,
                                           const float* x, uint32_t first_input) {
  constexpr uint32_t depth = 64, pitch = depth + 4, in_row = depth / 4,
                     stride = tile_threads / in_row, each = tile_rows / stride;
  static_assert(tile_rows == 32 && tile_inputs == 32);
  struct alignas(4 * sizeof(T)) Four {
    T values[4];
  };
  __shared__ __align__(16) float weights[tile_rows][pitch], inputs[tile_inputs][pitch];
  const Product& product = block.product;
  const uint32_t first_row = block.first, rows = product.rows;
  const T* w = reinterpret_cast<const T*>(product.w.low);
  after_previous();
  const uint32_t c = threadIdx.x % in_row * 4, r = threadIdx.x / in_row;
  float4 next_weights[each], next_inputs[each];
  const auto load = [&](uint32_t at) {
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint32_t row = first_row + r + i * stride, input = first_input + r + i * stride;
      const T* from = w + (block.first_weights + r + i * stride) * cols + at + c;
      const float* from_x = x + std::size_t{input} * cols + at + c;
      float v[4] = {}, y[4] = {};
      if constexpr (aligned) {
        if (row < rows && at + c < cols) {
          const Four some = *reinterpret_cast<const Four*>(from);
#pragma unroll
          for (int k = 0; k < 4; ++k) v[k] = to_float(some.values[k]);
        }
        if (input < n && at + c < cols) {
          const float4 some = *reinterpret_cast<const float4*>(from_x);
          y[0] = some.x, y[1] = some.y, y[2] = some.z, y[3] = some.w;
        }
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (row < rows && at + c + k < cols) v[k] = to_float(from[k]);
          if (input < n && at + c + k < cols) y[k] = from_x[k];
        }
      }
      next_weights[i] = make_float4(v[0], v[1], v[2], v[3]);
      next_inputs[i] = make_float4(y[0], y[1], y[2], y[3]);
    }
  };
  const uint32_t own_row = threadIdx.x % 8, own_input = threadIdx.x / 8;
  float total[4][2] = {};
  load(0);
#pragma unroll 1
  for (uint32_t at = 0; at < cols; at += depth) {
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      *reinterpret_cast<float4*>(&weights[r + i * stride][c]) = next_weights[i];
      *reinterpret_cast<float4*>(&inputs[r + i * stride][c]) = next_inputs[i];
    }
    __syncthreads();
    if (at + depth < cols) load(at + depth);
#pragma unroll 4
    for (uint32_t k = 0; k < depth; k += 4) {
      float4 b[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        b[j] = *reinterpret_cast<const float4*>(&inputs[own_input + j * 16][k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 a = *reinterpret_cast<const float4*>(&weights[own_row + i * 8][k]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          total[i][j] = fmaf(a.x, b[j].x, total[i][j]);
          total[i][j] = fmaf(a.y, b[j].y, total[i][j]);
          total[i][j] = fmaf(a.z, b[j].z, total[i][j]);
          total[i][j] = fmaf(a.w, b[j].w, total[i][j]);
        }
      }
    }
  }
  for (uint32_t i = 0; i < 4; ++i)
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t row = first_row + own_row + i * 8, input = first_input + own_input + j * 16;
      if (row < rows && input < n) put(block.add, product, input, row, total[i][j]);
    }
}

}  // namespace kvasir::cuda
