// A step's arrays in a device's memory, without those of attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "backend/device.h"
#include "base/checked.h"
#include "model/config.h"
#include "model/device_weights.h"

namespace kvasir {

constexpr uint32_t logit_rows = 16;  // at a time: a row is as long as the vocabulary

// Numbers of a token.
struct Widths {
  std::size_t width, q, kv, feed_forward, widest, angles, vocabulary;
};
inline Widths widths_of(const ModelConfig& c) {
  return {c.width,
          c.q_width(),
          c.kv_width(),
          c.feed_forward,
          std::max({c.width, c.q_width(), c.feed_forward}),
          c.angles(),
          c.vocabulary};
}

// A step's arrays in the device's memory, one behind the other in one allocation.
struct Workspace {
  // [n][width] twice, [n][q and k and v], [n][q], [n][feed_forward] twice
  float *x, *h, *qkv, *a, *gate, *up;
  float *cos, *sin;  // [RoPE sets][n][rope dim / 2]
  int8_t* quants;    // DeviceActivations of the widest input
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
    put(&gate, n * s.feed_forward), put(&up, n * s.feed_forward), put(&cos, n * s.angles),
        put(&sin, n * s.angles);
    put(&quants, n * s.widest), put(&scales, n * ceil_div(s.widest, 32)),
        put(&sums, n * ceil_div(s.widest, 16));
    put(&logits, logit_rows * s.vocabulary), put(&first_bad, 1);
    return at;
  }

  // Of n tokens, for products with these matrices.
  DeviceActivations inputs(uint32_t n, float* f32, std::size_t cols,
                           std::initializer_list<const DeviceWeights::Matrix*> matrices) const {
    DeviceActivations to{n, static_cast<uint32_t>(cols)};
    for (const DeviceWeights::Matrix* m : matrices) {
      if (tensor_type_info(m->w.type)->block_elements == 1) to.f32 = f32;
      else to.q = quants, to.scale = scales, to.sums = sums;
    }
    return to;
  }
};

// tokens that a session's workspace on a device is kept free for
constexpr uint32_t usual_step = 1024;

// Device memory of an executor for steps of n tokens.
inline uint64_t device_workspace_bytes(const ModelConfig& config, uint32_t n) {
  return Device::allocated_size(Workspace().place(widths_of(config), n, nullptr));
}

}  // namespace kvasir
