// Selection for new tokens; the names are those in launch.cc: the sketch's estimates of every
// token's score, from the same integers as on the CPU, and the choice of quads by them, as in
// select/bounded.cc and select/sampling.cc.
#include "attention_near.h"
#include "integer_products.h"
#include "threshold.h"

namespace kvasir::cuda {
namespace {

constexpr float like_the_best = 2;  // select/bounded.cc
constexpr float not_known = -1;     // a threshold that no block has found yet
// lists up to which each block finds the threshold for itself
constexpr uint32_t max_finding = 256;

constexpr uint32_t scan_rows = 4;  // rows of a group per pass
constexpr uint32_t tile_quads = 16;
// A reference of exponentials is set so far above the score that exceeded it: few scores exceed it
// again.
constexpr float far_above = 4;
constexpr float of_far_above = 0.0183156389f;  // e^-far_above

// Merges two sums of exponentials: the larger of their references, and the sum of both relative to
// it.
__device__ void add_scores(float& m, float& l, float other_m, float other_l) {
  const float most = fmaxf(m, other_m);
  l = l * relative(m, most) + other_l * relative(other_m, most);
  m = most;
}

// e^x; 0 below the smallest normal number.
__device__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

// Cache policy of an asynchronous copy to shared memory, 16 bytes, one of a group of copies: the
// data is read once and leaves the cache before other data.
__device__ unsigned long long read_once() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ void copy_16(void* to, const void* from, unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "l"(policy)
               : "memory");
}
__device__ void end_group() { asm volatile("cp.async.commit_group;"); }
template <uint32_t under_way>
__device__ void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(under_way) : "memory");
}

