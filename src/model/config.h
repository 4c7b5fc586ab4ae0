// The hyper-parameters of a model, read from GGUF metadata and checked: after read() every field is
// in its range and they agree.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "gguf/gguf.h"
#include "model/architectures.h"
#include "model/layer_config.h"

namespace kvasir {

enum class RopeScaling : uint32_t { none, linear, yarn, longrope };

struct RopeConfig {
  uint32_t dim = 0;  // dimensions of a head that rotate, even
  double base = 10000;
  bool neox = false;     // pairs (i, i + dim/2) instead of (2i, 2i + 1)
  bool divisors = true;  // "rope_freqs.weight" divides its frequencies, where the file has it
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;  // context extension: positions are divided by it
  uint64_t original_context = 0;
  double magnitude = 1;    // of cosines and sines
  double score_scale = 1;  // of scores, where a model of latent attention scales them
  // YaRN, arXiv 2309.00071, section 3.2
  double yarn_beta_fast = 32, yarn_beta_slow = 1;
  bool rounds_range = true;  // the range of the ramp, to whole dimensions
};

constexpr uint32_t max_streams = 16;  // of a token

// The shape of attention, the same in every layer of a store.
struct HeadShape {
  uint32_t layers = 0;
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;

  uint32_t group() const { return heads / kv_heads; }  // query heads per KV head
  uint32_t q_width() const { return heads * head_dim; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
};

// Queries are multiplied by 1 + scale * ln(floor((position + offset) / length) + 1).
struct Temperature {
  float scale = 0;  // 0: none
  uint64_t length = 1, offset = 0;

  float at(uint64_t position) const {
    const uint64_t turns = (position + offset) / length;
    return 1 + scale * static_cast<float>(std::log(static_cast<double>(turns + 1)));
  }
};

// HeadShape describes the layers that keep the keys and values of every token: those that a
// strategy selects in. `windows` describes the layers that see a window.
struct ModelConfig : HeadShape {
  const Architecture* architecture = nullptr;  // a row of the table; static storage
  std::string name;                            // "" when the file has none
  HeadShape windows;                           // windows.layers 0: none
  uint64_t window = 0;                         // of these
  bool chunked = false;                        // LayerConfig::chunked of these
  RecurrentConfig recurrent;                   // of the layers that have a state
  uint32_t recurrent_layers = 0;
  uint32_t width = 0;
  uint32_t feed_forward = 0;  // of the widest dense network
  uint32_t vocabulary = 0;
  uint64_t context = 0;         // tokens
  uint32_t layer_input = 0;     // numbers of a token that each layer gets for itself (Gemma 3n, 4)
  uint32_t streams = 1;         // of a token: more in models with AltUp (engine/altup.h)
  uint32_t skipped_layers = 0;  // behind the last layer: they predict more than one token
  NormKind norm = NormKind::rms;
  float norm_epsilon = 0;
  float embedding_scale = 1, residual_scale = 1, logit_scale = 1;  // factors
  float attention_softcap = 0, final_softcap = 0;  // c tanh(x / c) of scores and logits; 0: none
  Temperature temperature;
  std::vector<RopeConfig> ropes;           // sets of RoPE parameters
  std::vector<LayerConfig> layer_configs;  // [depth()]

  uint32_t depth() const { return static_cast<uint32_t>(layer_configs.size()); }
  const LayerConfig& layer(uint32_t l) const { return layer_configs[l]; }
  // Widths of the widest layer.
  uint32_t max_q_width() const { return std::max(q_width(), windows.q_width()); }
  uint32_t max_kv_width() const { return std::max(kv_width(), windows.kv_width()); }
  bool has_longrope() const;
  // Whether layers attend the keys and values of earlier ones.
  bool shares_kv() const {
    return std::any_of(layer_configs.begin(), layer_configs.end(),
                       [](const LayerConfig& l) { return !l.writes_kv; });
  }
  // Floats of a sequence's state: of all recurrent layers.
  std::size_t state_size() const { return recurrent_layers * recurrent.state_size(); }
  // Cosines of a token, of all RoPE sets before `set`; of all where set is ropes.size().
  uint32_t angles_before(std::size_t set) const {
    uint32_t n = 0;
    for (std::size_t i = 0; i < set; ++i) n += ropes[i].dim / 2;
    return n;
  }
  uint32_t angles() const { return angles_before(ropes.size()); }  // cosines of a token

  // Code::unsupported for a feature that is not supported, Code::corrupt for what is missing or
  // contradicts itself.
  static Status read(const Gguf& gguf, ModelConfig* out);
};

}  // namespace kvasir
