// The second moment of vectors.
#pragma once

#include "backend/kernels.h"

namespace kvasir {

// moment [dim][dim] += the sum of x x^T over n rows x: [n][dim], computed in float, which
// magnitudes of 1e19 and more exceed. dim is padded (PageShape::dim). product: [dim][dim], scratch.
inline void add_moment(const Kernels& kernels, const float* x, uint32_t n, uint32_t dim,
                       float* product, double* moment) {
  // Rows of a strip. The product is symmetric: only what is right of each strip's diagonal is
  // computed.
  constexpr uint32_t strip = 32;
  for (uint32_t i = 0; i < dim; i += strip)
    kernels.multiply(x + i, 1, dim, strip, x + i, dim, dim - i, n, product + i * dim + i, dim);
  for (uint32_t i = 0; i < dim; ++i)
    for (uint32_t j = 0; j < dim; ++j)
      moment[i * dim + j] +=
          static_cast<double>(j / strip >= i / strip ? product[i * dim + j] : product[j * dim + i]);
}

}  // namespace kvasir
