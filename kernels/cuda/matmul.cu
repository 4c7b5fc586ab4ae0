// Matrix products with one input, a warp per row, bound by reading the weights; the layout of
// weights; and products of float weights. 2 to 64 inputs of quantised weights: matmul_few.cu. More:
// matmul_many.cu. Sums of 32 products are exact integers, like those of the CPU's kernels; scales
// are applied in float.
#include "matmul_row.h"

namespace kvasir::cuda {

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
  }
KVASIR_QUANTISED_TYPES(KERNELS)

#define FLOAT_KERNELS(name, T)                                                                  \
  __global__ void __launch_bounds__(row_warps * 32)                                             \
      row_##name(Given products, uint32_t cols, uint32_t, const float* x) {                     \
    constexpr uint32_t warps = float_row_warps<T>;                                              \
    const Rows block = rows_of_block(products, row_warps / warps);                              \
    if (cols % (16 / sizeof(T))) multiply_float_row<T, 1, 1, warps>(block, cols, 1, x);         \
    else multiply_float_row<T, 16 / sizeof(T), 1, warps>(block, cols, 1, x);                    \
  }                                                                                             \
  __global__ void __launch_bounds__(row_warps * 32)                                             \
      rows_##name(Given products, uint32_t cols, uint32_t n, const float* x) {                  \
    constexpr uint32_t warps = float_row_warps<T>;                                              \
    const Rows block = rows_of_block(products, row_warps / warps);                              \
    if (cols % (16 / sizeof(T))) multiply_float_row<T, 1, max_alone, warps>(block, cols, n, x); \
    else multiply_float_row<T, 16 / sizeof(T), max_alone, warps>(block, cols, n, x);            \
  }                                                                                             \
  __global__ void __launch_bounds__(tile_threads)                                               \
      tile_##name(Given products, uint32_t cols, uint32_t n, const float* x) {                  \
    const Rows block = rows_of_block(products, tile_rows);                                      \
    const uint32_t input = blockIdx.y * tile_inputs;                                            \
    if (cols % 4) multiply_float_tile<T, false>(block, cols, n, x, input);                      \
    else multiply_float_tile<T, true>(block, cols, n, x, input);                                \
  }
FLOAT_KERNELS(f32, float) FLOAT_KERNELS(f16, __half) FLOAT_KERNELS(bf16, __nv_bfloat16)

}  // extern "C"
}  // namespace kvasir::cuda
