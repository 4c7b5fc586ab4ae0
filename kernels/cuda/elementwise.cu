// Operations that compute the inputs of products, and RoPE; the names are those in launch.cc. A
// thread has four neighbouring numbers, so eight threads have a block of 32 inputs.
#include <cmath>

#include "activated.h"
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

// norm_row() of at most max_short_norm numbers, by fewer threads, which have several fours each. So
// more rows are under way at once. The order of the sums is the same.
template <bool add>
__device__ inline void norm_short_row(const float* x, const float* weight, float epsilon,
                                      DeviceCheck check, DeviceActivations out) {
  constexpr uint32_t each = short_norm_threads * elementwise_each, fours = max_short_norm / each;
  __shared__ float parts[32];
  let_next_begin();
  const uint32_t cols = out.cols, first = threadIdx.x * elementwise_each, lane = threadIdx.x % 32;
  const std::size_t begin = std::size_t{blockIdx.x} * cols;
  Four w[fours], v[fours];
#pragma unroll
  for (uint32_t i = 0; i < fours; ++i) w[i] = load(weight, i * each + first, cols);
  after_previous();
#pragma unroll
  for (uint32_t i = 0; i < fours; ++i) v[i] = load(x + begin, i * each + first, cols);
  bool bad = false;
#pragma unroll
  for (uint32_t i = 0; i < fours; ++i) {
    float sum = 0;
    for (const float a : v[i].values) sum += a * a;
    bad |= is_bad(v[i], check.limit);
    sum = warp_sum(sum);
    if (lane == 0) parts[(i * short_norm_threads + threadIdx.x) / 32] = sum;
  }
  report(bad, check);
  __syncthreads();
  const uint32_t warps = (cols + 32 * elementwise_each - 1) / (32 * elementwise_each);
  const float sum = warp_sum(lane < warps ? parts[lane] : 0),
              factor = 1.0f / sqrtf(sum / static_cast<float>(cols) + epsilon);
#pragma unroll
  for (uint32_t i = 0; i < fours; ++i) {
    const uint32_t at = i * each + first;
    for (unsigned j = 0; j < elementwise_each; ++j)
      v[i].values[j] = v[i].values[j] * factor * w[i].values[j];
    if constexpr (add) {
      const Four sum_so_far = load(out.f32 + begin, at, cols);
      for (unsigned j = 0; j < elementwise_each; ++j) v[i].values[j] += sum_so_far.values[j];
    }
    if (out.f32) store(out.f32 + begin, at, cols, v[i]);
    if (out.q) round_inputs(v[i].values, begin + at, at < cols, out);
  }
}

struct Largest {
  float value = -INFINITY;
  uint32_t index = 0;
  bool is_bad = false;
  __device__ void take(float x, uint32_t at) {
    is_bad |= !(fabsf(x) < INFINITY);
    if (x > value || (x == value && at < index)) value = x, index = at;
  }
};

__device__ inline Largest warp_largest(Largest own) {
  for (int step = 16; step > 0; step /= 2) {
    const float value = __shfl_xor_sync(all_lanes, own.value, step);
    const uint32_t index = __shfl_xor_sync(all_lanes, own.index, step);
    const bool is_bad = __shfl_xor_sync(all_lanes, static_cast<int>(own.is_bad), step) != 0;
    if (value > own.value || (value == own.value && index < own.index))
      own.value = value, own.index = index;
    own.is_bad |= is_bad;
  }
  return own;
}

// The norm of one head's numbers, by a warp: (x - shift) * factor * weight.
struct HeadNorm {
  float shift = 0, factor = 1;
  const float* weight = nullptr;
  __device__ float of(float x, uint32_t d) const {
    return (x - shift) * factor * (weight ? weight[d] : 1.0f);
  }
};

