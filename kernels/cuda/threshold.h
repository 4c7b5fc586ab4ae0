// The threshold of a sample from a histogram of shares: select/sampling.h.
#pragma once

#include "attention_common.h"

namespace kvasir::cuda {

// Shares are counted after rounding to thirteen bits behind the first one: four are the number of
// the bin between two powers of two, nine the step in the bin. Positions in the bits of a float.
constexpr uint32_t bin_shift = 19, step_shift = 10, first_bin = (127 - 43) << 4;
constexpr uint32_t bin_steps = 1u << (bin_shift - step_shift);

__device__ inline float bin_edge(uint32_t bin) {
  return __uint_as_float((first_bin + bin) << bin_shift);
}

// The sum of `count` shares of a bin that are `steps` steps above its edge in all, in units of
// 1 / share_unit.
__device__ inline unsigned long long bin_sum(uint32_t bin, uint32_t count, uint32_t steps) {
  static_assert(share_unit == 0x1p56f);
  return (static_cast<unsigned long long>(count) * ((16 + bin % 16) * bin_steps) + steps)
         << bin / 16;
}

// The random number of a quad: Kernels::sample.
__device__ inline float random_of(uint32_t quad, uint32_t seed) {
  uint32_t x = quad * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x ^= x >> 16;
  return (static_cast<float>(x >> 8) + 0.5f) * 0x1p-24f;
}

// For some bins: the number of shares, their sum, and the sum of their squares.
struct BinSums {
  uint32_t count;
  unsigned long long sum;  // in units of 1 / share_unit
  float squares;
  __device__ BinSums& operator+=(const BinSums& b) {
    count += b.count, sum += b.sum, squares += b.squares;
    return *this;
  }
  __device__ BinSums operator+(const BinSums& b) const {
    return {count + b.count, sum + b.sum, squares + b.squares};
  }
  __device__ BinSums operator-(const BinSums& b) const {
    return {count - b.count, sum - b.sum, squares - b.squares};
  }
};

__device__ inline uint32_t shift_up(uint32_t x, unsigned lanes) {
  return __shfl_up_sync(all_lanes, x, lanes);
}
__device__ inline BinSums shift_up(const BinSums& x, unsigned lanes) {
  return {__shfl_up_sync(all_lanes, x.count, lanes), __shfl_up_sync(all_lanes, x.sum, lanes),
          __shfl_up_sync(all_lanes, x.squares, lanes)};
}

// The sum of x over the threads of a block before this one, in their order; *all gets the sum over
// all threads. parts: [warps], not used by the previous call.
template <uint32_t threads, class T>
__device__ T before_this(T x, T* parts, T* all) {
  constexpr uint32_t warps = threads / warp;
  const unsigned lane = threadIdx.x % warp, w = threadIdx.x / warp;
  T total = x, before{}, sum{};
  for (unsigned step = 1; step < warp; step *= 2) {
    const T other = shift_up(total, step);
    if (lane >= step) total += other;
  }
  if (lane == warp - 1) parts[w] = total;
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < warps; ++i) {
    if (i == w) before = sum;
    sum += parts[i];
  }
  *all = sum;
  return before + (total - x);
}

struct FindingMemory {
  BinSums parts[choose_threads / warp];
  // The first bins, whose edges are not above the threshold.
  uint32_t low;
  // The sums of shares below a bin's edge, and of their squares.
  float below[share_bins + 1], squares_below[share_bins + 1];
  uint32_t above[share_bins + 1];  // number of shares not below
};

// The threshold from a histogram of shares, returned to all threads of a block of choose_threads,
// which all call it. select/sampling.cc finds it by iteration, this function by the bin that
// contains it. The shares of that bin count as their mean, which changes the threshold by a
// thousandth at most.
__device__ inline float find_threshold(const DeviceBudget& budget, float variance, uint32_t n,
                                       const uint32_t* bin_counts,
                                       const unsigned long long* bin_sums, FindingMemory* m) {
  constexpr uint32_t each = share_bins / choose_threads;
  static_assert(share_bins % choose_threads == 0);
  if (n <= budget.min_quads) return 0;
  if (threadIdx.x == 0) m->low = 0;
  const auto as_share = [](unsigned long long sum) {
    return static_cast<float>(sum) * (1 / share_unit);
  };
  BinSums bins_here[each], own_sum{}, all;
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t bin = threadIdx.x * each + i;
    // Other blocks have counted too.
    bins_here[i].count = __ldcg(bin_counts + bin), bins_here[i].sum = __ldcg(bin_sums + bin);
  }
#pragma unroll
  for (BinSums& bin : bins_here) {
    bin.squares = bin.count > 0
                      ? as_share(bin.sum) * as_share(bin.sum) / static_cast<float>(bin.count)
                      : 0.0f;
    own_sum += bin;
  }
  BinSums before = before_this<choose_threads>(own_sum, m->parts, &all);
  auto& [parts, low, below, squares_below, above] = *m;
  uint32_t low_bins = 0;
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const uint32_t bin = threadIdx.x * each + i, others = all.count - before.count;
    const float t = bin_edge(bin), sum_below = as_share(before.sum),
                expected = static_cast<float>(others) + sum_below / t;
    below[bin] = sum_below, squares_below[bin] = before.squares, above[bin] = others;
    low_bins += expected >= static_cast<float>(budget.min_quads) &&
                (t * sum_below - before.squares <= variance ||
                 expected > static_cast<float>(budget.max_quads));
    before += bins_here[i];
  }
  low_bins = __reduce_add_sync(all_lanes, low_bins);
  if (threadIdx.x % warp == 0) atomicAdd(&low, low_bins);
  if (threadIdx.x == 0)
    below[share_bins] = as_share(all.sum), squares_below[share_bins] = all.squares,
    above[share_bins] = 0;
  __syncthreads();
  const uint32_t bins = low;
  if (bins == 0) return bin_edge(0);
  const auto from = [&](uint32_t edge) {
    const auto others = static_cast<float>(above[edge]);
    const auto by_count = [&](uint32_t wanted) {
      return static_cast<float>(wanted) > others
                 ? below[edge] / (static_cast<float>(wanted) - others)
                 : INFINITY;
    };
    return below[edge] > 0 ? fminf(fmaxf((variance + squares_below[edge]) / below[edge],
                                         by_count(budget.max_quads)),
                                   by_count(budget.min_quads))
                           : INFINITY;
  };
  const uint32_t bin_count = above[bins - 1] - above[bins];
  const float mean =
      bin_count > 0 ? (below[bins] - below[bins - 1]) / static_cast<float>(bin_count) : 0.0f;
  const float if_below = from(bins), if_not = from(bins - 1),
              t = if_below >= mean ? if_below : fminf(if_not, mean);
  return fminf(fmaxf(t, bin_edge(bins - 1)), bins < share_bins ? bin_edge(bins) : 3e38f);
}

}  // namespace kvasir::cuda
