// The hyper-parameters of a model, read from GGUF metadata and checked: after read() every field is
// in its range and they agree.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "gguf/gguf.h"
#include "model/architectures.h"
#include "model/layer_config.h"

namespace kvasir {

enum class RopeScaling : uint32_t { none, linear, yarn };

struct RopeConfig {
  uint32_t dim = 0;  // dimensions of a head that rotate, even
  double base = 10000;
  bool neox = false;  // pairs (i, i + dim/2) instead of (2i, 2i + 1)
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;  // context extension: positions are divided by it
  uint64_t original_context = 0;
  double yarn_attention_factor = 1;
  double yarn_beta_fast = 32, yarn_beta_slow = 1;  // YaRN, arXiv 2309.00071, section 3.2
};

// The shape of attention, the same in every layer.
struct HeadShape {
  uint32_t layers = 0;
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;

  uint32_t group() const { return heads / kv_heads; }  // query heads per KV head
  uint32_t q_width() const { return heads * head_dim; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
};

// The heads of HeadShape are those of every layer: the store has one shape.
struct ModelConfig : HeadShape {
  const Architecture* architecture = nullptr;  // a row of the table; static storage
  std::string name;                            // "" when the file has none
  uint32_t width = 0;
  uint32_t feed_forward = 0;  // of the widest layer
  uint32_t vocabulary = 0;
  uint64_t context = 0;  // tokens
  float rms_epsilon = 0;
  std::vector<RopeConfig> ropes;           // sets of RoPE parameters
  std::vector<LayerConfig> layer_configs;  // [layers]

  const LayerConfig& layer(uint32_t l) const { return layer_configs[l]; }
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
