// What new tokens attend, by the names in launch.cc: the sketch's estimates of every token's score, from the same integers as the processor's, and the
// choice of quads by them, as select/bounded.cc and select/sampling.cc have it.
#include "attention_common.h"

namespace kvasir::cuda {
namespace {

constexpr float like_the_best = 2;  // select/bounded.cc

constexpr uint32_t scan_rows = 4;  // of a group, that share a pass
constexpr uint32_t tile_quads = 16;

// The larger of two largest scores, and the sum of exponentials of both, relative to it.
__device__ void add_scores(float& m, float& l, float other_m, float other_l) {
  const float most = fmaxf(m, other_m);
  l = l * relative(m, most) + other_l * relative(other_m, most);
  m = most;
}

// A warp a tile of 16 quads: half of the lanes take every other token.
template <uint32_t groups>
__device__ void score_sketch(const DeviceKv& kv, const DeviceAttention& a) {
  constexpr uint32_t n = groups * 8, warps = scan_threads / warp;
  const uint32_t head = blockIdx.y / a.n, token = blockIdx.y % a.n, lane = threadIdx.x % warp, w = threadIdx.x / warp;
  const uint32_t quad = lane % tile_quads, half = lane / tile_quads;
  const uint32_t page_quads = kv.page_tokens / 4, tiles_of = extent_pages * page_quads / tile_quads;
  // The first tile of each warp; a tile is a part of an extent's sketch.
  if (const uint32_t tile = blockIdx.x * warps + w; token == 0 && tile < a.extents * tiles_of) {
    const std::size_t bytes = kv.sketch_size / tiles_of;
    const int8_t* its = kv.sketch + tile / tiles_of * kv.sketch_stride + head * kv.sketch_size + tile % tiles_of * bytes;
    for (std::size_t i = lane * std::size_t{128}; i < bytes; i += warp * 128) prefetch(its + i);
  }
  after_previous();
  __shared__ float parts[warps][scan_rows][2];
  const uint32_t pages = kv.counts->pages, extents = (pages + extent_pages - 1) / extent_pages, tiles = extents * tiles_of;
  const uint32_t first = page_quads, end = pages * page_quads;  // page 0 holds the sinks
  const std::size_t first_row = (std::size_t{head} * a.n + token) * kv.group, stride = std::size_t{a.extents} * tiles_of * tile_quads;
  for (uint32_t i = blockIdx.x * scan_threads + threadIdx.x; i < share_bins; i += gridDim.x * scan_threads)
    a.share_counts[(std::size_t{head} * a.n + token) * share_bins + i] = 0;
  for (uint32_t begin = 0; begin < kv.group; begin += scan_rows) {
    int32_t q[scan_rows][groups * 2], offset[scan_rows];
    float scale[scan_rows], m[scan_rows], l[scan_rows];
#pragma unroll
    for (uint32_t r = 0; r < scan_rows; ++r) {
      const bool there = begin + r < kv.group;
      offset[r] = 0, m[r] = -INFINITY, l[r] = 0;
      scale[r] = there ? a.projected_scale[first_row + begin + r] : 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < groups * 2; ++i) {
        q[r][i] = there ? reinterpret_cast<const int32_t*>(a.projected + (first_row + begin + r) * n)[i] : 0;
        offset[r] = __dp4a(0x08080808, q[r][i], offset[r]);  // the sketch's values are larger by 8
      }
    }
    for (uint32_t tile = blockIdx.x * warps + w; tile < tiles; tile += gridDim.x * warps) {
      const int8_t* sketch = kv.sketch + tile / tiles_of * kv.sketch_stride + head * kv.sketch_size;
      const uint32_t* lines = reinterpret_cast<const uint32_t*>(sketch) + std::size_t{tile % tiles_of} * 4 * groups * tile_quads + quad;
      const auto* scales = reinterpret_cast<const uint16_t*>(sketch + std::size_t{tiles_of} * 4 * groups * tile_quads * 4);
      uint32_t words[2][groups];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
        for (uint32_t g = 0; g < groups; ++g) words[i][g] = __ldcs(lines + ((2 * i + half) * groups + g) * tile_quads);
      const float step = from_bf16(scales[tile % tiles_of * tile_quads + quad]);
      const uint32_t at = tile * tile_quads + quad;
#pragma unroll
      for (uint32_t r = 0; r < scan_rows; ++r) {
        int32_t best = INT32_MIN;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          int32_t sum = 0;
#pragma unroll
          for (uint32_t g = 0; g < groups; ++g) {
            sum = __dp4a(static_cast<int32_t>(words[i][g] & 0x0f0f0f0f), q[r][2 * g], sum);
            sum = __dp4a(static_cast<int32_t>(words[i][g] >> 4 & 0x0f0f0f0f), q[r][2 * g + 1], sum);
          }
          best = max(best, sum);
        }
        best = max(best, __shfl_xor_sync(all_lanes, best, tile_quads));
        if (half == 0 && begin + r < kv.group) {
          const float score = static_cast<float>(best - offset[r]) * step * scale[r];
          a.scores[(first_row + begin + r) * stride + at] = score;
          if (at >= first && at < end) add_scores(m[r], l[r], score, 1);
        }
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < scan_rows; ++r) {
      const float most = warp_max(m[r]), sum = warp_sum(l[r] * relative(m[r], most));
      if (lane == 0) parts[w][r][0] = most, parts[w][r][1] = sum;
    }
    __syncthreads();
    if (const uint32_t r = threadIdx.x; r < scan_rows && begin + r < kv.group) {
      float most = -INFINITY, sum = 0;
      for (uint32_t i = 0; i < warps; ++i) add_scores(most, sum, parts[i][r][0], parts[i][r][1]);
      float* to = a.score_sums + ((first_row + begin + r) * most_score_parts + blockIdx.x) * 2;
      to[0] = most, to[1] = sum;
    }
    __syncthreads();
  }
}

// ---- the choice -----------------------------------------------------------------------------------------------------------

constexpr unsigned choose_warps = choose_threads / warp;
constexpr uint32_t exact_steps = 2;
constexpr uint32_t kept_masks = 4096;  // of 131,072 quads
constexpr uint32_t bin_shift = 19, first_bin = (127 - 43) << 4;  // of a float's bits

__device__ float bin_edge(uint32_t bin) { return __uint_as_float((first_bin + bin) << bin_shift); }

// The random number of a quad: Kernels::sample.
__device__ float random_of(uint32_t quad, uint32_t seed) {
  uint32_t x = quad * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x ^= x >> 16;
  return (static_cast<float>(x >> 8) + 0.5f) * 0x1p-24f;
}

// The sum of x of the threads before this one, in their order; *all gets that of all. parts: [choose_warps], not used by the call before.
template <class T>
__device__ T before_this(T x, T* parts, T* all) {
  const unsigned lane = threadIdx.x % warp, w = threadIdx.x / warp;
  const auto up_to = [&](T sum) {
    for (unsigned step = 1; step < warp; step *= 2) {
      const T other = __shfl_up_sync(all_lanes, sum, step);
      if (lane >= step) sum += other;
    }
    return sum;
  };
  const T its = up_to(x);
  if (lane == warp - 1) parts[w] = its;
  __syncthreads();
  const T of_warps = up_to(parts[lane]);
  *all = __shfl_sync(all_lanes, of_warps, warp - 1);
  const T before = __shfl_sync(all_lanes, of_warps, w > 0 ? w - 1 : 0);
  return (w > 0 ? before : T()) + its - x;
}

// To all threads, summed in their order. parts: [choose_warps], not used by the call before.
template <class T>
__device__ T sum_of_all(T x, T* parts) {
  T all;
  before_this(x, parts, &all);
  return all;
}

// Of a head's new list: which of its quads the other half of the hot ones has. By all threads of a block; the list is written. Gives their number to all.
__device__ uint32_t find_hot(const DeviceKv& kv, const DeviceHotQuads& hot, uint32_t head, const uint32_t* list, uint32_t count, uint32_t* parts) {
  const uint32_t turn = kv.counts->turn, mine = turn * kv.kv_heads + head, other = (1 - turn) * kv.kv_heads + head, kept = min(count, hot.room);
  const uint32_t* before = hot.held + std::size_t{other} * hot.room;
  const uint32_t known = kv.counts->hot ? hot.held_counts[other] : 0;
  uint32_t found = 0;
  for (uint32_t i = threadIdx.x; i < kept; i += choose_threads) {
    const uint32_t quad = list[i];
    uint32_t begin = 0, end = known;  // of the quads that are not below this one the first is in [begin, end]
    while (begin < end) {
      const uint32_t middle = (begin + end) / 2;
      if (before[middle] < quad)
        begin = middle + 1;
      else
        end = middle;
    }
    const bool there = begin < known && before[begin] == quad;
    hot.found[std::size_t{head} * hot.room + i] = there ? begin + 1 : 0;
    hot.held[std::size_t{mine} * hot.room + i] = quad;
    found += there;
  }
  if (threadIdx.x == 0) hot.held_counts[mine] = kept;
  uint32_t all;
  before_this(found, parts, &all);
  return all;
}

}  // namespace

