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
  const char* qkv = "attn_qkv";  // in place of the three: their rows, one after another
  const char* o = "attn_output";
  const char* q_norm = "attn_q_norm";
  const char* k_norm = "attn_k_norm";
  const char* sinks = "attn_sinks";
  const char* ffn_norm = "ffn_norm";
  const char* ffn_post_norm = "post_ffw_norm";
  const char* gate = "ffn_gate";
  const char* up = "ffn_up";  // without a gate in the file: the rows of the gate, then of up
  const char* down = "ffn_down";
  const char* output_norm = "output_norm";  // of the model
};

// Which numbers of a file scale the stream and the logits.
enum class Scales : uint8_t {
  none,
  cohere,    // logits are multiplied by logit_scale
  granite,   // embedding, residual and attention scales; logits are divided by logit_scale
  minicpm,   // the same without attention's, with defaults
  gemma,     // embeddings are multiplied by sqrt(width)
  minicpm3,  // constants
};

// The facts of an architecture that its files do not contain.
struct Architecture {
  const char* name;  // general.architecture

  bool rope_neox = false;  // RoPE pairs (i, i + dim/2) instead of (2i, 2i + 1)
  // Layers that differ from the others: 4 means layers 3, 7, 11 ...; 0 means none.
  uint32_t no_rope_every = 0;

  NormKind norm = NormKind::rms;
  NormPlacement norms = NormPlacement::before;
  QkNorm qk_norm = QkNorm::none;
  bool optional_qk_norm = false;  // a layer has it if the file has its weights
  bool qk_norm_after_rope = false;
  bool optional_ffn_norm = false;  // without it mixer and network are parallel
  bool biases = true;              // matrices may have biases
  bool sinks = false;

  Activation activation = Activation::silu;
  bool gated = true;
  Gating gating = Gating::softmax;  // where the file does not say
  bool normalises_experts = true;   // likewise
  bool expert_weighs_input = false, chooses_by_logits = false;
  bool gates_shared_expert = false;
  bool experts_share_width = false;  // without a width of their own: feed_forward_length / used

  // Of a model with windows: every n-th layer attends everything, where the file does not say.
  uint32_t full_every = 0;
  uint64_t window = 0;          // where the file does not say
  bool ignores_window = false;  // although the file says one
  bool chunked = false;
  bool rope_in_windows_only = false;  // of a model with windows
  bool scaling_in_full_only = false;  // RoPE scaling, of a model with windows
  bool freqs_in_full_only = false;    // "rope_freqs.weight" too
  double windowed_base = 0;           // of RoPE, where the file does not say; 0: rope.freq_base
  bool rounds_yarn = true;            // the range of YaRN's ramp to whole dimensions
  bool finetuned_rope = false;  // without rope.scaling.finetuned there is RoPE, with false none
  float attention_softcap = 0, final_softcap = 0;  // where the file does not say
  bool softcaps = false;                           // the file may say
  uint32_t wide_scale_layers = 0;  // with so many layers, scores are q . k / sqrt(width / heads)
  Scales scales = Scales::none;
  bool unit_scale = false;         // scores are q . k
  bool norms_values = false;       // LayerConfig::v_norm
  bool shares_kv = false;          // the file may have attention.shared_kv_layers
  bool keys_are_values = false;    // LayerConfig::v_is_k, of layers without attn_v
  bool dense_and_experts = false;  // ExpertConfig::parallel_dense
  bool scales_layers = false;      // the file may have layer_output_scale
  bool altup = false;              // several streams; a part of the gates may be 0 (Gemma 3n)
  float temperature = 0;           // of queries in layers without RoPE (Llama 4)
  bool latent = false;             // attention is MixerKind::latent

  // Layers that the file gives no KV heads are recurrent, or all but every n-th.
  RecurrentKind recurrent = RecurrentKind::none;
  uint32_t attention_every = 0;  // where the file does not say
  bool parallel_mixers = false;  // every layer attends too (Falcon-H1)
  bool single_blocks = false;    // a layer is a mixer or a feed-forward network (Nemotron-H)
  bool cyclic_keys = false;      // RecurrentConfig::cyclic_keys
  bool gates_attention = false;  // LayerConfig::gates_output

  TensorNames names = {};

  // Whether layer l is one of every n.
  static bool is_every(uint32_t n, uint32_t l) { return n > 0 && (l + 1) % n == 0; }
};

// Null when there is none.
const Architecture* find_architecture(std::string_view name);
std::string architecture_names();  // "llama, qwen2 and qwen3"

}  // namespace kvasir
