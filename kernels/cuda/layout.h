// The layout of quantised weights in device memory, for host code and kernels.
//
// The blocks of a file mix quants and scales in sizes that no vector load fits. When a matrix is
// loaded, the same bits are arranged in planes. Each plane begins at a multiple of 256 bytes and
// has the units of 32 weights one after the other:
//   low     2, 4 or 8 bits per weight. 8: in order. 4: byte j has weight j in its low half and
//           weight 16 + j in its high half. 2: like the high plane's two
//   high    1 or 2 bits per weight, above the low ones, for weight 4 k + b. 1: bit 8 b + k of a
//           32-bit word; 2: bits 8 b + 2 (k % 4) of word k / 4. So a shift and a mask put the bits
//           of weights 4 k to 4 k + 3 into the four bytes of a dot product
//   scales  the unit's own scale (and offset): half precision, or the small integers of the K
//           formats
//   supers  for the K formats, half-precision scale (and offset) of eight units
// IQ formats are decoded to indices of a table of 8 or 16 numbers: codewords are not read in
// products, and take more memory than in the file (IQ1_S: 3.6 in place of 1.6 bits per weight).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/device_attention.h"
#include "backend/device_nearest.h"
#include "gguf/tensor_type.h"

namespace kvasir::cuda {

struct Planes {
  uint8_t *low, *high, *scales, *supers;
};

// Sizes of a unit; super_bytes: of eight units. All zero for types that are not quantised.
struct Layout {
  uint32_t low_bits, high_bits, scale_bytes, super_bytes;
};

// The quantised types, each with kernels of its own.
// clang-format off
#define KVASIR_QUANTISED_TYPES(_)                                                                \
  _(q8_0) _(q4_0) _(q4_1) _(q5_0) _(q5_1) _(q2_k) _(q3_k) _(q4_k) _(q5_k) _(q6_k) _(iq4_nl)      \
  _(iq4_xs) _(mxfp4) _(nvfp4) _(iq3_s) _(iq3_xxs) _(iq2_s) _(iq2_xs) _(iq2_xxs) _(iq1_s)         \
  _(iq1_m) _(tq1_0) _(tq2_0)
// clang-format on

constexpr Layout layout_of(TensorType type) {
  switch (type) {
    case TensorType::q8_0:
      return {8, 0, 2, 0};
    case TensorType::q4_0:
    case TensorType::iq4_nl:
    case TensorType::mxfp4:
    case TensorType::nvfp4:
      return {4, 0, 2, 0};
    case TensorType::q4_1:
      return {4, 0, 4, 0};
    case TensorType::q5_0:
      return {4, 1, 2, 0};
    case TensorType::q5_1:
      return {4, 1, 4, 0};
    case TensorType::iq4_xs:
    case TensorType::iq3_s:
    case TensorType::iq3_xxs:
      return {4, 0, 2, 2};
    case TensorType::iq2_s:
    case TensorType::iq2_xs:
    case TensorType::iq2_xxs:
    case TensorType::iq1_s:
    case TensorType::iq1_m:
      return {2, 1, 2, 2};
    case TensorType::tq1_0:
    case TensorType::tq2_0:
      return {2, 0, 2, 0};
    case TensorType::q2_k:
      return {2, 0, 4, 4};
    case TensorType::q3_k:
      return {2, 1, 2, 2};
    case TensorType::q4_k:
      return {4, 0, 2, 4};
    case TensorType::q5_k:
      return {4, 1, 2, 4};
    case TensorType::q6_k:
      return {4, 2, 2, 2};
    default:
      return {};
  }
}

constexpr std::size_t plane_bytes(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// The beginnings of the planes of `units` units; adds their bytes to *bytes, which may be null.
inline Planes planes_at(TensorType type, std::size_t units, void* memory, std::size_t* bytes) {
  const Layout l = layout_of(type);
  const std::size_t sizes[] = {units * l.low_bits * 4, units * l.high_bits * 4,
                               units * l.scale_bytes, units / 8 * l.super_bytes};
  std::size_t at = 0;
  uint8_t* planes[4];
  for (int i = 0; i < 4; ++i) {
    planes[i] = reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(memory) + at);
    at += plane_bytes(sizes[i]);
  }
  if (bytes) *bytes += at;
  return {planes[0], planes[1], planes[2], planes[3]};
}

// Matrices of one type that one launch multiplies with one input. A block has rows of one of them.
struct Product {
  Planes w;              // float weights: in low
  uint32_t rows, begin;  // begin: its first block; UINT32_MAX: no product
  const float* bias;
  float* y;     // [inputs][rows]
  float scale;  // of the products
};
constexpr uint32_t max_products = 4;
struct Products {
  Product list[max_products];
  bool add;       // adds to y
  bool in_pairs;  // two, whose rows take turns in a tile (matmul_wide.h)
};

// The same of experts' matrices; rows: of one expert.
struct ExpertProducts {
  Products products;
  const float* scales[max_products];  // [experts], or null
  // Rows of the grid from `choices` on have the shared expert, and inputs from `shared_input` on.
  Planes shared[max_products];
  float shared_scales[max_products];
  uint32_t choices, shared_input;
};

// Launch parameters, for host code and kernels.
// Rows of a block, one input.
constexpr uint32_t row_warps = 4;
// Lanes that share a row of a chosen expert: rows of the last matrix are often short.
constexpr uint32_t chosen_lanes(uint32_t units) { return units <= 16 ? 16 : 32; }
// Of a block, float weights and more inputs.
constexpr uint32_t tile_rows = 32, tile_inputs = 32, tile_threads = 128;
// Of a block, quantised weights and more than max_few_inputs, with two tiles of units.
constexpr uint32_t many_inputs = 128, many_units = 4;
// The most common types, which have kernels that the others do without.
#define KVASIR_COMMON_TYPES(_) _(q8_0) _(q4_0) _(q4_k) _(q5_k) _(q6_k) _(iq4_nl) _(iq4_xs) _(mxfp4)
constexpr bool is_common(TensorType type) {
  switch (type) {
#define KVASIR_COMMON(name) case TensorType::name:
    KVASIR_COMMON_TYPES(KVASIR_COMMON)
#undef KVASIR_COMMON
    return true;
    default:
      return false;
  }
}
// Rows of such a block: many for the most common types and large matrices, else some.
constexpr uint32_t many_rows = 128, some_rows = 64;
constexpr bool has_many(TensorType type) { return is_common(type); }
// A warp has half of the rows and 64 inputs, or 32 where there is nothing to unpack.
constexpr uint32_t many_threads(TensorType type, uint32_t rows) {
  return type == TensorType::q8_0 && rows == many_rows ? 256 : 128;
}
// Of a block, 2 to 64 inputs, with a ring of steps of units.
constexpr uint32_t few_threads = 256, max_few_inputs = 64, few_units = 8, max_few_steps = 6;
constexpr uint32_t lay_out_threads = 128, elementwise_threads = 256, norm_threads = 1024;
// Norms of many rows, each of at most max_short_norm numbers.
constexpr uint32_t short_norm_threads = 256, max_short_norm = 4096;
// Neighbouring numbers per thread.
constexpr uint32_t elementwise_each = 4;
// Recurrent layers; a block of a convolution has so many tokens.
constexpr uint32_t recurrent_threads = 128, convolve_threads = 256, convolve_tokens = 16;
// Experts; a warp routes a token.
constexpr uint32_t expert_threads = 256, route_warps = 4, tiles_threads = 1024;
// Attention.
constexpr uint32_t begin_threads = 256, near_threads = 512, scan_threads = 256, scan_blocks = 4,
                   choose_threads = 256, attend_threads = 256, gather_threads = 256;
// share_quads: quads of one KV head that a block has at a time.
constexpr uint32_t share_threads = 384, share_each = 4, share_quads = share_threads * share_each,
                   share_blocks = 3;
// Prefill; a warp has a quarter of a block's rows.
constexpr uint32_t prefill_layout_threads = 256, prefill_threads = 128;
// Rows of queries that a block has, and keys of a tile: fewer of large heads, so that they fit any
// device.
constexpr uint32_t prefill_block_rows(uint32_t dim) { return dim > 128 ? 64 : prefill_rows; }
constexpr uint32_t prefill_tile_keys(uint32_t dim) { return dim > 128 ? 32 : 64; }
// Queries, and keys and values of two tiles.
constexpr uint32_t prefill_shared_bytes(uint32_t dim) {
  return (prefill_block_rows(dim) + 4 * prefill_tile_keys(dim)) * dim * 2;
}
constexpr uint32_t max_prefill_dim = 256;
static_assert(prefill_shared_bytes(max_prefill_dim) <= 99 << 10);
// Blocks that a multiprocessor of a large device computes at once, as prefill_attend_* say.
constexpr uint32_t prefill_resident(uint32_t dim) { return dim > 64 ? 2 : 3; }
// Where the number d of a row is, in halves, of those of a KV head that has `rows`: tiles of 64
// numbers, one after the other, whose rows have the 16 bytes p at p ^ (row & 7).
constexpr uint32_t prefill_columns = 64;
constexpr std::size_t prefill_place(uint32_t rows, uint32_t row, uint32_t d) {
  return (std::size_t{d / prefill_columns} * rows + row) * prefill_columns +
         ((d / 8 % 8) ^ (row & 7)) * 8 + d % 8;
}
// The choice of tiles for sparse prefill: rows that are summed together, those of some blocks, and
// keys of one copy. Shared memory holds two.
constexpr uint32_t prefill_choose_threads = 256, prefill_summed_rows = 64,
                   prefill_choosing_keys = 64;
constexpr uint32_t prefill_choosing_bytes(uint32_t dim) {
  return (prefill_summed_rows + 2 * prefill_choosing_keys) * tile_row_bytes(dim);
}
// By warp groups, of compute capability 9.0: two that have 64 rows each, and one that copies.
constexpr uint32_t prefill_wide_threads = 3 * 128;
constexpr uint32_t prefill_wide_keys(uint32_t dim) { return dim > 128 ? 64 : prefill_keys; }
// Queries, keys and values of some tiles, barriers, and what aligns them to 1,024 bytes.
constexpr uint32_t prefill_wide_steps(uint32_t dim) { return dim > 128 ? 2 : 3; }
constexpr uint32_t prefill_wide_shared_bytes(uint32_t dim) {
  return (prefill_rows + 2 * prefill_wide_steps(dim) * prefill_wide_keys(dim)) * dim * 2 + 128 +
         1024;
}
// The sums of tiles: warp groups that have prefill_summed_rows each, and one that copies tiles of
// keys.
constexpr uint32_t choosing_groups(uint32_t dim) { return dim > 128 ? 3 : 4; }
constexpr uint32_t wide_choosing_threads(uint32_t dim) { return (choosing_groups(dim) + 1) * 128; }
constexpr uint32_t prefill_key_stages(uint32_t dim) { return dim > 128 ? 4 : 8; }
constexpr uint32_t prefill_wide_choosing_bytes(uint32_t dim) {
  return prefill_key_stages(dim) * prefill_keys * tile_row_bytes(dim) + 128 + 1024;
}
constexpr bool fits_wide(uint32_t dim) {
  constexpr uint32_t block = 227 << 10, barriers = 128;  // bytes
  return prefill_wide_shared_bytes(dim) <= block && prefill_wide_choosing_bytes(dim) <= block &&
         8 + 2 * prefill_wide_steps(dim) * 16 <= barriers &&
         prefill_key_stages(dim) * 16 <= barriers;
}
static_assert(fits_wide(64) && fits_wide(128) && fits_wide(max_prefill_dim));
// Attention through windows; window_rows: query rows of a block.
constexpr uint32_t window_threads = 256, window_rows = 4, window_finish_threads = 128;
constexpr uint32_t window_dims[] = {64, 128, 256, 512};
// The search for nearest keys.
constexpr uint32_t nearest_threads = 256, nearest_choose_threads = 512;
// Query rows that read a page in one pass. More make the code large, and most models have no more
// per KV head.
constexpr uint32_t attended_rows = 4;

// Whether quants are indices of a table.
constexpr bool is_table(TensorType type) {
  switch (type) {
    case TensorType::iq4_nl:
    case TensorType::iq4_xs:
    case TensorType::mxfp4:
    case TensorType::nvfp4:
    case TensorType::iq3_s:
    case TensorType::iq3_xxs:
    case TensorType::iq2_s:
    case TensorType::iq2_xs:
    case TensorType::iq2_xxs:
    case TensorType::iq1_s:
    case TensorType::iq1_m:
      return true;
    default:
      return false;
  }
}
// Whether an offset is multiplied with the sums.
constexpr bool has_sums(TensorType type) {
  switch (type) {
    case TensorType::q4_1:
    case TensorType::q5_1:
    case TensorType::q2_k:
    case TensorType::q4_k:
    case TensorType::q5_k:
    case TensorType::tq1_0:
    case TensorType::tq2_0:
      return true;
    default:
      return false;
  }
}
// Whether there are two scales in a unit, one per 16 weights.
constexpr bool has_two_scales(TensorType type) {
  switch (type) {
    case TensorType::q2_k:
    case TensorType::q3_k:
    case TensorType::q6_k:
    case TensorType::nvfp4:
    case TensorType::iq2_xs:
    case TensorType::iq2_s:
    case TensorType::iq1_m:
      return true;
    default:
      return false;
  }
}
// Shared memory of a tile of units with many inputs; matmul_many.cu explains it. Gaps between rows
// put the words that a warp reads of eight rows at once into different banks.
constexpr uint32_t many_pitch(uint32_t bits) {
  return bits == 0 ? 0 : bits == 8 ? many_units * 32 : many_units * bits * 4 + 16;
}
constexpr uint32_t many_tile_bytes(TensorType type, uint32_t rows) {
  const Layout l = layout_of(type);
  const uint32_t halves = has_two_scales(type) ? 2 : 1, offsets = has_sums(type) ? halves : 0;
  return many_inputs * many_units * 32 + rows * (many_pitch(l.low_bits) + many_pitch(l.high_bits)) +
         many_units * 4 * (rows * (halves + offsets) + many_inputs * (1 + offsets));
}
static_assert(2 * many_tile_bytes(TensorType::q6_k, many_rows) <= 99 << 10);
// Shared memory of a step of units with few inputs: the planes of each row, then quants, scales and
// sums of each input. matmul_few.h explains the gaps between rows.
// bytes: of a unit.
constexpr uint32_t few_pitch(uint32_t bytes, uint32_t units = few_units) {
  return units * bytes + 16;
}
constexpr uint32_t few_scale_pitch(TensorType type, uint32_t units = few_units) {
  const Layout l = layout_of(type);
  return l.super_bytes || l.scale_bytes == 4 ? units * 4 + 16 : units * 2 + 4;
}
constexpr uint32_t few_step_bytes(TensorType type, uint32_t rows, uint32_t inputs,
                                  uint32_t units = few_units) {
  const Layout l = layout_of(type);
  const uint32_t row = few_pitch(l.low_bits * 4, units) +
                       (l.high_bits ? few_pitch(l.high_bits * 4, units) : 0) +
                       few_scale_pitch(type, units) + (l.super_bytes ? 4 : 0);
  return rows * row + inputs * (few_pitch(32, units) + units * (has_sums(type) ? 8 : 4));
}
// Bytes of a block's sums: four per thread for each tile of 8 inputs of its warp.
constexpr uint32_t few_sum_bytes(uint32_t rows, uint32_t inputs) {
  const uint32_t groups = few_threads / 2 / rows;  // warps that have the same 16 rows
  return few_threads * 16 * ((inputs / 8 + groups - 1) / groups);
}
// The same with up to max_alone inputs as if alone: each warp has a ring of its own.
constexpr uint32_t alone_rows = 16, alone_units = 4, max_alone_inputs = 8;
constexpr uint32_t alone_step_bytes(TensorType type) {
  return few_threads / 32 * few_step_bytes(type, alone_rows, max_alone_inputs, alone_units);
}
// The largest step fits a block of any device.
static_assert(few_sum_bytes(64, 64) + 2 * few_step_bytes(TensorType::q6_k, 64, 64) <= 99 << 10);
static_assert(2 * alone_step_bytes(TensorType::q6_k) <= 99 << 10);

}  // namespace kvasir::cuda
