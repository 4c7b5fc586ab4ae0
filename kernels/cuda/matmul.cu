// Matrix products. One input: a warp a row, bound by the reading of the weights. Several: tiles of 64 rows and 64 inputs by the tensor cores' integer
// products. Sums of 32 products are exact integers, as the processor's kernels have them; scales are applied in float.
#include <cuda_bf16.h>

#include "formats.h"
#include "stream.h"

namespace kvasir::cuda {
namespace {

std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

template <TensorType type>
Planes planes_of(const DeviceMatrix& m) {
  using F = Format<type>;
  const std::size_t units = std::size_t{m.rows} * m.cols / 32;
  auto* low = const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(m.data));
  uint8_t* high = low + padded(units * F::low * 4);
  uint8_t* scales = high + padded(units * F::high * 4);
  return {low, high, scales, scales + padded(units * F::scale_bytes)};
}

template <TensorType type>
std::size_t planes_bytes(std::size_t units) {
  using F = Format<type>;
  return padded(units * F::low * 4) + padded(units * F::high * 4) + padded(units * F::scale_bytes) + padded(units / 8 * F::super_bytes);
}

// f.template operator()<type>() for the quantised type; false for the others.
template <class Function>
bool with_format(TensorType type, Function&& f) {
  switch (type) {
    case TensorType::q8_0: return f.template operator()<TensorType::q8_0>(), true;
    case TensorType::q4_0: return f.template operator()<TensorType::q4_0>(), true;
    case TensorType::q4_1: return f.template operator()<TensorType::q4_1>(), true;
    case TensorType::q5_0: return f.template operator()<TensorType::q5_0>(), true;
    case TensorType::q5_1: return f.template operator()<TensorType::q5_1>(), true;
    case TensorType::iq4_nl: return f.template operator()<TensorType::iq4_nl>(), true;
    case TensorType::q2_k: return f.template operator()<TensorType::q2_k>(), true;
    case TensorType::q3_k: return f.template operator()<TensorType::q3_k>(), true;
    case TensorType::q4_k: return f.template operator()<TensorType::q4_k>(), true;
    case TensorType::q5_k: return f.template operator()<TensorType::q5_k>(), true;
    case TensorType::q6_k: return f.template operator()<TensorType::q6_k>(), true;
    default: return false;
  }
}

std::size_t float_bytes(TensorType type) { return type == TensorType::f32 ? 4 : 2; }

std::size_t matrix_bytes(TensorType type, uint32_t rows, uint32_t cols) {
  const std::size_t elements = std::size_t{rows} * cols;
  std::size_t bytes = padded(elements * float_bytes(type));
  with_format(type, [&]<TensorType t>() { bytes = planes_bytes<t>(elements / 32); });
  return bytes;
}

template <TensorType type>
__global__ void lay_out_kernel(Bytes file, std::size_t units, Planes to, std::size_t first) {
  const std::size_t unit = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (unit < units) lay_out_unit<type>(file, unit, to, first + unit);
}

int lay_out(DeviceStream* s, const DeviceMatrix& to, const std::byte* from, uint32_t row, uint32_t n) {
  if (const int error = begin(s)) return error;
  const bool quantised = with_format(to.type, [&]<TensorType t>() {
    const std::size_t in_row = to.cols / 32, units = n * in_row;
    lay_out_kernel<t><<<blocks_for(units, 128), 128, 0, s->stream>>>(reinterpret_cast<Bytes>(from), units, planes_of<t>(to), row * in_row);
  });
  if (quantised) return launched();
  const std::size_t row_bytes = to.cols * float_bytes(to.type);
  return cudaMemcpyAsync(const_cast<std::byte*>(to.data) + row * row_bytes, from, n * row_bytes, cudaMemcpyDeviceToDevice, s->stream);
}

// ---- one input ------------------------------------------------------------------------------------------------------------

constexpr unsigned row_warps = 4;

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

// The product of a unit of weights and of inputs, but for the inputs' scale.
template <TensorType type>
__device__ inline float unit_product(const Planes& w, std::size_t unit, uint4 low_inputs, uint4 high_inputs, short2 sum) {
  using F = Format<type>;
  uint32_t u[8];
  load_quants<type>(w, unit, u);
  float2 of[2];
  F::scales(w, unit, of);
  const int low = dot_words(u, low_inputs), high = dot_words(u + 4, high_inputs);
  float part;
  if constexpr (F::two_scales)
    part = of[0].x * static_cast<float>(low) + of[1].x * static_cast<float>(high);
  else
    part = of[0].x * static_cast<float>(low + high);
  if constexpr (F::has_offset) {
    if constexpr (F::two_scales)
      part += of[0].y * static_cast<float>(sum.x) + of[1].y * static_cast<float>(sum.y);
    else
      part += of[0].y * static_cast<float>(sum.x + sum.y);
  }
  return part;
}

// A warp has one row: with two, which would share their inputs, formats of 4 bits were a sixth slower (H200).
template <TensorType type>
__global__ void __launch_bounds__(row_warps * 32) row_kernel(Planes w, uint32_t rows, uint32_t units, const int8_t* __restrict__ q,
                                                             const float* __restrict__ scale, const int16_t* __restrict__ sums, const float* bias,
                                                             float* y) {
  const uint32_t row = blockIdx.x * row_warps + threadIdx.x / 32;
  if (row >= rows) return;
  float total = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x % 32; i < units; i += 32) {
    const uint4* x = reinterpret_cast<const uint4*>(q) + 2 * i;
    const uint4 low = __ldg(x), high = __ldg(x + 1);
    const short2 sum = Format<type>::has_offset ? reinterpret_cast<const short2*>(sums)[i] : short2{};
    total += unit_product<type>(w, std::size_t{row} * units + i, low, high, sum) * __ldg(scale + i);
  }
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0) y[row] = total + (bias ? bias[row] : 0.0f);
}

