// The elementwise operations in scalar double precision.
#include <cmath>

#include "reference.h"

namespace kvasir::reference {

void rms_norm(const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols,
              double* y) {
  for (std::size_t i = 0; i < n; ++i) {
    const float* row = x + i * cols;
    double sum = 0;
    for (std::size_t c = 0; c < cols; ++c) sum += double{row[c]} * double{row[c]};
    const double factor = 1.0 / std::sqrt(sum / cols + double{epsilon});
    for (std::size_t c = 0; c < cols; ++c)
      y[i * cols + c] = double{row[c]} * factor * double{weight[c]};
  }
}

void rope(double* x, uint32_t n_heads, std::size_t stride, uint32_t rotary_dim, const float* cos,
          const float* sin, bool neox) {
  const std::size_t half = rotary_dim / 2;
  for (std::size_t h = 0; h < n_heads; ++h) {
    double* head = x + h * stride;
    for (std::size_t i = 0; i < half; ++i) {
      double* a = head + (neox ? i : 2 * i);
      double* b = head + (neox ? i + half : 2 * i + 1);
      const double c = double{cos[i]}, s = double{sin[i]}, a0 = *a, b0 = *b;
      *a = a0 * c - b0 * s;
      *b = a0 * s + b0 * c;
    }
  }
}

void swiglu(const float* gate, const float* up, std::size_t n, double* y) {
  for (std::size_t i = 0; i < n; ++i)
    y[i] = double{gate[i]} / (1.0 + std::exp(-double{gate[i]})) * double{up[i]};
}

}  // namespace kvasir::reference
