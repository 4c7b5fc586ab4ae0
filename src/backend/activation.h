// The nonlinear function of a feed-forward network.
#pragma once

#include <cstdint>

namespace kvasir {

enum class Activation : uint8_t {
  silu,          // x sigmoid(x)
  gelu,          // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  relu_squared,  // max(x, 0)^2
  // Of a gated network: with g = min(gate, 7) and u = clamp(up, -7, 7), g sigmoid(1.702 g) (u + 1).
  clamped_silu,
};

}  // namespace kvasir