// A warp per tile of 16 quads. The tokens at the same place of the quads are the rows of a product
// with four queries. Rows and coordinates are ordered so that a lane reads two neighbouring words
// of the tile at a time: row i < 8 is quad 2 i, row 8 + i the next one. The columns are the four
// queries twice, so that half of the lanes find the scores of the first of the two quads, the
// others those of the second. The next tiles of a warp are in flight to shared memory meanwhile;
// the first ones are loaded before the queries are known, because no kernel writes a sketch.
template <uint32_t groups>
__device__ void score_sketch(const DeviceKv& kv, const DeviceAttention& a, uint32_t part,
                             uint32_t parts_of_head) {
  static_assert(groups == 3 || groups == 6);
  constexpr uint32_t n = groups * 8, warps = scan_threads / warp, ahead = 3,
                     tile_bytes = 4 * groups * tile_quads * 4, step_bytes = tile_quads * 2;
  const uint32_t at = blockIdx.y, head = at / a.blocks, lane = threadIdx.x % warp,
                 w = threadIdx.x / warp;
  const uint32_t pair = lane / 4, of_key = lane % 4, quad = 2 * pair + of_key / 2;
  // Of a head of 64 or 128.
  constexpr uint32_t page_quads = page_size / 2 / (groups * 64 / 3) / 4,
                     tiles_of = extent_pages * page_quads / tile_quads;
  __shared__ float parts[warps][scan_rows][2];
  __shared__ __align__(16) uint8_t ring[warps][ahead][tile_bytes + step_bytes];
  const auto its_offset = static_cast<uint32_t>(kv.sketch_offset + head * kv.sketch_size);
  const uint32_t pages = kv.counts->pages, extents = (pages + extent_pages - 1) / extent_pages,
                 tiles = extents * tiles_of;
  const uint32_t first_tile = part * warps + w, hop = parts_of_head * warps;
  const auto extent_of = [&](uint32_t tile) {
    return tile < tiles
               ? __ldg(reinterpret_cast<const unsigned long long*>(kv.sketch_at) + tile / tiles_of)
               : 0;
  };
  const unsigned long long policy = read_once();
  const auto fetch = [&](unsigned long long extent, uint32_t tile, uint8_t* to) {
    const auto* from = reinterpret_cast<const uint8_t*>(extent) + its_offset;
    if (tile < tiles) {
#pragma unroll
      for (uint32_t i = 0; i < tile_bytes; i += warp * 16)
        if (tile_bytes % (warp * 16) == 0 || i + lane * 16 < tile_bytes)
          copy_16(to + i + lane * 16, from + tile % tiles_of * tile_bytes + i + lane * 16, policy);
      if (lane < step_bytes / 16)
        copy_16(to + tile_bytes + lane * 16,
                from + tiles_of * tile_bytes + tile % tiles_of * step_bytes + lane * 16, policy);
    }
    end_group();
  };
  const auto fetch_first = [&] {
#pragma unroll
    for (uint32_t i = 0; i < ahead; ++i)
      fetch(extent_of(first_tile + i * hop), first_tile + i * hop, ring[w][i]);
  };
  fetch_first();
  after_previous();
  // Rows of a lane when scores are known: neighbouring ones.
  constexpr uint32_t its_rows = scan_rows / 2;
  constexpr auto minus_eights = static_cast<int32_t>(0xf8f8f8f8u);
  const uint32_t first = page_quads, end = pages * page_quads;  // page 0 holds the sinks
  const QueryGroup askers = query_group_of(a.n, a.blocks, at % a.blocks);
  const uint32_t rows = askers.selecting() * kv.group;
  const std::size_t first_row = std::size_t{at} * a.selecting_rows,
                    stride = std::size_t{a.extents} * tiles_of * tile_quads;
  float* const scores = a.scores + first_row * stride;
  for (uint32_t i = part * scan_threads + threadIdx.x; i < share_bins;
       i += parts_of_head * scan_threads)
    a.share_counts[std::size_t{at} * share_bins + i] = 0,
                                                  a.share_sums[std::size_t{at} * share_bins + i] =
                                                      0;
  const uint32_t parts_of = static_cast<uint32_t>((stride + choose_quads - 1) / choose_quads);
  for (uint32_t i = part * scan_threads + threadIdx.x; i < parts_of;
       i += parts_of_head * scan_threads)
    a.part_counts[std::size_t{at} * parts_of + i] = 0;
  if (part == 0 && threadIdx.x < 2) a.list_counts[2 * at + threadIdx.x] = 0;
  if (part == 0 && threadIdx.x == 2) a.thresholds[at] = not_known;
  for (uint32_t begin = 0; begin < rows; begin += scan_rows) {
    if (begin > 0) fetch_first();
    const uint32_t mine = begin + of_key % 2 * its_rows;  // first row of this lane
    uint32_t q[2], q_rest = 0;
    int32_t start[its_rows] = {};
    float scale[its_rows], m[its_rows], l[its_rows] = {};
    uint32_t to[its_rows];  // offset of its quad of tile 0 in the scores of the list
    const auto query_at = [&](uint32_t row) {
      return (std::size_t{head} * a.n + askers.token(row / kv.group)) * kv.group + row % kv.group;
    };
    const auto projected = [&](uint32_t row) {
      return reinterpret_cast<const int32_t*>(a.projected + query_at(min(row, rows - 1)) * n);
    };
    const int32_t* column = projected(begin + pair % scan_rows);
    q[0] = of_key < groups ? column[2 * of_key] : 0;
    q[1] = of_key < groups ? column[2 * of_key + 1] : 0;
    if (groups > 4) q_rest = column[8 + of_key];
#pragma unroll
    for (uint32_t r = 0; r < its_rows; ++r) {
      scale[r] = a.projected_scale[query_at(min(mine + r, rows - 1))];
      m[r] = -INFINITY;
      // Missing rows repeat the last one.
      to[r] = min(mine + r, rows - 1) * static_cast<uint32_t>(stride) + quad;
#pragma unroll
      // The values of the sketch are stored + 8.
      for (uint32_t i = 0; i < groups * 2; ++i)
        start[r] = __dp4a(minus_eights, projected(mine + r)[i], start[r]);
    }
    uint32_t place = 0;
    unsigned long long next = extent_of(first_tile + ahead * hop);
    for (uint32_t tile = first_tile; tile < tiles; tile += hop) {
      uint8_t* const its_tile = ring[w][place];
      place = place + 1 < ahead ? place + 1 : 0;
      wait_groups<ahead - 1>();
      __syncwarp();
      const float step = from_bf16(reinterpret_cast<const uint16_t*>(its_tile + tile_bytes)[quad]);
      int32_t best[its_rows];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint2* words =
            reinterpret_cast<const uint2*>(its_tile) + i * groups * tile_quads / 2 + pair;
        const uint2 whole = of_key < groups ? words[of_key * tile_quads / 2] : uint2();
        int32_t d[4] = {start[0], start[1], start[0], start[1]};
        const auto low = [](uint32_t x) { return x & 0x0f0f0f0f; };
        const auto high = [](uint32_t x) { return x >> 4 & 0x0f0f0f0f; };
        multiply_32(d, {low(whole.x), low(whole.y), high(whole.x), high(whole.y)}, q);
        if constexpr (groups > 4) {  // more coordinates than a product of 32 takes
          const uint2 rest = words[(4 + of_key / 2) * tile_quads / 2];
          multiply_16(d, low(rest.x >> of_key % 2 * 4), low(rest.y >> of_key % 2 * 4), q_rest);
        }
#pragma unroll
        for (uint32_t r = 0; r < its_rows; ++r) {
          const int32_t its = of_key < 2 ? d[r] : d[2 + r];
          best[r] = i == 0 ? its : max(best[r], its);
        }
      }
      __syncwarp();
      fetch(next, tile + ahead * hop, its_tile);
      next = extent_of(tile + (ahead + 1) * hop);
      const bool inside = tile * tile_quads + quad - first < end - first;
#pragma unroll
      for (uint32_t r = 0; r < its_rows; ++r) {
        const float score = static_cast<float>(best[r]) * step * scale[r];
        scores[to[r] + tile * tile_quads] = score;
        if (!inside) continue;
        if (score > m[r]) {
          const float most = score + far_above;
          l[r] = l[r] * exponential(m[r] - most) + of_far_above, m[r] = most;
        } else {
          l[r] += exponential(score - m[r]);
        }
      }
    }
    wait_groups<0>();
    // The lanes of every other column have the same rows.
#pragma unroll
    for (uint32_t r = 0; r < its_rows; ++r) {
      float most = m[r], sum = l[r];
#pragma unroll
      for (uint32_t step = 2; step < warp; step *= 2) {
        const float other_m = __shfl_xor_sync(all_lanes, most, step),
                    other_l = __shfl_xor_sync(all_lanes, sum, step);
        add_scores(most, sum, other_m, other_l);
      }
      if (lane < 2) parts[w][lane * its_rows + r][0] = most, parts[w][lane * its_rows + r][1] = sum;
    }
    __syncthreads();
    if (const uint32_t r = threadIdx.x; r < scan_rows && begin + r < rows) {
      float most = -INFINITY, sum = 0;
      for (uint32_t i = 0; i < warps; ++i) add_scores(most, sum, parts[i][r][0], parts[i][r][1]);
      float* to = a.score_sums + ((first_row + begin + r) * max_score_parts + part) * 2;
      to[0] = most, to[1] = sum;
    }
    __syncthreads();
  }
}

