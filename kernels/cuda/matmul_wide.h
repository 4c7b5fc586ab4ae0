// Products with many inputs in halves: sizes, for host code and kernels. matmul_wide.cu explains.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/device_inputs.h"
#include "layout.h"

namespace kvasir::cuda {

constexpr uint32_t wide_rows = 128, wide_inputs = 256, wide_columns = 64;  // of a tile
constexpr uint32_t wide_steps = 4;                                         // of the ring
constexpr uint32_t wide_threads = 3 * 128, wide_halves_threads = 256;
constexpr uint32_t wide_shared_bytes =
    wide_steps * ((wide_rows + wide_inputs) * wide_columns * 2 + 16) + 1024;

// Halves are so many times the weights, without DeviceMatrix::scale: those below 1e-6 lose digits,
// and those from 1,023 on are infinite, which the check of the next operation reports. Those of
// NVFP4 are up to 2,688, and the matrix has their scale.
constexpr float weight_factor(TensorType type) { return type == TensorType::nvfp4 ? 16 : 64; }

// Tiles of rows of some products, one product after the other; Product::begin counts tiles. A tile
// of two products in pairs has half as many rows of each, eight of one and eight of the other in
// turn: then a thread that multiplies has the same row of both.
constexpr const Product& product_of_tile(const Products& products, uint32_t tile) {
  uint32_t which = 0;
  for (uint32_t i = 1; i < max_products; ++i) which += tile >= products.list[i].begin;
  return products.list[which];
}

constexpr uint32_t pair_rows = wide_rows / 2;
struct WideRow {
  const Product& product;
  uint32_t row;  // of the product, or beyond its last
};
constexpr WideRow row_of_tile(const Products& products, uint32_t tile, uint32_t row) {
  if (products.in_pairs)
    return {products.list[row / 8 % 2], tile * pair_rows + row / 16 * 8 + row % 8};
  const Product& product = product_of_tile(products, tile);
  return {product, (tile - product.begin) * wide_rows + row};
}

// Tiles [first, first + row_tiles) of the products' rows, and all inputs.
struct WideSlice {
  uint32_t first, row_tiles, steps, n;  // steps: tiles of columns
  const uint8_t *weights, *inputs;      // [row_tiles or tiles of inputs][steps] tiles of halves
  const float* input_scales;            // [n]
};

// Activations of products in pairs that have kernels.
#define KVASIR_WIDE_ACTIVATIONS(_) _(silu) _(gelu)

// What becomes of products in pairs: f(first) * second, checked, then rounded to out.
struct WideGated {
  DeviceCheck check;
  DeviceActivations out;
};

}  // namespace kvasir::cuda
