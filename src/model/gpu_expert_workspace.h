// A step's arrays of experts in a device's memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/checked.h"
#include "model/gpu_workspace.h"
#include "model/model.h"

namespace kvasir {

// Numbers of a token, of the widest layer with experts.
struct ExpertWidths {
  std::size_t width = 0, inner = 0, shared = 0;  // inner: of one expert
  std::size_t experts = 0, used = 0;             // of routed experts on the device
  bool has_experts = false, floats = false, dense = false;
};

// routed: routed experts are on the device.
inline ExpertWidths expert_widths_of(const ModelConfig& config, const Weights& weights,
                                     bool routed) {
  ExpertWidths out;
  out.width = config.width;
  for (uint32_t l = 0; l < config.depth(); ++l) {
    const ExpertConfig& e = config.layer(l).experts;
    if (e.count == 0) continue;
    const ExpertWeights& w = weights.layers[l].experts;
    out.has_experts = true;
    out.dense |= config.layer(l).has_dense();
    out.shared = std::max<std::size_t>(out.shared, e.shared_width);
    if (!routed) continue;
    out.experts = std::max<std::size_t>(out.experts, e.count);
    out.used = std::max<std::size_t>(out.used, e.used);
    out.inner = std::max<std::size_t>(out.inner, e.width);
    for (const WeightView& m : {w.gate.first, w.up.first})
      out.floats |= m.data && tensor_type_info(m.type)->block_elements == 1;
  }
  return out;
}

// Those of a step's arrays, which depend on the types of weights too.
inline Widths workspace_widths_of(const ModelConfig& config, const Weights& weights) {
  Widths out = widths_of(config);
  const auto is_float = [](const LayerWeights& w) {
    return w.down.w.data && tensor_type_info(w.down.w.type)->block_elements == 1;
  };
  out.gated_floats = std::any_of(weights.layers.begin(), weights.layers.end(), is_float);
  return out;
}

struct ExpertWorkspace {
  float* logits;         // [n][experts]
  DeviceChoice* chosen;  // [n][used]
  uint32_t *row_of, *choice_of;
  DeviceExpertTile* tiles;
  float* inputs;   // [n * used][width], of float weights
  int8_t* quants;  // of the rows' inputs, then of what follows the activation
  float* scales;
  int16_t* sums;
  float *gate, *up;             // [n * used][inner], [n][shared]; where joined one after the other
  float* rows;                  // [n * used + n][width]; [n][width] of experts on the CPU
  float *shared, *shared_gate;  // [n][width], [n]
  float* dense;                 // [n][width]: the dense network's output

  // Returns its bytes. memory null: that alone.
  std::size_t place(const ExpertWidths& s, std::size_t n, std::byte* memory) {
    std::size_t at = 0;
    const auto put = [&](auto** array, std::size_t count) {
      *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(
          reinterpret_cast<uintptr_t>(memory) + at);
      at += round_up(count * sizeof **array, 256);
    };
    if (!s.has_experts) return 0;
    const std::size_t choices = n * s.used, inner = choices * s.inner + n * s.shared,
                      widest = std::max(choices * s.width, inner);
    put(&logits, n * s.experts), put(&chosen, choices), put(&row_of, choices);
    put(&choice_of, choices);
    put(&tiles, DeviceExpertTile::max_count(static_cast<uint32_t>(n), static_cast<uint32_t>(s.used),
                                            static_cast<uint32_t>(s.experts)));
    put(&inputs, s.floats ? choices * s.width : 0);
    put(&quants, widest), put(&scales, ceil_div(widest, 32)), put(&sums, ceil_div(widest, 16));
    put(&gate, inner), put(&up, inner), put(&rows, (choices + n) * s.width);
    put(&shared, s.shared > 0 ? n * s.width : 0), put(&shared_gate, n);
    put(&dense, s.dense ? n * s.width : 0);
    return at;
  }
};

// Device memory of an executor for steps of n tokens.
inline uint64_t device_workspace_bytes(const Widths& widths, const ExpertWidths& experts,
                                       uint32_t n) {
  return Device::allocated_size(Workspace().place(widths, n, nullptr) +
                                ExpertWorkspace().place(experts, n, nullptr));
}

}  // namespace kvasir
