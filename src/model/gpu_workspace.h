// A step's arrays in a device's memory, without those of attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <type_traits>

#include "backend/device.h"
#include "backend/page.h"
#include "base/checked.h"
#include "model/config.h"
#include "model/device_weights.h"

namespace kvasir {

constexpr uint32_t logit_rows = 16;  // at a time: a row is as long as the vocabulary

// Numbers of a token in recurrent layers; rates: of alpha and beta.
struct RecurrentWidths {
  std::size_t channels = 0, inner = 0, alpha = 0, beta = 0;
};
inline RecurrentWidths recurrent_widths_of(const ModelConfig& c) {
  const RecurrentConfig& r = c.recurrent;
  if (c.recurrent_layers == 0) return {};
  if (r.kind == RecurrentKind::convolution) return {r.channels, r.inner(), 0, r.channels};
  return {r.channels, r.inner(), r.heads, r.heads};
}

// Numbers of a token.
struct Widths {
  std::size_t width, q, kv, feed_forward, widest, angles, vocabulary;
  std::size_t parallel;     // width where a layer's mixer and network are parallel, otherwise 0
  std::size_t inputs;       // of all layers' inputs
  std::size_t shared;       // of a windowed layer whose keys and values others attend, or 0
  std::size_t query_gates;  // q, where attention's output is gated, or 0
  RecurrentWidths recurrent;
  std::size_t layer_input;
  bool gated_floats = true;  // floats are the input of a dense network's last matrix
};
// Those of the widest layer.
inline Widths widths_of(const ModelConfig& c) {
  const auto any = [&](auto&& is) {
    return std::any_of(c.layer_configs.begin(), c.layer_configs.end(), is);
  };
  const bool parallel = any([](const auto& l) { return l.is_parallel(); });
  const bool gates = any([](const auto& l) { return l.gates_output; });
  const RecurrentWidths recurrent = recurrent_widths_of(c);
  return {c.width,
          c.max_q_width(),
          c.max_kv_width(),
          std::max(c.feed_forward, c.layer_input),
          std::max<std::size_t>(
              {c.width, c.max_q_width(), c.feed_forward, c.layer_input, recurrent.inner}),
          c.angles(),
          c.vocabulary,
          parallel ? c.width : 0,
          std::size_t{c.depth()} * c.layer_input,
          c.shares_kv() ? c.windows.q_width() + 2 * c.windows.kv_width() : 0,
          gates ? c.max_q_width() : 0,
          recurrent,
          c.layer_input};
}

// A step's arrays in the device's memory, one behind the other in one allocation.
struct Workspace {
  // Tokens that have floats of gate and up at a time. Those of all would take much of a small
  // device.
  static constexpr uint32_t gated_tokens = 1024;

  // [n][width] twice, [n][q and k and v], [n][q], [gated_tokens][feed_forward] twice; gate: [n]
  // where its floats are multiplied
  float *x, *h, *qkv, *a, *gate, *up;
  float* y;             // [n][width] the normalised input of a parallel layer
  float *cos, *sin;     // [RoPE sets][n][rope dim / 2]
  float* factors;       // [n] ModelConfig::temperature of each token
  float* layer_inputs;  // [depth][n][layer_input]
  float* query_gates;   // [n][q] of attention's output
  // Of a recurrent layer: what goes into the convolution and comes out of it, [n][channels]; what
  // gates its output and what leaves the heads, [n][inner]; the others for each head.
  struct Recurrent {
    float *in, *mixed, *gate, *out, *alpha, *beta, *decay, *rate;
  } recurrent;
  float* shared;   // [n][q and k and v] of the windowed layer whose keys and values others attend
  int8_t* quants;  // DeviceActivations of the widest input
  float* scales;
  int16_t* sums;
  float* logits;        // [logit_rows][vocabulary]
  uint32_t* first_bad;  // layer in which a number was too large

  // Returns its bytes. memory null: that alone.
  std::size_t place(const Widths& s, std::size_t n, std::byte* memory) {
    std::size_t at = 0;
    const auto put = [&](auto** array, std::size_t count) {
      *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(
          reinterpret_cast<uintptr_t>(memory) + at);
      at += round_up(count * sizeof **array, 256);
    };
    put(&x, n * s.width), put(&h, n * s.width), put(&qkv, n * (s.q + 2 * s.kv)), put(&a, n * s.q);
    const std::size_t gated = std::min<std::size_t>(n, gated_tokens) * s.feed_forward;
    put(&gate, s.gated_floats ? n * s.feed_forward : std::max(gated, n * s.layer_input));
    put(&up, gated), put(&y, n * s.parallel);
    put(&cos, n * s.angles), put(&sin, n * s.angles), put(&factors, n);
    put(&layer_inputs, n * s.inputs), put(&shared, n * s.shared);
    put(&query_gates, n * s.query_gates);
    const RecurrentWidths& r = s.recurrent;
    put(&recurrent.in, n * r.channels), put(&recurrent.mixed, n * r.channels);
    put(&recurrent.gate, n * r.inner), put(&recurrent.out, r.alpha > 0 ? n * r.inner : 0);
    put(&recurrent.alpha, n * r.alpha), put(&recurrent.beta, n * r.beta);
    put(&recurrent.decay, n * r.alpha), put(&recurrent.rate, n * r.alpha);
    put(&quants, n * s.widest), put(&scales, n * ceil_div(s.widest, 32)),
        put(&sums, n * ceil_div(s.widest, 16));
    put(&logits, logit_rows * s.vocabulary), put(&first_bad, 1);
    return at;
  }

