// Experts without their products: the choice, the order of rows, their inputs and the sum.
#include <cfloat>
#include <cmath>

#include "backend/device_experts.h"
#include "layout.h"
#include "rounding.h"

namespace kvasir::cuda {
namespace {

constexpr unsigned all_lanes = ~0u, threads = expert_threads;
// As in engine/expert_routing.cc.
constexpr float excluded = -INFINITY, min_sum = 6.103515625e-5f;

__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, step));
  return x;
}
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
  return x;
}

// ---- the choice; a warp has a token

// Of equal numbers equal, -0 and 0 too, and of larger ones larger.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// The sum of the two largest scores.
__device__ inline float best_two(const float* scores, uint32_t n) {
  float first = excluded, second = excluded;
  for (uint32_t i = 0; i < n; ++i) {
    if (scores[i] > first) second = first, first = scores[i];
    else if (scores[i] > second) second = scores[i];
  }
  return n == 1 ? first : first + second;
}

// Excludes the experts of all groups but the best ones. sums: [groups].
__device__ inline void exclude_groups(const DeviceRouting& r, float* scores, float* sums) {
  const uint32_t lane = threadIdx.x % 32, size = r.experts / r.groups;
  for (uint32_t g = lane; g < r.groups; g += 32) sums[g] = best_two(scores + g * size, size);
  __syncwarp();
  for (uint32_t g = lane; g < r.groups; g += 32) {
    uint32_t better = 0;
    for (uint32_t other = 0; other < r.groups; ++other)
      better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    if (better < r.groups_used) continue;
    for (uint32_t i = 0; i < size; ++i) scores[g * size + i] = excluded;
  }
  __syncwarp();
}

// p = gating(logits), of the experts that a lane has: every 32nd from its own number on.
template <uint32_t each>
__device__ inline void gate(const DeviceRouting& r, float (&p)[each]) {
  if (r.gating == Gating::sigmoid)
#pragma unroll
    for (float& x : p) x = 1 / (1 + expf(-x));
  if (r.gating != Gating::softmax) return;
  float top = -INFINITY, sum = 0;
#pragma unroll
  for (const float x : p) top = fmaxf(top, x);
  top = warp_max(top);
#pragma unroll
  for (float& x : p) sum += x = expf(x - top);
  sum = warp_sum(sum);
#pragma unroll
  for (float& x : p) x /= sum;
}

// From the gated numbers of the chosen, in shared memory, to their weights.
__device__ inline void weigh(const DeviceRouting& r, float* weights) {
  const uint32_t lane = threadIdx.x % 32;
  if (r.gating == Gating::softmax_chosen) {
    float top = -INFINITY, sum = 0;
    for (uint32_t i = lane; i < r.used; i += 32) top = fmaxf(top, weights[i]);
    top = warp_max(top);
    for (uint32_t i = lane; i < r.used; i += 32) sum += weights[i] = expf(weights[i] - top);
    sum = warp_sum(sum);
    for (uint32_t i = lane; i < r.used; i += 32) weights[i] /= sum;
  }
  float factor = r.scale;
  if (r.normalise) {
    float sum = 0;
    for (uint32_t i = lane; i < r.used; i += 32) sum += weights[i];
    factor /= fmaxf(warp_sum(sum), min_sum);
  }
  for (uint32_t i = lane; i < r.used; i += 32) weights[i] *= factor;
}

