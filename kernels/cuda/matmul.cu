// Matrix products. One input: a warp per row, bound by reading the weights. Many: tiles of 64 rows
// and 64 inputs with the tensor cores' integer products. Up to 64 inputs of quantised weights:
// matmul_few.cu. Sums of 32 products are exact integers, like those of the CPU's kernels; scales
// are applied in float.
#include "integer_products.h"
#include "matmul_row.h"

namespace kvasir::cuda {
namespace {

// ---- many inputs

constexpr int tile_units = 4;
// Bytes of a row in shared memory: the words of eight rows of a product occupy all banks.
constexpr int tile_pitch = tile_units * 32 + 16;

struct Tile {
  alignas(16) uint8_t weights[tile_rows][tile_pitch];
  alignas(16) uint8_t inputs[tile_inputs][tile_pitch];
  float2 scales[tile_units][2][tile_rows];  // scale and offset
  float scale[tile_units][tile_inputs], sums[tile_units][2][tile_inputs];
};

template <TensorType type>
__device__ void multiply_tile(const Products& products, uint32_t units, uint32_t n, const int8_t* q,
                              const float* scale, const int16_t* sums) {
  using F = Format<type>;
  __shared__ Tile tile;
  uint32_t first_row;
  const Product product = product_of_block(products, tile_rows, &first_row);
  const Planes& w = product.w;
  const uint32_t rows = product.rows;
  after_previous();
  const uint32_t first_input = blockIdx.y * tile_inputs;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            g = lane / 4, t = lane % 4;
  float total[tile_inputs / 8][4] = {};
  for (uint32_t at = 0; at < units; at += tile_units) {
    __syncthreads();
    for (int i = thread; i < tile_rows * tile_units; i += tile_threads) {
      const int r = i / tile_units, k = i % tile_units;
      uint32_t u[8] = {};
      float2 scales[2] = {};
      if (first_row + r < rows && at + k < units) {
        const std::size_t unit = std::size_t{first_row + r} * units + at + k;
        load_quants<type>(w, unit, u);
        F::scales(w, unit, scales);
      }
      auto* to = reinterpret_cast<uint4*>(&tile.weights[r][k * 32]);
      to[0] = make_uint4(u[0], u[1], u[2], u[3]);
      to[1] = make_uint4(u[4], u[5], u[6], u[7]);
      tile.scales[k][0][r] = scales[0];
      tile.scales[k][1][r] = scales[1];
    }
    for (int i = thread; i < tile_inputs * tile_units; i += tile_threads) {
      const int r = i / tile_units, k = i % tile_units;
      uint4 a = {}, b = {};
      float unit_scale = 0, low = 0, high = 0;
      if (first_input + r < n && at + k < units) {
        const std::size_t unit = std::size_t{first_input + r} * units + at + k;
        const uint4* from = reinterpret_cast<const uint4*>(q) + 2 * unit;
        a = from[0], b = from[1];
        unit_scale = scale[unit];
        if constexpr (F::has_offset) low = sums[2 * unit], high = sums[2 * unit + 1];
      }
      auto* to = reinterpret_cast<uint4*>(&tile.inputs[r][k * 32]);
      to[0] = a, to[1] = b;
      tile.scale[k][r] = unit_scale;
      if constexpr (F::has_offset)
        tile.sums[k][0][r] = F::two_scales ? low : low + high, tile.sums[k][1][r] = high;
    }
    __syncthreads();
    for (int k = 0; k < tile_units; ++k) {
      const int row = warp * 16 + g;
      const auto word = [&](const uint8_t(*from)[tile_pitch], int r, int half) {
        return *reinterpret_cast<const uint32_t*>(&from[r][k * 32 + half * 16 + t * 4]);
      };
      const uint32_t a[4] = {word(tile.weights, row, 0), word(tile.weights, row + 8, 0),
                             word(tile.weights, row, 1), word(tile.weights, row + 8, 1)};
#pragma unroll
      for (int j = 0; j < tile_inputs / 8; ++j) {
        const uint32_t b[2] = {word(tile.inputs, j * 8 + g, 0), word(tile.inputs, j * 8 + g, 1)};
        float part[4] = {};
#pragma unroll
        for (int half = 0; half < (F::two_scales ? 2 : 1); ++half) {
          int d[4] = {};
          if constexpr (F::two_scales) multiply_16(d, a[2 * half], a[2 * half + 1], b[half]);
          else multiply_32(d, a, b);
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // row i / 2 * 8, input i % 2
            const float2 scales = tile.scales[k][half][row + i / 2 * 8];
            part[i] = __fmaf_rn(scales.x, static_cast<float>(d[i]), part[i]);
            if constexpr (F::has_offset)
              part[i] = __fmaf_rn(scales.y, tile.sums[k][half][j * 8 + 2 * t + i % 2], part[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
          total[j][i] = __fmaf_rn(part[i], tile.scale[k][j * 8 + 2 * t + i % 2], total[j][i]);
      }
    }
  }
  for (int j = 0; j < tile_inputs / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = first_row + static_cast<uint32_t>(warp) * 16 + g + i / 2 * 8,
                     input = first_input + j * 8 + 2 * t + i % 2;
      if (row < rows && input < n) put(products.add, product, input, row, total[j][i]);
    }
  }
}

// Many inputs, for weights with a scale per 32 and no offset: tiles of 128 by 128, of which a warp
// has 64 rows and 32 inputs. Each output is computed by the same operations as above, so it does
// not depend on the number of inputs. Rows in shared memory are 128 bytes in pieces of 16; those of
// eight rows that a matrix is loaded from occupy all banks.
struct WideTile {
  alignas(128) uint8_t weights[wide_rows * tile_units * 32], inputs[wide_inputs * tile_units * 32];
  float scales[tile_units][wide_rows], scale[tile_units][wide_inputs];
};

__device__ inline uint32_t piece_of(uint32_t row, uint32_t at) {
  return row * (tile_units * 32) + ((at ^ (row & 7)) << 4);
}
__device__ inline void load_matrices(uint32_t (&to)[4], const uint8_t* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))));
}

