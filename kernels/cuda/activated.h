// Activations, as Kernels::activate has them but for the device's approximations of exponentials
// and quotients.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "backend/activation.h"

namespace kvasir::cuda {
namespace {

__device__ inline float tanh_of(float x) {
  const float e = __expf(-2.0f * fabsf(x));
  return copysignf(__fdividef(1.0f - e, 1.0f + e), x);
}

// A comparison with NaN is false: NaN stays.
__device__ inline float clamped(float x, float low, float high) {
  return x > high ? high : x < low ? low : x;
}

__device__ inline float activated(Activation f, float gate, float up) {
  switch (f) {
    case Activation::silu:
      return __fdividef(gate, 1.0f + __expf(-gate)) * up;
    case Activation::gelu:
      return 0.5f * gate *
             (1.0f + tanh_of(0.797884561f * (gate + 0.044715f * gate * gate * gate))) * up;
    case Activation::relu_squared:
      gate = gate < 0.0f ? 0.0f : gate;
      return gate * gate * up;
    case Activation::clamped_silu:
      gate = clamped(gate, -INFINITY, 7.0f);
      return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (clamped(up, -7.0f, 7.0f) + 1.0f);
  }
  return 0.0f;
}

}  // namespace
}  // namespace kvasir::cuda
