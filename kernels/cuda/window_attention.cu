// Attention of layers whose queries see a window; the names are those in launch.cc. Keys and values
// are floats: those before the step in a ring, those of the step as the projection made them.
#include <cmath>

#include "attention_common.h"
#include "backend/device_window.h"

namespace kvasir::cuda {
namespace {

constexpr uint32_t window_warps = window_threads / warp;

// The key of token `at` for a KV head, and its value.
struct Pair {
  const float *key, *value;
};
__device__ inline Pair pair_of(const DeviceWindow& w, const float* k, const float* v, uint32_t head,
                               uint64_t position, uint64_t at, uint32_t ring_row) {
  if (at >= position) {
    const std::size_t from =
        (std::size_t{static_cast<uint32_t>(at - position)} * w.kv_heads + head) * w.head_dim;
    return {k + from, v + from};
  }
  const float* key = w.ring + (std::size_t{head} * 2 * w.room + ring_row) * w.head_dim;
  return {key, key + std::size_t{w.room} * w.head_dim};
}

// Block (rows of queries, KV head, part of the keys). A warp attends `together` keys at a time for
// all rows of the block; a lane has every 32nd dimension.
template <uint32_t each, uint32_t together>
__device__ void attend_window(const DeviceWindow& w, const float* query, const float* k,
                              const float* v) {
  constexpr uint32_t rows = window_rows;
  __shared__ float part_o[window_warps][each * warp], part_m[window_warps], part_l[window_warps];
  after_previous();
  const uint32_t lane = threadIdx.x % warp, own = threadIdx.x / warp, head = blockIdx.y,
                 group = w.heads / w.kv_heads, first_row = blockIdx.x * rows,
                 all_rows = w.n * group, dim = w.head_dim;
  const uint64_t position = *w.position;
  const auto token_of = [&](uint32_t r) { return min(first_row + r, all_rows - 1) / group; };
  const auto at_row = [&](uint32_t r) {
    const uint32_t row = min(first_row + r, all_rows - 1);
    return std::size_t{row / group} * w.heads + head * group + row % group;
  };
  const float scale = 1.0f / sqrtf(static_cast<float>(dim));
  float q[rows][each], o[rows][each] = {}, m[rows], l[rows] = {};
#pragma unroll
  for (uint32_t r = 0; r < rows; ++r) {
    m[r] = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint32_t d = i * warp + lane;
      q[r][i] = d < dim ? query[at_row(r) * dim + d] * scale : 0.0f;
    }
  }
  // The tokens that any row sees; later rows see none before those of the first row.
  const uint64_t begin = first_seen_of(w, position + token_of(0)),
                 end = position + token_of(rows - 1) + 1;
  for (uint64_t at = begin + (blockIdx.z * window_warps + own) * together; at < end;
       at += gridDim.z * window_warps * together) {
    const auto ring_row = static_cast<uint32_t>(at % w.room);
    float keys[together][each], values[together][each];
#pragma unroll
    for (uint32_t t = 0; t < together; ++t) {
      const uint32_t row = ring_row + t;
      const Pair pair = pair_of(w, k, v, head, position, at + t, row < w.room ? row : row % w.room);
#pragma unroll
      for (uint32_t i = 0; i < each; ++i) {
        const uint32_t d = i * warp + lane;
        const bool inside = at + t < end && d < dim;
        keys[t][i] = inside ? pair.key[d] : 0.0f;
        values[t][i] = inside ? pair.value[d] : 0.0f;
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < rows; ++r) {
      const uint64_t own_position = position + token_of(r), first = first_seen_of(w, own_position);
      float s[together], max_score = m[r];
#pragma unroll
      for (uint32_t t = 0; t < together; ++t) {
        float sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < each; ++i) sum += q[r][i] * keys[t][i];
        sum = warp_sum(sum);
        if (w.softcap > 0) sum = w.softcap * tanhf(sum / w.softcap);
        s[t] = at + t >= first && at + t <= own_position ? sum : -INFINITY;
        max_score = fmaxf(max_score, s[t]);
      }
      const float keep = relative(m[r], max_score);
      l[r] *= keep;
#pragma unroll
      for (uint32_t i = 0; i < each; ++i) o[r][i] *= keep;
#pragma unroll
      for (uint32_t t = 0; t < together; ++t) {
        const float weight = relative(s[t], max_score);
        l[r] += weight;
#pragma unroll
        for (uint32_t i = 0; i < each; ++i) o[r][i] += weight != 0 ? weight * values[t][i] : 0.0f;
      }
      m[r] = max_score;
    }
  }
  // Merges the parts of the warps, row by row.
#pragma unroll
  for (uint32_t r = 0; r < rows; ++r) {
    __syncthreads();
    if (lane == 0) part_m[own] = m[r], part_l[own] = l[r];
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) part_o[own][i * warp + lane] = o[r][i];
    __syncthreads();
    if (first_row + r >= all_rows) continue;
    float* state = w.states + (std::size_t{blockIdx.z} * w.n * w.heads + at_row(r)) * (dim + 2);
    for (uint32_t d = threadIdx.x; d < dim; d += window_threads) {
      float max_score = -INFINITY, sum = 0, out = 0;
      for (uint32_t i = 0; i < window_warps; ++i) max_score = fmaxf(max_score, part_m[i]);
      for (uint32_t i = 0; i < window_warps; ++i) {
        const float weight = relative(part_m[i], max_score);
        sum += weight * part_l[i];
        out += weight * part_o[i][d];
      }
      state[d] = out;
      if (d == 0) state[dim] = max_score, state[dim + 1] = sum;
    }
  }
}

}  // namespace

