// The parts of a layer. A model is a list of layers, each a mixer and a feed-forward network:
//
//   x += mixer(norm(x))
//   x += ffn(norm(x))
//
// Executors and weights depend on the LayerConfig of a layer, never on the architecture.
#pragma once

#include <cstdint>

#include "backend/activation.h"
#include "backend/gating.h"
#include "backend/kernels.h"

namespace kvasir {

// The block that mixes tokens.
enum class MixerKind : uint8_t {
  attention,
  latent,     // attention whose keys and values are products of a small latent vector (MLA)
  recurrent,  // a state of fixed size in place of keys and values
  both,       // attention and a recurrent mixer of the same input; their outputs are added
  none,       // the layer is a feed-forward network
};

// What a recurrent mixer keeps of the tokens before.
enum class RecurrentKind : uint8_t {
  none,
  convolution,  // the newest inputs of a short convolution (LFM2)
  mamba,        // these, and a matrix for each head (Mamba-2, arXiv 2405.21060)
  delta_net,    // likewise, by the gated delta rule (arXiv 2412.06464)
};

// The shape of a recurrent mixer, the same in every layer of a model.
struct RecurrentConfig {
  RecurrentKind kind = RecurrentKind::none;
  uint32_t taps = 0;                  // of the convolution: inputs of an output
  uint32_t channels = 0;              // of the convolution
  uint32_t heads = 0, key_heads = 0;  // of values; of keys and queries
  uint32_t key_dim = 0, value_dim = 0;
  bool joint = false;  // one matrix makes the convolution's inputs and the gates (old Qwen3-Next)
  bool cyclic_keys = false;  // head h has key head h % key_heads instead of h / (heads / key_heads)

  uint32_t inner() const {  // numbers of a token that leave the state
    return kind == RecurrentKind::convolution ? channels : heads * value_dim;
  }
  uint32_t key_head(uint32_t head) const {
    return cyclic_keys ? head % key_heads : head / (heads / key_heads);
  }
  // Floats of a layer's state: the convolution's inputs, then the heads' matrices in panels.
  std::size_t inputs_size() const { return taps > 0 ? std::size_t{taps - 1} * channels : 0; }
  std::size_t matrix_size() const {
    return std::size_t{state_panels(value_dim)} * key_dim * state_panel;
  }
  std::size_t state_size() const { return inputs_size() + heads * matrix_size(); }
};

// Where the norms of a mixer and of a feed-forward network stand.
enum class NormPlacement : uint8_t {
  before,    // x += f(norm(x))
  after,     // x += norm(f(x))
  both,      // x += norm(f(norm(x)))
  parallel,  // y = norm(x); x += mixer(y) + ffn(y)
};

enum class NormKind : uint8_t {
  rms,    // x / sqrt(mean(x^2) + epsilon) * weight
  layer,  // (x - mean) / sqrt(variance + epsilon) * weight + bias, where there is a bias
};

// Norm of queries and keys, of the model's NormKind.
enum class QkNorm : uint8_t {
  none,
  head,        // of each head; weights: [head_dim]
  projection,  // of all heads together; weights: [heads * head_dim], [kv_heads * head_dim]
  own,         // of each head, with weights of its own: [heads][head_dim], [kv_heads][head_dim]
  plain,       // of each head, without weights
};

// A feed-forward network of which a router chooses some experts for each token:
//
//   p = gating(W_router x);  chosen = the `used` largest of p + selection bias
//   y = sum over chosen of weight_e expert_e(x) + shared(x);  weight_e = p_e, normalised, * scale
struct ExpertConfig {
  uint32_t count = 0;  // 0: one dense network
  uint32_t used = 0;
  uint32_t width = 0;         // of an expert
  uint32_t shared_width = 0;  // of the expert that every token uses; 0: none
  Gating gating = Gating::softmax;
  bool normalise = false;     // weights are divided by their sum
  float scale = 1;            // of the weights
  uint32_t groups = 1;        // equal runs of experts;
  uint32_t groups_used = 1;   // only those with the largest sums of their two best are chosen from
  bool weighs_input = false;  // the weight multiplies the expert's input
  bool chooses_by_logits = false;  // by the logits instead of p
  bool parallel_dense = false;     // the layer has a dense network too (Gemma 4)
};

// Attention whose keys and values are products of a latent vector c (MLA, arXiv 2405.04434, section
// 2.1). It is computed in the absorbed form, in which all heads share one key and c is its value:
//
//   q = W_q x, or W_q norm(W_qa x);  (c, k) = W_kv x;  c = norm(c)
//   key = (c, RoPE(k));  value = c;  query of head h = (W_kh^T q_h, RoPE(r_h)), q = (q_h, r_h)
//   output of head h = W_vh sum over tokens of a_t c_t
struct LatentConfig {
  uint32_t rank = 0;        // numbers of c; 0: the layer has none
  uint32_t query_rank = 0;  // numbers of W_qa x; 0: one matrix makes the queries
  uint32_t plain = 0;       // numbers of a head of queries without RoPE,
  uint32_t rotated = 0;     // and with it
  uint32_t values = 0;      // numbers of a head of the output
  bool joint = false;       // the rows of W_kh and of W_vh alternate in one matrix

