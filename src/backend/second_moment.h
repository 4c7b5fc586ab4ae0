// The second moment of vectors.
#pragma once

#include "backend/kernels.h"

namespace kvasir {

// moment [dim][dim] += the sum of x x^T of n rows x [n][dim], found in float, which those of
// magnitudes of 1e19 and more exceed; dim as pages have it. product: [dim][dim], scratch.
inline void add_moment(const Kernels& kernels, const float* x, uint32_t n, uint32_t dim,
                       float* product, double* moment) {
  // of rows of the product: what is left of them is the same as what is right of others
  constexpr uint32_t strip = 32;
  for (uint32_t i = 0; i < dim; i += strip)
    kernels.multiply(x + i, 1, dim, strip, x + i, dim, dim - i, n, product + i * dim + i, dim);
  for (uint32_t i = 0; i < dim; ++i)
    for (uint32_t j = 0; j < dim; ++j)
      moment[i * dim + j] +=
          static_cast<double>(j / strip >= i / strip ? product[i * dim + j] : product[j * dim + i]);
}

}  // namespace kvasir
