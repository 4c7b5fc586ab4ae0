// The architectures that Kvasir runs, a row each. A new architecture of known features is a new
// row, and a fixture of the tests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "model/layer_config.h"

namespace kvasir {

// Names of a layer's tensors, without "blk.N." and ".weight". A LayerConfig says which exist.
struct TensorNames {
  const char* mixer_norm = "attn_norm";
  const char* mixer_post_norm = "post_attention_norm";
  const char* q = "attn_q";
  const char* k = "attn_k";
  const char* v = "attn_v";
  const char* o = "attn_output";
  const char* q_norm = "attn_q_norm";
  const char* k_norm = "attn_k_norm";
  const char* ffn_norm = "ffn_norm";
  const char* ffn_post_norm = "post_ffw_norm";
  const char* gate = "ffn_gate";
  const char* up = "ffn_up";
  const char* down = "ffn_down";
};

// The facts of an architecture that its files do not contain.
struct Architecture {
  const char* name;        // general.architecture
  bool rope_neox = false;  // RoPE pairs (i, i + dim/2) instead of (2i, 2i + 1)
  NormPlacement norms = NormPlacement::before;
  QkNorm qk_norm = QkNorm::none;
  bool biases = true;  // matrices may have biases
  // Layers that differ from the others: 4 means layers 3, 7, 11 ...; 0 means none.
  uint32_t no_rope_every = 0;
  uint32_t full_every = 0;  // of a model with windows: layers that attend everything
  TensorNames names = {};

  // Whether layer l is one of every n.
  static bool is_every(uint32_t n, uint32_t l) { return n > 0 && (l + 1) % n == 0; }
};

// Null when there is none.
const Architecture* find_architecture(std::string_view name);
std::string architecture_names();  // "llama, qwen2 and qwen3"

}  // namespace kvasir
