// The kernels of products of quantised weights with 2 to 64 inputs, and of those with up to
// max_alone inputs as if alone, with their names in launch.cc.
#include "matmul_alone.h"

namespace kvasir::cuda {
extern "C" {

#define KERNEL(name)                                                                              \
  __global__ void __launch_bounds__(few_threads, 2)                                               \
      few_##name(Given products, uint32_t units, uint32_t n, const int8_t* q, const float* scale, \
                 const int16_t* sums, uint32_t block_rows, uint32_t steps) {                      \
    multiply_few<TensorType::name>(rows_of_block(products, block_rows), units, n, q, scale, sums, \
                                   block_rows, steps);                                            \
  }
KVASIR_QUANTISED_TYPES(KERNEL)

#define ALONE_KERNEL(name)                                                                         \
  __global__ void __launch_bounds__(few_threads, 2)                                                \
      rows_##name(Given products, uint32_t units, uint32_t n, const int8_t* q, const float* scale, \
                  const int16_t* sums, uint32_t, uint32_t steps) {                                 \
    multiply_alone<TensorType::name>(rows_of_block(products, alone_rows), units, n, q, scale,      \
                                     sums, steps);                                                 \
  }
KVASIR_COMMON_TYPES(ALONE_KERNEL)

}  // extern "C"
}  // namespace kvasir::cuda