// The choice of a token by a warp.
template <uint32_t each>
__device__ inline void route(const DeviceRouting& r, const float* logits, const DeviceCheck& check,
                             float* memory, DeviceChoice* chosen) {
  const uint32_t lane = threadIdx.x % 32;
  float p[each], scores[each];
  bool bad = false;
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t e = lane + i * 32;
    p[i] = scores[i] = e < r.experts ? logits[e] : -INFINITY;
    bad |= e < r.experts && !(fabsf(p[i]) < check.limit);
  }
  report(bad, check);
  gate(r, p);
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t e = lane + i * 32;
    if (!r.chooses_by_logits) scores[i] = p[i];
    if (r.bias && e < r.experts) scores[i] += r.bias[e];
    // NaN too: the choices differ, whatever the logits are
    scores[i] = e < r.experts ? fmaxf(scores[i], -FLT_MAX) : excluded;
  }
  float *const weights = memory, *const all_scores = memory + r.experts;
  auto* const list = reinterpret_cast<uint32_t*>(all_scores);
  if (r.groups_used < r.groups) {
#pragma unroll
    for (uint32_t i = 0; i < each; ++i)
      if (const uint32_t e = lane + i * 32; e < r.experts) all_scores[e] = scores[i];
    __syncwarp();
    exclude_groups(r, all_scores, all_scores + r.experts);
#pragma unroll
    for (uint32_t i = 0; i < each; ++i)
      if (const uint32_t e = lane + i * 32; e < r.experts) scores[i] = all_scores[e];
    __syncwarp();  // before the list of the chosen takes their place
  }
  for (uint32_t c = 0; c < r.used; ++c) {
    // the largest of all, the first of equals
    float score = scores[0], weight = p[0];
    uint32_t expert = lane;
#pragma unroll
    for (uint32_t i = 1; i < each; ++i)
      if (scores[i] > score) score = scores[i], weight = p[i], expert = lane + i * 32;
    const uint32_t key = ordered(score), top = __reduce_max_sync(all_lanes, key),
                   best = __reduce_min_sync(all_lanes, key == top ? expert : UINT32_MAX);
    if (expert == best) list[c] = best, weights[c] = weight;
#pragma unroll
    for (uint32_t i = 0; i < each; ++i)
      if (lane + i * 32 == best) scores[i] = excluded;
  }
  __syncwarp();
  weigh(r, weights);
  for (uint32_t c = lane; c < r.used; c += 32) chosen[c] = {list[c], weights[c]};
}

// Writes the exclusive sums of the threads' numbers over a block; returns the total.
__device__ inline uint32_t block_scan(uint32_t x, uint32_t* before) {
  __shared__ uint32_t parts[32];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  uint32_t sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(all_lanes, sum, step);
    if (lane >= static_cast<uint32_t>(step)) sum += other;
  }
  __syncthreads();  // nobody reads the parts of an earlier call
  if (lane == 31) parts[warp] = sum;
  __syncthreads();
  uint32_t start = 0, total = 0;
  for (uint32_t w = 0; w < warps; ++w) {
    start += w < warp ? parts[w] : 0;
    total += parts[w];
  }
  *before = start + sum - x;
  return total;
}

}  // namespace