template <class T>
__device__ inline float to_float(T x) {
  if constexpr (sizeof(T) == 4) return x;
  else return static_cast<float>(x);
}

// vector: weights that one load brings; cols is a multiple of it.
template <class T, int vector>
__global__ void __launch_bounds__(row_warps * 32) float_row_kernel(const T* w, uint32_t rows, uint32_t cols, const float* __restrict__ x,
                                                                   const float* bias, float* y) {
  struct alignas(sizeof(T) * vector) Weights {
    T of[vector];
  };
  struct alignas(vector > 1 ? 16 : 4) Inputs {
    float of[vector];
  };
  const uint32_t row = blockIdx.x * row_warps + threadIdx.x / 32;
  if (row >= rows) return;
  w += std::size_t{row} * cols;
  float total = 0;
#pragma unroll 4
  for (uint32_t c = threadIdx.x % 32 * vector; c < cols; c += 32 * vector) {
    const Weights some = *reinterpret_cast<const Weights*>(w + c);
    const Inputs its = *reinterpret_cast<const Inputs*>(x + c);
#pragma unroll
    for (int i = 0; i < vector; ++i) total += to_float(some.of[i]) * its.of[i];
  }
  total = warp_sum(total);
  if (threadIdx.x % 32 == 0) y[row] = total + (bias ? bias[row] : 0.0f);
}

// ---- several inputs -------------------------------------------------------------------------------------------------------

constexpr int tile_rows = 64, tile_inputs = 64, tile_units = 4, tile_threads = 128;
constexpr int tile_pitch = tile_units * 32 + 16;  // bytes of a row in shared memory: eight rows' words of a product lie in all banks

// d += a . b of 16 rows, 8 inputs and 32 or 16 products.
__device__ inline void multiply_32(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void multiply_16(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(a1), "r"(b));
}

struct Tile {
  alignas(16) uint8_t weights[tile_rows][tile_pitch];
  alignas(16) uint8_t inputs[tile_inputs][tile_pitch];
  float2 of[tile_units][2][tile_rows];              // scale and offset
  float scale[tile_units][tile_inputs], sums[tile_units][2][tile_inputs];
};

