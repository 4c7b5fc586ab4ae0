// Prefill attention on the warp-group products of compute capability 9.0; what it reads, and
// what it leaves, is as in prefill_attention.cu.
//
// A block has 128 query rows and goes once over the keys that they see. One warp group copies tiles
// of keys and of values to a ring, and leaves registers to the two that have 64 rows each.
// Such a group multiplies the keys of the next tile and the values of this one together: it finds
// the weights of the next tile while outputs are summed, as in Shah et al., "FlashAttention-3"
// (2024).
#include "prefill_rows.h"
#include "warp_groups.h"

namespace kvasir::cuda {
namespace {

// Addresses in shared memory. Each matrix is tiles of 64 columns, one after the other.
template <int dim>
struct Places {
  static constexpr uint32_t keys = prefill_wide_keys(dim), matrix = keys * dim * 2,
                            steps = prefill_wide_steps(dim);  // of the ring
  uint32_t queries;
  __device__ uint32_t key_tile(uint32_t step) const {
    return queries + prefill_rows * dim * 2 + step * 2 * matrix;
  }
  __device__ uint32_t value_tile(uint32_t step) const { return key_tile(step) + matrix; }
  __device__ uint32_t barriers() const { return key_tile(steps); }
  __device__ uint32_t queries_full() const { return barriers(); }
  // which: 0 keys, 1 values.
  __device__ uint32_t full(uint32_t which, uint32_t step) const {
    return barriers() + 8 + (which * steps + step) * 16;
  }
  __device__ uint32_t empty(uint32_t which, uint32_t step) const { return full(which, step) + 8; }
};

// Rows [first, first + rows) of a head's `room`.
template <int dim>
__device__ inline void copy_matrix(uint32_t to, const uint16_t* from, uint32_t room, uint32_t first,
                                   uint32_t rows, uint32_t barrier) {
  expect(barrier, rows * dim * 2);
  for (uint32_t d = 0; d < dim; d += prefill_columns)
    copy_tile(to + d * rows * 2,
              reinterpret_cast<const uint8_t*>(
                  from + (std::size_t{d / prefill_columns} * room + first) * prefill_columns),
              rows * prefill_columns * 2, barrier);
}

// By one thread.
template <int dim>
__device__ inline void copy_text(const DevicePrefill& r, const Places<dim>& at,
                                 const SeenTiles& seen, uint32_t head, uint32_t first_row) {
  constexpr uint32_t keys = Places<dim>::keys;
  const uint16_t* from[2] = {r.keys + std::size_t{head} * r.room * dim,
                             r.values + std::size_t{head} * r.room * dim};
  copy_matrix<dim>(at.queries, r.q + std::size_t{head} * r.q_room * dim, r.q_room, first_row,
                   prefill_rows, at.queries_full());
  for (uint32_t number = seen.begin; number < seen.end; ++number) {
    const uint32_t i = number - seen.begin, step = i % at.steps, parity = i / at.steps % 2 ^ 1,
                   tile = seen.tile(number);
#pragma unroll
    for (uint32_t which = 0; which < 2; ++which) {
      wait_for(at.empty(which, step), parity);
      copy_matrix<dim>(which ? at.value_tile(step) : at.key_tile(step), from[which], r.room,
                       tile * keys, keys, at.full(which, step));
    }
  }
}

// A warp group's 64 rows. A thread has rows 16 warp + g and 8 more, and of eight columns 2 t and
// 2 t + 1.
template <int dim, bool windowed>
struct GroupRows {
  static constexpr uint32_t keys = Places<dim>::keys;
  float o[dim / 2], s[keys / 2];
  uint32_t p[keys / 16][4];  // weights, as the products read them
  float max_score[2], sum[2], factor[2], keep[2];

  __device__ void begin(const DevicePrefill& r, uint32_t head, uint32_t row) {
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) o[i] = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factor[i] = score_factor(r, head, row + 8 * i);
      max_score[i] = least_score<windowed>(factor[i]);
      sum[i] = 0;
    }
  }

