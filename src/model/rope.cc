#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace kvasir {
namespace {

// The dimension whose wave turns `rotations` times in the original context (YaRN, equation 17
// solved for the dimension).
double yarn_dimension(const RopeConfig& c, double rotations) {
  return c.dim *
         std::log(static_cast<double>(c.original_context) / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(c.base));
}

}  // namespace

Rope::Rope(const RopeConfig& c, std::span<const float> divisors) : frequency_(c.dim / 2) {
  const bool yarn = c.scaling == RopeScaling::yarn;
  double low = yarn ? yarn_dimension(c, c.yarn_beta_fast) : 0;
  double high = yarn ? yarn_dimension(c, c.yarn_beta_slow) : 0;
  if (c.rounds_range) low = std::floor(low), high = std::ceil(high);
  low = std::max(0.0, low), high = std::min(c.dim - 1.0, high);
  for (uint32_t i = 0; i < c.dim / 2; ++i) {
    double f = std::pow(c.base, -2.0 * i / c.dim);
    if (!divisors.empty()) f /= static_cast<double>(divisors[i]);
    if (c.scaling == RopeScaling::linear) f /= c.factor;
    if (yarn) {  // fast waves stay, slow ones are interpolated, a ramp between (equation 18)
      const double ramp = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
      f = f / c.factor * ramp + f * (1 - ramp);
    }
    frequency_[i] = f;
  }
  magnitude_ = c.magnitude;
}

void Rope::angles(uint64_t first, uint32_t n, float* cos, float* sin) const {
  const std::size_t half = frequency_.size();
  for (uint32_t t = 0; t < n; ++t) {
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(first + t) * frequency_[i];
      cos[t * half + i] = static_cast<float>(std::cos(angle) * magnitude_);
      sin[t * half + i] = static_cast<float>(std::sin(angle) * magnitude_);
    }
  }
}

void Rope::turn(uint64_t tokens, float* cos, float* sin) const {
  for (std::size_t i = 0; i < frequency_.size(); ++i) {
    const double angle = static_cast<double>(tokens) * frequency_[i];
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
}

}  // namespace kvasir
