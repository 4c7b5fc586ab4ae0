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

// The index of the largest score, the first of equals, in all lanes.
__device__ inline uint32_t best_of(const float* scores, uint32_t n) {
  uint32_t best = threadIdx.x % 32;
  float score = best < n ? scores[best] : excluded;
  for (uint32_t i = best + 32; i < n; i += 32)
    if (scores[i] > score) score = scores[i], best = i;
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(all_lanes, score, step);
    const uint32_t at = __shfl_xor_sync(all_lanes, best, step);
    if (other > score || (other == score && at < best)) score = other, best = at;
  }
  return best;
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

// p = gating(logits)
__device__ inline void gate(const DeviceRouting& r, float* p) {
  const uint32_t lane = threadIdx.x % 32;
  if (r.gating == Gating::sigmoid)
    for (uint32_t i = lane; i < r.experts; i += 32) p[i] = 1 / (1 + expf(-p[i]));
  if (r.gating != Gating::softmax) return;
  float top = -INFINITY, sum = 0;
  for (uint32_t i = lane; i < r.experts; i += 32) top = fmaxf(top, p[i]);
  top = warp_max(top);
  for (uint32_t i = lane; i < r.experts; i += 32) sum += p[i] = expf(p[i] - top);
  sum = warp_sum(sum);
  for (uint32_t i = lane; i < r.experts; i += 32) p[i] /= sum;
}

// From the gated numbers of the chosen to their weights, by one lane.
__device__ inline void weigh(const DeviceRouting& r, DeviceChoice* out) {
  if (r.gating == Gating::softmax_chosen) {
    float top = out[0].weight, sum = 0;
    for (uint32_t i = 1; i < r.used; ++i) top = fmaxf(top, out[i].weight);
    for (uint32_t i = 0; i < r.used; ++i) sum += out[i].weight = expf(out[i].weight - top);
    for (uint32_t i = 0; i < r.used; ++i) out[i].weight /= sum;
  }
  if (r.normalise) {
    float sum = 0;
    for (uint32_t i = 0; i < r.used; ++i) sum += out[i].weight;
    for (uint32_t i = 0; i < r.used; ++i) out[i].weight /= fmaxf(sum, min_sum);
  }
  for (uint32_t i = 0; i < r.used; ++i) out[i].weight *= r.scale;
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

// Shared memory per warp: probabilities, scores and sums of groups, [experts] each.
__global__ void __launch_bounds__(route_warps * 32)
    experts_route(DeviceRouting r, uint32_t n, const float* logits, DeviceCheck check,
                  DeviceChoice* chosen) {
  extern __shared__ float route_memory[];
  let_next_begin();
  after_previous();
  const uint32_t token = blockIdx.x * route_warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= n) return;
  float *const p = route_memory + threadIdx.x / 32 * 3 * r.experts, *const scores = p + r.experts;
  logits += std::size_t{token} * r.experts;
  bool bad = false;
  for (uint32_t i = lane; i < r.experts; i += 32) {
    p[i] = scores[i] = logits[i];
    bad |= !(fabsf(p[i]) < check.limit);
  }
  report(bad, check);
  gate(r, p);
  for (uint32_t i = lane; i < r.experts; i += 32) {
    if (!r.chooses_by_logits) scores[i] = p[i];
    if (r.bias) scores[i] += r.bias[i];
    scores[i] = fmaxf(scores[i], -FLT_MAX);  // NaN too: the choices differ, whatever the logits are
  }
  __syncwarp();
  if (r.groups_used < r.groups) exclude_groups(r, scores, scores + r.experts);
  chosen += std::size_t{token} * r.used;
  for (uint32_t i = 0; i < r.used; ++i) {
    const uint32_t best = best_of(scores, r.experts);
    if (lane == 0) {
      chosen[i] = {best, p[best]};
      scores[best] = excluded;
    }
    __syncwarp();
  }
  if (lane == 0) weigh(r, chosen);
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
