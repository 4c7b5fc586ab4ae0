// The keys nearest to queries by inner product, exactly, for building an index of keys.
//
// The scores are never stored, only the best of each eight neighbouring keys (a group). The k best
// groups contain the k best keys: each of these groups has a key at least as good as the best of
// any other group, and among equal scores groups are ordered, like keys, by the lowest number. A
// first kernel multiplies everything and stores an eighth of it. A second one, with a block per
// query, chooses groups, scores their keys again and chooses among these. It compares integers that
// rise with the score and fall with the item: no two are equal, so exactly k reach one of them.
#include "attention_common.h"
#include "integer_products.h"
#include "tiles.h"

namespace kvasir::cuda {
namespace {

// Of an item or a group: the rank of its score, then the complement of its number.
using Key = unsigned long long;

__device__ inline float scaled(float product, float key_scale, float query_scale) {
  return __fmul_rn(product, __fmul_rn(key_scale, query_scale));
}

// Larger floats have larger ranks; -0 has the rank of 0, NaN the least; no rank is 0.
__device__ inline uint32_t rank_of(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(fmaxf(x, -INFINITY), 0.0f));
  return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}
__device__ inline Key key_of(float score, uint32_t number) {
  return Key{rank_of(score)} << 32 | ~number;
}
__device__ inline uint32_t number_of(Key key) { return ~static_cast<uint32_t>(key); }

// ---- the best of groups

constexpr uint32_t row_tiles = nearest_rows / (nearest_threads / warp) / 16;  // per warp
constexpr uint32_t halves = 2, key_tiles = nearest_items / 8 / halves;
// Start of integer sums: the bits of 1.5 * 2^23. With a sum d added they are the bits of the float
// that is larger by d.
constexpr int start = 0x4b400000;
static_assert(row_tiles == 2 && key_tiles == 4);

// The place of a row of a tile of keys in shared memory. Pairs of a matrix's columns go to the
// lanes of a warp: in this order a lane gets two whole groups, one from each half of the tile.
__device__ inline uint32_t place_of(uint32_t item) {
  return item / 8 % 2 * 32 + item % 8 / 2 * 8 + item / 16 * 2 + item % 2;
}

// Rows of bytes in pieces of 16: the same piece of eight rows occupies all banks.
template <uint32_t dim>
__device__ inline uint32_t piece_of(uint32_t row, uint32_t at) {
  return row * dim + ((at ^ (dim == 128 ? row & 7 : row >> 1 & 3)) << 4);
}

template <uint32_t dim>
__device__ inline void copy_tile(uint32_t to, const DeviceNearest& n, uint32_t tile) {
  constexpr uint32_t pieces = dim / 16;
#pragma unroll
  for (uint32_t i = 0; i < nearest_items * pieces / nearest_threads; ++i) {
    const uint32_t at = i * nearest_threads + threadIdx.x, item = at / pieces, piece = at % pieces;
    // The last item is repeated behind the end.
    const std::size_t from = min(tile * nearest_items + item, n.items - 1);
    copy_async(to + piece_of<dim>(place_of(item), piece), n.keys + from * dim + piece * 16);
  }
}

// Block (rows of queries, part of the items): a warp keeps 32 rows in registers and goes over the
// tiles of the part.
template <uint32_t dim>
__device__ void best_of_groups(const DeviceNearest& n) {
  constexpr uint32_t steps = dim / 32;
  constexpr uint32_t tile_bytes = nearest_items * dim;
  alignas(128) __shared__ int8_t tiles_of[2 * tile_bytes];
  alignas(16) __shared__ float scales[2][nearest_items];
  const uint32_t lane = threadIdx.x % warp, g = lane / 4, t = lane % 4,
                 first_row = blockIdx.x * nearest_rows + threadIdx.x / warp * (row_tiles * 16);
  const uint32_t tiles = (n.items + nearest_items - 1) / nearest_items,
                 part = (tiles + gridDim.y - 1) / gridDim.y;
  const uint32_t first = min(blockIdx.y * part, tiles), end = min(first + part, tiles);
  const uint32_t shared = shared_address(tiles_of);
  after_previous();
  if (first == end) return;
  copy_tile<dim>(shared, n, first);
  copies_given();
  const auto scale_of = [&](uint32_t tile) {
    return threadIdx.x < nearest_items
               ? n.key_scale[min(tile * nearest_items + threadIdx.x, n.items - 1)]
               : 0.0f;
  };
  if (threadIdx.x < nearest_items) scales[0][threadIdx.x] = scale_of(first);
  uint32_t a[row_tiles][steps][4];
  float query_scale[row_tiles][2];
#pragma unroll
  for (uint32_t m = 0; m < row_tiles; ++m)
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const std::size_t row = min(first_row + m * 16 + i * 8 + g, n.rows - 1);
      const auto* words = reinterpret_cast<const uint32_t*>(n.queries + row * dim) + t;
      query_scale[m][i] = n.query_scale[row];
#pragma unroll
      for (uint32_t s = 0; s < steps; ++s)
        a[m][s][i] = words[s * 8], a[m][s][2 + i] = words[s * 8 + 4];
    }

