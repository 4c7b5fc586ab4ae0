// The tiles of keys that a sparse prefill attends, of the text before its newest part. Block-sparse
// prefill is that of Jiang et al., "MInference 1.0" (2024). Here the choice is a sample, as in
// select/sampling.h, whose units are tiles.
//
// Tokens choose for their block of rows, by some of their heads. prefill_sum_tiles_*() find
// the sum of e^score of each of these rows in each tile, where the best of eight keys stands for
// them. Scores are products of bytes: each query has a scale, and 32 keys have one. The share of a
// tile is the sum of these parts of the rows' attention. prefill_choose_tiles() reads tiles with
// large shares always, and a sample of the others for all of them.
#include "prefill_matrices.h"
#include "prefill_rows.h"
#include "threshold.h"

namespace kvasir::cuda {
namespace {

constexpr uint32_t rows_of_warp = 16, summed = prefill_summed_rows;
static_assert(summed == prefill_threads / warp * rows_of_warp);

// Block (some blocks of rows; head, from first_head on; part of the tiles). A warp has 16 rows.
template <int dim>
__device__ void sum_tiles(const DevicePrefill& r, uint32_t first_head) {
  constexpr uint32_t keys = prefill_choosing_keys, parts_of_tile = prefill_keys / keys,
                     row_bytes = tile_row_bytes(dim), row_halves = row_bytes / 2,
                     part_bytes = keys * row_bytes, pieces = row_bytes / 16;
  extern __shared__ uint4 shared[];
  const uint32_t queries = shared_address(shared), first_part = queries + summed * row_bytes;
  const uint32_t lane = threadIdx.x % warp, g = lane / 4, t = lane % 4,
                 warp_row = threadIdx.x / warp * rows_of_warp;
  const uint32_t first_row = blockIdx.x * summed, head = first_head + blockIdx.y,
                 rows = choosing_rows_of(r);
  after_previous();
  // The first and last tile of a part; tiles that every block attends count in the sums of rows.
  const uint32_t before = r.pages * r.page_tokens + r.window,
                 all = tiles_of_choosing(r, first_row + summed),
                 each = (all + gridDim.z - 1) / gridDim.z, begin = blockIdx.z * each,
                 end = min(begin + each, all);
  if (begin >= end) return;
  const auto* text =
      reinterpret_cast<const uint16_t*>(r.tiles.keys + std::size_t{head} * r.room * row_bytes);
  const int8_t* q = r.tiles.q + std::size_t{head} * r.q_room * row_bytes;
  const auto row_of = [&](uint32_t i) {
    return choosing_row(min(first_row + i, rows - 1), r.group);
  };
  for (uint32_t i = threadIdx.x; i < summed * pieces; i += prefill_threads) {
    const uint32_t row = i / pieces, own = i % pieces, from = row_of(row);
    copy_async(piece<row_halves>(queries, row, own),
               q + 2 * prefill_place(r.q_room, from, own * 8));
  }
  const auto copy_keys = [&](uint32_t number) {
    copy_rows<row_halves, keys>(first_part + number % 2 * part_bytes, text, r.room, number * keys);
    copies_given();
  };
  copy_keys(begin * parts_of_tile);

  uint32_t a[dim / 32][4], row[2];
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row[i] = row_of(warp_row + i * 8 + g);
    factor[i] = tile_factor(r, head, row[i]);
  }
  float* out[2];  // null: there is no such row
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t own = first_row + warp_row + i * 8 + g;
    out[i] = own < rows ? r.tiles.scores + (std::size_t{blockIdx.y} * rows + own) * r.tiles.room
                        : nullptr;
  }
  for (uint32_t tile = begin; tile < end; ++tile) {
    const float4 scales = tile_scales(r, head, tile);
    int s[prefill_keys / 8][4] = {};
#pragma unroll
    for (uint32_t part = 0; part < parts_of_tile; ++part) {
      const uint32_t number = tile * parts_of_tile + part,
                     part_keys = first_part + number % 2 * part_bytes;
      copies_done();
      __syncthreads();
      if (number + 1 < end * parts_of_tile) copy_keys(number + 1);
      if (number == begin * parts_of_tile) {
#pragma unroll
        for (int d = 0; d < dim / 32; ++d)
          load_matrices(a[d], piece<row_halves>(queries, warp_row + lane % 16, 2 * d + lane / 16));
      }
#pragma unroll
      for (int d = 0; d < dim / 32; ++d)
#pragma unroll
        for (uint32_t k = 0; k < keys / 16; ++k) {
          uint32_t b[4];
          load_matrices(b, piece<row_halves>(part_keys, k * 16 + lane / 16 * 8 + lane % 8,
                                             2 * d + lane / 8 % 2));
          const uint32_t at = part * (keys / 8) + 2 * k;
          multiply_32(s[at], a[d], {b[0], b[1]});
          multiply_32(s[at + 1], a[d], {b[2], b[3]});
        }
    }
    const auto sum = [&]<bool masked>() {
      const SeenTiles seen{before};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = tile_sum<masked>(factor[i], scales, [&](uint32_t group, uint32_t n) {
          const uint32_t k = group * 4 + n / 2, key = tile * prefill_keys + k * 8 + 2 * t + n % 2;
          return !masked || is_seen<false>(r, seen, row[i], key) ? s[k][2 * i + n % 2] : unseen;
        });
        if (t == 0 && out[i]) out[i][tile] = x;
      }
    };
    if ((tile + 1) * prefill_keys > before) sum.template operator()<true>();
    else sum.template operator()<false>();
  }
}

struct ChoosingMemory {
  uint32_t counts[prefill_choose_threads / warp];
  float sums[prefill_choose_threads / warp];
};

