// The matrix product, for every instruction set: few inputs, and what is common with many
// (matmul_many-inl.h). Two methods, by the number of input rows n:
//
//   few   each row of weights is read in the file's layout and multiplied with up to row_tokens
//         inputs at once: as fast as memory delivers weights (decode).
//   many  panel_rows rows by panel_cols columns of weights are unpacked into scratch as [cols /
//         4][panel_rows][4] bytes, so that one broadcast of four input bytes serves every row; one
//         tile kernel for all formats then runs over all inputs (prefill). The panel and its scales
//         fit the first-level cache.
//
// `Isa` supplies the primitives: those of formats.h, and
//   F, I, lanes             vectors of `lanes` floats and int32s; zero, load, store, broadcast,
//                           fma, mul, add, sum, to_float
//   prepare, prepare_panel  quants as row_group and accumulate take them
//   row_tokens              inputs per pass of the row kernel: 4, or 1 for less code
//   far_bytes               larger groups of few inputs are prefetched to the second-level cache
//   row_pair<Format>        rows of weights per pass of the row kernel: 1 or 2
//   RowSum, row_group       dot product of one group (256 weights, in registers) of these rows with
//                           one input. Each block (or each 16 weights that have a scale) is a float
//                           lane: the integer sum of its products is added, times the scale.
//   row_totals              the lanes' sums, of each row
//   tile_bias<Kind>         what a tile's weights lie above their values
//   pair_sums(p, a, b)      a * p[2 i] + b * p[2 i + 1] for lane i
//   accumulate              adds the integer products of one run of `width` columns to a tile
//   sum_start, scaled, sum_to_float   see `Sums` below
//   word, transpose         bytes of a word of a panel: neighbours of one row; `lanes` rows of
//                           4 * lanes bytes become words of `lanes` rows
// AMX's int8 tiles are not used. They cannot scale the sums of 32 columns, so every sum goes
// through memory; on Sapphire Rapids a product then took as long as with AVX-512 VNNI.
// matmul_amx.cc multiplies bf16 tiles instead.
//
// Included by one file per instruction set; everything here has internal linkage.
#pragma once

#include "backend/kernels.h"
#include "formats_grid.h"