  for (uint32_t tile = first; tile < end; ++tile) {
    const uint32_t turn = (tile - first) % 2;
    copies_done();
    __syncthreads();
    if (tile + 1 < end) {
      copy_tile<dim>(shared + (1 - turn) * tile_bytes, n, tile + 1);
      copies_given();
    }
    const float next_scale = tile + 1 < end ? scale_of(tile + 1) : 0;
    float first_half[row_tiles][2];
#pragma unroll 1  // keeps the registers of one half at a time
    for (uint32_t h = 0; h < halves; ++h) {
      int d[row_tiles][key_tiles][4];
#pragma unroll
      for (uint32_t two = 0; two < steps / 2; ++two)
#pragma unroll
        for (uint32_t j = 0; j < key_tiles; ++j) {
          uint32_t b[4];
          load_matrices(b, shared + turn * tile_bytes +
                               piece_of<dim>(h * 32 + j * 8 + lane % 8, two * 4 + lane / 8));
#pragma unroll
          for (uint32_t m = 0; m < row_tiles; ++m) {
            const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
            if (two == 0) multiply_32_from(d[m][j], start, a[m][0], low);
            else multiply_32(d[m][j], a[m][2 * two], low);
            multiply_32(d[m][j], a[m][2 * two + 1], high);
          }
        }
      const auto* item_scales = reinterpret_cast<const float4*>(scales[turn] + t * 16 + h * 8);
      const float4 s0 = item_scales[0], s1 = item_scales[1];
      float* out = n.group_best + std::size_t{first_row + g} * n.groups +
                   tile * (nearest_items / nearest_group) + t * 2;
      const float key_scale[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
#pragma unroll
      for (uint32_t m = 0; m < row_tiles; ++m)
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i, out += 8 * n.groups) {
          float max_rank = -INFINITY;
#pragma unroll
          for (uint32_t j = 0; j < 8; ++j)
            max_rank = fmaxf(
                max_rank, scaled(__int_as_float(d[m][j / 2][2 * i + j % 2]) - __int_as_float(start),
                                 key_scale[j], query_scale[m][i]));
          if (h == 0) first_half[m][i] = max_rank;
          else if (first_row + m * 16 + i * 8 + g < n.rows)
            *reinterpret_cast<float2*>(out) = make_float2(first_half[m][i], max_rank);
        }
    }
    if (threadIdx.x < nearest_items) scales[1 - turn][threadIdx.x] = next_scale;
  }
}

// ---- the choice

constexpr uint32_t threads = nearest_choose_threads, warps = threads / warp;
// Items of the chosen groups; groups that are listed.
constexpr uint32_t max_items = max_nearest * nearest_group, listed = max_items;
constexpr uint32_t lanes_a_key = 4, keys_a_warp = warp / lanes_a_key;
static_assert(max_nearest == threads && keys_a_warp == nearest_group);

// Shared by the threads of a block.
struct Chosen {
  Key keys[max_items];  // of groups; then of their items
  uint32_t groups[max_nearest];
  Key best[max_nearest];  // to be sorted
  uint32_t sums[2][warps], turn_of_most[warps], listed, chosen, found;
};

