// How the logits of a router become the weights of experts.
#pragma once

#include <cstdint>

namespace kvasir {

enum class Gating : uint8_t {
  softmax,         // of all logits
  sigmoid,         // of each logit
  softmax_chosen,  // of the chosen logits
};

}  // namespace kvasir