  // Of n tokens, for products with these matrices; a layer may lack some.
  DeviceActivations inputs(uint32_t n, float* f32, std::size_t cols,
                           std::initializer_list<const DeviceWeights::Matrix*> matrices) const {
    DeviceActivations to{n, static_cast<uint32_t>(cols)};
    for (const DeviceWeights::Matrix* m : matrices) {
      if (!m->w.data) continue;
      if (tensor_type_info(m->w.type)->block_elements == 1) to.f32 = f32;
      else to.q = quants, to.scale = scales, to.sums = sums;
    }
    return to;
  }
};

// Inputs of n tokens to a matrix before the first layer (DeviceWeights::inputs()): floats, then the
// same rounded.
inline std::size_t joined_bytes(std::size_t cols, std::size_t n) {
  return round_up(n * cols * 4, 256) + round_up(n * cols, 256) + round_up(n * cols / 8, 256) +
         round_up(n * cols / 8, 256);
}
inline DeviceActivations joined_inputs(std::byte* memory, uint32_t cols, uint32_t n) {
  DeviceActivations x{n, cols};
  x.f32 = reinterpret_cast<float*>(memory);
  std::byte* at = memory + round_up(std::size_t{n} * cols * 4, 256);
  x.q = reinterpret_cast<int8_t*>(at), at += round_up(std::size_t{n} * cols, 256);
  x.scale = reinterpret_cast<float*>(at), at += round_up(std::size_t{n} * cols / 8, 256);
  x.sums = reinterpret_cast<int16_t*>(at);
  return x;
}

// Tokens of a prefill step that a session's workspace on a device is kept free for. Much of a large
// device is idle at the ends of smaller steps.
constexpr uint32_t usual_step = 1024, large_step = 2048;
inline uint32_t usual_step_of(const Device& device) {
  constexpr uint64_t large = uint64_t{32} << 30;
  return device.budget() >= large ? large_step : usual_step;
}
// The same where weights come in prefill. On a large device larger steps gain more than the weights
// that they displace.
inline uint32_t streamed_step_of(const Device& device) {
  constexpr uint32_t large = 64;  // multiprocessors
  return device.info().multiprocessors >= large ? large_step : usual_step_of(device);
}

// Of layers whose queries see a window (offload/gpu_window_attention.h): rows of a layer's ring,
// its bytes, and floats of the partials of any step of at most n tokens.
// Of a step's tokens as if alone not all may stay: what they replace in the ring is still seen.
inline uint32_t window_room(const ModelConfig& c) {
  return static_cast<uint32_t>(c.window) + max_alone - 1;
}
inline uint64_t window_layer_bytes(const ModelConfig& c) {
  return uint64_t{2} * window_room(c) * c.windows.kv_width() * sizeof(float);
}
inline std::size_t max_window_state_floats(uint32_t n, uint32_t heads, uint32_t head_dim) {
  std::size_t floats = 0;
  for (const uint32_t each : {n, std::min(n, 16u)})
    floats = std::max(floats, window_state_floats(each, heads, head_dim));
  return floats;
}
// Whether a step is attended by the kernels of prefill; rows of keys, and of queries.
inline bool window_lays_out(uint32_t n, uint32_t head_dim, float softcap) {
  const uint32_t dim = PageShape::of(head_dim).dim;
  return n > max_selective_tokens && softcap == 0 &&
         std::find(std::begin(attended_dims), std::end(attended_dims), dim) !=
             std::end(attended_dims);
}
inline uint32_t window_prefill_rows(uint32_t window, uint32_t n) {
  return static_cast<uint32_t>(round_up(std::size_t{window} - 1 + n, prefill_keys));
}
inline uint32_t window_query_rows(uint32_t n, uint32_t group) {
  return static_cast<uint32_t>(round_up(std::size_t{n} * group, prefill_rows));
}
// Bytes besides the rings that a session takes for steps of n tokens.
inline uint64_t window_step_bytes(const ModelConfig& c, uint32_t n) {
  const HeadShape& s = c.windows;
  if (s.layers == 0) return 0;
  const auto states = [&](uint32_t tokens) {
    return Device::allocated_size(max_window_state_floats(tokens, s.heads, s.head_dim) *
                                  sizeof(float));
  };
  if (!window_lays_out(n, s.head_dim, c.attention_softcap)) return states(n);
  const std::size_t dim = PageShape::of(s.head_dim).dim, kv_heads = s.kv_heads,
                    rows = window_prefill_rows(window_room(c), n),
                    q_rows = window_query_rows(n, s.group());
  return states(max_selective_tokens) +  // of decode steps, which stay
         2 * Device::allocated_size(kv_heads * rows * dim * sizeof(uint16_t)) +
         Device::allocated_size(kv_heads * q_rows * dim * sizeof(uint16_t)) +
         3 * Device::allocated_size(kv_heads * q_rows * sizeof(float));
}

}  // namespace kvasir