  // s = Q K^T
  __device__ void score(uint32_t queries, uint32_t tile) {
    products_begin();
#pragma unroll
    for (uint32_t d = 0; d < dim / 16; ++d) {
      const uint32_t column = d / 4, within = 2 * (d % 4);
      multiply_halves(s, descriptor_of(queries + column * prefill_rows * 128) + within,
                      descriptor_of(tile + column * keys * 128) + within, d > 0);
    }
    products_given();
  }
  // o += P V
  __device__ void add_values(uint32_t tile) {
    products_begin();
#pragma unroll
    for (uint32_t k = 0; k < keys / 16; ++k)
      multiply_halves(o, p[k], descriptor_of_rows(tile + k * 16 * 128, keys * 128));
    products_given();
  }

  __device__ void mask(const DevicePrefill& r, const SeenTiles& seen, uint32_t row, uint32_t key) {
#pragma unroll
    for (uint32_t i = 0; i < keys / 2; ++i)
      if (!is_seen<windowed>(r, seen, row + i / 2 % 2 * 8,
                             key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2))
        s[i] = -INFINITY;
  }

  // Scores become weights; keep: what sums and outputs of tiles before are multiplied by.
  __device__ void weigh(float bias) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = fmaxf(s[2 * i], s[2 * i + 1]);
#pragma unroll
      for (uint32_t k = 1; k < keys / 8; ++k)
        largest = fmaxf(largest, fmaxf(s[4 * k + 2 * i], s[4 * k + 2 * i + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 2));
      largest = fmaxf(largest * factor[i] + bias, max_score[i]);
      // The first tile has a key that every row sees.
      keep[i] = power_of_two(max_score[i] - largest);
      max_score[i] = largest;
      const float offset = largest - bias;
      float tile_sum = 0;
#pragma unroll
      for (uint32_t k = 0; k < keys / 8; ++k)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          float& x = s[4 * k + 2 * i + j];
          x = power_of_two(x * factor[i] - offset);
          tile_sum += x;
        }
      sum[i] = sum[i] * keep[i] + tile_sum;
    }
  }
  __device__ void rescale() {
    if (!__any_sync(all_lanes, keep[0] != 1 || keep[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < dim / 2; ++i) o[i] *= keep[i / 2 % 2];
  }
  __device__ void pack() {
#pragma unroll
    for (uint32_t k = 0; k < keys / 16; ++k)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) p[k][i] = halves(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
  }
};

template <int dim, bool windowed>
__device__ inline void attend_rows(const DevicePrefill& r, const Places<dim>& at,
                                   const SeenTiles& seen, uint32_t head, uint32_t first_row,
                                   float* out, float* lse) {
  const uint32_t group = threadIdx.x / 128,
                 row =
                     first_row + group * 64 + threadIdx.x / warp % 4 * 16 + threadIdx.x % warp / 4;
  const uint32_t queries = at.queries + group * 64 * 128;
  const bool speaks = threadIdx.x % 128 == 0;
  GroupRows<dim, windowed> rows;
  rows.begin(r, head, row);
  const auto weigh = [&](uint32_t at, float bias) {
    if (at >= seen.masked_from || at < seen.masked_to)
      rows.mask(r, seen, row, seen.tile(at) * Places<dim>::keys);
    rows.weigh(bias);
  };
  wait_for(at.queries_full(), 0);
  wait_for(at.full(0, 0), 0);
  rows.score(queries, at.key_tile(0));
  products_done<0>();
  if (speaks) arrive(at.empty(0, 0));
  weigh(seen.begin, seen.bias(seen.begin));
  rows.pack();
  uint32_t step = 0, parity = 0;  // of the tile whose values come next
  for (uint32_t number = seen.begin + 1; number < seen.end; ++number) {
    const float bias = seen.bias(number);
    const uint32_t next = step + 1 < at.steps ? step + 1 : 0, next_parity = parity ^ (next == 0);
    wait_for(at.full(0, next), next_parity);
    rows.score(queries, at.key_tile(next));
    wait_for(at.full(1, step), parity);
    rows.add_values(at.value_tile(step));
    products_done<1>();
    if (speaks) arrive(at.empty(0, next));
    weigh(number, bias);
    products_done<0>();
    if (speaks) arrive(at.empty(1, step));
    rows.rescale();
    rows.pack();
    step = next, parity = next_parity;
  }
  wait_for(at.full(1, step), parity);
  rows.add_values(at.value_tile(step));
  products_done<0>();
#pragma unroll
  for (int i = 0; i < 2; ++i)
    write_row<dim>(
        r, head, row + 8 * i, rows.max_score[i], warp_sum(rows.sum[i], 4), out, lse,
        [&](int d) { return make_float2(rows.o[4 * d + 2 * i], rows.o[4 * d + 2 * i + 1]); });
}

// Block (rows of queries, the last ones first; head; part of the keys).
template <int dim, bool windowed>
__device__ inline void attend_text_wide(const DevicePrefill& r, float* out, float* lse) {
  extern __shared__ uint8_t wide_memory[];
  const Places<dim> at{(shared_address(wide_memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    begin_barrier(at.queries_full(), 1);
    for (uint32_t which = 0; which < 2; ++which)
      for (uint32_t i = 0; i < at.steps; ++i)
        begin_barrier(at.full(which, i), 1), begin_barrier(at.empty(which, i), 2);
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  after_previous();
  const uint32_t head = blockIdx.y, first_row = (gridDim.x - 1 - blockIdx.x) * prefill_rows;
  const SeenTiles seen = seen_tiles<windowed>(r, head, first_row, prefill_rows, Places<dim>::keys);
  if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    attend_rows<dim, windowed>(r, at, seen, head, first_row, out, lse);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) copy_text<dim>(r, at, seen, head, first_row);
  }
}

// ---- the sums of tiles, as prefill_tiles.cu has them

// A ring of tiles of keys in shared memory.
template <int dim>
struct KeyRing {
  static constexpr uint32_t stages = prefill_key_stages(dim),
                            bytes = prefill_keys * tile_row_bytes(dim);  // of a tile
  uint32_t tiles;                                                        // an address
  uint32_t stage = 0, parity = 0;
  __device__ uint32_t tile() const { return tiles + stage * bytes; }
  __device__ uint32_t full() const { return tiles + stages * bytes + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Tiles [begin, end) of a warp group's 64 rows, the first a multiple of 4. While it sums one, other
// groups multiply theirs.
template <int dim>
struct GroupSums {
  const DevicePrefill& r;
  uint32_t head, thread = threadIdx.x % 4, row[2];
  float factor[2];
  float* out[2];            // null: there is no such row
  uint32_t q[dim / 32][4];  // as the products read them
  int s[prefill_keys / 2];
  float sums[2] = {};  // of one of four tiles

  __device__ GroupSums(const DevicePrefill& of, uint32_t its_head, uint32_t first_head)
      : r(of), head(its_head) {
    const uint32_t own = blockIdx.x * choosing_groups(dim) * prefill_summed_rows +
                         threadIdx.x / warp * 16 + threadIdx.x % warp / 4;
    const std::size_t rows = choosing_rows_of(r);
    int8_t* const queries = r.tiles.q + std::size_t{head} * r.q_room * tile_row_bytes(dim);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t number = own + 8 * i;
      const bool there = number < rows;
      row[i] = choosing_row(there ? number : 0, r.group);
      factor[i] = tile_factor(r, head, row[i]);
      out[i] =
          there ? r.tiles.scores + ((head - first_head) * rows + number) * r.tiles.room : nullptr;
#pragma unroll
      for (uint32_t k = 0; k < dim / 16; ++k)
        q[k / 2][i + k % 2 * 2] = *reinterpret_cast<const uint32_t*>(
            tile_bytes_at(queries, r.q_room, row[i], 16 * k + 4 * thread));
    }
  }
  __device__ void multiply(uint32_t tile) {
    products_begin();
#pragma unroll
    for (uint32_t d = 0; d < dim / 32; ++d)
      multiply_bytes(s, q[d], descriptor_of(tile + d / 4 * prefill_keys * 128) + 2 * (d % 4),
                     d > 0);
    products_given();
    products_done<0>();
  }
  template <bool masked>
  __device__ void sum(uint32_t tile, const float4& scales) {
    const SeenTiles seen{r.pages * r.page_tokens + r.window};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float x = tile_sum<masked>(factor[i], scales, [&](uint32_t group, uint32_t n) {
        const uint32_t k = group * 4 + n / 2,
                       key = tile * prefill_keys + k * 8 + thread * 2 + n % 2;
        return !masked || is_seen<false>(r, seen, row[i], key) ? s[4 * k + 2 * i + n % 2] : unseen;
      });
      if (tile % 4 == thread) sums[i] = x;
    }
  }
  // Each of the four threads of a row, of its tile.
  __device__ void write(uint32_t tile, uint32_t end) {
    const uint32_t own = tile / 4 * 4 + thread;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
      if (out[i] && own < end) out[i][own] = sums[i];
  }
};

// Block (some blocks of rows; head, from first_head on; part of the tiles).
template <int dim>
__device__ inline void sum_tiles_wide(const DevicePrefill& r, uint32_t first_head) {
  extern __shared__ uint8_t wide_memory[];
  KeyRing<dim> ring{(shared_address(wide_memory) + 1023) / 1024 * 1024};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < ring.stages; ++i, ring.next())
      begin_barrier(ring.full(), 1), begin_barrier(ring.empty(), choosing_groups(dim));
    asm volatile("fence.proxy.async;" ::: "memory");
    ring.parity = 0;
  }
  __syncthreads();
  after_previous();
  const uint32_t head = first_head + blockIdx.y, before = r.pages * r.page_tokens + r.window,
                 all = tiles_of_choosing(
                     r, (blockIdx.x + 1) * choosing_groups(dim) * prefill_summed_rows),
                 each = ((all + gridDim.z - 1) / gridDim.z + 3) / 4 * 4,
                 begin = min(blockIdx.z * each, all), end = min(begin + each, all);
  if (threadIdx.x >= choosing_groups(dim) * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 128 != 0) return;
    const auto* text = reinterpret_cast<const uint16_t*>(r.tiles.keys + std::size_t{head} * r.room *
                                                                            tile_row_bytes(dim));
    for (uint32_t tile = begin; tile < end; ++tile, ring.next()) {
      wait_for(ring.empty(), ring.parity ^ 1);
      copy_matrix<tile_row_bytes(dim) / 2>(ring.tile(), text, r.room, tile * prefill_keys,
                                           prefill_keys, ring.full());
    }
    return;
  }
  // All of a block's threads together never have more than they began with.
  if constexpr (dim > 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  GroupSums<dim> group(r, head, first_head);
  for (uint32_t tile = begin; tile < end; ++tile, ring.next()) {
    const float4 scales = tile_scales(r, head, tile);
    wait_for(ring.full(), ring.parity);
    group.multiply(ring.tile());
    if (threadIdx.x % 128 == 0) arrive(ring.empty());
    if ((tile + 1) * prefill_keys > before) group.template sum<true>(tile, scales);
    else group.template sum<false>(tile, scales);
    if (tile % 4 == 3 || tile + 1 == end) group.write(tile, end);
  }
}

}  // namespace

extern "C" {

#define KVASIR_OF_DIM(dim)                                                 \
  __global__ void __launch_bounds__(prefill_wide_threads, 1)               \
      prefill_wide_##dim(DevicePrefill r, float* out, float* lse) {        \
    attend_text_wide<dim, false>(r, out, lse);                             \
  }                                                                        \
  __global__ void __launch_bounds__(prefill_wide_threads, 1)               \
      prefill_wide_window_##dim(DevicePrefill r, float* out, float* lse) { \
    attend_text_wide<dim, true>(r, out, lse);                              \
  }                                                                        \
  __global__ void __launch_bounds__(wide_choosing_threads(dim), 1)         \
      prefill_wide_tiles_##dim(DevicePrefill r, uint32_t first_head) {     \
    sum_tiles_wide<dim>(r, first_head);                                    \
  }

KVASIR_OF_DIM(64)
KVASIR_OF_DIM(128)
KVASIR_OF_DIM(256)

}  // extern "C"
}  // namespace kvasir::cuda