extern "C" {

// A block per query row: merges the parts of its keys and the sink logit.
__global__ void __launch_bounds__(window_finish_threads)
    window_finish(DeviceWindow w, float* out, uint32_t parts) {
  after_previous();
  const uint32_t row = blockIdx.x, head = row % w.heads, dim = w.head_dim;
  const std::size_t part = std::size_t{w.n} * w.heads * (dim + 2);
  const float* states = w.states + std::size_t{row} * (dim + 2);
  const float logit = w.sinks ? w.sinks[head] : -INFINITY;
  float max_score = logit;
  for (uint32_t i = 0; i < parts; ++i) max_score = fmaxf(max_score, states[i * part + dim]);
  float sum = relative(logit, max_score);
  for (uint32_t i = 0; i < parts; ++i)
    sum += relative(states[i * part + dim], max_score) * states[i * part + dim + 1];
  for (uint32_t d = threadIdx.x; d < dim; d += window_finish_threads) {
    float x = 0;
    for (uint32_t i = 0; i < parts; ++i)
      x += relative(states[i * part + dim], max_score) * states[i * part + d];
    out[std::size_t{row} * dim + d] = x / sum;
  }
}

// Block (token of the newest `kept`, KV head).
__global__ void __launch_bounds__(window_finish_threads)
    window_keep(DeviceWindow w, const float* k, const float* v, uint32_t kept) {
  after_previous();
  const uint32_t token = w.n - kept + blockIdx.x, head = blockIdx.y, dim = w.head_dim;
  const auto row = static_cast<uint32_t>((*w.position + token) % w.room);
  const std::size_t from = (std::size_t{token} * w.kv_heads + head) * dim,
                    value = std::size_t{w.room} * dim;
  float* to = w.ring + (std::size_t{head} * 2 * w.room + row) * dim;
  for (uint32_t d = threadIdx.x; d < dim; d += window_finish_threads)
    to[d] = k[from + d], to[value + d] = v[from + d];
}

#define KVASIR_OF_DIM(dim, together)                                                        \
  __global__ void __launch_bounds__(window_threads)                                         \
      window_attend_##dim(DeviceWindow w, const float* q, const float* k, const float* v) { \
    attend_window<dim / warp, together>(w, q, k, v);                                        \
  }

KVASIR_OF_DIM(64, 4)
KVASIR_OF_DIM(128, 4)
KVASIR_OF_DIM(256, 2)
KVASIR_OF_DIM(512, 1)

}  // extern "C"
}  // namespace kvasir::cuda
