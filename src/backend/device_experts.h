// Arguments of a GPU's operations on experts. Plain data: kernels take it by value. All pointers
// are device.
//
// A choice is one of the `used` experts of a token, the best first. Choices of one token stay in
// order, a row each. Those of several tokens are grouped: rows of an expert follow one another, in
// the order of the choices. So each expert's weights are read once. Without the arrays of groups
// the choices of several tokens stay in order too, and each row has the bits of one token alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/gating.h"

namespace kvasir {

// The router of a layer, as engine/expert_routing.h has it.
struct DeviceRouting {
  static constexpr uint32_t max_experts = 1024;
  uint32_t experts, used, groups, groups_used;
  Gating gating;
  bool normalise, chooses_by_logits;
  float scale;
  const float* bias;  // [experts], or null
};

struct DeviceChoice {
  uint32_t expert;
  float weight;
};

// At most max_rows rows of one expert, which one block multiplies; rows 0: none.
struct DeviceExpertTile {
  static constexpr uint32_t max_rows = 64;
  uint32_t expert, first, rows;

  static constexpr std::size_t max_count(uint32_t n, uint32_t used, uint32_t experts) {
    const std::size_t choices = std::size_t{n} * used;
    return std::min<std::size_t>(choices, experts) + choices / max_rows;
  }
};

// The choices of a step's tokens. The last three arrays are null where choice i has row i, as those
// of one token have, and those of several tokens that are computed as if alone.
struct DeviceExpertRows {
  uint32_t n = 0, used = 0, experts = 0;
  DeviceChoice* chosen = nullptr;     // [n][used]
  uint32_t* row_of = nullptr;         // [n][used] of each choice
  uint32_t* choice_of = nullptr;      // [n * used] of each row
  DeviceExpertTile* tiles = nullptr;  // [DeviceExpertTile::max_count()]

  constexpr bool in_order() const { return !row_of; }
  constexpr std::size_t choices() const { return std::size_t{n} * used; }
  constexpr std::size_t max_tiles() const { return DeviceExpertTile::max_count(n, used, experts); }
};

// out.f32 = factor * (sum over the choices of a token of weight * row
//                     + shared * sigmoid(shared_gate)); or it is added to out.f32.
struct DeviceExpertSum {
  const float* rows = nullptr;         // [n * used][cols]
  bool weighs = true;                  // false: weights are 1
  const float* shared = nullptr;       // [n][cols], or null
  const float* shared_gate = nullptr;  // [n]; null: 1 in place of the sigmoid
  float factor = 1;
  bool add = false;
};

}  // namespace kvasir