// ---- the choice

// The place at which a selected quad is cached, as in DeviceHotQuads::list_places. Other threads
// use the same places. A thread takes an entry by exchanging it for its own, and no thread takes it
// again in this step, so each failed exchange is the success of another thread.
__device__ uint32_t keep_quad(const DeviceHotQuads& hot, const DeviceCounts& counts, uint32_t head,
                              uint32_t quad) {
  const uint32_t first = hot_place(quad, hot.room);
  unsigned long long* const entries = hot.entries + std::size_t{head} * hot.room + first;
  const unsigned long long mine = static_cast<unsigned long long>(counts.step) << 32 | quad;
  for (;;) {
    unsigned long long its[hot_ways], before = 0;  // before: the former entry of the place
    uint32_t place = 0, last = UINT32_MAX;
#pragma unroll
    // All loads are in flight at once.
    for (uint32_t i = 0; i < hot_ways; ++i)
      its[i] = *reinterpret_cast<volatile unsigned long long*>(entries + i);
    bool there = false;
#pragma unroll
    for (uint32_t i = 0; i < hot_ways; ++i) {
      const bool kept = is_kept(its[i], counts);
      if (there) continue;
      there = kept && static_cast<uint32_t>(its[i]) == quad;
      const uint32_t chosen = kept ? static_cast<uint32_t>(its[i] >> 32) : 0;
      if (there || chosen < last) before = its[i], place = i, last = chosen;
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
  constexpr uint32_t together = 4;  // rows whose scores are in flight at once
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
  const QueryGroup askers = query_group_of(a.n, a.blocks, blockIdx.y % a.blocks);
  const uint32_t rows = askers.selecting() * kv.group;
  const std::size_t at = blockIdx.y, first_row = at * a.selecting_rows,
                    stride = std::size_t{a.extents} * extent_pages * page_quads;
  for (uint32_t i = thread; i < share_threads / counting * share_bins; i += share_threads)
    words[0][i] = 0;
  after_previous();
  const uint32_t end = kv.counts->pages * page_quads;
  float* const scores = a.scores + first_row * stride + thread * share_each;
  // Pages have whole fours of quads.
  const auto inside = [&](uint32_t part) {
    return part + thread * share_each >= first && part + thread * share_each < end;
  };
  const auto scores_of = [&](uint32_t row, uint32_t part) {
    return part + thread * share_each < stride && row < rows
               ? __ldcg(reinterpret_cast<const float4*>(scores + row * stride + part))
               : float4();
  };
  float4 next[together];
#pragma unroll
  for (uint32_t r = 0; r < together; ++r) next[r] = scores_of(r, blockIdx.x * share_quads);
  if (end <= first) return;
  for (uint32_t r = w; r < rows; r += share_threads / warp) {
    const auto* sums =
        reinterpret_cast<const float2*>(a.score_sums) + (first_row + r) * max_score_parts;
    const float* state =
        a.states + state_at(kv, a, head, askers.token(r / kv.group), 0, r % kv.group);
    float2 its[max_score_parts / warp];
#pragma unroll
    for (uint32_t i = 0; i < max_score_parts / warp; ++i)
      its[i] =
          i * warp + lane < score_parts ? __ldcg(sums + i * warp + lane) : float2{-INFINITY, 0};
    const float near_m = __ldcg(state + kv.dim) - __logf(like_the_best),
                near_l = __ldcg(state + kv.dim + 1);
    float m = its[0].x;
#pragma unroll
    for (uint32_t i = 1; i < max_score_parts / warp; ++i) m = fmaxf(m, its[i].x);
    const float most = fmaxf(warp_max(m), near_m);
    float l = 0;
#pragma unroll
    for (const float2& part : its) l += part.y * relative(part.x, most);
    const float sum = warp_sum(l), total = sum + near_l * relative(near_m, most);
    if (lane == 0) max_of[r] = most, part_of[r] = 1 / total, share_of[r] = sum / total;
  }
  __syncthreads();
  // A share that is too small for one of many tokens makes its sample too heavy for all of them:
  // select/bounded.cc.
  float least = 0;
  for (uint32_t r = 0; a.n > 1 && r < rows; ++r) least += share_of[r];
  least *= 0.1f / static_cast<float>(end - first);
  constexpr uint32_t each = share_bins / share_threads;
  uint32_t counts[each] = {};
  unsigned long long sums[each] = {};
  const auto take_counts = [&] {
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint32_t bin = i * share_threads + thread;
      uint32_t count = 0, steps = 0;
      for (auto& of : words) {
        count += of[bin] >> count_shift, steps += of[bin] & ((1u << count_shift) - 1);
        of[bin] = 0;
      }
      counts[i] += count, sums[i] += bin_sum(bin, count, steps);
    }
    __syncthreads();
  };
  uint32_t pass = 0;
  for (uint32_t part = blockIdx.x * share_quads; part < end; part += gridDim.x * share_quads) {
    float share[share_each] = {};
    const auto add = [&](const float4& of, uint32_t r) {
      const float most = max_of[r], its = part_of[r];
      share[0] += exponential(of.x - most) * its, share[1] += exponential(of.y - most) * its,
          share[2] += exponential(of.z - most) * its, share[3] += exponential(of.w - most) * its;
    };
#pragma unroll
    for (uint32_t r = 0; r < together; ++r) {
      if (r < rows) add(next[r], r);
      next[r] = scores_of(r, part + gridDim.x * share_quads);
    }
#pragma unroll 4
    for (uint32_t r = together; r < rows; ++r) add(scores_of(r, part), r);
    if (inside(part)) {
#pragma unroll
      for (float& its : share) {
        its = fmaxf(its >= bin_edge(0) ? its : 0, least);  // NaNs too
        const uint32_t bits = (__float_as_uint(its) + (1u << step_shift >> 1)) >> step_shift,
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
  __shared__ float its_threshold;
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
  const uint32_t end = step.pages * page_quads, most = kv.budget->max_quads;
  if (end <= first || begin >= end || most == 0) return;
  float* const own_shares = shares + thread * each;
  for (uint32_t i = 0; i < each && own + i < stride; i += 4)
    copy_16(own_shares + i, a.scores + at * a.selecting_rows * stride + own + i, read_once());
  end_group();
  const auto asking =
      static_cast<float>(query_group_of(a.n, a.blocks, blockIdx.y % a.blocks).selecting());
  const bool each_finds = gridDim.x * gridDim.y <= max_finding;
  float t = not_known;
  if (each_finds || blockIdx.x == 0)
    t = find_threshold(*kv.budget, kv.budget->variance * asking * asking, end - first,
                       a.share_counts + at * share_bins, a.share_sums + at * share_bins,
                       &memory.finding);
  if (!each_finds) {
    volatile float* const known = a.thresholds + at;
    if (blockIdx.x == 0 && thread == 0) *known = t;
    while (thread == 0 && t == not_known) t = *known;
    if (thread == 0) its_threshold = t;
    __syncthreads();
    t = its_threshold;
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
    uint32_t its;
    while ((its = counts[i]) == 0) {
    }
    others += its - 1;
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
#define KVASIR_OF_DIM(dim, groups)                                                   \
  __global__ void __launch_bounds__(scan_threads, scan_blocks)                       \
      attention_scan_##dim(DeviceKv kv, DeviceAttention a, uint32_t near_rows) {     \
    if (blockIdx.x < near_rows)                                                      \
      attend_sinks_and_window<dim / warp, scan_threads / warp>(                      \
          kv, a, blockIdx.y * near_rows + blockIdx.x, 0);                            \
    else score_sketch<groups>(kv, a, blockIdx.x - near_rows, gridDim.x - near_rows); \
  }
KVASIR_OF_DIM(64, 3)
KVASIR_OF_DIM(128, 6)

}  // extern "C"
}  // namespace kvasir::cuda
