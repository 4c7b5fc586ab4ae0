// Calls of the matrix product as the engine cuts them.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <memory>

#include "backend/kernels.h"
#include "support.h"

namespace kvasir::test {

// y of all rows, computed in tasks of `task_rows` rows; [n][rows] with `gap` untouched floats after
// each row of y.
inline std::unique_ptr<Guarded<float>> multiply(const Kernels& k, const WeightView& w,
                                                const Activations& x, uint32_t task_rows,
                                                std::size_t gap = 0) {
  const std::size_t stride = w.rows + gap;
  auto y = std::make_unique<Guarded<float>>(x.n * stride);
  Guarded<std::byte> scratch(k.matmul_scratch(w.type, x.method));
  for (uint32_t r = 0; r < w.rows; r += task_rows) {
    const uint32_t end = r + task_rows < w.rows ? r + task_rows : w.rows;
    k.matmul(w, x, y->data(), stride, r, end, scratch.data());
  }
  CHECK(y->guards_intact());
  CHECK(scratch.guards_intact());
  for (std::size_t i = 0; i < x.n; ++i)
    for (std::size_t g = w.rows; g < stride; ++g) CHECK(std::isnan((*y)[i * stride + g]));
  return y;
}

}  // namespace kvasir::test
