// Selection for new tokens; the names are those in launch.cc: the sketch's estimates of every
// token's score, from the same integers as on the CPU, and the choice of quads by them, as in
// select/bounded.cc and select/sampling.cc.
#include "sketch_scan.h"
#include "threshold.h"

namespace kvasir::cuda {
namespace {

constexpr float best_tokens_of_quad = 2;  // select/bounded.cc
// lists up to which each block finds the threshold for itself
constexpr uint32_t max_finding = 256;

// The place at which a selected quad is cached, as in DeviceHotQuads::list_places. Other threads
// use the same places. A thread takes an entry by exchanging it for its own, and no thread takes it
// again in this step, so each failed exchange is the success of another thread.
__device__ uint32_t keep_quad(const DeviceHotQuads& hot, const DeviceCounts& counts, uint32_t head,
                              uint32_t quad) {
  const uint32_t first = hot_place(quad, hot.room);
  unsigned long long* const entries = hot.entries + std::size_t{head} * hot.room + first;
  const unsigned long long mine = static_cast<unsigned long long>(counts.step) << 32 | quad;
  for (;;) {
    unsigned long long held[hot_ways], before = 0;  // before: the former entry of the place
    uint32_t place = 0, last = UINT32_MAX;
#pragma unroll
    // All loads are in flight at once.
    for (uint32_t i = 0; i < hot_ways; ++i)
      held[i] = *reinterpret_cast<volatile unsigned long long*>(entries + i);
    bool there = false;
#pragma unroll
    for (uint32_t i = 0; i < hot_ways; ++i) {
      const bool kept = is_kept(held[i], counts);
      if (there) continue;
      there = kept && static_cast<uint32_t>(held[i]) == quad;
      const uint32_t chosen = kept ? static_cast<uint32_t>(held[i] >> 32) : 0;
      if (there || chosen < last) before = held[i], place = i, last = chosen;
    }
    if (there)
      return atomicCAS(entries + place, before, mine) == before ? (first + place + 1) | hot_present
                                                                : 0;
    if (last == counts.step) return 0;  // all places belong to this step
    if (atomicCAS(entries + place, before, mine) == before) return first + place + 1;
  }
}

}  // namespace

extern "C" {

// Blocks of a list, share_quads quads each: the shares summed over the rows, in place of the scores
// of the first row, and a histogram of them. Sums are integers, so their order does not matter.
__global__ void __launch_bounds__(share_threads, share_blocks)
    attention_shares(DeviceKv kv, DeviceAttention a, uint32_t score_parts) {
  constexpr uint32_t rows_at_once = 4;  // rows whose scores are in flight at once
  // Some threads have counters of their own: the number of shares of a bin in the upper bits, the
  // sum of their steps above the bin's edge in the lower ones. A word has room for so many shares.
  constexpr uint32_t counting = 128, count_shift = 20, word_shares = 2048,
                     passes = word_shares / (counting * share_each);
  static_assert(word_shares * (bin_steps - 1) < 1u << count_shift &&
                word_shares < 1u << (32 - count_shift) && share_bins % share_threads == 0);
  __shared__ float max_of[max_selecting_rows], part_of[max_selecting_rows],
      share_of[max_selecting_rows];
  __shared__ uint32_t words[share_threads / counting][share_bins];
  const uint32_t head = blockIdx.y / a.blocks, thread = threadIdx.x, lane = thread % warp,
                 w = thread / warp;
  const uint32_t page_quads = kv.page_tokens / 4, first = page_quads;
  const QueryGroup group = query_group_of(a.n, a.blocks, blockIdx.y % a.blocks);
  const uint32_t rows = group.selecting() * kv.group;
  const std::size_t at = blockIdx.y, first_row = at * a.selecting_rows,
                    stride = std::size_t{a.extents} * extent_pages * page_quads;
  for (uint32_t i = thread; i < share_threads / counting * share_bins; i += share_threads)
    words[0][i] = 0;
  after_previous();
  const uint32_t end = kv.counts->pages * page_quads;
  float* const scores = a.scores + first_row * stride + thread * share_each;
  const auto inside = [&](uint32_t quad) { return quad >= first && quad < end; };
  const auto scores_of = [&](uint32_t row, uint32_t part) {
    return part + thread * share_each < stride && row < rows
               ? __ldcg(reinterpret_cast<const float4*>(scores + row * stride + part))
               : float4();
  };
  float4 next[rows_at_once];
#pragma unroll
  for (uint32_t r = 0; r < rows_at_once; ++r) next[r] = scores_of(r, blockIdx.x * share_quads);
  if (end <= first) return;
  for (uint32_t r = w; r < rows; r += share_threads / warp) {
    const auto* sums =
        reinterpret_cast<const float2*>(a.score_sums) + (first_row + r) * max_score_parts;
    const float* state =
        a.states + state_at(kv, a, head, group.token(r / kv.group), 0, r % kv.group);
    float2 part_sums[max_score_parts / warp];
#pragma unroll
    for (uint32_t i = 0; i < max_score_parts / warp; ++i)
      part_sums[i] =
          i * warp + lane < score_parts ? __ldcg(sums + i * warp + lane) : float2{-INFINITY, 0};
    const float near_m = __ldcg(state + kv.dim) - __logf(best_tokens_of_quad),
                near_l = __ldcg(state + kv.dim + 1);
    float m = part_sums[0].x;
#pragma unroll
    for (uint32_t i = 1; i < max_score_parts / warp; ++i) m = fmaxf(m, part_sums[i].x);
    const float max_score = fmaxf(warp_max(m), near_m);
    float l = 0;
#pragma unroll
    for (const float2& part : part_sums) l += part.y * relative(part.x, max_score);
    const float sum = warp_sum(l), total = sum + near_l * relative(near_m, max_score);
    if (lane == 0) max_of[r] = max_score, part_of[r] = 1 / total, share_of[r] = sum / total;
  }
  __syncthreads();
  // A share that is too small for one of many tokens makes its sample too heavy for all of them:
  // select/bounded.cc.
  float min_share = 0;
  for (uint32_t r = 0; a.n > 1 && r < rows; ++r) min_share += share_of[r];
  min_share *= 0.1f / static_cast<float>(end - first);
  constexpr uint32_t each = share_bins / share_threads;
  uint32_t counts[each] = {};
  unsigned long long sums[each] = {};
  const auto take_counts = [&] {
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint32_t bin = i * share_threads + thread;
      uint32_t count = 0, steps = 0;
      for (auto& counters : words) {
        count += counters[bin] >> count_shift, steps += counters[bin] & ((1u << count_shift) - 1);
        counters[bin] = 0;
      }
      counts[i] += count, sums[i] += bin_sum(bin, count, steps);
    }
    __syncthreads();
  };
  uint32_t pass = 0;
  for (uint32_t part = blockIdx.x * share_quads; part < end; part += gridDim.x * share_quads) {
    float share[share_each] = {};
    const auto add = [&](const float4& scores, uint32_t r) {
      const float max_score = max_of[r], inverse = part_of[r];
      share[0] += exponential(scores.x - max_score) * inverse,
          share[1] += exponential(scores.y - max_score) * inverse,
          share[2] += exponential(scores.z - max_score) * inverse,
          share[3] += exponential(scores.w - max_score) * inverse;
    };
#pragma unroll
    for (uint32_t r = 0; r < rows_at_once; ++r) {
      if (r < rows) add(next[r], r);
      next[r] = scores_of(r, part + gridDim.x * share_quads);
    }
#pragma unroll 4
    for (uint32_t r = rows_at_once; r < rows; ++r) add(scores_of(r, part), r);
    const uint32_t own = part + thread * share_each;
    if (inside(own) || inside(own + share_each - 1)) {
#pragma unroll
      for (uint32_t i = 0; i < share_each; ++i) {
        if (!inside(own + i)) continue;  // of pages with fewer than four quads
        float& sum = share[i];
        sum = fmaxf(sum >= bin_edge(0) ? sum : 0, min_share);  // NaNs too
        const uint32_t bits = (__float_as_uint(sum) + (1u << step_shift >> 1)) >> step_shift,
                       above = bits - first_bin * bin_steps;
        if (bits < first_bin * bin_steps) continue;
        atomicAdd(&words[thread / counting][min(above / bin_steps, share_bins - 1)],
                  1u << count_shift | (above < share_bins * bin_steps ? above % bin_steps : 0));
        if (above >= share_bins * bin_steps)  // rare, with many rows
          atomicAdd(a.share_sums + (at + 1) * share_bins - 1,
                    __float2ull_rn(__uint_as_float(bits << step_shift) * share_unit) -
                        bin_sum(share_bins - 1, 1, 0));
      }
      __stcg(reinterpret_cast<float4*>(scores + part),
             float4{share[0], share[1], share[2], share[3]});
    }
    if (++pass % passes == 0) take_counts();
  }
  take_counts();
#pragma unroll
  for (uint32_t i = 0; i < each; ++i) {
    const std::size_t bin = at * share_bins + i * share_threads + thread;
    if (counts[i] > 0)
      atomicAdd(a.share_counts + bin, counts[i]), atomicAdd(a.share_sums + bin, sums[i]);
  }
}

// Blocks of choose_quads quads of a list: finds the threshold (each for itself or, with many
// blocks, the first one of a list for all), the quads above it, their places in the list after
// those of the previous blocks, and where they are cached. A block waits for the results of
// previous blocks, which have started before it.
__global__ void __launch_bounds__(choose_threads, 6)
    attention_choose(DeviceKv kv, DeviceAttention a) {
  constexpr uint32_t each = choose_quads / choose_threads, warps = choose_threads / warp;
  static_assert(each % 4 == 0);
  struct Taken {
    uint16_t places[choose_quads];
    float shares[choose_quads];
  };
  union Memory {  // one after the other
    FindingMemory finding;
    Taken taken;
  };
  __shared__ Memory memory;
  __shared__ uint32_t parts[warps], before[warps];
  __shared__ float block_threshold;
  __shared__ __align__(16) float shares[choose_quads];  // a thread uses its own only
  const uint32_t head = blockIdx.y / a.blocks, thread = threadIdx.x,
                 page_quads = kv.page_tokens / 4, first = page_quads;
  // See sample_seed().
  const uint32_t begin = blockIdx.x * choose_quads, own = begin + thread * each,
                 seed = (kv.layer << 16 | head) * 0x85ebca6bu;
  const std::size_t at = blockIdx.y, stride = std::size_t{a.extents} * extent_pages * page_quads;
  if (const std::size_t line = (std::size_t{blockIdx.x} * choose_threads + thread) * 16;
      a.hot.room && line < a.hot.room)
    prefetch(a.hot.entries + std::size_t{head} * a.hot.room + line);
  after_previous();
  const DeviceCounts step = *kv.counts;
  const uint32_t end = step.pages * page_quads, max_score = kv.budget->max_quads;
  if (end <= first || begin >= end || max_score == 0) return;
  float* const own_shares = shares + thread * each;
  for (uint32_t i = 0; i < each && own + i < stride; i += 4)
    copy_16(own_shares + i, a.scores + at * a.selecting_rows * stride + own + i, read_once());
  end_group();
  const auto selecting =
      static_cast<float>(query_group_of(a.n, a.blocks, blockIdx.y % a.blocks).selecting());
  const bool each_finds = gridDim.x * gridDim.y <= max_finding;
  float t = not_known;
  if (each_finds || blockIdx.x == 0)
    t = find_threshold(*kv.budget, kv.budget->variance * selecting * selecting, end - first,
                       a.share_counts + at * share_bins, a.share_sums + at * share_bins,
                       &memory.finding);
  if (!each_finds) {
    volatile float* const known = a.thresholds + at;
    if (blockIdx.x == 0 && thread == 0) *known = t;
    while (thread == 0 && t == not_known) t = *known;
    if (thread == 0) block_threshold = t;
    __syncthreads();
    t = block_threshold;
  }
  wait_groups<0>();
  __align__(16) float share[each];
#pragma unroll
  for (uint32_t i = 0; i < each; i += 4)
    *reinterpret_cast<float4*>(share + i) = *reinterpret_cast<const float4*>(own_shares + i);
  uint32_t mask = 0;
#pragma unroll
  for (uint32_t i = 0; i < each; ++i)
    mask |= uint32_t{own + i >= first && own + i < end && share[i] >= t * random_of(own + i, seed)}
            << i;
  uint32_t all,
      place = before_this<choose_threads>(static_cast<uint32_t>(__popc(mask)), parts, &all);
  volatile uint32_t* const counts = a.part_counts + at * gridDim.x;
  if (thread == 0) counts[blockIdx.x] = all + 1;  // 0: not known yet
  auto& [places, taken] = memory.taken;
#pragma unroll
  for (uint32_t i = 0; i < each; ++i)
    if (mask >> i & 1)
      places[place] = static_cast<uint16_t>(thread * each + i), taken[place++] = share[i];
  uint32_t others = 0, first_place;
  for (uint32_t i = thread; i < blockIdx.x; i += choose_threads) {
    uint32_t count;
    while ((count = counts[i]) == 0) {
    }
    others += count - 1;
  }
  before_this<choose_threads>(others, before, &first_place);
  // More than the room is next to impossible.
  if (begin + choose_quads >= end && thread == 0)
    a.list_counts[2 * at] = min(first_place + all, a.max_quads);
  uint32_t again = 0;
  for (uint32_t i = thread; i < all && first_place + i < a.max_quads; i += choose_threads) {
    const uint32_t to = first_place + i, quad = begin + places[i];
    a.lists[at * a.max_quads + to] = quad;
    a.biases[at * a.max_quads + to] = taken[i] < t ? __logf(t / taken[i]) : 0.0f;
    if (!a.hot.room) continue;
    const uint32_t found = keep_quad(a.hot, step, head, quad);
    a.hot.list_places[std::size_t{head} * a.max_quads + to] = found;
    again += found >> 31;
  }
  again = __reduce_add_sync(all_lanes, again);
  if (thread % warp == 0 && again > 0) atomicAdd(a.list_counts + 2 * at + 1, again);
}

// near_rows: the first blocks of a KV head attend sinks and window, one of near_rows query rows of
// a token each; 0: attention_near does.
#define KVASIR_OF_DIM(dim, groups, blocks)                                           \
  __global__ void __launch_bounds__(scan_threads, blocks)                            \
      attention_scan_##dim(DeviceKv kv, DeviceAttention a, uint32_t near_rows) {     \
    if (blockIdx.x < near_rows)                                                      \
      attend_sinks_and_window<dim / warp, scan_threads / warp>(                      \
          kv, a, blockIdx.y * near_rows + blockIdx.x, 0);                            \
    else score_sketch<groups>(kv, a, blockIdx.x - near_rows, gridDim.x - near_rows); \
  }
KVASIR_OF_DIM(64, 3, scan_blocks)
KVASIR_OF_DIM(128, 6, scan_blocks)
KVASIR_OF_DIM(256, 12, scan_blocks / 2)

}  // extern "C"
}  // namespace kvasir::cuda
