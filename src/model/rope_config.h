// The RoPE sets of a model, read from GGUF metadata.
#pragma once

#include "gguf/gguf.h"
#include "model/config.h"
#include "model/schema.h"

namespace kvasir {

// Appends the sets to c->ropes: that of the layers that keep every token, then that of the layers
// with a window, where it differs. Layers are assigned to them. Needs c->layer_configs.
void read_ropes(const Gguf& gguf, Schema* schema, ModelConfig* c);

}  // namespace kvasir
