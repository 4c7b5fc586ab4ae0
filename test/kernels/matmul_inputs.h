// Inputs and tolerances of the tests of matrix products.
#pragma once

#include <algorithm>

#include "reference/reference.h"
#include "support.h"
#include "tolerances.h"
#include "weights.h"

namespace kvasir::test {

struct Inputs {
  Inputs(const Kernels& k, uint32_t n, uint32_t cols, Random& random)
      : x(std::size_t{n} * cols), q(x.size()), scale(x.size() / 32), sums(x.size() / 16) {
    const float mean = random.uniform(-1, 1);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = mean + random.normal();
    if (cols % 32 == 0) k.quantize(x.data(), n, cols, q.data(), scale.data(), sums.data());
    view = {n, cols, x.data(), q.data(), scale.data(), sums.data()};
  }
  Guarded<float> x;
  Guarded<int8_t> q;
  Guarded<float> scale;
  Guarded<int16_t> sums;
  Activations view;
};

// How many outputs of `quantize` are not the nearest step of the block's largest magnitude, its
// scale or the sums of its quants. Blocks below 1e-30 are zeros.
inline uint32_t quantize_differences(const float* x, std::size_t size, const int8_t* q,
                                     const float* scale, const int16_t* sums) {
  uint32_t differences = 0;
  for (std::size_t b = 0; b < size / 32; ++b) {
    float amax = 0;
    for (std::size_t i = 0; i < 32; ++i) amax = std::max(amax, std::fabs(x[b * 32 + i]));
    const bool is_zero = amax < 1e-30f;
    differences += scale[b] != (is_zero ? 0.0f : amax / 127.0f);
    int total[2] = {};
    for (std::size_t i = 0; i < 32; ++i) {
      const float exact = is_zero ? 0.0f : x[b * 32 + i] * (127.0f / amax);
      differences += int{q[b * 32 + i]} != static_cast<int>(std::nearbyint(exact));
      total[i / 16] += q[b * 32 + i];
    }
    differences += sums[2 * b] != total[0];
    differences += sums[2 * b + 1] != total[1];
  }
  return differences;
}

// out[i * rows + r] = sum_c |w[r][c] x[i][c]|
inline std::vector<double> magnitudes(const WeightView& w, const Activations& x) {
  std::vector<double> out(std::size_t{x.n} * w.rows), weights(w.cols);
  for (uint32_t r = 0; r < w.rows; ++r) {
    reference::dequantize_row(w, r, weights.data());
    for (std::size_t i = 0; i < x.n; ++i) {
      for (uint32_t c = 0; c < w.cols; ++c)
        out[i * w.rows + r] += std::fabs(weights[c] * double{x.f32[i * w.cols + c]});
    }
  }
  return out;
}

// The largest error of y, [n][stride], relative to the sum of the magnitudes of its products.
inline double product_error(const WeightView& w, const Activations& x, const float* y,
                            std::size_t stride) {
  std::vector<double> expected(x.n * stride);
  reference::matmul(w, x, expected.data(), stride);
  const std::vector<double> magnitude = magnitudes(w, x);
  double worst = 0;
  for (std::size_t i = 0; i < x.n; ++i) {
    for (std::size_t r = 0; r < w.rows; ++r) {
      const std::size_t at = i * stride + r;
      const double error =
          std::fabs(double{y[at]} - expected[at]) / (magnitude[i * w.rows + r] + 1e-30);
      worst = error <= worst ? worst : error;  // a NaN wins
    }
  }
  return worst;
}

}  // namespace kvasir::test