extern "C" {

// Blocks of share_quads quads of a KV head and token: the rows' shares, summed, in the place of the first row's scores, and how many are of which size.
__global__ void __launch_bounds__(share_threads) attention_shares(DeviceKv kv, DeviceAttention a, uint32_t score_parts) {
  after_previous();
  __shared__ float most_of[most_attended_group], part_of[most_attended_group];
  __shared__ uint32_t counts[share_bins];
  const uint32_t head = blockIdx.y / a.n, token = blockIdx.y % a.n, thread = threadIdx.x, lane = thread % warp, w = thread / warp;
  const uint32_t page_quads = kv.page_tokens / 4, first = page_quads, end = kv.counts->pages * page_quads;
  const uint32_t begin = max(first, blockIdx.x * share_quads), stop = min(end, (blockIdx.x + 1) * share_quads);
  if (begin >= stop) return;
  const std::size_t at = std::size_t{head} * a.n + token, stride = std::size_t{a.extents} * extent_pages * page_quads;
  for (uint32_t i = thread; i < share_bins; i += share_threads) counts[i] = 0;
  for (uint32_t r = w; r < kv.group; r += share_threads / warp) {
    const float* sums = a.score_sums + (at * kv.group + r) * most_score_parts * 2;
    const float* state = a.states + state_at(kv, a, head, token, 0, r);
    float m = -INFINITY, l = 0;
    if (lane == 0) m = state[kv.dim] - __logf(like_the_best), l = state[kv.dim + 1];
    for (uint32_t i = lane; i < score_parts; i += warp) add_scores(m, l, sums[2 * i], sums[2 * i + 1]);
    const float most = warp_max(m), total = warp_sum(l * relative(m, most));
    if (lane == 0) most_of[r] = most, part_of[r] = 1 / total;
  }
  __syncthreads();
  float* scores = a.scores + at * kv.group * stride;
#pragma unroll
  for (uint32_t i = 0; i < share_quads / share_threads; ++i) {
    const uint32_t quad = blockIdx.x * share_quads + i * share_threads + thread;
    if (quad < begin || quad >= stop) continue;
    float share = 0;
    for (uint32_t r = 0; r < kv.group; ++r) share += __expf(scores[r * stride + quad] - most_of[r]) * part_of[r];
    share = share >= 0 ? share : 0;  // a not-a-number is none
    scores[quad] = share;
    if (const uint32_t bin = __float_as_uint(share) >> bin_shift; bin >= first_bin) atomicAdd(counts + min(bin - first_bin, share_bins - 1), 1u);
  }
  __syncthreads();
  for (uint32_t i = thread; i < share_bins; i += share_threads)
    if (counts[i] > 0) atomicAdd(a.share_counts + at * share_bins + i, counts[i]);
}

// A block a KV head and token: the threshold by how many shares are of which size, and what it takes.
__global__ void __launch_bounds__(choose_threads) attention_choose(DeviceKv kv, DeviceAttention a) {
  after_previous();
  __shared__ float sums[4][choose_warps];
  __shared__ uint32_t counts[4][choose_warps];
  __shared__ float below_edge[share_bins + 1][2];  // the sums of shares below a bin's edge, and of their squares
  __shared__ uint32_t above_edge[share_bins + 1];
  __shared__ unsigned masks[kept_masks];  // what is taken of 32 quads
  const uint32_t head = blockIdx.x, token = blockIdx.y, thread = threadIdx.x, lane = thread % warp, w = thread / warp;
  const uint32_t page_quads = kv.page_tokens / 4, pages = kv.counts->pages;
  const std::size_t at = std::size_t{head} * a.n + token, stride = std::size_t{a.extents} * extent_pages * page_quads;
  uint32_t* list = a.lists + at * a.most;
  float* biases = a.biases + at * a.most;
  if (thread < 2) a.list_counts[2 * at + thread] = 0;
  if (a.hot.room && thread == 0) a.hot.held_counts[kv.counts->turn * kv.kv_heads + head] = 0;
  const DeviceBudget budget = *kv.budget;
  const uint32_t first = page_quads, end = pages * page_quads;  // page 0 holds the sinks
  if (pages <= 1 || budget.most == 0) return;
  const float* shares = a.scores + at * kv.group * stride;

  // What lies below the edge of each bin. A share counts as the middle of its bin.
  const uint32_t its = thread < share_bins ? a.share_counts[at * share_bins + thread] : 0;
  const float middle = thread < share_bins ? bin_edge(thread) * (1 + 1.0f / 32) : 0.0f, its_sum = static_cast<float>(its) * middle;
  uint32_t all;
  float sum, squares;
  const uint32_t before = before_this(its, counts[0], &all);
  const float below = before_this(its_sum, sums[0], &sum), squares_below = before_this(its_sum * middle, sums[1], &squares);
  if (thread < share_bins) below_edge[thread][0] = below, below_edge[thread][1] = squares_below, above_edge[thread] = all - before;
  if (thread == 0) below_edge[share_bins][0] = sum, below_edge[share_bins][1] = squares, above_edge[share_bins] = 0;
  bool low = false;  // the threshold is not below the bin's edge
  if (thread < share_bins) {
    const float t = bin_edge(thread), expected = static_cast<float>(all - before) + below / t;
    low = expected >= static_cast<float>(budget.least) && (t * below - squares_below <= budget.variance || expected > static_cast<float>(budget.most));
  }
  const auto bins = static_cast<uint32_t>(__syncthreads_count(low));
  // A step of select/sampling.cc's from where so much is below.
  const auto next = [&](float sum_below, float squares_of, float others) {
    const auto by_count = [&](uint32_t count) { return static_cast<float>(count) > others ? sum_below / (static_cast<float>(count) - others) : INFINITY; };
    return sum_below > 0 ? fminf(fmaxf((budget.variance + squares_of) / sum_below, by_count(budget.most)), by_count(budget.least)) : INFINITY;
  };
  float t = end - first > budget.least ? bin_edge(0) : 0;
  if (t > 0 && bins > 0) {
    t = fmaxf(next(below_edge[bins][0], below_edge[bins][1], static_cast<float>(above_edge[bins])), bin_edge(bins - 1));
    t = fminf(t, bins < share_bins ? bin_edge(bins) : 3e38f);
    // From there by the shares themselves, so that it is the processor's.
    for (uint32_t step = 0; step < exact_steps; ++step) {
      float its_below = 0, its_squares = 0;
      uint32_t others = 0;
#pragma unroll 8
      for (uint32_t i = first + thread; i < end; i += choose_threads) {
        const float share = shares[i], x = share < t ? share : 0.0f;
        its_below += x, its_squares += x * x, others += share >= t;
      }
      its_below = sum_of_all(its_below, sums[2 * (step % 2)]), its_squares = sum_of_all(its_squares, sums[2 * (step % 2) + 1]);
      others = sum_of_all(others, counts[1 + step % 2]);
      if (its_below > 0) t = fminf(next(its_below, its_squares, static_cast<float>(others)), 3e38f);
    }
  }

  const uint32_t seed = (kv.layer << 16 | head) * 0x85ebca6bu;  // sample_seed()
  const uint32_t run = ((end - first + choose_warps - 1) / choose_warps + warp - 1) / warp;  // times 32 a warp's quads
  const uint32_t begin = first + w * run * warp, runs = begin < end ? min(run, (end - begin + warp - 1) / warp) : 0;
  const bool kept = run * choose_warps <= kept_masks;
  const auto mask_of = [&](uint32_t i) {
    const uint32_t quad = begin + i * warp + lane;
    return __ballot_sync(all_lanes, quad < end && shares[quad] / random_of(quad, seed) >= t);
  };
  // To count, then to write where the count says.
  uint32_t count = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < runs; ++i) {
    const unsigned mask = mask_of(i);
    if (kept && lane == 0) masks[w * run + i] = mask;
    count += lane == 0 ? __popc(mask) : 0;
  }
  uint32_t found;
  uint32_t place = __shfl_sync(all_lanes, before_this(count, counts[3], &found), 0);
  for (uint32_t i = 0; i < runs; ++i) {
    const unsigned mask = kept ? masks[w * run + i] : mask_of(i);
    const uint32_t to = place + __popc(mask & ((1u << lane) - 1)), quad = begin + i * warp + lane;
    if (mask >> lane & 1 && to < a.most) {  // more than there is room for is all but impossible
      list[to] = quad;
      biases[to] = shares[quad] < t ? __logf(t / shares[quad]) : 0.0f;
    }
    place += __popc(mask);
  }
  found = min(found, a.most);
  if (thread == 0) a.list_counts[2 * at] = found;
  if (!a.hot.room) return;
  __syncthreads();
  const uint32_t hot = find_hot(kv, a.hot, head, list, found, counts[0]);
  if (thread == 0) a.list_counts[2 * at + 1] = hot;
}

#define KVASIR_OF_DIM(dim, groups) \
  __global__ void __launch_bounds__(scan_threads) attention_scan_##dim(DeviceKv kv, DeviceAttention a) { score_sketch<groups>(kv, a); }
KVASIR_OF_DIM(64, 3)
KVASIR_OF_DIM(128, 6)

}  // extern "C"
}  // namespace kvasir::cuda