template <TensorType type>
__global__ void __launch_bounds__(tile_threads) tile_kernel(Planes w, uint32_t rows, uint32_t units, uint32_t n, const int8_t* __restrict__ q,
                                                            const float* __restrict__ scale, const int16_t* __restrict__ sums, const float* bias,
                                                            float* y, std::size_t y_stride) {
  using F = Format<type>;
  __shared__ Tile tile;
  const uint32_t first_row = blockIdx.x * tile_rows, first_input = blockIdx.y * tile_inputs;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  float total[tile_inputs / 8][4] = {};
  for (uint32_t at = 0; at < units; at += tile_units) {
    __syncthreads();
    for (int i = thread; i < tile_rows * tile_units; i += tile_threads) {
      const int r = i / tile_units, k = i % tile_units;
      uint32_t u[8] = {};
      float2 of[2] = {};
      if (first_row + r < rows && at + k < units) {
        const std::size_t unit = std::size_t{first_row + r} * units + at + k;
        load_quants<type>(w, unit, u);
        F::scales(w, unit, of);
      }
      auto* to = reinterpret_cast<uint4*>(&tile.weights[r][k * 32]);
      to[0] = make_uint4(u[0], u[1], u[2], u[3]);
      to[1] = make_uint4(u[4], u[5], u[6], u[7]);
      tile.of[k][0][r] = of[0];
      tile.of[k][1][r] = of[1];
    }
    for (int i = thread; i < tile_inputs * tile_units; i += tile_threads) {
      const int r = i / tile_units, k = i % tile_units;
      uint4 a = {}, b = {};
      float its_scale = 0, low = 0, high = 0;
      if (first_input + r < n && at + k < units) {
        const std::size_t unit = std::size_t{first_input + r} * units + at + k;
        const uint4* from = reinterpret_cast<const uint4*>(q) + 2 * unit;
        a = from[0], b = from[1];
        its_scale = scale[unit];
        if constexpr (F::has_offset) low = sums[2 * unit], high = sums[2 * unit + 1];
      }
      auto* to = reinterpret_cast<uint4*>(&tile.inputs[r][k * 32]);
      to[0] = a, to[1] = b;
      tile.scale[k][r] = its_scale;
      if constexpr (F::has_offset) tile.sums[k][0][r] = F::two_scales ? low : low + high, tile.sums[k][1][r] = high;
    }
    __syncthreads();
    for (int k = 0; k < tile_units; ++k) {
      const int row = warp * 16 + g;
      const auto word = [&](const uint8_t (*from)[tile_pitch], int r, int half) {
        return *reinterpret_cast<const uint32_t*>(&from[r][k * 32 + half * 16 + t * 4]);
      };
      const uint32_t a[4] = {word(tile.weights, row, 0), word(tile.weights, row + 8, 0), word(tile.weights, row, 1), word(tile.weights, row + 8, 1)};
#pragma unroll
      for (int j = 0; j < tile_inputs / 8; ++j) {
        const uint32_t b[2] = {word(tile.inputs, j * 8 + g, 0), word(tile.inputs, j * 8 + g, 1)};
        float part[4] = {};
#pragma unroll
        for (int half = 0; half < (F::two_scales ? 2 : 1); ++half) {
          int d[4] = {};
          if constexpr (F::two_scales)
            multiply_16(d, a[2 * half], a[2 * half + 1], b[half]);
          else
            multiply_32(d, a, b);
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // row i / 2 * 8, input i % 2
            const float2 of = tile.of[k][half][row + i / 2 * 8];
            part[i] += of.x * static_cast<float>(d[i]);
            if constexpr (F::has_offset) part[i] += of.y * tile.sums[k][half][j * 8 + 2 * t + i % 2];
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] += part[i] * tile.scale[k][j * 8 + 2 * t + i % 2];
      }
    }
  }
  for (int j = 0; j < tile_inputs / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = first_row + warp * 16 + g + i / 2 * 8, input = first_input + j * 8 + 2 * t + i % 2;
      if (row < rows && input < n) y[input * y_stride + row] = total[j][i] + (bias ? bias[row] : 0.0f);
    }
  }
}

