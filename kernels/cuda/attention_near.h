// Attention of sinks and window, for a kernel of its own or for some blocks of another.
#pragma once

#include <type_traits>

#include "attention_common.h"

namespace kvasir::cuda {

constexpr uint32_t near_together = 4;  // tokens of a warp in flight

// Attends sinks and window for one query row, `at_row` of all heads, by a block. A lane has `each`
// neighbouring dimensions.
template <uint32_t each, uint32_t near_warps>
__device__ void attend_sinks_and_window(const DeviceKv& kv, const DeviceAttention& a,
                                        uint32_t at_row, uint32_t token) {
  constexpr uint32_t dim = each * warp;
  if (at_row % kv.group == 0 && token == 0) {
    const std::size_t values = std::size_t{kv.window_rows} * dim;
    const float* window_rows_of_head = kv.window + at_row / kv.group * 2 * values;
    prefetch_all(window_rows_of_head, values * sizeof(float));
    prefetch_all(window_rows_of_head + values, values * sizeof(float));
  }
  after_previous();
  using Vector = std::conditional_t<each == 2, float2, float4>;
  const auto read = [lane = threadIdx.x % warp](const float* x, float(&to)[each]) {
    constexpr uint32_t vectors = each * sizeof(float) / sizeof(Vector);
    for (uint32_t i = 0; i < vectors; ++i)
      reinterpret_cast<Vector*>(to)[i] = reinterpret_cast<const Vector*>(x)[lane * vectors + i];
  };
  __shared__ float part_m[near_warps], part_l[near_warps], part_o[near_warps][dim];
  const uint32_t head = at_row / kv.group, row = at_row % kv.group, lane = threadIdx.x % warp,
                 w = threadIdx.x / warp;
  const DeviceCounts counts = *kv.counts;
  const uint32_t sinks = counts.pages > 0 ? kv.page_tokens : 0,
                 all = sinks + counts.window + token + 1;
  const float* sink = kv.sinks + std::size_t{head} * 2 * kv.page_tokens * dim;
  const float* window = kv.window + std::size_t{head} * 2 * kv.window_rows * dim;
  alignas(Vector) float q[each];
  float o[each] = {}, m = -INFINITY, l = 0;
  read(a.q + ((std::size_t{head} * a.n + token) * kv.group + row) * dim, q);
  // A learned score without a value. Scores are those of centred keys.
  if (kv.sink_logits && w == 0) {
    alignas(Vector) float centre[each];
    read(kv.centre + std::size_t{head} * dim, centre);
    float sum = 0;
    for (uint32_t d = 0; d < each; ++d) sum += q[d] * centre[d];
    m = kv.sink_logits[at_row] - warp_sum(sum), l = 1;
  }
  for (uint32_t at = w * near_together; at < all; at += near_warps * near_together) {
    alignas(Vector) float k[near_together][each], v[near_together][each];
    float s[near_together];
#pragma unroll
    for (uint32_t t = 0; t < near_together; ++t) {
      const uint32_t i = at + t;
      const bool is_sink = i < sinks;
      const uint32_t at_window = window_row(counts, i < all ? i - sinks : 0, kv.window_rows);
      const float* from =
          is_sink ? sink + std::size_t{i} * dim : window + std::size_t{at_window} * dim;
      const float* value = from + std::size_t{is_sink ? kv.page_tokens : kv.window_rows} * dim;
      read(from, k[t]), read(value, v[t]);
    }
    float max_score = m;
#pragma unroll
    for (uint32_t t = 0; t < near_together; ++t) {
      float sum = 0;
      for (uint32_t d = 0; d < each; ++d) sum += q[d] * k[t][d];
      s[t] = at + t < all ? warp_sum(sum) : -INFINITY;
      max_score = fmaxf(max_score, s[t]);
    }
    const float keep = relative(m, max_score);
    l *= keep;
    for (uint32_t d = 0; d < each; ++d) o[d] *= keep;
#pragma unroll
    for (uint32_t t = 0; t < near_together; ++t) {
      const float weight = relative(s[t], max_score);
      l += weight;
      for (uint32_t d = 0; d < each; ++d) o[d] += weight > 0 ? weight * v[t][d] : 0.0f;
    }
    m = max_score;
  }
  if (lane == 0) part_m[w] = m, part_l[w] = l;
  for (uint32_t d = 0; d < each; ++d) part_o[w][lane * each + d] = o[d];
  __syncthreads();
  if (threadIdx.x >= dim) return;
  float max_score = -INFINITY, sum = 0, out = 0;
  for (uint32_t i = 0; i < near_warps; ++i) max_score = fmaxf(max_score, part_m[i]);
  for (uint32_t i = 0; i < near_warps; ++i) {
    const float weight = relative(part_m[i], max_score);
    sum += weight * part_l[i];
    out += weight * part_o[i][threadIdx.x];
  }
  float* state = a.states + state_at(kv, a, head, token, 0, row);
  state[threadIdx.x] = out;
  if (threadIdx.x > 0) return;
  state[dim] = max_score, state[dim + 1] = state[dim + 2] = sum;
  if (!a.near_sums) return;
  const std::size_t rows = std::size_t{kv.kv_heads} * a.n * kv.group,
                    at = (std::size_t{head} * a.n + token) * kv.group + row;
  a.near_sums[at] = max_score, a.near_sums[rows + at] = sum;
}

}  // namespace kvasir::cuda
