// What new tokens attend, by the names in launch.cc: the sketch's estimates of every token's score, from the same integers as the processor's, and the
// choice of pages by them, as select/bounded.cc and select/sampling.cc have it.
#include "attention_common.h"

namespace kvasir::cuda {
namespace {

constexpr float like_the_best = 4;  // select/bounded.cc

constexpr uint32_t scan_rows = 4;  // of a group, that share a pass

// A warp a tile of 16 blocks: half of the lanes take every other token.
template <uint32_t groups>
__device__ void score_sketch(const DeviceKv& kv, const DeviceAttention& a) {
  constexpr uint32_t n = groups * 8, tile_blocks = 16;
  const uint32_t head = blockIdx.y / a.n, token = blockIdx.y % a.n, lane = threadIdx.x % warp, block = lane % tile_blocks, half = lane / tile_blocks;
  const uint32_t tiles_of = extent_pages * kv.page_tokens / kv.block_tokens / tile_blocks;
  // The first tile of each warp; a tile is a part of an extent's sketch.
  if (const uint32_t tile = (blockIdx.x * scan_threads + threadIdx.x) / warp; token == 0 && tile < a.extents * tiles_of) {
    const std::size_t bytes = kv.sketch_size / tiles_of;
    const int8_t* its = kv.sketch + tile / tiles_of * kv.sketch_stride + head * kv.sketch_size + tile % tiles_of * bytes;
    for (std::size_t i = lane * std::size_t{128}; i < bytes; i += warp * 128) prefetch(its + i);
  }
  after_previous();
  const uint32_t extents = (kv.counts->pages + extent_pages - 1) / extent_pages, tiles = extents * tiles_of;
  const std::size_t first_row = (std::size_t{head} * a.n + token) * kv.group, stride = std::size_t{a.extents} * tiles_of * tile_blocks;
  for (uint32_t begin = 0; begin < kv.group; begin += scan_rows) {
    int32_t q[scan_rows][groups * 2], offset[scan_rows];
    float scale[scan_rows];
#pragma unroll
    for (uint32_t r = 0; r < scan_rows; ++r) {
      const bool there = begin + r < kv.group;
      offset[r] = 0;
      scale[r] = there ? a.projected_scale[first_row + begin + r] : 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < groups * 2; ++i) {
        q[r][i] = there ? reinterpret_cast<const int32_t*>(a.projected + (first_row + begin + r) * n)[i] : 0;
        offset[r] = __dp4a(0x08080808, q[r][i], offset[r]);  // the sketch's values are larger by 8
      }
    }
    for (uint32_t tile = (blockIdx.x * scan_threads + threadIdx.x) / warp; tile < tiles; tile += gridDim.x * (scan_threads / warp)) {
      const int8_t* sketch = kv.sketch + tile / tiles_of * kv.sketch_stride + head * kv.sketch_size;
      const uint32_t* lines = reinterpret_cast<const uint32_t*>(sketch) + std::size_t{tile % tiles_of} * kv.block_tokens * groups * tile_blocks + block;
      const float* scales = reinterpret_cast<const float*>(sketch + std::size_t{tiles_of} * kv.block_tokens * groups * tile_blocks * 4);
      int32_t best[scan_rows];
      for (int32_t& b : best) b = INT32_MIN;
#pragma unroll 2
      for (uint32_t t = half; t < kv.block_tokens; t += 2) {
        uint32_t words[groups];
#pragma unroll
        for (uint32_t g = 0; g < groups; ++g) words[g] = __ldcs(lines + (t * groups + g) * tile_blocks);
#pragma unroll
        for (uint32_t r = 0; r < scan_rows; ++r) {
          int32_t sum = 0;
#pragma unroll
          for (uint32_t g = 0; g < groups; ++g) {
            sum = __dp4a(static_cast<int32_t>(words[g] & 0x0f0f0f0f), q[r][2 * g], sum);
            sum = __dp4a(static_cast<int32_t>(words[g] >> 4 & 0x0f0f0f0f), q[r][2 * g + 1], sum);
          }
          best[r] = max(best[r], sum);
        }
      }
      const float step = scales[tile % tiles_of * tile_blocks + block];
#pragma unroll
      for (uint32_t r = 0; r < scan_rows; ++r) {
        const int32_t largest = max(best[r], __shfl_xor_sync(all_lanes, best[r], tile_blocks));
        if (half == 0 && begin + r < kv.group)
          a.scores[(first_row + begin + r) * stride + tile * tile_blocks + block] = static_cast<float>(largest - offset[r]) * step * scale[r];
      }
    }
  }
}

// ---- the choice -----------------------------------------------------------------------------------------------------------

constexpr unsigned choose_warps = choose_threads / warp;
constexpr uint32_t near_blocks = 8192;  // whose priorities are kept where they are read fast
constexpr uint32_t above_all = 0x4f000000;  // the bits of 2^31: shares of a group sum to at most 16, and no random number is below 2^-25

// The random number of a block: Kernels::sample_priorities.
__device__ float random_of(uint32_t block, uint32_t seed) {
  uint32_t x = block * 0x9e3779b1u + seed;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  x ^= x >> 16;
  return (static_cast<float>(x >> 8) + 0.5f) * 0x1p-24f;
}

// How many blocks have at least a priority, and the variance that such a threshold leaves, in parts of the one that is allowed; a thread's is at most
// enough to say that it is too large. Whole numbers, summed over a warp by one instruction and in any order to the same.
constexpr uint32_t allowed = 1u << 21;
struct Found {
  uint32_t count, variance;
};

struct Want {
  uint32_t least, most;
  __device__ bool met(const Found& f) const { return f.count > most || (f.count > least && f.variance < allowed); }  // one is left out
};

// Sums over all threads, which all get. parts: [choose_warps][n], not used by the call before.
template <uint32_t n>
__device__ void sum_of_all(Found (&x)[n], Found* parts) {
  const unsigned lane = threadIdx.x % warp;
#pragma unroll
  for (uint32_t i = 0; i < n; ++i) {
    const Found part{__reduce_add_sync(all_lanes, x[i].count), __reduce_add_sync(all_lanes, x[i].variance)};
    if (lane == 0) parts[threadIdx.x / warp * n + i] = part;
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < n; ++i) {
    const Found part = parts[lane * n + i];
    x[i] = {__reduce_add_sync(all_lanes, part.count), __reduce_add_sync(all_lanes, part.variance)};
  }
}

// parts: [choose_warps], not used by the call before.
__device__ uint32_t max_of_all(uint32_t x, uint32_t* parts) {
  x = __reduce_max_sync(all_lanes, x);
  if (threadIdx.x % warp == 0) parts[threadIdx.x / warp] = x;
  __syncthreads();
  return __reduce_max_sync(all_lanes, parts[threadIdx.x % warp]);
}

// The sum of x of the threads before this one; *all gets that of all. parts: [choose_warps], not used by the call before.
__device__ uint32_t before_this(uint32_t x, uint32_t* parts, uint32_t* all) {
  const unsigned lane = threadIdx.x % warp, w = threadIdx.x / warp;
  uint32_t upto = x;
  for (unsigned step = 1; step < warp; step *= 2) {
    const uint32_t other = __shfl_up_sync(all_lanes, upto, step);
    upto += lane >= step ? other : 0;
  }
  if (lane == warp - 1) parts[w] = upto;
  __syncthreads();
  const uint32_t part = parts[lane];
  *all = __reduce_add_sync(all_lanes, part);
  return upto - x + __reduce_add_sync(all_lanes, lane < w ? part : 0);
}

// Of a head's new list: which of its pages the other half of the hot ones has. By all threads of a block; the list is written. Gives their number to all.
__device__ uint32_t find_hot(const DeviceKv& kv, const DeviceHotPages& hot, uint32_t head, const uint32_t* list, uint32_t count, uint32_t* parts) {
  const uint32_t turn = kv.counts->turn, mine = turn * kv.kv_heads + head, other = (1 - turn) * kv.kv_heads + head, kept = min(count, hot.room);
  const uint32_t* before = hot.held + std::size_t{other} * hot.room;
  const uint32_t known = kv.counts->hot ? hot.held_counts[other] : 0;
  uint32_t found = 0;
  for (uint32_t i = threadIdx.x; i < kept; i += choose_threads) {
    const uint32_t page = list[i] >> 4;
    uint32_t begin = 0, end = known;  // of the pages that are not below this one the first is in [begin, end]
    while (begin < end) {
      const uint32_t middle = (begin + end) / 2;
      if (before[middle] < page)
        begin = middle + 1;
      else
        end = middle;
    }
    const bool there = begin < known && before[begin] == page;
    hot.found[std::size_t{head} * hot.room + i] = there ? begin + 1 : 0;
    hot.held[std::size_t{mine} * hot.room + i] = page;
    found += there;
  }
  if (threadIdx.x == 0) hot.held_counts[mine] = kept;
  uint32_t all;
  before_this(found, parts, &all);
  return all;
}

}  // namespace