// Floats: tiles of 64 by 64, each thread 8 rows and 4 inputs.
template <class T>
__global__ void __launch_bounds__(tile_threads) float_tile_kernel(const T* w, uint32_t rows, uint32_t cols, uint32_t n, const float* x,
                                                                  const float* bias, float* y, std::size_t y_stride) {
  constexpr int depth = 16;
  __shared__ float weights[depth][tile_rows + 1], inputs[depth][tile_inputs + 1];
  const uint32_t first_row = blockIdx.x * tile_rows, first_input = blockIdx.y * tile_inputs;
  const int thread = static_cast<int>(threadIdx.x), row = thread % 8 * 8, input = thread / 8 * 4;
  float total[8][4] = {};
  for (uint32_t at = 0; at < cols; at += depth) {
    __syncthreads();
    for (int i = thread; i < tile_rows * depth; i += tile_threads) {
      const int r = i / depth, c = i % depth;
      const bool there = at + c < cols;
      weights[c][r] = there && first_row + r < rows ? to_float(w[std::size_t{first_row + r} * cols + at + c]) : 0.0f;
      inputs[c][r] = there && first_input + r < n ? x[std::size_t{first_input + r} * cols + at + c] : 0.0f;
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
      if (r < rows && t < n) y[t * y_stride + r] = total[i][j] + (bias ? bias[r] : 0.0f);
    }
  }
}

template <class T>
void multiply_floats(DeviceStream* s, const DeviceMatrix& m, const DeviceActivations& x, const float* bias, float* y, std::size_t y_stride) {
  const T* w = reinterpret_cast<const T*>(m.data);
  if (x.n == 1) {
    constexpr int vector = 16 / sizeof(T);
    const auto kernel = m.cols % vector ? float_row_kernel<T, 1> : float_row_kernel<T, vector>;
    kernel<<<blocks_for(m.rows, row_warps), row_warps * 32, 0, s->stream>>>(w, m.rows, m.cols, x.f32, bias, y);
    return;
  }
  const dim3 grid(blocks_for(m.rows, tile_rows), blocks_for(x.n, tile_inputs));
  float_tile_kernel<T><<<grid, tile_threads, 0, s->stream>>>(w, m.rows, m.cols, x.n, x.f32, bias, y, y_stride);
}

int matmul(DeviceStream* s, const DeviceMatrix& m, const DeviceActivations& x, const float* bias, float* y, std::size_t y_stride) {
  if (const int error = begin(s)) return error;
  const uint32_t units = m.cols / 32;
  const bool quantised = with_format(m.type, [&]<TensorType t>() {
    if (x.n == 1) {
      row_kernel<t><<<blocks_for(m.rows, row_warps), row_warps * 32, 0, s->stream>>>(planes_of<t>(m), m.rows, units, x.q, x.scale, x.sums, bias, y);
      return;
    }
    const dim3 grid(blocks_for(m.rows, tile_rows), blocks_for(x.n, tile_inputs));
    tile_kernel<t><<<grid, tile_threads, 0, s->stream>>>(planes_of<t>(m), m.rows, units, x.n, x.q, x.scale, x.sums, bias, y, y_stride);
  });
  if (quantised) return launched();
  if (m.type == TensorType::f32) multiply_floats<float>(s, m, x, bias, y, y_stride);
  if (m.type == TensorType::f16) multiply_floats<__half>(s, m, x, bias, y, y_stride);
  if (m.type == TensorType::bf16) multiply_floats<__nv_bfloat16>(s, m, x, bias, y, y_stride);
  return launched();
}

}  // namespace

void fill_matmul(DeviceKernels* k) {
  k->matrix_bytes = matrix_bytes;
  k->lay_out = lay_out;
  k->matmul = matmul;
}

}  // namespace kvasir::cuda