// Copies 16 bytes asynchronously, or zeros.
__device__ inline void copy_later(uint8_t* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0));
}

// Two tiles: one is filled while the other is multiplied. Copies weights as they are in memory,
// which fits Q8_0.
template <TensorType type>
__device__ void multiply_wide(const Products& products, uint32_t units, uint32_t n, const int8_t* q,
                              const float* scale) {
  using F = Format<type>;
  static_assert(!F::two_scales && !F::has_offset && F::low == 8 &&
                2 * sizeof(WideTile) == wide_shared_bytes);
  constexpr int row_tiles = 4, input_tiles = 4;
  // An integer sum d that starts with it is, as a float, 12582912 + d.
  constexpr int as_float = 0x4b400000;
  extern __shared__ __align__(128) uint8_t wide_memory[];
  auto* const tiles = reinterpret_cast<WideTile*>(wide_memory);
  uint32_t first_row;
  const Product product = product_of_block(products, wide_rows, &first_row);
  const Planes& w = product.w;
  const uint32_t rows = product.rows;
  after_previous();
  const uint32_t first_input = blockIdx.y * wide_inputs;
  const uint32_t thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  const uint32_t warp_row = thread / 32 % 2 * 64, warp_input = thread / 64 * 32;
  // Starts the copy of the tile at `at` of the sums, 16 bytes at a time; zeros outside of the
  // matrices.
  const auto copy = [&](WideTile& to, uint32_t at) {
#pragma unroll
    for (uint32_t i = thread; i < wide_rows * tile_units * 2; i += wide_threads) {
      const uint32_t r = i / (tile_units * 2), piece = i % (tile_units * 2), unit = at + piece / 2;
      const bool row_there = first_row + r < rows && unit < units,
                 input_there = first_input + r < n && unit < units;
      const uint8_t* weights =
          w.low +
          (row_there ? (std::size_t{first_row + r} * units + unit) * 32 + piece % 2 * 16 : 0);
      const int8_t* inputs =
          q +
          (input_there ? (std::size_t{first_input + r} * units + unit) * 32 + piece % 2 * 16 : 0);
      copy_later(to.weights + piece_of(r, piece), weights, row_there);
      copy_later(to.inputs + piece_of(r, piece), inputs, input_there);
    }
    asm volatile("cp.async.commit_group;");
  };
  constexpr uint32_t each = wide_rows * tile_units / wide_threads;
  float weight_scales[each], unit_scale[each];
  const auto load_scales = [&](uint32_t at) {
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint32_t r = (thread + i * wide_threads) / tile_units, unit = at + thread % tile_units;
      float2 scales[2] = {};
      if (first_row + r < rows && unit < units)
        F::scales(w, std::size_t{first_row + r} * units + unit, scales);
      weight_scales[i] = scales[0].x;
      unit_scale[i] = first_input + r < n && unit < units
                          ? scale[std::size_t{first_input + r} * units + unit]
                          : 0.0f;
    }
  };
  const auto put_scales = [&](WideTile& to) {
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint32_t r = (thread + i * wide_threads) / tile_units, k = thread % tile_units;
      to.scales[k][r] = weight_scales[i], to.scale[k][r] = unit_scale[i];
    }
  };
  float total[row_tiles][input_tiles][4] = {};
  copy(tiles[0], 0);
  load_scales(0);
  put_scales(tiles[0]);