// The sum of x over the block, returned to all threads. Calls alternate between two arrays of sums,
// so one wait suffices.
__device__ inline uint32_t block_sum(uint32_t x, uint32_t* turn, Chosen* c) {
  uint32_t* sums = c->sums[*turn ^= 1];
  x = __reduce_add_sync(all_lanes, x);
  if (threadIdx.x % warp == 0) sums[threadIdx.x / warp] = x;
  __syncthreads();
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < warps; ++i) sum += sums[i];
  return sum;
}

// A number that k to `allowed` keys reach. At least k keys reach low, none reaches high. count(x):
// the number of the block's keys that reach x.
template <class Number, class Count>
__device__ inline Number reached_by(Number low, Number high, uint32_t k, uint32_t allowed,
                                    Count&& count) {
  while (high - low > 1) {
    const Number middle = low + (high - low) / 2;
    const uint32_t reached = count(middle);
    if (reached >= k) low = middle;
    else high = middle;
    if (reached >= k && reached <= allowed) break;
  }
  return low;
}

// Writes the k best of more groups to c->groups in any order. *least, *most: bounds of the ranks of
// the last and the best of them.
__device__ inline void choose_groups(const float* best, uint32_t groups, uint32_t k, uint32_t* turn,
                                     uint32_t* min_rank, uint32_t* max_rank, Chosen* c) {
  const uint32_t thread = threadIdx.x;
  uint32_t largest = 0;  // the best of this thread's groups
  for (uint32_t i = thread; i < groups; i += threads) largest = max(largest, rank_of(best[i]));
  if (const uint32_t x = __reduce_max_sync(all_lanes, largest); thread % warp == 0)
    c->turn_of_most[thread / warp] = x;
  __syncthreads();
  uint32_t highest = 0;
#pragma unroll
  for (uint32_t i = 0; i < warps; ++i) highest = max(highest, c->turn_of_most[i]);
  // At least k groups reach what the best groups of k threads reach, and not many more.
  const auto threads_with = [&](uint32_t rank) {
    return static_cast<uint32_t>(__syncthreads_count(largest >= rank));
  };
  const uint32_t low = reached_by(0u, highest + 1, k, k + k / 8, threads_with);
  for (uint32_t i = thread; i < groups; i += threads)
    if (const float x = best[i]; rank_of(x) >= low)
      if (const uint32_t to = atomicAdd(&c->listed, 1u); to < listed) c->keys[to] = key_of(x, i);
  __syncthreads();
  const uint32_t there = c->listed;
  const bool fits = there <= listed;  // otherwise many are equal, and they are read repeatedly
  const uint32_t n = fits ? there : groups;
  const auto key_at = [&](uint32_t i) { return fits ? c->keys[i] : key_of(best[i], i); };
  const Key reached = reached_by(Key{low} << 32, Key{highest + 1} << 32, k, k, [&](Key key) {
    uint32_t count = 0;
    for (uint32_t i = thread; i < n; i += threads) count += key_at(i) >= key;
    return block_sum(count, turn, c);
  });
  for (uint32_t i = thread; i < n; i += threads)
    if (const Key key = key_at(i); key >= reached)
      c->groups[atomicAdd(&c->chosen, 1u)] = number_of(key);
  *min_rank = static_cast<uint32_t>(reached >> 32), *max_rank = highest;
  __syncthreads();
}

