// Rows of exact prefill attention (prefill_attention.cu): where those of keys and values come from,
// what a row of queries sees, and what it leaves.
#pragma once

#include <cuda_fp16.h>

#include "attention_common.h"
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

// Where a block leaves a part of (block of rows, head): O [rows][dim], then each row's largest
// score times log2 e, then its sum of weights.
__device__ inline float* part_of(const DevicePrefill& r, uint32_t block, uint32_t head,
                                 uint32_t part, uint32_t blocks, uint32_t parts) {
  return r.parts +
         ((std::size_t{head} * blocks + block) * parts + part) * prefill_part_floats(r.dim);
}

}  // namespace
}  // namespace kvasir::cuda