extern "C" {

// A block a KV head and token. Priorities are not negative, so their bits are in their order: the threshold is found by its bits, two at a time, by what
// three thresholds would take.
__global__ void __launch_bounds__(choose_threads) attention_choose(DeviceKv kv, DeviceAttention a) {
  after_previous();
  __shared__ float near_by[near_blocks];
  __shared__ float row_m[most_attended_group][choose_warps], row_l[most_attended_group][choose_warps];
  __shared__ float most_of[most_attended_group], part_of[most_attended_group];
  __shared__ Found parts[2][choose_warps * 3];  // then counts, three times choose_warps
  const uint32_t head = blockIdx.x, token = blockIdx.y, thread = threadIdx.x, lane = thread % warp, w = thread / warp;
  const uint32_t page_blocks = kv.page_tokens / kv.block_tokens, pages = kv.counts->pages;
  const std::size_t at = std::size_t{head} * a.n + token, stride = std::size_t{a.extents} * extent_pages * page_blocks;
  uint32_t* list = a.lists + at * a.most;
  float* biases = a.biases + at * a.most * page_blocks;
  if (thread < 3) a.list_counts[3 * at + thread] = 0;
  if (a.hot.room && thread == 0) a.hot.held_counts[kv.counts->turn * kv.kv_heads + head] = 0;
  if (pages <= 1) return;
  const uint32_t first = page_blocks, end = pages * page_blocks;  // page 0 holds the sinks

  // Each row's largest score and sum of exponentials; eight blocks are on their way to a thread at a time.
  constexpr uint32_t together = 8;
  float* scores = a.scores + at * kv.group * stride;
  for (uint32_t r = 0; r < kv.group; ++r) {
    const float* its = scores + r * stride;
    float m = -INFINITY, l = 0;
    for (uint32_t begin = first + thread; begin < end; begin += together * choose_threads) {
      float score[together], most = m;
#pragma unroll
      for (uint32_t i = 0; i < together; ++i) {
        const uint32_t b = begin + i * choose_threads;
        score[i] = b < end ? its[b] : -INFINITY;
      }
#pragma unroll
      for (uint32_t i = 0; i < together; ++i) most = fmaxf(most, score[i]);
      l *= relative(m, most);
#pragma unroll
      for (uint32_t i = 0; i < together; ++i) l += relative(score[i], most);
      m = most;
    }
    const float most = warp_max(m);
    l = warp_sum(l * relative(m, most));
    if (lane == 0) row_m[r][w] = most, row_l[r][w] = l;
  }
  __syncthreads();
  if (w < kv.group) {
    const float* state = a.states + state_at(kv, a, head, token, 0, w);
    const float near_m = state[kv.dim] - __logf(like_the_best), m = row_m[w][lane], most = fmaxf(near_m, warp_max(m));
    const float total = warp_sum(relative(m, most) * row_l[w][lane]) + relative(near_m, most) * state[kv.dim + 1];
    if (lane == 0) most_of[w] = most, part_of[w] = 1 / total;
  }
  __syncthreads();
  // The rows' shares, summed, in the place of the first row's scores, and their priorities.
  const bool is_near = end <= near_blocks;
  const uint32_t seed = (kv.layer << 16 | head) * 0x85ebca6bu;  // sample_seed()
#pragma unroll 4
  for (uint32_t b = first + thread; b < end; b += choose_threads) {
    float share = 0;
    for (uint32_t r = 0; r < kv.group; ++r) share += __expf(scores[r * stride + b] - most_of[r]) * part_of[r];
    share = share >= 0 ? share : 0;  // a not-a-number is none
    scores[b] = share;
    if (is_near) near_by[b] = share / random_of(b, seed);
  }
  __syncthreads();
  const auto priority = [&](uint32_t b) { return __float_as_uint(is_near ? near_by[b] : scores[b] / random_of(b, seed)); };

  // What is taken are the blocks whose priority's bits are `high` or more. At most one is left between `low` and `high`: the first that is left out, whose
  // priority is the threshold, or else `low` is. The processor's threshold (select/sampling.cc) lies between the same two blocks.
  const DeviceBudget budget = *kv.budget;
  const Want want{budget.least, budget.most};
  const float scale = budget.variance > 0 ? static_cast<float>(allowed) / budget.variance : 0;
  uint32_t low = 0, high = end - first > want.least ? above_all : 0, turn = 0;
  Found above{}, from_low{end - first, 0};
  while (high - low > 1 && from_low.count - above.count > 1) {
    const uint32_t step = (high - low + 3) / 4;
    const uint32_t t[3] = {low + step, min(low + 2 * step, high), min(low + 3 * step, high)};
    Found found[3] = {};
    float variance[3] = {};
#pragma unroll 8
    for (uint32_t b = first + thread; b < end; b += choose_threads) {
      const uint32_t bits = priority(b);
      const float share = scores[b];
#pragma unroll
      for (uint32_t i = 0; i < 3; ++i) {
        found[i].count += bits >= t[i];
        variance[i] += share * fmaxf(__uint_as_float(t[i]) - share, 0.0f);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) found[i].variance = __float2uint_rn(fminf(variance[i] * scale, static_cast<float>(allowed)));
    sum_of_all(found, parts[turn++ % 2]);
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      if (t[i] >= high) continue;
      if (want.met(found[i])) {
        low = t[i], from_low = found[i];
      } else {
        high = t[i], above = found[i];
        break;
      }
    }
  }
  uint32_t left_out = low;  // or what is between
  for (uint32_t b = first + thread; b < end; b += choose_threads)
    if (const uint32_t bits = priority(b); bits >= low && bits < high) left_out = bits;
  const float threshold = __uint_as_float(max_of_all(left_out, reinterpret_cast<uint32_t*>(parts[turn % 2])));
  __syncthreads();
  auto* counts = reinterpret_cast<uint32_t*>(parts);  // [3][choose_warps]
  const uint32_t run = (pages - 1 + choose_threads - 1) / choose_threads;  // a thread's pages
  const uint32_t run_begin = min(pages, 1 + thread * run), run_end = min(pages, run_begin + run);
  // Twice: to count, and to write where the count says.
  uint32_t place = 0, count = 0;
  for (uint32_t pass = 0; pass < 2; ++pass) {
    uint32_t taken = 0, tokens = 0;
    for (uint32_t p = run_begin; p < run_end; ++p) {
      uint32_t mask = 0;
      for (uint32_t i = 0; i < page_blocks; ++i) mask |= priority(p * page_blocks + i) >= high ? 1u << i : 0u;
      if (mask == 0) continue;
      if (pass == 1) {
        list[place + taken] = p << 4 | mask;
        for (uint32_t i = 0; i < page_blocks; ++i) {
          const float share = scores[p * page_blocks + i];
          biases[(place + taken) * page_blocks + i] = mask >> i & 1 && share < threshold ? __logf(threshold / share) : 0.0f;
        }
      }
      ++taken;
      tokens += __popc(mask) * kv.block_tokens;
    }
    if (pass == 1) break;
    uint32_t all_taken, all_tokens;
    place = before_this(taken, counts + choose_warps, &all_taken);
    before_this(tokens, counts + 2 * choose_warps, &all_tokens);
    if (thread == 0) a.list_counts[3 * at] = all_taken, a.list_counts[3 * at + 1] = all_tokens;
    count = all_taken;
  }
  if (!a.hot.room) return;
  __syncthreads();
  const uint32_t found = find_hot(kv, a.hot, head, list, count, counts);
  if (thread == 0) a.list_counts[3 * at + 2] = found;
}

}  // extern "C"

extern "C" {

#define KVASIR_OF_DIM(dim, groups) \
  __global__ void __launch_bounds__(scan_threads) attention_scan_##dim(DeviceKv kv, DeviceAttention a) { score_sketch<groups>(kv, a); }
KVASIR_OF_DIM(64, 3)
KVASIR_OF_DIM(128, 6)

}  // extern "C"
}  // namespace kvasir::cuda