// The keys of all items of the chosen groups, a warp per group, four lanes per item; 0 for items
// behind the last one.
__device__ inline void score_groups(const DeviceNearest& n, uint32_t row, uint32_t groups,
                                    Chosen* c) {
  constexpr uint32_t max_loads = 2;  // of 16 bytes: 128 dimensions in four lanes
  const uint32_t loads = n.dim / (lanes_a_key * 16);
  const uint32_t lane = threadIdx.x % warp, part = lane % lanes_a_key;
  uint4 q[max_loads] = {};
#pragma unroll
  for (uint32_t i = 0; i < max_loads; ++i)
    if (i < loads)
      q[i] = reinterpret_cast<const uint4*>(n.queries +
                                            std::size_t{row} * n.dim)[i * lanes_a_key + part];
  const float query_scale = n.query_scale[row];
  for (uint32_t i = threadIdx.x / warp; i < groups; i += warps) {
    const uint32_t item = c->groups[i] * nearest_group + lane / lanes_a_key,
                   read = min(item, n.items - 1);
    const auto* words = reinterpret_cast<const uint4*>(n.keys + std::size_t{read} * n.dim);
    int dot = 0;
#pragma unroll
    for (uint32_t l = 0; l < max_loads; ++l) {
      if (l == loads) break;
      const uint4 k = words[l * lanes_a_key + part];
      dot = __dp4a(static_cast<int>(k.x), static_cast<int>(q[l].x), dot);
      dot = __dp4a(static_cast<int>(k.y), static_cast<int>(q[l].y), dot);
      dot = __dp4a(static_cast<int>(k.z), static_cast<int>(q[l].z), dot);
      dot = __dp4a(static_cast<int>(k.w), static_cast<int>(q[l].w), dot);
    }
#pragma unroll
    for (uint32_t step = 1; step < lanes_a_key; step *= 2)
      dot += __shfl_xor_sync(all_lanes, dot, step);
    if (part == 0)
      c->keys[i * nearest_group + lane / lanes_a_key] =
          item < n.items
              ? key_of(scaled(static_cast<float>(dot), n.key_scale[read], query_scale), item)
              : 0;
  }
}

// Sorts c->best descending by a bitonic sort (Batcher, 1968), a key per thread.
__device__ inline void sort_best(Chosen* c) {
  for (uint32_t size = 2; size <= max_nearest; size *= 2)
    for (uint32_t step = size / 2; step > 0; step /= 2) {
      const uint32_t i = threadIdx.x, other = i ^ step;
      __syncthreads();
      if (other <= i) continue;
      const Key a = c->best[i], b = c->best[other];
      if ((a < b) == ((i & size) == 0)) c->best[i] = b, c->best[other] = a;
    }
  __syncthreads();
}

}  // namespace

extern "C" {

// Block (query).
__global__ void __launch_bounds__(nearest_choose_threads, 3) nearest_choose(DeviceNearest n) {
  __shared__ Chosen c;
  const uint32_t thread = threadIdx.x, row = blockIdx.x,
                 groups = (n.items + nearest_group - 1) / nearest_group;
  uint32_t turn = 0, min_rank = 0, max_rank = ~0u - 1;
  if (thread == 0) c.listed = c.chosen = c.found = 0;
  c.best[thread] = 0;
  after_previous();
  __syncthreads();
  if (groups > n.k)
    choose_groups(n.group_best + row * std::size_t{n.groups}, groups, n.k, &turn, &min_rank,
                  &max_rank, &c);
  else if (thread < groups) c.groups[thread] = thread;
  __syncthreads();
  const uint32_t chosen = min(groups, n.k), k = min(n.items, n.k);
  score_groups(n, row, chosen, &c);
  __syncthreads();
  Key keys[nearest_group];
#pragma unroll
  for (uint32_t i = 0; i < nearest_group; ++i)
    keys[i] = i * threads + thread < chosen * nearest_group ? c.keys[i * threads + thread] : 0;
  const Key reached = reached_by(Key{min_rank} << 32, Key{max_rank + 1} << 32, k, k, [&](Key key) {
    uint32_t count = 0;
#pragma unroll
    for (uint32_t i = 0; i < nearest_group; ++i) count += keys[i] >= key;
    return block_sum(count, &turn, &c);
  });
#pragma unroll
  for (uint32_t i = 0; i < nearest_group; ++i)
    if (keys[i] > 0 && keys[i] >= reached) c.best[atomicAdd(&c.found, 1u)] = keys[i];
  sort_best(&c);
  if (thread < k) n.nearest[std::size_t{row} * n.k + thread] = number_of(c.best[thread]);
}

#define KVASIR_OF_DIM(dim)                                                                      \
  __global__ void __launch_bounds__(nearest_threads, 2) nearest_groups_##dim(DeviceNearest n) { \
    best_of_groups<dim>(n);                                                                     \
  }
KVASIR_OF_DIM(64)
KVASIR_OF_DIM(128)

}  // extern "C"
}  // namespace kvasir::cuda
