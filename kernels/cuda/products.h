// Common code of the matrix product kernels: the product that a block has rows of, and the place of
// its outputs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace kvasir::cuda {

// A kernel argument that is read in place, also by index.
#define Given const __grid_constant__ Products

// The product of the block; first_row: of the block.
__device__ inline const Product& product_of_block(const Products& products, uint32_t rows_of_block,
                                                  uint32_t* first_row) {
  uint32_t which = 0;
#pragma unroll
  for (uint32_t i = 1; i < max_products; ++i) which += blockIdx.x >= products.list[i].begin;
  const Product& product = products.list[which];
  *first_row = (blockIdx.x - product.begin) * rows_of_block;
  return product;
}

// Rows of a product that a block has, from `first` on; first_weights: of its first row among the
// rows of `w`, which are those of several matrices where a router chooses one.
struct Rows {
  const Product& product;
  uint32_t first;
  std::size_t first_weights;
  bool add;
};

__device__ inline Rows rows_of_block(const Products& products, uint32_t count) {
  uint32_t first;
  const Product& product = product_of_block(products, count, &first);
  return {product, first, first, products.add};
}

__device__ inline void put(bool add, const Product& product, uint32_t input, uint32_t row,
                           float x) {
  float& to = product.y[std::size_t{input} * product.rows + row];
  x = __fmul_rn(x, product.scale);
  if (product.bias) x += product.bias[row];
  to = add ? to + x : x;
}

}  // namespace kvasir::cuda