#pragma unroll 1
  for (uint32_t at = 0, turn = 0; at < units; at += tile_units, turn ^= 1) {
    asm volatile("cp.async.wait_all;");
    __syncthreads();  // this tile has arrived, and nobody reads the other one
    const WideTile& tile = tiles[turn];
    const bool more = at + tile_units < units;
    if (more) copy(tiles[turn ^ 1], at + tile_units), load_scales(at + tile_units);
#pragma unroll 1
    for (int k = 0; k < tile_units; ++k) {
      uint32_t a[row_tiles][4], b[input_tiles / 2][4];
      float weight_scale[row_tiles][2];
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        load_matrices(a[i],
                      tile.weights + piece_of(warp_row + i * 16 + lane % 16, 2 * k + lane / 16));
        weight_scale[i][0] = tile.scales[k][warp_row + i * 16 + g],
        weight_scale[i][1] = tile.scales[k][warp_row + i * 16 + g + 8];
      }
#pragma unroll
      for (int j = 0; j < input_tiles / 2; ++j)
        load_matrices(b[j], tile.inputs + piece_of(warp_input + j * 16 + lane / 16 * 8 + lane % 8,
                                                   2 * k + lane / 8 % 2));
      float2 scales[input_tiles];
#pragma unroll
      for (int j = 0; j < input_tiles; ++j)
        scales[j] = *reinterpret_cast<const float2*>(&tile.scale[k][warp_input + j * 8 + 2 * t]);
#pragma unroll
      for (int i = 0; i < row_tiles; ++i) {
        // Exact: a scale has 11 bits, so its product with d is rounded once.
        const float off[2] = {weight_scale[i][0] * -12582912.0f, weight_scale[i][1] * -12582912.0f};
#pragma unroll
        for (int j = 0; j < input_tiles; ++j) {
          const uint32_t input_words[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
          int d[4];
          multiply_32_from(d, as_float, a[i], input_words);
#pragma unroll
          for (int c = 0; c < 4; ++c)  // row c / 2 * 8, input c % 2
            total[i][j][c] =
                __fmaf_rn(__fmaf_rn(weight_scale[i][c / 2], __int_as_float(d[c]), off[c / 2]),
                          c % 2 ? scales[j].y : scales[j].x, total[i][j][c]);
        }
      }
    }
    if (more) put_scales(tiles[turn ^ 1]);
  }
  // Through shared memory, half of the inputs at a time: neighbouring rows are written at once,
  // with little code.
  auto* staged = reinterpret_cast<float*>(tiles->weights);
  static_assert(sizeof tiles->weights + sizeof tiles->inputs ==
                wide_inputs / 2 * wide_rows * sizeof(float));
  for (uint32_t part = 0; part < 2; ++part) {
    __syncthreads();
    if (warp_input / (wide_inputs / 2) == part) {
#pragma unroll
      for (int i = 0; i < row_tiles; ++i)
#pragma unroll
        for (int j = 0; j < input_tiles; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            staged[(warp_input % (wide_inputs / 2) + j * 8 + 2 * t + c % 2) * wide_rows + warp_row +
                   i * 16 + g + c / 2 * 8] = total[i][j][c];
    }
    __syncthreads();
    const uint32_t row = first_row + thread % wide_rows;
    for (uint32_t i = thread / wide_rows; row < rows && i < wide_inputs / 2;
         i += wide_threads / wide_rows)
      if (const uint32_t input = first_input + part * (wide_inputs / 2) + i; input < n)
        put(products.add, product, input, row, staged[i * wide_rows + thread % wide_rows]);
  }
}

}  // namespace

