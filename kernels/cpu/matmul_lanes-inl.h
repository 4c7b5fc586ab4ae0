// The matrix product for several inputs in the order of the row kernel: see matmul-inl.h.
//
// A float lane adds up one block of each group, so the sum of a block's products is an integer. The
// row kernel adds up the lanes of its products for that. Here no sum crosses lanes: weights and
// inputs are transposed, so that a word of four columns of each block is one register. Weights of
// some rows are decoded and transposed once, and multiplied with all inputs.
//
// `Isa` supplies
//   lane_block[8]           the block of a float lane
//   lane_rows<Kind>         rows of weights that are multiplied at once
//   LaneSum                 the sums of these rows with one input
//   LaneWeights<Kind>       a group of these rows
//   lane_weights, lane_group, lane_total
#pragma once

#include "matmul-inl.h"

namespace kvasir {
namespace {

// A group of an input. Word k of the block of lane i is at lane_word(k) + 4 i.
struct LaneGroup {
  alignas(64) int8_t q[group_weights];
  float scale[8];    // [lane]
  int16_t sums[16];  // [lane][half of a block]
};

inline uint32_t groups_of(uint32_t cols) { return (cols + group_weights - 1) / group_weights; }

// [groups][n] LaneGroup. For two inputs the row kernel is as fast.
template <class Isa>
std::size_t lane_bytes(uint32_t n, uint32_t cols) {
  return n < 3 || n > max_lane_inputs ? 0 : std::size_t{groups_of(cols)} * n * sizeof(LaneGroup);
}

template <class Isa>
void to_lanes(const Activations& x, uint32_t first, uint32_t count, std::byte* out) {
  const uint32_t blocks = x.cols / 32;
  for (std::size_t i = first; i < first + count; ++i) {
    for (uint32_t g = 0; g < groups_of(x.cols); ++g) {
      LaneGroup& to = reinterpret_cast<LaneGroup*>(out)[std::size_t{g} * x.n + i];
      for (uint32_t lane = 0; lane < 8; ++lane) {
        const uint32_t block = 8 * g + Isa::lane_block[lane];
        const std::size_t at = i * blocks + block;
        const bool is_there = block < blocks;
        for (uint32_t word = 0; word < 8; ++word) {
          const uint32_t zero = 0;
          std::memcpy(to.q + lane_word(word) + 4 * lane,
                      is_there ? static_cast<const void*>(x.q + 32 * at + 4 * word) : &zero, 4);
        }
        to.scale[lane] = is_there ? x.scale[at] : 0;
        for (uint32_t h = 0; h < 2; ++h) to.sums[2 * lane + h] = is_there ? x.sums[2 * at + h] : 0;
      }
    }
  }
}

template <class Isa, class Kind>
void lane_products(const WeightView& w, const Decoder& format, const Activations& x, Output out,
                   RowRange range) {
  constexpr uint32_t rows = Isa::template lane_rows<Kind>;
  const uint32_t groups = groups_of(w.cols), rest = w.cols % group_weights;
  const auto* data = reinterpret_cast<const uint8_t*>(w.data);
  alignas(64) uint8_t last[max_group_bytes] = {};
  Group group[rows];
  typename Isa::LaneSum sum[max_lane_inputs];
  for (uint32_t r = range.begin; r < range.end; r += rows) {
    const uint32_t count = range.end - r < rows ? range.end - r : rows;
    for (uint32_t t = 0; t < x.n; ++t) sum[t] = {};
    const auto* in = reinterpret_cast<const LaneGroup*>(x.lanes);
    const uint8_t* next = data + (r + rows) * w.row_bytes;  // the next rows, or behind the matrix
    for (uint32_t g = 0; g < groups; ++g, in += x.n) {
      // In the order of addresses: the order in which rows are read takes half as long again.
      for (uint32_t b = 0; b < rows * format.group_bytes; b += 64)
        __builtin_prefetch(next + b, 0, 2);
      next += rows * format.group_bytes;
      for (uint32_t i = 0; i < rows; ++i) {  // repeats the last row in the place of missing ones
        const uint8_t* p = data + (r + (i < count ? i : count - 1)) * w.row_bytes +
                           std::size_t{g} * format.group_bytes;
        if (rest && g + 1 == groups) {
          std::memcpy(last, p, rest / format.block * format.block_bytes);
          p = last;
        }
        format.decode(p, group[i]);
      }
      typename Isa::template LaneWeights<Kind> weights;
      Isa::template lane_weights<Kind>(group, weights);
      for (uint32_t t = 0; t < x.n; ++t) Isa::template lane_group<Kind>(sum[t], weights, in[t]);
    }
    for (uint32_t t = 0; t < x.n; ++t) {
      float totals[rows];
      Isa::template lane_totals<Kind>(sum[t], totals);
      for (uint32_t i = 0; i < count; ++i) out.y[t * out.stride + r + i] = totals[i] * out.scale;
    }
  }
}

}  // namespace
}  // namespace kvasir
