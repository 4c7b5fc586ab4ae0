// The elementwise operations in scalar double precision.
#include <algorithm>
#include <cmath>
#include <numbers>

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

void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, uint32_t n,
                uint32_t cols, double* y) {
  for (std::size_t i = 0; i < n; ++i) {
    const float* row = x + i * cols;
    double sum = 0, squares = 0;
    for (std::size_t c = 0; c < cols; ++c) sum += double{row[c]};
    const double mean = sum / cols;
    for (std::size_t c = 0; c < cols; ++c) squares += std::pow(double{row[c]} - mean, 2);
    const double factor = 1.0 / std::sqrt(squares / cols + double{epsilon});
    for (std::size_t c = 0; c < cols; ++c)
      y[i * cols + c] =
          (double{row[c]} - mean) * factor * double{weight[c]} + (bias ? double{bias[c]} : 0.0);
  }
}

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double activated(Activation f, double gate, double up) {
  switch (f) {
    case Activation::silu:
      return gate * sigmoid(gate) * up;
    case Activation::gelu:
      return gate / 2 *
             (1 +
              std::tanh(std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate))) *
             up;
    case Activation::relu_squared:
      return std::pow(std::max(gate, 0.0), 2) * up;
    case Activation::clamped_silu:
      gate = std::min(gate, 7.0);
      return gate * sigmoid(1.702 * gate) * (std::clamp(up, -7.0, 7.0) + 1);
  }
  return 0;
}

}  // namespace

void activate(Activation f, const float* gate, const float* up, std::size_t n, double* y) {
  for (std::size_t i = 0; i < n; ++i)
    y[i] = activated(f, double{gate[i]}, up ? double{up[i]} : 1.0);
}

}  // namespace kvasir::reference
