// Arguments of a GPU's operations on recurrent layers. Plain data: kernels take it by value. A
// layer's state has the layout of RecurrentConfig::state_size(): the convolution's inputs, then the
// heads' matrices in panels of state_panel columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/kernels.h"

namespace kvasir {

constexpr uint32_t max_device_keys = 256;  // rows of a head's matrix that a GPU computes

// The states before and after a step, or before and after each of its tokens. They are in device
// memory, so that a recorded graph serves every step.
struct DeviceStates {
  const float* from;
  float* to;
};

// Convolution of backend/kernels.h, all pointers device; `offset` floats into both states.
struct DeviceConvolution {
  uint32_t n = 0, taps = 0, channels = 0;
  const float* x = nullptr;              // [n][channels]
  const float* factors = nullptr;        // [n][channels] of the inputs, or null
  const float* weights = nullptr;        // [taps][channels]; the last tap is the token's own
  const float* bias = nullptr;           // [channels], or null
  const float* gates = nullptr;          // [n][channels] factors of the outputs, or null
  bool silu = false;                     // before the gates
  const DeviceStates* states = nullptr;  // [each ? n : 1]
  bool each = false;  // of each of at most max_alone tokens; only the first is read
  std::size_t offset = 0;
  float* y = nullptr;  // [n][channels]
};

// The heads of a layer, which n tokens read and change one after another: StateStep of
// backend/kernels.h. All pointers device.
//
//   delta rule   q, k: of length 1, q / sqrt(keys) besides; rate = sigmoid(beta),
//                decay = exp(factor softplus(alpha + bias)); the matrix is corrected
//   otherwise    rate = softplus(alpha + bias), decay = exp(factor rate); out += skip v
struct DeviceHeadStates {
  uint32_t n = 0, heads = 0, key_heads = 0, keys = 0, values = 0;
  bool delta = false;
  bool cyclic_keys = false;  // RecurrentConfig::cyclic_keys
  uint32_t channels = 0;     // of a token in x,
  // which has k and q [key_heads][keys] and v [heads][values] from these on
  uint32_t k_at = 0, q_at = 0, v_at = 0;
  float* x = nullptr;                                 // [n][channels]
  const float *alpha = nullptr, *beta = nullptr;      // [n][heads]; beta: of the delta rule
  const float *factors = nullptr, *biases = nullptr;  // [heads]
  const float* skip = nullptr;                        // [heads], or null
  float epsilon = 0;                                  // of the norm of q and k
  float *decay = nullptr, *rate = nullptr;            // [n][heads]
  // [each ? n : 1]. The first is read while earlier kernels still run: an earlier step wrote it.
  const DeviceStates* states = nullptr;
  bool each = false;  // of each token; only the first is read
  std::size_t offset = 0;
  float* out = nullptr;  // [n][heads][values]

  constexpr std::size_t matrix_size() const {
    return std::size_t{state_panels(values)} * keys * state_panel;
  }
};

// The output of the heads, normalised in groups of `cols` and gated.
struct DeviceGatedNorm {
  uint32_t rows = 0, cols = 0;     // rows: groups of all tokens
  const float* x = nullptr;        // [rows][cols], which is checked
  float* gates = nullptr;          // [rows][cols]; becomes the output
  const float* weights = nullptr;  // [groups_of_weights][cols]; null: no norm
  uint32_t groups_of_weights = 1;  // row r has those of r % groups_of_weights
  bool gates_first = false;        // norm(silu(gate) x), otherwise silu(gate) norm(x)
  float epsilon = 0;
  // The output as the input of a quantised matrix (DeviceActivations), checked as well; cols is a
  // multiple of 32 then. Null: the floats alone.
  int8_t* q = nullptr;
  float* scale = nullptr;
  int16_t* sums = nullptr;
};

}  // namespace kvasir
