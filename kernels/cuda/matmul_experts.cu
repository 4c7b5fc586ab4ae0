// Products of the chosen experts' matrices, with the code of matmul_row.h and matmul_few.h. What a
// block multiplies follows from arrays on the device, so no weights can be prefetched before the
// previous kernel has ended.
#include "backend/device_experts.h"
#include "matmul_few.h"
#include "matmul_row.h"

namespace kvasir::cuda {
namespace {

static_assert(DeviceExpertTile::max_rows <= max_few_inputs);

#define GivenExperts const __grid_constant__ ExpertProducts

// The product of a block with an expert's matrix; y: its row `output`.
__device__ inline Product product_of_expert(const ExpertProducts& given, uint32_t block_rows,
                                            uint32_t expert, std::size_t output,
                                            uint32_t* first_row) {
  const Product& all = product_of_block(given.products, block_rows, first_row);
  const float* scales = given.scales[&all - given.products.list];
  Product product = all;
  if (all.bias) product.bias += std::size_t{expert} * all.rows;
  if (scales) product.scale *= scales[expert];
  product.y += output * all.rows;
  return product;
}

// ---- choices in order: a row of the grid has one; of_input: neighbouring choices with one input

struct ChosenRows {
  Product product;
  uint32_t first, input;
  std::size_t first_weights;
  __device__ ChosenRows(const ExpertProducts& given, const DeviceChoice* chosen, uint32_t of_input,
                        uint32_t block_rows) {
    if (blockIdx.y >= given.choices) {
      share(given, block_rows);
      return;
    }
    const uint32_t expert = chosen[blockIdx.y].expert;
    product = product_of_expert(given, block_rows, expert, blockIdx.y, &first);
    first_weights = std::size_t{expert} * product.rows + first;
    input = blockIdx.y / of_input;
  }
  __device__ void share(const ExpertProducts& given, uint32_t block_rows) {
    const Product& all = product_of_block(given.products, block_rows, &first);
    const auto which = &all - given.products.list;
    product = {given.shared[which],
               all.rows,
               all.begin,
               nullptr,
               all.y + std::size_t{blockIdx.y} * all.rows,
               given.shared_scales[which]};
    first_weights = first;
    input = given.shared_input + blockIdx.y - given.choices;
  }
  __device__ Rows rows() const { return {product, first, first_weights, false}; }
};

template <TensorType type>
__device__ inline void multiply_chosen(const ExpertProducts& given, const DeviceChoice* chosen,
                                       uint32_t of_input, uint32_t units, const int8_t* q,
                                       const float* scale, const int16_t* sums) {
  after_previous();
  const uint32_t lanes = chosen_lanes(units);
  const ChosenRows its(given, chosen, of_input, row_warps * 32 / lanes);
  const std::size_t input = std::size_t{its.input} * units;
  multiply_row<type>(its.rows(), units, q + input * 32, scale + input, sums + input * 2, lanes);
}

template <class T>
__device__ inline void multiply_float_chosen(const ExpertProducts& given,
                                             const DeviceChoice* chosen, uint32_t of_input,
                                             uint32_t cols, const float* x) {
  after_previous();
  const ChosenRows its(given, chosen, of_input, row_warps);
  x += std::size_t{its.input} * cols;
  if (cols % (16 / sizeof(T))) multiply_float_row<T, 1, 1>(its.rows(), cols, 1, x);
  else multiply_float_row<T, 16 / sizeof(T), 1>(its.rows(), cols, 1, x);
}

// ---- several tokens: a row of the grid has a tile of an expert's rows

template <TensorType type>
__device__ inline void multiply_group(const ExpertProducts& given, const DeviceExpertTile& tile,
                                      uint32_t units, const int8_t* q, const float* scale,
                                      const int16_t* sums, uint32_t block_rows, uint32_t steps) {
  if (tile.rows == 0) return;
  uint32_t first;
  const Product product = product_of_expert(given, block_rows, tile.expert, tile.first, &first);
  const Rows rows{product, first, std::size_t{tile.expert} * product.rows + first, false};
  const std::size_t input = std::size_t{tile.first} * units;
  multiply_few<type>(rows, units, tile.rows, q + input * 32, scale + input, sums + input * 2,
                     block_rows, steps);
}

template <class T>
__device__ inline void multiply_float_group(const ExpertProducts& given,
                                            const DeviceExpertTile& tile, uint32_t cols,
                                            const float* x) {
  if (tile.rows == 0) return;
  uint32_t first;
  const Product product = product_of_expert(given, tile_rows, tile.expert, tile.first, &first);
  const Rows rows{product, first, std::size_t{tile.expert} * product.rows + first, false};
  const float* const its = x + std::size_t{tile.first} * cols;
  for (uint32_t input = 0; input < tile.rows; input += tile_inputs)
    if (cols % 4) multiply_float_tile<T, false>(rows, cols, tile.rows, its, input);
    else multiply_float_tile<T, true>(rows, cols, tile.rows, its, input);
}

}  // namespace

// The kernels, with their names in launch_experts.cc.
extern "C" {

#define KERNELS(name)                                                                             \
  __global__ void __launch_bounds__(row_warps * 32) experts_row_##name(                           \
      GivenExperts given, const DeviceChoice* chosen, uint32_t of_input, uint32_t units,          \
      const int8_t* q, const float* scale, const int16_t* sums) {                                 \
    multiply_chosen<TensorType::name>(given, chosen, of_input, units, q, scale, sums);            \
  }                                                                                               \
  __global__ void __launch_bounds__(few_threads, 2) experts_few_##name(                           \
      GivenExperts given, const DeviceExpertTile* tiles, uint32_t units, const int8_t* q,         \
      const float* scale, const int16_t* sums, uint32_t block_rows, uint32_t steps) {             \
    after_previous();                                                                             \
    multiply_group<TensorType::name>(given, tiles[blockIdx.y], units, q, scale, sums, block_rows, \
                                     steps);                                                      \
  }
KVASIR_QUANTISED_TYPES(KERNELS)

#define FLOAT_KERNELS(name, T)                                                              \
  __global__ void __launch_bounds__(row_warps * 32)                                         \
      experts_row_##name(GivenExperts given, const DeviceChoice* chosen, uint32_t of_input, \
                         uint32_t cols, const float* x) {                                   \
    multiply_float_chosen<T>(given, chosen, of_input, cols, x);                             \
  }                                                                                         \
  __global__ void __launch_bounds__(tile_threads) experts_tile_##name(                      \
      GivenExperts given, const DeviceExpertTile* tiles, uint32_t cols, const float* x) {   \
    after_previous();                                                                       \
    multiply_float_group<T>(given, tiles[blockIdx.y], cols, x);                             \
  }
FLOAT_KERNELS(f32, float) FLOAT_KERNELS(f16, __half) FLOAT_KERNELS(bf16, __nv_bfloat16)

}  // extern "C"
}  // namespace kvasir::cuda