// Of all threads of a block.
__device__ inline float block_sum(float x, float* parts) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % warp == 0) parts[threadIdx.x / warp] = x;
  __syncthreads();
  float sum = 0;
  for (uint32_t i = 0; i < prefill_choose_threads / warp; ++i) sum += parts[i];
  return sum;
}

// The threshold at which `count` tiles are expected, as in select/sampling.cc.
__device__ inline float tile_threshold(const float* shares, uint32_t n, uint32_t count,
                                       ChoosingMemory* m) {
  constexpr int most_steps = 24;
  if (n <= count) return 0;
  float all = 0;
  for (uint32_t i = threadIdx.x; i < n; i += prefill_choose_threads) all += shares[i];
  float threshold = block_sum(all, m->sums) / static_cast<float>(count);
  for (int step = 0; step < most_steps; ++step) {
    float below = 0, others = 0;
    for (uint32_t i = threadIdx.x; i < n; i += prefill_choose_threads)
      shares[i] < threshold ? below += shares[i] : others += 1;
    below = block_sum(below, m->sums), others = block_sum(others, m->sums);
    if (!(below > 0) || others >= static_cast<float>(count)) break;
    const float next = below / (static_cast<float>(count) - others);
    const bool last = next * 1.001f >= threshold;
    threshold = next;
    if (last) break;
  }
  return threshold;
}

}  // namespace

extern "C" {

// Block (block of rows; head, from first_head on).
__global__ void __launch_bounds__(prefill_choose_threads)
    prefill_choose_tiles(DevicePrefill r, uint32_t first_head) {
  extern __shared__ float shares[];  // [near]
  __shared__ ChoosingMemory memory;
  __shared__ float totals[max_choosing_rows];
  const uint32_t block = blockIdx.x, head = first_head + blockIdx.y, room = r.tiles.room,
                 lane = threadIdx.x % warp, choosing = choosing_rows(r.group);
  after_previous();
  const uint32_t all = tiles_seen(r, (block + 1) * prefill_rows);
  const std::size_t at = head * blocks_of(r) + block;
  const float* scores =
      r.tiles.scores + (blockIdx.y * blocks_of(r) + block) * choosing * std::size_t{room};
  for (uint32_t i = threadIdx.x / warp; i < choosing; i += prefill_choose_threads / warp) {
    const float* row = scores + std::size_t{i} * room;
    const bool there = choosing_row(block * choosing + i, r.group) / r.group < r.n;
    float largest = -INFINITY, sum = 0;
#pragma unroll 4
    for (uint32_t tile = lane; there && tile < all; tile += warp)
      largest = fmaxf(largest, row[tile]);
    largest = warp_max(largest);
#pragma unroll 4
    for (uint32_t tile = lane; there && tile < all; tile += warp)
      sum += power_of_two(row[tile] - largest);
    sum = warp_sum(sum);
    if (lane == 0) totals[i] = there ? largest + log2f(sum) : INFINITY;
  }
  __syncthreads();
  // Tile 0 is always attended, and those from `near` on.
  const uint32_t n = r.tiles.near > 1 ? r.tiles.near - 1 : 0;
  float sum = 0;
  for (uint32_t tile = threadIdx.x; tile < n; tile += prefill_choose_threads) {
    float share = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < choosing; ++i)
      share += power_of_two(scores[std::size_t{i} * room + tile + 1] - totals[i]);
    shares[tile] = share, sum += share;
  }
  // A share that is too small for one row makes the sample too heavy for it: select/bounded.cc.
  const float least = 0.1f * block_sum(sum, memory.sums) / static_cast<float>(max(n, 1u));
  for (uint32_t tile = threadIdx.x; tile < n; tile += prefill_choose_threads)
    shares[tile] = fmaxf(shares[tile], least);
  __syncthreads();
  const uint32_t chosen = block < r.tiles.exact ? n : r.tiles.chosen;
  const float threshold = tile_threshold(shares, n, chosen, &memory);
  const uint32_t seed = r.tiles.seed_of(head, block);
  uint32_t* const list = r.tiles.lists + at * room;
  float* const biases = r.tiles.biases + at * room;
  if (threadIdx.x == 0) list[0] = 0, biases[0] = 0;
  uint32_t count = 1;
  for (uint32_t first = 0; first < n; first += prefill_choose_threads) {
    const uint32_t tile = first + threadIdx.x;
    const float share = tile < n ? shares[tile] : 0;
    const bool taken = tile < n && share >= random_of(tile + 1, seed) * threshold;
    uint32_t taken_here = 0;
    __syncthreads();
    const uint32_t place =
        count + before_this<prefill_choose_threads>(uint32_t{taken}, memory.counts, &taken_here);
    if (taken) {
      list[place] = tile + 1;
      biases[place] = share < threshold ? log2f(threshold / share) : 0.0f;
    }
    count += taken_here;
  }
  if (threadIdx.x == 0) r.tiles.counts[at] = r.tiles.near > 0 ? count : 0;
}

__global__ void __launch_bounds__(prefill_threads, 4)
    prefill_sum_tiles_64(DevicePrefill r, uint32_t first_head) {
  sum_tiles<64>(r, first_head);
}
__global__ void __launch_bounds__(prefill_threads, 3)
    prefill_sum_tiles_128(DevicePrefill r, uint32_t first_head) {
  sum_tiles<128>(r, first_head);
}
__global__ void __launch_bounds__(prefill_threads, 2)
    prefill_sum_tiles_256(DevicePrefill r, uint32_t first_head) {
  sum_tiles<256>(r, first_head);
}

}  // extern "C"
}  // namespace kvasir::cuda
