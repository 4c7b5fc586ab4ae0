// Shapes of well-known models, and the tensors and metadata of a model of such a shape.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gguf/tensor_type.h"

namespace kvasir {

// What the models of an architecture have in common.
struct Family {
  const char* architecture;
  const char* ffn_norm = "ffn_norm";
  float rope_base = 500000, rms_epsilon = 1e-5f;
  bool qk_norm = false;           // of each head
  bool biases_and_sinks = false;  // biases of attention and experts, sinks, YaRN
  bool sandwich = false;          // norms after attention and the network too; RoPE scaled by 8
  bool hybrid = false;            // three gated delta nets to one gated attention layer
  uint32_t window = 0;            // of the windowed layers; 0: none
};

struct Shape {
  const Family* family;
  // ffn: of an expert, where there are experts
  uint32_t layers, width, heads, kv_heads, head_dim, ffn, vocab, context, experts, used;
  bool mtp = false;  // with an MTP layer behind the last one
};

const std::map<std::string, Shape>& known_shapes();

// The delta nets of a hybrid: key and value heads, numbers of a head, and taps of the convolution.
constexpr uint32_t kDeltaKeyHeads = 16, kDeltaValueHeads = 32, kDeltaState = 128, kDeltaTaps = 4;
constexpr uint64_t kDeltaInner = uint64_t{kDeltaValueHeads} * kDeltaState;

enum class Fill {
  weights,  // normal numbers
  ones,     // norms
  taps,     // of a convolution: normal numbers of a larger deviation
  decay,    // -1 to -16
  step,     // -4: with these decays a state forgets half in 2 to 40 tokens
};

struct Tensor {
  std::string name;
  std::vector<uint64_t> dims;  // the contiguous one first
  TensorType type;
  Fill fill;

  uint64_t elements() const;
  uint64_t bytes() const;
};

struct TensorTypes {
  TensorType matrices, embedding, experts;
};

std::vector<Tensor> list_tensors(const Shape& shape, const TensorTypes& types, bool untied);

// Receives the metadata of a shape; names have no prefix of the architecture.
struct ShapeKeys {
  std::function<void(const char* name, uint32_t value)> number;
  std::function<void(const char* name, float value)> real;
  std::function<void(const char* name, const char* value)> text;
  std::function<void(const char* name, const std::vector<int32_t>& values)> numbers;
};

void list_keys(const Shape& shape, const ShapeKeys& keys);

}  // namespace kvasir
