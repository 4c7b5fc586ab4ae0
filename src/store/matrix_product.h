// Products of matrices of any size by the kernels.
#pragma once

#include "backend/kernels.h"

namespace kvasir {

// Kernels::multiply, also for fewer columns than it takes.
inline void multiply(const Kernels& kernels, const float* a, std::size_t row, std::size_t step,
                     uint32_t rows, const float* b, std::size_t b_stride, uint32_t cols, uint32_t n,
                     float* out, std::size_t out_stride) {
  constexpr uint32_t min_cols = 16;
  if (cols >= min_cols)
    return kernels.multiply(a, row, step, rows, b, b_stride, cols, n, out, out_stride);
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < cols; ++c) {
      float sum = 0;
      for (uint32_t k = 0; k < n; ++k) sum += a[r * row + k * step] * b[k * b_stride + c];
      out[r * out_stride + c] = sum;
    }
}

// y += factor x, n floats.
inline void add_multiple(float factor, const float* __restrict x, uint32_t n, float* __restrict y) {
  for (uint32_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// y -= x, [rows][cols] of the given strides.
inline void subtract(const float* __restrict x, std::size_t x_stride, uint32_t rows, uint32_t cols,
                     float* __restrict y, std::size_t y_stride) {
  for (uint32_t r = 0; r < rows; ++r)
    for (uint32_t c = 0; c < cols; ++c) y[r * y_stride + c] -= x[r * x_stride + c];
}

}  // namespace kvasir
