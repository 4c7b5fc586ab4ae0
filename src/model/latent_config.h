// The sizes of latent attention (MLA), read from GGUF metadata.
#pragma once

#include "gguf/gguf.h"
#include "model/config.h"
#include "model/layer_config.h"
#include "model/schema.h"

namespace kvasir {

// Fills the mixer of a layer, which has its number of heads. `width`: of the model.
void read_latent(const Gguf& gguf, Schema* schema, uint32_t width, LayerConfig* layer);
// Scores are q . k times this.
double latent_scale(const LatentConfig& latent, const RopeConfig& rope);

}  // namespace kvasir