extern "C" {

// Shared memory per warp: weights of the chosen, scores and sums of groups, [experts] each.
__global__ void __launch_bounds__(route_warps * 32)
    experts_route(DeviceRouting r, uint32_t n, const float* logits, DeviceCheck check,
                  DeviceChoice* chosen) {
  extern __shared__ float route_memory[];
  let_next_begin();
  after_previous();
  const uint32_t token = blockIdx.x * route_warps + threadIdx.x / 32;
  if (token >= n) return;
  float* const memory = route_memory + threadIdx.x / 32 * 3 * r.experts;
  logits += std::size_t{token} * r.experts;
  chosen += std::size_t{token} * r.used;
  if (r.experts <= 8 * 32) route<8>(r, logits, check, memory, chosen);
  else route<DeviceRouting::max_experts / 32>(r, logits, check, memory, chosen);
}

// One block. The tiles of each expert, those of the first one first; then empty ones.
__global__ void __launch_bounds__(tiles_threads) experts_tiles(DeviceExpertRows rows) {
  __shared__ uint32_t counts[DeviceRouting::max_experts];
  after_previous();
  for (uint32_t e = threadIdx.x; e < rows.experts; e += tiles_threads) counts[e] = 0;
  __syncthreads();
  const std::size_t choices = rows.choices();
  for (std::size_t i = threadIdx.x; i < choices; i += tiles_threads)
    atomicAdd(&counts[rows.chosen[i].expert], 1);
  __syncthreads();
  static_assert(tiles_threads >= DeviceRouting::max_experts);
  constexpr uint32_t most = DeviceExpertTile::max_rows;
  const uint32_t e = threadIdx.x, count = e < rows.experts ? counts[e] : 0,
                 tiles = (count + most - 1) / most;
  uint32_t first, at;
  block_scan(count, &first);
  const uint32_t all = block_scan(tiles, &at);
  for (uint32_t i = 0; i < tiles; ++i)
    rows.tiles[at + i] = {e, first + i * most, min(most, count - i * most)};
  for (std::size_t i = all + threadIdx.x; i < rows.max_tiles(); i += tiles_threads)
    rows.tiles[i] = {};
}

// A block has an expert: it counts the rows before its first one, then places its own in order.
__global__ void __launch_bounds__(threads) experts_place(DeviceExpertRows rows) {
  after_previous();
  const uint32_t e = blockIdx.x;
  const std::size_t choices = rows.choices();
  uint32_t earlier = 0, its = 0, unused;
  for (std::size_t i = threadIdx.x; i < choices; i += threads) {
    earlier += rows.chosen[i].expert < e;
    its += rows.chosen[i].expert == e;
  }
  uint32_t row = block_scan(earlier, &unused);
  if (block_scan(its, &unused) == 0) return;
  for (std::size_t from = 0; from < choices; from += threads) {
    const std::size_t i = from + threadIdx.x;
    const bool is_its = i < choices && rows.chosen[i].expert == e;
    uint32_t before;
    const uint32_t found = block_scan(is_its, &before);
    if (is_its) {
      rows.row_of[i] = row + before;
      rows.choice_of[row + before] = static_cast<uint32_t>(i);
    }
    row += found;
  }
}

// A block has a row.
__global__ void __launch_bounds__(threads)
    experts_gather(DeviceExpertRows rows, DeviceActivations x, uint32_t weighs,
                   DeviceActivations out) {
  after_previous();
  const std::size_t to = blockIdx.x, choice = rows.choice_of ? rows.choice_of[to] : to,
                    from = choice / rows.used, cols = x.cols;
  const float weight = weighs ? rows.chosen[choice].weight : 1.0f;
  if (out.f32)
    for (uint32_t c = threadIdx.x; c < cols; c += threads)
      out.f32[to * cols + c] = x.f32[from * cols + c] * weight;
  if (!out.q) return;
  for (uint32_t c = threadIdx.x; c < cols / 4; c += threads)
    reinterpret_cast<char4*>(out.q + to * cols)[c] =
        reinterpret_cast<const char4*>(x.q + from * cols)[c];
  for (uint32_t c = threadIdx.x; c < cols / 16; c += threads)
    out.sums[to * (cols / 16) + c] = x.sums[from * (cols / 16) + c];
  for (uint32_t c = threadIdx.x; c < cols / 32; c += threads)
    out.scale[to * (cols / 32) + c] = x.scale[from * (cols / 32) + c] * weight;
}

// A thread has a column of a token.
__global__ void __launch_bounds__(threads)
    experts_sum(DeviceExpertRows rows, DeviceExpertSum sum, float* y, uint32_t cols) {
  let_next_begin();
  after_previous();
  const std::size_t token = blockIdx.x;
  const uint32_t c = blockIdx.y * threads + threadIdx.x;
  if (c >= cols) return;
  float total = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < rows.used; ++i) {
    const std::size_t choice = token * rows.used + i,
                      row = rows.row_of ? rows.row_of[choice] : choice;
    const float weight = sum.weighs ? rows.chosen[choice].weight : 1.0f;
    total += weight * sum.rows[row * cols + c];
  }
  if (sum.shared) {
    const float weight = sum.shared_gate ? 1 / (1 + expf(-sum.shared_gate[token])) : 1.0f;
    total += weight * sum.shared[token * cols + c];
  }
  total *= sum.factor;
  float& out = y[token * cols + c];
  out = sum.add ? out + total : total;
}

}  // extern "C"
}  // namespace kvasir::cuda
