// Rotary position embeddings (RoFormer, arXiv 2104.09864): the angles of each position, with
// context extension.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.h"
#include "model/config.h"

namespace kvasir {

class Rope {
 public:
  Rope() = default;
  // divisors: [dim / 2] from the file (Llama 3, longrope), or empty.
  Rope(const RopeConfig& config, std::span<const float> divisors);

  uint32_t dim() const { return static_cast<uint32_t>(frequency_.size()) * 2; }
  // cos, sin: [n][dim / 2] of positions first .. first + n - 1.
  void angles(uint64_t first, uint32_t n, float* cos, float* sin) const;
  // cos, sin: [dim / 2] that turn a query by so many tokens more; of magnitude 1.
  void turn(uint64_t tokens, float* cos, float* sin) const;

 private:
  Array<double> frequency_;  // [dim / 2] radians a token
  double magnitude_ = 1;     // of cosines and sines
};

}  // namespace kvasir