__device__ inline HeadNorm head_norm(const float* x, uint32_t dim, DeviceHeadNorm kind,
                                     const float* weight, float epsilon) {
  const uint32_t lane = threadIdx.x % 32;
  float shift = 0, sum = 0;
  if (kind == DeviceHeadNorm::layer) {
#pragma unroll 1
    for (uint32_t d = lane; d < dim; d += 32) sum += x[d];
    shift = warp_sum(sum) / static_cast<float>(dim);
  }
  sum = 0;
#pragma unroll 1
  for (uint32_t d = lane; d < dim; d += 32) sum += (x[d] - shift) * (x[d] - shift);
  return {shift, 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + epsilon), weight};
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

__global__ void __launch_bounds__(short_norm_threads)
    short_rms_norm(const float* x, const float* weight, float epsilon, DeviceCheck check,
                   DeviceActivations out) {
  norm_short_row<false>(x, weight, epsilon, check, out);
}

__global__ void __launch_bounds__(short_norm_threads)
    add_short_rms_norm(const float* x, const float* weight, float epsilon, DeviceCheck check,
                       DeviceActivations out) {
  norm_short_row<true>(x, weight, epsilon, check, out);
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

// A block a row. Like norm_row(), a thread writes only what it alone reads.
__global__ void __launch_bounds__(norm_threads)
    layer_norm(const float* x, const float* weight, const float* bias, float epsilon,
               DeviceCheck check, DeviceActivations out) {
  let_next_begin();
  after_previous();
  const uint32_t cols = out.cols, each = blockDim.x * elementwise_each,
                 first = threadIdx.x * elementwise_each;
  const std::size_t begin = std::size_t{blockIdx.x} * cols;
  x += begin;
  float sum = 0;
  bool bad = false;
#pragma unroll 1
  for (uint32_t at = first; at < cols; at += each) {
    const Four v = load(x, at, cols);
    for (const float a : v.values) sum += a;
    bad |= is_bad(v, check.limit);
  }
  report(bad, check);
  const float mean = block_sum(sum) / static_cast<float>(cols);
  __syncthreads();  // block_sum() uses its memory again
  sum = 0;
#pragma unroll 1
  for (uint32_t at = first; at < cols; at += each) {
    const Four v = load(x, at, cols);
    for (unsigned i = 0; i < elementwise_each; ++i)
      sum += at + i < cols ? (v.values[i] - mean) * (v.values[i] - mean) : 0.0f;
  }
  const float factor = 1.0f / sqrtf(block_sum(sum) / static_cast<float>(cols) + epsilon);
#pragma unroll 1
  for (uint32_t from = 0; from < cols; from += each) {
    const uint32_t at = from + first;
    Four v = load(x, at, cols);
    const Four w = load(weight, at, cols), b = bias ? load(bias, at, cols) : Four{};
    for (unsigned i = 0; i < elementwise_each; ++i)
      v.values[i] = (v.values[i] - mean) * factor * w.values[i] + b.values[i];
    if (out.f32) store(out.f32 + begin, at, cols, v);
    if (out.q) round_inputs(v.values, begin + at, at < cols, out);
  }
}

__global__ void __launch_bounds__(threads)
    activate(Activation f, const float* gate, const float* up, DeviceCheck check,
             DeviceActivations out) {
  let_next_begin();
  after_previous();
  const std::size_t n = std::size_t{out.n} * out.cols,
                    at = (std::size_t{blockIdx.x} * threads + threadIdx.x) * elementwise_each;
  Four v = load(gate, at, n);
  const Four u = up ? load(up, at, n) : Four{1, 1, 1, 1};
  for (unsigned i = 0; i < elementwise_each; ++i)
    v.values[i] = activated(f, v.values[i], u.values[i]);
  report(is_bad(v, check.limit), check);
  if (out.f32) store(out.f32, at, n, v);
  if (out.q) round_inputs(v.values, at, at < n, out);
}

__global__ void __launch_bounds__(threads) scale(float* x, std::size_t n, float factor) {
  let_next_begin();
  after_previous();
  const std::size_t at = (std::size_t{blockIdx.x} * threads + threadIdx.x) * elementwise_each;
  Four v = load(x, at, n);
  for (float& a : v.values) a *= factor;
  store(x, at, n, v);
}

// A block (part, row): a row of logits is as long as the vocabulary.
__global__ void __launch_bounds__(norm_threads)
    find_largest(const float* x, std::size_t n, DeviceLargest* out) {
  __shared__ Largest parts[norm_threads / 32];
  x += blockIdx.y * n, out += blockIdx.y * largest_parts + blockIdx.x;
  const std::size_t part = (n + largest_parts - 1) / largest_parts,
                    each = (part + elementwise_each - 1) / elementwise_each * elementwise_each,
                    end = min((blockIdx.x + 1) * each, n);
  let_next_begin();
  after_previous();
  Largest own;
#pragma unroll 4
  for (std::size_t at = blockIdx.x * each + threadIdx.x * elementwise_each; at < end;
       at += norm_threads * elementwise_each) {
    const Four v = load(x, at, n);
    for (unsigned i = 0; i < elementwise_each; ++i)
      if (at + i < n) own.take(v.values[i], static_cast<uint32_t>(at + i));
  }
  own = warp_largest(own);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  own = warp_largest(parts[threadIdx.x]);
  if (threadIdx.x == 0) *out = {own.value, own.is_bad ? no_largest : own.index};
}

// A warp per head of a token.
__global__ void __launch_bounds__(threads) rotate(DeviceHeads h, DeviceCheck check) {
  after_previous();
  const uint32_t row = blockIdx.x * (threads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32,
                 of_q = h.n * h.heads, of_k = h.n * h.kv_heads;
  if (row >= of_q + 2 * of_k) return;
  const bool is_q = row < of_q, is_v = row >= of_q + of_k;
  const uint32_t heads = is_q ? h.heads : h.kv_heads,
                 of_kind = is_q   ? row
                           : is_v ? row - of_q - of_k
                                  : row - of_q,
                 token = of_kind / heads, half = is_v ? 0 : h.rotary_dim / 2;
  const std::size_t angles = std::size_t{token} * half;
  float* x = h.qkv + std::size_t{row} * h.head_dim;
  const DeviceHeadNorm kind = !is_v      ? h.norm
                              : h.norm_v ? DeviceHeadNorm::rms
                                         : DeviceHeadNorm::none;
  const float* weights = is_v ? nullptr : is_q ? h.q_norm : h.k_norm;
  if (weights) weights += std::size_t{of_kind % heads} * h.norm_stride;
  const bool has_norm = kind != DeviceHeadNorm::none, after = has_norm && h.norm_after_rope;
  HeadNorm norm;
  if (has_norm && !after) norm = head_norm(x, h.head_dim, kind, weights, h.epsilon);
  const float factor = is_q ? h.q_factor * (h.q_factors ? h.q_factors[token] : 1.0f) : 1.0f;
  bool bad = false;
  const auto put = [&](uint32_t d, float v) {
    x[d] = v;
    bad |= !(fabsf(v) < check.limit);
  };
  const float first_factor = after ? 1.0f : factor;
#pragma unroll 1
  for (uint32_t i = lane; i < half; i += 32) {
    const uint32_t one = h.neox ? i : 2 * i, other = h.neox ? half + i : one + 1;
    const float c = h.cos[angles + i], s = h.sin[angles + i], a = norm.of(x[one], one),
                b = norm.of(x[other], other);
    put(one, (a * c - b * s) * first_factor);
    put(other, (a * s + b * c) * first_factor);
  }
#pragma unroll 1
  for (uint32_t d = 2 * half + lane; d < h.head_dim; d += 32)
    put(d, norm.of(x[d], d) * first_factor);
  if (after) {
    __syncwarp();  // a lane reads what others have written
    norm = head_norm(x, h.head_dim, kind, weights, h.epsilon);
#pragma unroll 1
    for (uint32_t d = lane; d < h.head_dim; d += 32) put(d, norm.of(x[d], d) * factor);
  }
  report(bad, check);
}

}  // extern "C"
}  // namespace kvasir::cuda