namespace kvasir {
namespace {

constexpr uint32_t panel_cols = 512;        // of a quantised panel: 32 rows are 16 KiB
constexpr uint32_t float_panel_cols = 128;  // of a float panel: the same
constexpr uint32_t few = 16;                // inputs of a pass over the rows

inline bool reads_in_place(const Activations& x) { return method_of(x) == ProductMethod::few; }

// Bytes that the row kernel prefetches ahead, beyond the CPU's own prefetching. Measured on Zen 5:
// less than 4 KiB loses, and 8 KiB gains a twentieth. Rows are contiguous, so it reaches into later
// ones.
constexpr uint32_t read_ahead = 8192;

// One group of an input row.
struct GroupInput {
  const int8_t* q;      // [256]
  const float* scale;   // [8]
  const int16_t* sums;  // [16]
};

// Where word k (four columns) of eight blocks is in a group of lanes (matmul_lanes-inl.h): words of
// the first halves next to those of the second halves.
constexpr uint32_t lane_word(uint32_t k) { return 32 * (k % 4 * 2 + k / 4); }

// The columns after the last whole group, padded with zeros to a group.
struct PaddedGroup {
  alignas(64) int8_t q[group_weights] = {};
  alignas(64) float scale[8] = {};
  alignas(64) int16_t sums[16] = {};
};

struct Output {
  float* y;
  std::size_t stride;
  float scale;  // of the products
};

template <class Format>
constexpr std::size_t scale_count = group_weights / Format::width;

// The properties of a format that products of decoded weights depend on: formats with equal ones
// share their code.
template <uint32_t width_, uint32_t zero_, bool is_signed_, uint32_t max_, bool has_offset_>
struct Kind {
  static constexpr uint32_t width = width_, zero = zero_, max = max_;
  static constexpr bool is_signed = is_signed_, has_offset = has_offset_;
};
template <class Isa, class Format>
using KindOf = Kind<Format::width, Format::zero, Format::is_signed, Isa::template tile_max<Format>,
                    Format::has_offset>;

// A decoded group.
struct Group {
  alignas(64) uint8_t u[group_weights];
  alignas(64) float scale[group_weights / 16];   // [256 / width]
  alignas(64) float offset[group_weights / 16];  // likewise, in some formats
};

// A format as data, for code that all formats share.
struct Decoder {
  void (*decode)(const uint8_t* p, Group& out);
  uint32_t block, block_bytes, group_bytes;
};

template <class Isa, class Format>
[[gnu::noinline]] void decode_group(const uint8_t* p, Group& out) {
  typename Isa::W u[4];
  Floats<Isa, scale_count<Format>> scale, offset;
  Format::template quants<Isa>(p, u);
  Format::template scales<Isa>(p, scale, offset);
  for (uint32_t j = 0; j < 4; ++j) Isa::store64(out.u + 64 * j, u[j]);
  Isa::store(out.scale, scale);
  if constexpr (Format::has_offset) Isa::store(out.offset, offset);
}

template <class Isa, class Format>
constexpr Decoder decoder_of = {decode_group<Isa, Format>, Format::block, Format::block_bytes,
                                Format::group_bytes};
constexpr uint32_t max_group_bytes = 272;

// ---- few inputs

template <class Isa, class Format>
constexpr uint32_t row_pair = Isa::template row_pair<Format>;

// A group of each row of a pass.
template <class Isa, class Format>
struct RowGroups {
  typename Isa::W u[row_pair<Isa, Format>][4];
  Floats<Isa, scale_count<Format>> scale[row_pair<Isa, Format>], offset[row_pair<Isa, Format>];
};

template <class Isa, class Format, std::size_t tokens>
[[gnu::always_inline]] inline void row_group(const uint8_t* const* p,
                                             typename Isa::RowSum (&sum)[tokens],
                                             const GroupInput (&in)[tokens]) {
  RowGroups<Isa, Format> w;
  for (uint32_t i = 0; i < row_pair<Isa, Format>; ++i) {
    Format::template quants<Isa>(p[i], w.u[i]);
    Format::template scales<Isa>(p[i], w.scale[i], w.offset[i]);
    Isa::template prepare<Format>(w.u[i]);
  }
  for (std::size_t t = 0; t < tokens; ++t) Isa::template row_group<Format>(sum[t], w, in[t]);
}

// Rows of weights that begin at the same column.
template <uint32_t rows>
struct RowPointers {
  const uint8_t* at[rows];
  const uint8_t* tail[rows];  // the columns after the last whole group; null: none
  uint32_t count;             // of rows with a result: the others repeat the last one
};

// The rows of a pass with inputs [first, first + tokens).
template <class Isa, class Format, std::size_t tokens>
void row_product(const RowPointers<row_pair<Isa, Format>>& rows, const Activations& x,
                 uint32_t first, const PaddedGroup* padded, Output out) {
  constexpr uint32_t pair = row_pair<Isa, Format>;
  const uint32_t groups = x.cols / group_weights;
  typename Isa::RowSum sum[tokens];
  GroupInput in[tokens];
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t i = first + t;
    in[t] = {x.q + i * x.cols, x.scale + i * (x.cols / 32), x.sums + i * (x.cols / 16)};
  }
  const uint8_t* ahead = rows.at[0] + read_ahead + (rows.at[pair - 1] - rows.at[0]);
  // The tail is a round of the same loop: a second copy of its code would be half of the kernels.
  for (uint32_t g = 0; g < groups + (rows.tail[0] ? 1 : 0); ++g) {
    const uint8_t* p[pair];
    for (uint32_t i = 0; i < pair; ++i) p[i] = rows.at[i] + std::size_t{g} * Format::group_bytes;
    if (g == groups) {
      for (uint32_t i = 0; i < pair; ++i) p[i] = rows.tail[i];
      for (std::size_t t = 0; t < tokens; ++t)
        in[t] = {padded[t].q, padded[t].scale, padded[t].sums};
    }
    for (uint32_t b = 0; b < pair * Format::group_bytes; b += 64)
      __builtin_prefetch(ahead + b, 0, Format::group_bytes > Isa::far_bytes ? 2 : 3);
    ahead += pair * Format::group_bytes;
    row_group<Isa, Format, tokens>(p, sum, in);
    for (GroupInput& each : in) each = {each.q + 256, each.scale + 8, each.sums + 16};
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    float totals[pair];
    Isa::template row_totals<Format>(sum[t], totals);
    for (uint32_t i = 0; i < rows.count; ++i)
      out.y[(first + t) * out.stride + i] = totals[i] * out.scale;
  }
}

// Rows [begin, end) of the output.
struct RowRange {
  uint32_t begin, end;
};

// Calls f for each `few` inputs.
template <class F>
void for_passes(const Activations& x, Output out, F&& f) {
  for (uint32_t i = 0; i < x.n; i += few)
    f(rows_of(x, i, x.n - i < few ? x.n - i : few),
      Output{out.y + i * out.stride, out.stride, out.scale});
}

template <class Isa, class Format>
void few_products(const WeightView& w, const Activations& x, Output out, uint32_t row_begin,
                  uint32_t row_end) {
  constexpr uint32_t pair = row_pair<Isa, Format>;
  PaddedGroup padded[few];
  alignas(64) uint8_t last[pair][Format::group_bytes] = {};
  const uint32_t whole = w.cols / group_weights * group_weights, rest = w.cols - whole;
  for (std::size_t i = 0; rest && i < x.n; ++i) {
    std::memcpy(padded[i].q, x.q + i * x.cols + whole, rest);
    std::memcpy(padded[i].scale, x.scale + (i * x.cols + whole) / 32, rest / 32 * sizeof(float));
    std::memcpy(padded[i].sums, x.sums + (i * x.cols + whole) / 16, rest / 16 * sizeof(int16_t));
  }
  const auto* const data = reinterpret_cast<const uint8_t*>(w.data);
  const uint8_t* const end = data + std::size_t{w.rows} * w.row_bytes;
  for (uint32_t r = row_begin; r < row_end; r += pair) {
    RowPointers<pair> rows{{}, {}, row_end - r < pair ? row_end - r : pair};
    for (uint32_t i = 0; i < pair; ++i) {
      rows.at[i] = data + (r + (i < rows.count ? i : rows.count - 1)) * w.row_bytes;
      if (!rest) continue;
      // What follows the row in memory is multiplied with zeros.
      const uint8_t* const tail = rows.at[i] + whole / Format::block * Format::block_bytes;
      const bool is_inside = static_cast<std::size_t>(end - tail) >= Format::group_bytes;
      if (!is_inside) std::memcpy(last[i], tail, rest / Format::block * Format::block_bytes);
      rows.tail[i] = is_inside ? tail : last[i];
    }
    const Output y = {out.y + r, out.stride, out.scale};
    constexpr bool by_four = Isa::row_tokens >= 4, by_two = by_four && !Format::is_gathered;
    for (uint32_t i = 0; i < x.n;) {
      const uint32_t left = x.n - i;
      if (by_four && left >= 4) {
        row_product<Isa, Format, by_four ? 4 : 1>(rows, x, i, padded + i, y), i += 4;
      } else if (by_two && left >= 2) {
        row_product<Isa, Format, by_two ? 2 : 1>(rows, x, i, padded + i, y), i += 2;
      } else {
        row_product<Isa, Format, 1>(rows, x, i, padded + i, y), i += 1;
      }
    }
  }
}

}  // namespace
}  // namespace kvasir
