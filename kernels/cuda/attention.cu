// Attention of new tokens; the names are those in launch.cc: sinks and window; the selected pages,
// read in host memory, or gathered from there, or staged by the CPU; the merged output. Each
// computes what the CPU does for `bounded` (attention/attention.cc), with scores of pages from the
// same integers.
#include "attention_chosen.h"
#include "attention_near.h"
#include "attention_quads.h"
#include "rounding.h"

namespace kvasir::cuda {
namespace {

// The largest |x| of a block of begin_threads, returned to all threads.
__device__ float block_largest(float x, float* parts) {
  x = warp_max(fabsf(x));
  __syncthreads();
  if (threadIdx.x % warp == 0) parts[threadIdx.x / warp] = x;
  __syncthreads();
  return warp_max(parts[threadIdx.x % (begin_threads / warp)]);
}

}  // namespace

extern "C" {

// A block per query row: scaled, rounded, and in the sketch's coordinates. Then a block per key and
// value, which it writes to the window.
__global__ void __launch_bounds__(begin_threads)
    attention_begin(DeviceKv kv, DeviceAttention a, const float* q, const float* k,
                    const float* v) {
  const uint32_t rows = kv.kv_heads * a.n * kv.group, thread = threadIdx.x;
  let_next_begin();
  // Some threads share the sum of a coordinate. They load their part of the basis, which no kernel
  // writes, before its factors exist.
  // For heads of 128 in 48 coordinates; the rest of larger ones is loaded later, as many at a time.
  constexpr uint32_t max_each = 26;
  const uint32_t n = kv.sketch_dim, shares = begin_threads / n, coordinate = thread % n,
                 share = thread / n;
  float basis[max_each] = {};
  if (a.projected && blockIdx.x < rows && share < shares) {
    const float* columns =
        kv.basis + (std::size_t{blockIdx.x / (a.n * kv.group)} * kv.dim + share) * n + coordinate;
#pragma unroll
    for (uint32_t i = 0; i < max_each; ++i)
      if (share + i * shares < kv.dim) basis[i] = __ldg(columns + std::size_t{i} * shares * n);
  }
  after_previous();
  if (blockIdx.x >= rows) {
    const uint32_t i = blockIdx.x - rows, head = i % kv.kv_heads, token = i / kv.kv_heads;
    const DeviceCounts& counts = *kv.counts;
    const uint32_t window_at = window_row(counts, counts.window + token, kv.window_rows);
    float* to = kv.window + (std::size_t{head} * 2 * kv.window_rows + window_at) * kv.dim;
    const std::size_t from = (std::size_t{token} * kv.kv_heads + head) * kv.head_dim,
                      value = std::size_t{kv.window_rows} * kv.dim;
    for (uint32_t d = thread; d < kv.dim; d += begin_threads) {
      const bool inside = d < kv.head_dim;
      to[d] = inside ? k[from + d] - kv.centre[head * kv.dim + d] : 0.0f;
      to[value + d] = inside ? v[from + d] : 0.0f;
    }
    return;
  }
  __shared__ float x[begin_threads], sums[begin_threads], parts[begin_threads / warp];
  const uint32_t row = blockIdx.x, head = row / (a.n * kv.group), token = row / kv.group % a.n,
                 of_group = row % kv.group;
  const std::size_t from =
      (std::size_t{token} * kv.kv_heads * kv.group + head * kv.group + of_group) * kv.head_dim;
  const float scale = 1.0f / sqrtf(static_cast<float>(kv.head_dim));
  const float own = thread < kv.head_dim ? q[from + thread] * scale : 0.0f;
  x[thread] = own;
  const float finite = isfinite(own) ? own : 0.0f, largest = block_largest(finite, parts);
  if (thread < kv.dim) {
    const std::size_t at = std::size_t{row} * kv.dim + thread;
    a.q[at] = own;
    a.q8[at] = static_cast<int8_t>(largest > 0 ? __float2int_rn(finite * (127 / largest)) : 0);
    if (thread == 0) a.q_scale[row] = largest / 127;
  }
  if (!a.projected) return;
  float sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < max_each; ++i)
    if (share < shares && share + i * shares < kv.dim) sum += x[share + i * shares] * basis[i];
  const float* column = kv.basis + std::size_t{head} * kv.dim * n + coordinate;
#pragma unroll 1
  for (uint32_t d = share + max_each * shares; share < shares && d < kv.dim;
       d += max_each * shares) {
#pragma unroll
    for (uint32_t i = 0; i < max_each; ++i)
      basis[i] = d + i * shares < kv.dim ? __ldg(column + std::size_t{d + i * shares} * n) : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < max_each; ++i)
      if (d + i * shares < kv.dim) sum += x[d + i * shares] * basis[i];
  }
  sums[thread] = sum;
  __syncthreads();
  if (thread < n) {
    for (uint32_t s = 1; s < shares; ++s) sum += sums[s * n + thread];
  } else {
    sum = 0;
  }
  const float max_score = block_largest(sum, parts);
  const bool none = !(max_score > 1e-30f && max_score < 1e30f);
  if (thread < n)
    a.projected[std::size_t{row} * n + thread] =
        static_cast<int8_t>(none ? 0 : __float2int_rn(sum * (127 / max_score)));
  if (thread == 0) a.projected_scale[row] = none ? 0 : max_score / 127;
}

}  // extern "C"

