// DeviceInputs of a GPU's operations and what they find, for tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "device_support.h"
#include "reference/reference.h"
#include "weights.h"

namespace kvasir::test {

struct DeviceInputs {
  DeviceInputs(uint32_t n, uint32_t cols, Random& random)
      : host(std::size_t{n} * cols), x(host.size()), q(host.size()), scale(ceil(32)),
        sums(ceil(16)), view{n, cols, x.data(), q.data(), scale.data(), sums.data()} {
    const float mean = random.uniform(-1, 1);
    for (float& v : host) v = mean + random.normal();
    x.put(host.data());
  }
  std::size_t ceil(std::size_t of) const { return (host.size() + of - 1) / of; }
  std::vector<float> host;
  Memory<float> x;
  Memory<int8_t> q;
  Memory<float> scale;
  Memory<int16_t> sums;
  DeviceActivations view;
};

constexpr uint32_t no_mark = UINT32_MAX;

// What finds numbers that are too large, and its mark.
struct Found {
  Memory<uint32_t> first{&no_mark, 1};
  DeviceCheck check(uint32_t mark) { return {1e30f, mark, first.data()}; }
  uint32_t get() { return first.get()[0]; }
};

// The reference's product of the very inputs that the device rounded, added to the former output
// (null: nothing); errors relative to the sums of magnitudes.
inline double product_error(const WeightView& w, DeviceInputs& x, bool quantised, const float* bias,
                            const float* before, const float* y) {
  const Activations view{x.view.n,
                         w.cols,
                         x.host.data(),
                         quantised ? x.q.get().data() : nullptr,
                         quantised ? x.scale.get().data() : nullptr,
                         quantised ? x.sums.get().data() : nullptr};
  std::vector<double> expected(std::size_t{x.view.n} * w.rows), weights(w.cols);
  reference::matmul(w, view, expected.data(), w.rows);
  double worst = 0;
  for (uint32_t r = 0; r < w.rows; ++r) {
    reference::dequantize_row(w, r, weights.data());
    for (std::size_t i = 0; i < x.view.n; ++i) {
      const double former =
          (bias ? double{bias[r]} : 0.0) + (before ? double{before[i * w.rows + r]} : 0.0);
      double magnitude = 1e-30 + (bias ? std::fabs(double{bias[r]}) : 0.0) +
                         (before ? std::fabs(double{before[i * w.rows + r]}) : 0.0);
      for (uint32_t c = 0; c < w.cols; ++c)
        magnitude += std::fabs(weights[c] * double{x.host[i * w.cols + c]});
      const double error =
          std::fabs(double{y[i * w.rows + r]} - (expected[i * w.rows + r] + former)) / magnitude;
      worst = error <= worst ? worst : error;  // a not-a-number wins
    }
  }
  return worst;
}

inline std::vector<float> normals(std::size_t n, Random& random) {
  std::vector<float> x(n);
  for (float& v : x) v = random.normal();
  return x;
}

}  // namespace kvasir::test
