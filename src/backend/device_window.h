// Arguments of a GPU's attention in a layer whose queries see a window. Plain data: kernels take it
// by value. The newest keys and values are in a ring: those of token p are in row p % room. Keys
// are not centred.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

struct DeviceWindow {
  uint32_t n = 0;  // tokens of the step
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t window = 0;   // newest tokens that a query sees, itself included,
  bool chunked = false;  // or those since the last multiple of `window`
  uint32_t room = 0;     // rows of the ring, at least `window`
  // All pointers device. position: of the step's first token; it changes from step to step, so that
  // one graph serves many steps.
  const uint64_t* position = nullptr;
  float* ring = nullptr;         // [kv_heads][2][room][head_dim]
  const float* sinks = nullptr;  // [heads] sink logits, or null
  float softcap = 0;             // 0: none
  float* states = nullptr;       // window_state_floats()
};

// Parts of a query's keys that thread blocks attend in parallel: few tokens alone do not keep a
// device busy.
constexpr uint32_t window_parts(uint32_t n) { return n <= 16 ? 8 : 1; }
// Floats of the partials of a step: [parts][n * heads][head_dim + 2] o, m, l.
constexpr std::size_t window_state_floats(uint32_t n, uint32_t heads, uint32_t head_dim) {
  return std::size_t{window_parts(n)} * n * heads * (head_dim + 2);
}
constexpr uint32_t max_window_head_dim = 512;

// The first token that the query at a position sees.
constexpr uint64_t first_seen_of(const DeviceWindow& w, uint64_t position) {
  if (w.chunked) return position - position % w.window;
  return position < w.window ? 0 : position + 1 - w.window;
}

}  // namespace kvasir