// The kernels, with their names in launch.cc.
extern "C" {

#define KERNELS(name)                                                                           \
  __global__ void __launch_bounds__(lay_out_threads)                                            \
      lay_out_##name(Bytes file, std::size_t units, Planes to, std::size_t first) {             \
    after_previous();                                                                           \
    const std::size_t unit = std::size_t{blockIdx.x} * lay_out_threads + threadIdx.x;           \
    if (unit < units) lay_out_unit<TensorType::name>(file, unit, to, first + unit);             \
  }                                                                                             \
  __global__ void __launch_bounds__(row_warps * 32)                                             \
      row_##name(Given products, uint32_t units, uint32_t, const int8_t* q, const float* scale, \
                 const int16_t* sums) {                                                         \
    multiply_row<TensorType::name>(rows_of_block(products, row_warps), units, q, scale, sums);  \
  }                                                                                             \
  __global__ void __launch_bounds__(tile_threads)                                               \
      tile_##name(Products products, uint32_t units, uint32_t n, const int8_t* q,               \
                  const float* scale, const int16_t* sums) {                                    \
    multiply_tile<TensorType::name>(products, units, n, q, scale, sums);                        \
  }
KVASIR_QUANTISED_TYPES(KERNELS)

#define WIDE_KERNEL(name)                                                         \
  __global__ void __launch_bounds__(wide_threads, 2)                              \
      wide_##name(Products products, uint32_t units, uint32_t n, const int8_t* q, \
                  const float* scale, const int16_t*) {                           \
    multiply_wide<TensorType::name>(products, units, n, q, scale);                \
  }
WIDE_KERNEL(q8_0)

#define FLOAT_KERNELS(name, T)                                                 \
  __global__ void __launch_bounds__(row_warps * 32)                            \
      row_##name(Given products, uint32_t cols, uint32_t, const float* x) {    \
    const Rows block = rows_of_block(products, row_warps);                     \
    if (cols % (16 / sizeof(T))) multiply_float_row<T, 1>(block, cols, x);     \
    else multiply_float_row<T, 16 / sizeof(T)>(block, cols, x);                \
  }                                                                            \
  __global__ void __launch_bounds__(tile_threads)                              \
      tile_##name(Given products, uint32_t cols, uint32_t n, const float* x) { \
    multiply_float_tile<T>(rows_of_block(products, tile_rows), cols, n, x,     \
                           blockIdx.y * tile_inputs);                          \
  }
FLOAT_KERNELS(f32, float) FLOAT_KERNELS(f16, __half) FLOAT_KERNELS(bf16, __nv_bfloat16)

}  // extern "C"
}  // namespace kvasir::cuda
