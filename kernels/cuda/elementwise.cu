// Operations that compute the inputs of products, and RoPE; the names are those in launch.cc. A
// thread has four neighbouring numbers, so eight threads have a block of 32 inputs.
#include <cmath>

#include "layout.h"
#include "rounding.h"

namespace kvasir::cuda {
namespace {

constexpr unsigned threads = elementwise_threads, all_lanes = ~0u;

struct Four {
  float values[elementwise_each];
};

// Loads four of n numbers from `at` on, 0 beyond.
__device__ inline Four load(const float* x, std::size_t at, std::size_t n) {
  if (at + elementwise_each <= n && reinterpret_cast<std::size_t>(x + at) % 16 == 0) {
    const float4 v = *reinterpret_cast<const float4*>(x + at);
    return {{v.x, v.y, v.z, v.w}};
  }
  Four v = {};
  for (unsigned i = 0; i < elementwise_each && at + i < n; ++i) v.values[i] = x[at + i];
  return v;
}

__device__ inline void store(float* x, std::size_t at, std::size_t n, const Four& v) {
  if (at + elementwise_each <= n && reinterpret_cast<std::size_t>(x + at) % 16 == 0)
    *reinterpret_cast<float4*>(x + at) = {v.values[0], v.values[1], v.values[2], v.values[3]};
  else
    for (unsigned i = 0; i < elementwise_each && at + i < n; ++i) x[at + i] = v.values[i];
}

__device__ inline bool is_bad(const Four& v, float limit) {
  bool bad = false;
  for (const float x : v.values) bad |= !(fabsf(x) < limit);
  return bad;
}

__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
  return x;
}

// The sum over a block, returned to all threads.
__device__ float block_sum(float x) {
  __shared__ float parts[32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0);
}

// The norm of a block's row. A thread keeps its first four numbers; the numbers behind those of all
// threads are read twice. A thread writes only what it alone reads, so that out.f32 may be x.
// add: to what out.f32 has.
template <bool add>
__device__ inline void norm_row(const float* x, const float* weight, float epsilon,
                                DeviceCheck check, DeviceActivations out) {
  let_next_begin();
  const uint32_t cols = out.cols, each = blockDim.x * elementwise_each,
                 first = threadIdx.x * elementwise_each;
  const Four first_weights = load(weight, first, cols);
  after_previous();
  const std::size_t begin = std::size_t{blockIdx.x} * cols;
  x += begin;
  const Four first_numbers = load(x, first, cols);
  float sum = 0;
  bool bad = false;
#pragma unroll 1
  for (uint32_t from = 0; from < cols; from += each) {
    const Four v = from == 0 ? first_numbers : load(x, from + first, cols);
    for (const float a : v.values) sum += a * a;
    bad |= is_bad(v, check.limit);
  }
  report(bad, check);
  const float factor = 1.0f / sqrtf(block_sum(sum) / static_cast<float>(cols) + epsilon);
#pragma unroll 1
  for (uint32_t from = 0; from < cols; from += each) {
    const uint32_t at = from + first;
    Four v = from == 0 ? first_numbers : load(x, at, cols);
    const Four w = from == 0 ? first_weights : load(weight, at, cols);
    for (unsigned i = 0; i < elementwise_each; ++i)
      v.values[i] = v.values[i] * factor * w.values[i];
    if constexpr (add) {
      const Four sum_so_far = load(out.f32 + begin, at, cols);
      for (unsigned i = 0; i < elementwise_each; ++i) v.values[i] += sum_so_far.values[i];
    }
    if (out.f32) store(out.f32 + begin, at, cols, v);
    if (out.q) round_inputs(v.values, begin + at, at < cols, out);
  }
}

}  // namespace

extern "C" {

// A block a row.
__global__ void __launch_bounds__(norm_threads)
    rms_norm(const float* x, const float* weight, float epsilon, DeviceCheck check,
             DeviceActivations out) {
  norm_row<false>(x, weight, epsilon, check, out);
}

__global__ void __launch_bounds__(norm_threads)
    add_rms_norm(const float* x, const float* weight, float epsilon, DeviceCheck check,
                 DeviceActivations out) {
  norm_row<true>(x, weight, epsilon, check, out);
}

__global__ void __launch_bounds__(threads) quantize(DeviceActivations x, DeviceCheck check) {
  let_next_begin();
  after_previous();
  const std::size_t n = std::size_t{x.n} * x.cols,
                    at = (std::size_t{blockIdx.x} * threads + threadIdx.x) * elementwise_each;
  const Four v = load(x.f32, at, n);
  report(is_bad(v, check.limit), check);
  if (x.q) round_inputs(v.values, at, at < n, x);
}

__global__ void __launch_bounds__(threads)
    swiglu(const float* gate, const float* up, DeviceCheck check, DeviceActivations out) {
  let_next_begin();
  after_previous();
  const std::size_t n = std::size_t{out.n} * out.cols,
                    at = (std::size_t{blockIdx.x} * threads + threadIdx.x) * elementwise_each;
  Four v = load(gate, at, n);
  const Four u = load(up, at, n);
  for (unsigned i = 0; i < elementwise_each; ++i)
    v.values[i] = v.values[i] / (1.0f + expf(-v.values[i])) * u.values[i];
  report(is_bad(v, check.limit), check);
  if (out.f32) store(out.f32, at, n, v);
  if (out.q) round_inputs(v.values, at, at < n, out);
}

// A warp per head of a token.
__global__ void __launch_bounds__(threads) rotate(DeviceHeads h, DeviceCheck check) {
  after_previous();
  const uint32_t row = blockIdx.x * (threads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32,
                 of_q = h.n * h.heads, of_k = h.n * h.kv_heads;
  if (row >= of_q + 2 * of_k) return;
  const bool is_q = row < of_q, is_v = row >= of_q + of_k;
  const float* norm = is_v ? nullptr : is_q ? h.q_norm : h.k_norm;
  const uint32_t half = is_v ? 0 : h.rotary_dim / 2;
  const std::size_t angles = std::size_t{is_q ? row / h.heads : (row - of_q) / h.kv_heads} * half;
  float* x = h.qkv + std::size_t{row} * h.head_dim;
  float factor = 1;
  if (norm) {
    float sum = 0;
#pragma unroll 1
    for (uint32_t d = lane; d < h.head_dim; d += 32) sum += x[d] * x[d];
    factor = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(h.head_dim) + h.epsilon);
  }
  bool bad = false;
  const auto get = [&](uint32_t d) { return norm ? x[d] * factor * norm[d] : x[d]; };
  const auto put = [&](uint32_t d, float v) {
    x[d] = v;
    bad |= !(fabsf(v) < check.limit);
  };
#pragma unroll 1
  for (uint32_t i = lane; i < half; i += 32) {
    const uint32_t one = h.neox ? i : 2 * i, other = h.neox ? half + i : one + 1;
    const float c = h.cos[angles + i], s = h.sin[angles + i], a = get(one), b = get(other);
    put(one, a * c - b * s);
    put(other, a * s + b * c);
  }
#pragma unroll 1
  for (uint32_t d = 2 * half + lane; d < h.head_dim; d += 32) put(d, get(d));
  report(bad, check);
}

}  // extern "C"
}  // namespace kvasir::cuda