namespace {

// near_rows: 0, or every quad is selected and the first blocks of a KV head attend sinks and
// window, one of near_rows query rows each.
template <uint32_t dim>
__device__ void attend_chosen_or_near(const DeviceKv& kv, const DeviceAttention& a,
                                      uint32_t near_rows) {
  const uint32_t chunks = (kv.group + attended_rows - 1) / attended_rows;
  if (blockIdx.x >= near_rows)
    return attend_chosen<dim, attended_rows>(kv, a, blockIdx.x - near_rows, near_rows > 0);
  if (blockIdx.y % chunks > 0) return;
  attend_sinks_and_window<dim / warp, attend_warps>(
      kv, a, blockIdx.y / chunks * near_rows + blockIdx.x, blockIdx.z);
}

}  // namespace

extern "C" {

// A block per query row. lse, mass: [n][kv_heads * group] ln of the sum of e^score, and the part of
// it that was attended and stands for itself. out.q: where head_dim is a multiple of 32.
__global__ void attention_finish(DeviceKv kv, DeviceAttention a, DeviceActivations out,
                                 DeviceCheck check, float* lse, float* mass) {
  let_next_begin();
  after_previous();
  const uint32_t head = blockIdx.x / kv.group, row = blockIdx.x % kv.group, token = blockIdx.y,
                 heads = kv.kv_heads * kv.group;
  static_assert(attention_parts < warp);  // the CPU's partial is one more
  const auto has = [&](uint32_t i) {
    return i < a.parts || (i == attention_parts && a.cpu_states);
  };
  const auto part = [&](uint32_t i) {
    return i == attention_parts && a.cpu_states
               ? a.cpu_states +
                     ((std::size_t{head} * a.n + token) * kv.group + row) * (kv.dim + state_sums)
               : a.states + state_at(kv, a, head, token, has(i) ? i : 0, row);
  };
  const uint32_t lane = threadIdx.x % warp;  // a part each
  const bool there = has(lane);
  const float *state = part(lane) + kv.dim, m = there ? state[0] : -INFINITY,
              l = there ? state[1] : 0, own = there ? state[2] : 0;
  float o[attention_parts + 1];  // all loads are in flight at once
#pragma unroll
  for (uint32_t i = 0; i <= attention_parts; ++i) o[i] = part(i)[threadIdx.x];
  const float max_score = warp_max(m), weight = relative(m, max_score), sum = warp_sum(weight * l),
              read = warp_sum(weight * own);
  const bool inside = threadIdx.x < kv.head_dim;  // there are kv.dim threads
  const std::size_t at = std::size_t{token} * heads * kv.head_dim +
                         std::size_t{blockIdx.x} * kv.head_dim + threadIdx.x;
  float x[1] = {};
#pragma unroll
  for (uint32_t i = 0; i <= attention_parts; ++i) {
    const float source = __shfl_sync(all_lanes, weight, static_cast<int>(i));
    x[0] += has(i) ? source * o[i] : 0.0f;
  }
  x[0] /= sum;
  if (inside) out.f32[at] = x[0];
  else x[0] = 0;
  report(!(fabsf(x[0]) < check.limit), check);
  if (out.q) round_inputs(x, at, inside, out);
  if (threadIdx.x > 0) return;
  lse[token * heads + blockIdx.x] = max_score + __logf(sum);
  mass[token * heads + blockIdx.x] = read / sum;
}

// A warp per quad: copies it from its page to where several tokens read it.
__global__ void __launch_bounds__(gather_threads) attention_gather(DeviceKv kv, DeviceAttention a) {
  after_previous();
  const std::size_t at = blockIdx.y;
  const uint32_t lane = threadIdx.x % warp, words = kv.dim / 4, count = a.list_counts[2 * at];
  for (uint32_t i = (blockIdx.x * gather_threads + threadIdx.x) / warp; i < count;
       i += gridDim.x * gather_threads / warp) {
    copy_quad(Quad(kv, blockIdx.y / a.blocks, a.lists[at * a.max_quads + i], kv.dim), words, lane,
              a.gathered + (at * a.max_quads + i) * quad_bytes_of(kv.dim));
  }
}

// A warp per quad of a KV head and layer.
__global__ void __launch_bounds__(gather_threads)
    attention_gather_group(DeviceKv kv, DeviceGroup g) {
  after_previous();
  const uint32_t head = blockIdx.y, lane = threadIdx.x % warp, words = kv.dim / 4, count = *g.count;
  kv.pages_offset += blockIdx.z * std::size_t{kv.kv_heads} * extent_pages * page_size;
  kv.scales_offset += blockIdx.z * std::size_t{kv.kv_heads} * extent_pages * kv.page_tokens * 4;
  uint8_t* const places =
      g.to + (std::size_t{blockIdx.z} * kv.kv_heads + head) * g.room * quad_bytes_of(kv.dim);
  for (uint32_t i = (blockIdx.x * gather_threads + threadIdx.x) / warp; i < count;
       i += gridDim.x * gather_threads / warp)
    copy_quad(Quad(kv, head, g.quads[i], kv.dim), words, lane,
              places + g.places[i] * quad_bytes_of(kv.dim));
}

#define KVASIR_OF_DIM(dim)                                                                   \
  __global__ void __launch_bounds__(near_threads)                                            \
      attention_near_##dim(DeviceKv kv, DeviceAttention a) {                                 \
    attend_sinks_and_window<dim / warp, near_threads / warp>(kv, a, blockIdx.x, blockIdx.y); \
  }                                                                                          \
  __global__ void __launch_bounds__(attend_threads, dim > 128 ? 1 : 2)                       \
      attention_chosen_##dim(DeviceKv kv, DeviceAttention a, uint32_t near_rows) {           \
    attend_chosen_or_near<dim>(kv, a, near_rows);                                            \
  }

KVASIR_OF_DIM(64)
KVASIR_OF_DIM(128)
KVASIR_OF_DIM(256)

}  // extern "C"
}  // namespace kvasir::cuda
