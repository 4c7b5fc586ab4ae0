// The scan of a sketch for new tokens: estimates of every token's score, and the sums of their
// exponentials; and the asynchronous copies that select.cu uses too.
#pragma once

#include "attention_near.h"
#include "integer_products.h"

namespace kvasir::cuda {
namespace {

constexpr float not_known = -1;    // a threshold that no block has found yet
constexpr uint32_t scan_rows = 4;  // rows of a group per pass
constexpr uint32_t tile_quads = 16;
// A reference of exponentials is set so far above the score that exceeded it: few scores exceed it
// again.
constexpr float far_above = 4;
constexpr float of_far_above = 0.0183156389f;  // e^-far_above

// Merges two sums of exponentials: the larger of their references, and the sum of both relative to
// it.
__device__ void add_scores(float& m, float& l, float other_m, float other_l) {
  const float max_score = fmaxf(m, other_m);
  l = l * relative(m, max_score) + other_l * relative(other_m, max_score);
  m = max_score;
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
  static_assert(groups == 3 || groups == 6 || groups == 12);
  // Products of 32 coordinates, four groups each. Shared memory has room for fewer large tiles.
  constexpr uint32_t products = groups == 12 ? 3 : 1;
  constexpr uint32_t n = groups * 8, warps = scan_threads / warp, ahead = groups == 12 ? 1 : 3,
                     tile_bytes = 4 * groups * tile_quads * 4, step_bytes = tile_quads * 2;
  const uint32_t at = blockIdx.y, head = at / a.blocks, lane = threadIdx.x % warp,
                 w = threadIdx.x / warp;
  const uint32_t pair = lane / 4, of_key = lane % 4, quad = 2 * pair + of_key / 2;
  // Of a head of 64, 128 or 256.
  constexpr uint32_t page_quads = page_size / 2 / (groups * 64 / 3) / 4,
                     tiles_of = extent_pages * page_quads / tile_quads;
  __shared__ float parts[warps][scan_rows][2];
  __shared__ __align__(16) uint8_t ring[warps][ahead][tile_bytes + step_bytes];
  const auto head_offset = static_cast<uint32_t>(kv.sketch_offset + head * kv.sketch_size);
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
    const auto* from = reinterpret_cast<const uint8_t*>(extent) + head_offset;
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
  constexpr uint32_t lane_rows = scan_rows / 2;
  constexpr auto minus_eights = static_cast<int32_t>(0xf8f8f8f8u);
  const uint32_t first = page_quads, end = pages * page_quads;  // page 0 holds the sinks
  const QueryGroup group = query_group_of(a.n, a.blocks, at % a.blocks);
  const uint32_t rows = group.selecting() * kv.group;
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
    const uint32_t mine = begin + of_key % 2 * lane_rows;  // first row of this lane
    uint32_t q[products][2], q_rest = 0;
    int32_t start[lane_rows] = {};
    float scale[lane_rows], m[lane_rows], l[lane_rows] = {};
    uint32_t to[lane_rows];  // offset of its quad of tile 0 in the scores of the list
    const auto query_at = [&](uint32_t row) {
      return (std::size_t{head} * a.n + group.token(row / kv.group)) * kv.group + row % kv.group;
    };
    const auto projected = [&](uint32_t row) {
      return reinterpret_cast<const int32_t*>(a.projected + query_at(min(row, rows - 1)) * n);
    };
    const int32_t* column = projected(begin + pair % scan_rows);
#pragma unroll
    for (uint32_t p = 0; p < products; ++p) {
      q[p][0] = of_key < groups ? column[8 * p + 2 * of_key] : 0;
      q[p][1] = of_key < groups ? column[8 * p + 2 * of_key + 1] : 0;
    }
    if (groups == 6) q_rest = column[8 + of_key];
#pragma unroll
    for (uint32_t r = 0; r < lane_rows; ++r) {
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
      uint8_t* const tile_data = ring[w][place];
      place = place + 1 < ahead ? place + 1 : 0;
      wait_groups<ahead - 1>();
      __syncwarp();
      const float step = from_bf16(reinterpret_cast<const uint16_t*>(tile_data + tile_bytes)[quad]);
      int32_t best[lane_rows];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint2* words =
            reinterpret_cast<const uint2*>(tile_data) + i * groups * tile_quads / 2 + pair;
        int32_t d[4] = {start[0], start[1], start[0], start[1]};
        const auto low = [](uint32_t x) { return x & 0x0f0f0f0f; };
        const auto high = [](uint32_t x) { return x >> 4 & 0x0f0f0f0f; };
#pragma unroll
        for (uint32_t p = 0; p < products; ++p) {
          const uint2 whole = of_key < groups ? words[(4 * p + of_key) * tile_quads / 2] : uint2();
          multiply_32(d, {low(whole.x), low(whole.y), high(whole.x), high(whole.y)}, q[p]);
        }
        if constexpr (groups == 6) {  // more coordinates than a product of 32 takes
          const uint2 rest = words[(4 + of_key / 2) * tile_quads / 2];
          multiply_16(d, low(rest.x >> of_key % 2 * 4), low(rest.y >> of_key % 2 * 4), q_rest);
        }
#pragma unroll
        for (uint32_t r = 0; r < lane_rows; ++r) {
          const int32_t score = of_key < 2 ? d[r] : d[2 + r];
          best[r] = i == 0 ? score : max(best[r], score);
        }
      }
      __syncwarp();
      fetch(next, tile + ahead * hop, tile_data);
      next = extent_of(tile + (ahead + 1) * hop);
      const bool inside = tile * tile_quads + quad - first < end - first;
#pragma unroll
      for (uint32_t r = 0; r < lane_rows; ++r) {
        const float score = static_cast<float>(best[r]) * step * scale[r];
        scores[to[r] + tile * tile_quads] = score;
        if (!inside) continue;
        if (score > m[r]) {
          const float max_score = score + far_above;
          l[r] = l[r] * exponential(m[r] - max_score) + of_far_above, m[r] = max_score;
        } else {
          l[r] += exponential(score - m[r]);
        }
      }
    }
    wait_groups<0>();
    // The lanes of every other column have the same rows.
#pragma unroll
    for (uint32_t r = 0; r < lane_rows; ++r) {
      float max_score = m[r], sum = l[r];
#pragma unroll
      for (uint32_t step = 2; step < warp; step *= 2) {
        const float other_m = __shfl_xor_sync(all_lanes, max_score, step),
                    other_l = __shfl_xor_sync(all_lanes, sum, step);
        add_scores(max_score, sum, other_m, other_l);
      }
      if (lane < 2)
        parts[w][lane * lane_rows + r][0] = max_score, parts[w][lane * lane_rows + r][1] = sum;
    }
    __syncthreads();
    if (const uint32_t r = threadIdx.x; r < scan_rows && begin + r < rows) {
      float max_score = -INFINITY, sum = 0;
      for (uint32_t i = 0; i < warps; ++i)
        add_scores(max_score, sum, parts[i][r][0], parts[i][r][1]);
      float* to = a.score_sums + ((first_row + begin + r) * max_score_parts + part) * 2;
      to[0] = max_score, to[1] = sum;
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace kvasir::cuda
