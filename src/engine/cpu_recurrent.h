// Mixers with a state of fixed size on the CPU. y = norm(x), state: of all tokens before.
//
//   short convolution   b, c, u = W_in y;   out = W_out (c * conv(b * u))
//   Mamba-2             z, u, dt = W_in y;  x, B, C = silu(conv(u) + bias);  per head
//                       d = softplus(dt + bias), H = exp(d a) H + B (d x)^T, o = H^T C + skip x
//                       out = W_out norm(o * silu(z))
//   gated delta net     u = W_in y, z = W_gate y;  q, k, v = silu(conv(u));  q, k: of length 1
//                       beta = sigmoid(W_beta y), g = exp(a softplus(W_alpha y + bias));  per head
//                       M = g M, M += k (beta (v - M^T k))^T, o = M^T q / sqrt(key_dim)
//                       out = W_out (norm(o) * silu(z))
//
// A token's state depends on its inputs and on the state before, in the same order of sums for any
// division of a text into steps.
#pragma once

#include <cstdint>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "engine/cpu_products.h"
#include "model/model.h"
#include "store/recurrent_state.h"

namespace kvasir {

constexpr float l2_epsilon = 1e-6f;  // of the norm of keys and queries

class CpuRecurrent {
 public:
  // All arguments must outlive it.
  CpuRecurrent(const Model& model, ThreadPool* pool, CpuProducts* products);

  // Makes room for steps of n tokens. Throws std::bad_alloc.
  void resize(uint32_t n);
  // For a step of n tokens. open: only the first ones may stay. Throws std::bad_alloc.
  void begin(uint32_t n, bool open, RecurrentState* states, const CancelLatch& cancel);
  // The mixer of a layer. y: [n][width]. out: [n - first][width], of tokens [first, n); may be y.
  // The layer's next state becomes that after the step. False: a number is too large or NaN, or
  // one of the state is NaN or infinity.
  bool run(uint32_t layer, const float* y, uint32_t first, float* out);
  // After all layers of an open step: the next states become those after its first n tokens.
  void keep_first(uint32_t n);

 private:
  // What the next state of a layer follows from. An open step has it of each layer.
  struct Inputs {
    float* in;            // [n][channels]
    float *decay, *rate;  // [n][heads]
  };
  Inputs inputs_of(uint32_t layer, uint32_t n) const;  // of a step of n tokens
  void next_state(uint32_t layer);
  void convolve(uint32_t layer, bool silu);
  void short_convolution(uint32_t layer, const float* y);
  void mamba(uint32_t layer, const float* y);
  void delta_net(uint32_t layer, const float* y);
  void split_joint();
  void mamba_rates(const RecurrentWeights& w);
  void delta_rates(const RecurrentWeights& w);
  void normalise_keys();
  void advance(uint32_t layer, std::size_t values, std::size_t keys, std::size_t queries);
  void gate_mamba(const RecurrentWeights& w, uint32_t first);
  void gate_delta(const RecurrentWeights& w, uint32_t first);
  bool is_good(const float* rows, std::size_t cols, uint32_t first);

  const Model& model_;
  const RecurrentConfig& config_;
  const Kernels& kernels_;
  ThreadPool* const pool_;
  CpuProducts* const products_;
  RecurrentState* states_ = nullptr;
  const CancelLatch* cancel_ = nullptr;
  uint32_t n_ = 0;
  bool open_ = false;
  Array<uint32_t> layers_;                  // that an open step has computed
  Array<float> key_factor_, query_factor_;  // [key_dim] norms of keys and queries
  Buffer<float> inputs_;                    // [1, or the states of an open step]{Inputs}
  std::size_t inputs_size_ = 0;             // floats
  Inputs x_ = {};                           // of the layer
  Buffer<float> mixed_;                     // [n][channels] after the convolution
  Buffer<float> gate_, o_;                  // [n][inner]
  Buffer<float> joint_;                     // [n][channels + inner], where RecurrentConfig::joint
  Buffer<float> alpha_, beta_;              // [n][rows of their matrices]
};

}  // namespace kvasir
