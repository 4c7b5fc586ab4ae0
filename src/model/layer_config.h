// The parts of a layer. A model is a list of layers, each a mixer and a feed-forward network:
//
//   x += mixer(norm(x))
//   x += ffn(norm(x))
//
// Executors and weights depend on the LayerConfig of a layer, never on the architecture.
#pragma once

#include <cstdint>

namespace kvasir {

// The block that mixes tokens.
enum class MixerKind : uint8_t {
  attention,
  recurrent,  // a state of fixed size in place of keys and values; not supported
};

enum class FfnKind : uint8_t {
  swiglu,   // W_down (silu(W_gate x) * W_up x)
  experts,  // a router chooses some of many; not supported
};

// The norms of a mixer and of a feed-forward network.
enum class NormPlacement : uint8_t {
  before,  // x += f(norm(x))
  after,   // x += norm(f(x))
  both,    // x += norm(f(norm(x)))
};

// RMS norm of queries and keys, before RoPE.
enum class QkNorm : uint8_t {
  none,
  head,        // of each head; weights: [head_dim]
  projection,  // of all heads together; weights: [heads * head_dim], [kv_heads * head_dim]
};

struct LayerConfig {
  static constexpr uint32_t no_rope = UINT32_MAX;

  MixerKind mixer = MixerKind::attention;
  FfnKind ffn = FfnKind::swiglu;
  NormPlacement norms = NormPlacement::before;
  QkNorm qk_norm = QkNorm::none;
  bool biases = true;   // matrices may have biases
  uint32_t rope = 0;    // index of ModelConfig::ropes, or no_rope
  uint64_t window = 0;  // newest tokens that a query sees, itself included; 0: all
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t feed_forward = 0;

  bool norm_before() const { return norms != NormPlacement::after; }
  bool norm_after() const { return norms != NormPlacement::before; }
  bool has_rope() const { return rope != no_rope; }
  uint32_t q_width() const { return heads * head_dim; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
};

}  // namespace kvasir
