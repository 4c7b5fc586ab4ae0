// The hyper-parameters of a model, read from GGUF metadata and checked: after read() every field is
// in its range and they agree.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "gguf/gguf.h"

namespace kvasir {

enum class Architecture : uint32_t { llama, qwen2, qwen3 };

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

// What attention knows of a model.
struct HeadShape {
  uint32_t layers = 0;
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;

  uint32_t group() const { return heads / kv_heads; }  // query heads a KV head serves
  uint32_t q_width() const { return heads * head_dim; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
};

struct ModelConfig : HeadShape {
  Architecture architecture = Architecture::llama;
  std::string architecture_name;
  std::string name;  // "" when the file has none
  uint32_t width = 0;
  uint32_t feed_forward = 0;
  uint32_t vocabulary = 0;
  uint64_t context = 0;
  float rms_epsilon = 0;
  RopeConfig rope;

  // Code::unsupported for a feature that is not supported, Code::corrupt for what is missing or
  // contradicts itself.
  static Status read(const Gguf& gguf, ModelConfig* out);
};

}  // namespace kvasir