  uint32_t query() const { return plain + rotated; }
};

struct LayerConfig {
  static constexpr uint32_t no_rope = UINT32_MAX;

  MixerKind mixer = MixerKind::attention;
  NormPlacement norms = NormPlacement::before;
  QkNorm qk_norm = QkNorm::none;
  bool qk_norm_after_rope = false;
  bool v_norm = false;       // values: RMS norm of each head, without weights
  bool v_is_k = false;       // values are the keys before their norm and RoPE
  bool biases = true;        // matrices may have biases
  bool sinks = false;        // each query head has one more logit, learned, without a value
  bool temperature = false;  // queries grow with the position: ModelConfig::temperature
  uint32_t rope = 0;         // index of ModelConfig::ropes, or no_rope
  uint64_t window = 0;       // newest tokens that a query sees, itself included; 0: all
  bool chunked = false;      // a query sees the tokens since the last multiple of `window` instead
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  float query_scale = 1;  // queries are multiplied by it; scores are q . k / sqrt(head_dim)
  // The place of its keys and values: a number among the layers without a window, or among those
  // with one.
  uint32_t kv = 0;
  bool writes_kv = true;      // false: it attends the keys and values of an earlier layer
  bool gates_output = false;  // attention's output is multiplied by sigmoid(gate); gates follow q
  uint32_t state = 0;         // the place of its state: a number among the layers that have one

  LatentConfig latent;  // of MixerKind::latent

  Activation activation = Activation::silu;
  bool gated = true;          // W_down (f(W_gate x) * W_up x); otherwise W_down f(W_up x)
  uint32_t feed_forward = 0;  // of the dense network
  float sparsity = 0;  // gate values less than so many standard deviations above the mean are 0
  ExpertConfig experts;

  bool norm_before() const { return norms != NormPlacement::after; }
  bool norm_after() const { return norms == NormPlacement::after || norms == NormPlacement::both; }
  bool is_parallel() const { return norms == NormPlacement::parallel; }
  bool has_attention() const {
    return mixer == MixerKind::attention || mixer == MixerKind::both || mixer == MixerKind::latent;
  }
  bool is_recurrent() const { return mixer == MixerKind::recurrent || mixer == MixerKind::both; }
  bool has_rope() const { return rope != no_rope; }
  bool is_windowed() const { return window > 0; }
  bool has_experts() const { return experts.count > 0; }
  bool has_dense() const { return feed_forward > 0 && (!has_experts() || experts.parallel_dense); }
  bool has_feed_forward() const { return has_dense() || has_experts(); }
  bool is_latent() const { return mixer == MixerKind::latent; }
  uint32_t q_width() const { return heads * head_dim; }
  uint32_t kv_width() const { return kv_heads * head_dim; }
  // Inputs of the matrix that ends the mixer.
  uint32_t o_width() const { return is_latent() ? heads * latent.values : q_width(); }
};

}  // namespace kvasir
