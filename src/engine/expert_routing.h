// Which experts a token uses, and with which weights.
#pragma once

#include <cstdint>

#include "model/layer_config.h"

namespace kvasir {

struct ExpertChoice {
  uint32_t expert;
  float weight;  // of its output in the sum
};

// Chooses `used` different experts by a token's logits, the best first; the lowest number wins a
// tie. logits: [count], finite; overwritten by the probabilities. bias: [count], or null. scores:
// scratch, [2 * count]. out: [used].
void choose_experts(const ExpertConfig& config, const float* bias, float* logits, float* scores,
                    ExpertChoice* out);

}  // namespace kvasir
