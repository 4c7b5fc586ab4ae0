// Rows of prefill attention (prefill_attention.cu, prefill_wide.cu, prefill_tiles.cu): where those
// of keys and values come from, what a row of queries sees, and what it leaves; and the sums by
// which it chooses tiles.
#pragma once

#include <cuda_fp16.h>

#include <climits>

#include "attention_common.h"
#include "integer_products.h"
#include "tiles.h"

namespace kvasir::cuda {
namespace {

__device__ inline float block_max(float x) {
  __shared__ float parts[warp];
  x = warp_max(x);
  if (threadIdx.x % warp == 0) parts[threadIdx.x / warp] = x;
  __syncthreads();
  return warp_max(threadIdx.x % warp < blockDim.x / warp ? parts[threadIdx.x % warp] : 0.0f);
}

// Packs two floats as halves, the first in the low half.
__device__ inline uint32_t halves(float a, float b) {
  const __half2 both = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ inline float inverse(float x) { return x > 1e-30f ? 1.0f / x : 0.0f; }

// ---- queries, keys and values in half precision

// A row of the step's k or v, of the window or of the sinks; which: 0 keys, 1 values.
struct Rows {
  const float *row, *centre;  // centre: to be subtracted, or null
  uint32_t there;             // numbers in the row; the others are 0
};

__device__ inline Rows rows_of(const DevicePrefill& r, const float* step, uint32_t head,
                               uint32_t which, uint32_t token) {
  const uint32_t sealed = r.pages * r.page_tokens;
  if (token < sealed)
    return {r.sinks + ((std::size_t{head} * 2 + which) * r.page_tokens + token) * r.dim, nullptr,
            r.dim};
  token -= sealed;
  if (token < r.window) {
    const uint32_t dim = r.seen ? r.head_dim : r.dim,
                   row = r.seen ? (r.ring_first + token) % r.window_room : token;
    return {r.window_rows + ((std::size_t{head} * 2 + which) * r.window_room + row) * dim, nullptr,
            dim};
  }
  token -= r.window;
  if (token >= r.n) return {nullptr, nullptr, 0};
  return {step + (std::size_t{token} * r.kv_heads + head) * r.head_dim,
          which || !r.centre ? nullptr : r.centre + std::size_t{head} * r.dim, r.head_dim};
}

__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The first key, of those laid out, that a token of the step sees through its window.
__device__ inline uint32_t first_key(const DevicePrefill& r, uint32_t token) {
  const uint32_t own = r.window + token;
  if (r.chunked) {
    const auto in_chunk = static_cast<uint32_t>((r.position + token) % r.seen);
    return own > in_chunk ? own - in_chunk : 0;
  }
  return own >= r.seen ? own + 1 - r.seen : 0;
}

// What a row's sums are multiplied by, and its log-sum-exp. largest: of the row's scores times
// log2 e; all: the sum of its weights. Counts the learned score without a value, if there is one.
struct RowEnd {
  float scale, lse;
};
__device__ inline RowEnd end_row(const DevicePrefill& r, uint32_t head, uint32_t row, float largest,
                                 float all) {
  float keep = 1;
  if (r.sink_scores) {
    const float score = r.sink_scores[std::size_t{head} * r.q_room + row] * 1.44269504f,
                before = largest;
    largest = fmaxf(before, score);
    keep = power_of_two(before - largest);
    all = all * keep + power_of_two(score - largest);
  }
  return {r.largest[head * 2 + 1] * keep / all, largest * 0.693147181f + logf(all)};
}

// What a row leaves of a part of the keys: its output, then its largest score times log2 e, then
// its sum of weights. rows: of the step, in whole blocks.
__device__ inline float* part_of(const DevicePrefill& r, uint32_t head, uint32_t part,
                                 uint32_t parts, uint32_t row) {
  const uint32_t rows = (r.n * r.group + prefill_rows - 1) / prefill_rows * prefill_rows;
  return r.parts + ((std::size_t{head} * parts + part) * rows + row) * prefill_part_floats(r.dim);
}

// Of one thread of the four that have a row: writes its pairs of outputs, at dimensions 8 i + 2 t.
// pair(i): the i-th. parts: 1, or of how many this is one.
template <int dim, class Pair>
__device__ inline void write_row(const DevicePrefill& r, uint32_t head, uint32_t row, float largest,
                                 float all, float* out, float* lse, Pair&& pair) {
  const uint32_t t = threadIdx.x % 4, token = row / r.group;
  if (gridDim.z > 1) {
    float* const part = part_of(r, head, blockIdx.z, gridDim.z, row);
    if (t == 0) part[dim] = largest, part[dim + 1] = all;
#pragma unroll
    for (int i = 0; i < dim / 8; ++i) *reinterpret_cast<float2*>(part + i * 8 + 2 * t) = pair(i);
    return;
  }
  if (token >= r.n) return;
  const RowEnd end = end_row(r, head, row, largest, all);
  const std::size_t at = std::size_t{token} * r.kv_heads * r.group + head * r.group + row % r.group;
  if (t == 0) lse[at] = end.lse;
#pragma unroll
  for (int i = 0; i < dim / 8; ++i) {
    const float2 x = pair(i);
    const uint32_t c = i * 8 + 2 * t;
    float* const to = out + at * r.head_dim + c;
    if (c < r.head_dim) to[0] = x.x * end.scale;
    if (c + 1 < r.head_dim) to[1] = x.y * end.scale;
  }
}

// Blocks of query rows of a KV head.
__device__ inline std::size_t blocks_of(const DevicePrefill& r) {
  return (r.n * r.group + prefill_rows - 1) / prefill_rows;
}
// Rows of a KV head that choose tiles.
__device__ inline uint32_t choosing_rows_of(const DevicePrefill& r) {
  return static_cast<uint32_t>(blocks_of(r)) * choosing_rows(r.group);
}
// Tiles of prefill_keys keys that rows before `end` see.
__device__ inline uint32_t tiles_seen(const DevicePrefill& r, uint32_t end) {
  const uint32_t before = r.pages * r.page_tokens + r.window,
                 last_token = min((end - 1) / r.group, r.n - 1);
  return (before + last_token) / prefill_keys + 1;
}
// Those that blocks of rows see of which some have choosing rows before `end`.
__device__ inline uint32_t tiles_of_choosing(const DevicePrefill& r, uint32_t end) {
  return tiles_seen(r, ((end - 1) / choosing_rows(r.group) + 1) * prefill_rows);
}

// Which tiles of keys a block attends, of its rows [first_row, first_row + rows): those that were
// chosen for it, if some were, then all from `near` on. begin, end, masked_to and masked_from are
// positions in this order.
struct SeenTiles {
  uint32_t before;       // keys before the step
  uint32_t begin, end;   // tiles
  uint32_t masked_to;    // those before it have keys that some row does not see any more
  uint32_t masked_from;  // those from it on have keys that some row does not see yet
  uint32_t listed = 0, near = 0, parts = 1;  // parts: of a tile of prefill_keys
  const uint32_t* list = nullptr;
  const float* biases = nullptr;

  __device__ uint32_t tile(uint32_t i) const {
    return i < listed ? list[i / parts] * parts + i % parts : near + (i - listed);
  }
  // Log2 of the weight of the tile's keys.
  __device__ float bias(uint32_t i) const { return i < listed ? biases[i / parts] : 0.0f; }
};
template <bool windowed>
__device__ inline SeenTiles seen_tiles(const DevicePrefill& r, uint32_t head, uint32_t first_row,
                                       uint32_t rows, uint32_t tile_keys) {
  const uint32_t before = r.pages * r.page_tokens + r.window,
                 last_token = min((first_row + rows - 1) / r.group, r.n - 1);
  // To the last row's own key.
  SeenTiles seen{before, 0, (before + last_token + tile_keys) / tile_keys, 0,
                 (before + first_row / r.group + 1) / tile_keys};
  if constexpr (windowed) {
    seen.begin = first_key(r, first_row / r.group) / tile_keys;
    seen.masked_to = (first_key(r, last_token) + tile_keys - 1) / tile_keys;
    return seen;
  }
  if (r.tiles.room > 0) {
    const std::size_t at = head * blocks_of(r) + first_row / prefill_rows;
    seen.parts = prefill_keys / tile_keys;
    seen.list = r.tiles.lists + at * r.tiles.room, seen.biases = r.tiles.biases + at * r.tiles.room;
    seen.listed = r.tiles.counts[at] * seen.parts, seen.near = r.tiles.near * seen.parts;
    seen.end = seen.listed + (seen.end - seen.near);
    seen.masked_from = seen.listed + (seen.masked_from - seen.near);
  }
  if (gridDim.z > 1) {  // every row sees all of a part's first tile
    const uint32_t each = seen.masked_from / gridDim.z;
    seen.begin = blockIdx.z * each;
    if (blockIdx.z + 1 < gridDim.z) seen.end = seen.begin + each;
  }
  return seen;
}
// Less than the score of any key, times log2 e. Where a row sees nothing of the first tile, it is
// not infinite.
template <bool windowed>
__device__ inline float least_score(float factor) {
  return windowed ? -1e4f * factor : -INFINITY;
}
template <bool windowed>
__device__ inline bool is_seen(const DevicePrefill& r, const SeenTiles& seen, uint32_t row,
                               uint32_t key) {
  const uint32_t token = row / r.group;
  return key <= seen.before + token && !(windowed && key < first_key(r, token));
}

// Scores of a row are products times this. Changes the base from e to 2; not 0, because 0 times
// minus infinity is NaN.
__device__ inline float score_factor(const DevicePrefill& r, uint32_t head, uint32_t row) {
  return fmaxf(r.q_scale[std::size_t{head} * r.q_room + row] * (r.largest[head * 2] * 1.44269504f),
               1e-30f);
}

// ---- the choice of tiles

// Of the rows that the choice reads, with two bytes in the place of a half: where the bytes
// [d, d + 4) of a row are; d: a multiple of 4.
__device__ inline char4* tile_bytes_at(int8_t* rows, uint32_t room, uint32_t row, uint32_t d) {
  return reinterpret_cast<char4*>(rows + 2 * prefill_place(room, row, d / 2));
}
// Numbers times `scale`, rounded; they are at most largest_byte.
constexpr float largest_byte = 127;
__device__ inline char4 rounded(float4 x, float scale) {
  const auto byte = [&](float each) {
    return static_cast<signed char>(__float2int_rn(each * scale));
  };
  return make_char4(byte(x.x), byte(x.y), byte(x.z), byte(x.w));
}

// Products of a row's bytes times this, and times the scale of the keys, are scores to the base 2.
__device__ inline float tile_factor(const DevicePrefill& r, uint32_t head, uint32_t row) {
  return row < r.q_room
             ? r.q_scale[std::size_t{head} * r.q_room + row] * (1.44269504f / largest_byte)
             : 0.0f;
}
// The scales of the keys of a tile.
__device__ inline float4 tile_scales(const DevicePrefill& r, uint32_t head, uint32_t tile) {
  static_assert(prefill_keys / tile_scale_keys == 4);
  return reinterpret_cast<const float4*>(r.tiles.key_scales +
                                         std::size_t{head} * (r.room / tile_scale_keys))[tile];
}

// Of a number that is not subnormal.
__device__ inline float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr int unseen = INT_MIN;
// Of a row of four threads that have four groups of eight keys each (tile_group_of()): log2 of the
// sum of e^score, of the best key of each group. score(group, n): of the thread's own keys, a
// product of bytes or, only where `masked`, unseen.
template <bool masked, class Score>
__device__ inline float tile_sum(float factor, const float4& key_scales, Score&& score) {
  const float scales[4] = {key_scales.x, key_scales.y, key_scales.z, key_scales.w};
  float best[4], largest = -INFINITY, sum = 0;
#pragma unroll
  for (uint32_t group = 0; group < 4; ++group) {
    int most = score(group, 0);
#pragma unroll
    for (uint32_t n = 1; n < 8; ++n) most = max(most, score(group, n));
    best[group] = (__int_as_float(as_float + most) - as_float_value) * (factor * scales[group]);
    if (masked && most == unseen) best[group] = -INFINITY;
    largest = fmaxf(largest, best[group]);
  }
  largest = warp_max(largest, 4);
  if (masked && largest == -INFINITY) largest = -1e30f;
#pragma unroll
  for (const float x : best) sum += power_of_two(x - largest);
  return largest + log2_of(warp_sum(sum, 4));
}

}  // namespace
}  // namespace kvasir::cuda
