// The matrix product, for every instruction set. Two methods, by the number of input rows n:
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
//   RowSum, row_group       dot product of one group (256 weights, in registers) with one input
//   accumulate              tile of integer products of one run of `width` columns
//   transpose               lanes x lanes 32-bit words
// Included by one file per instruction set; everything here has internal linkage.
#pragma once

#include "backend/kernels.h"
#include "formats_grid.h"

namespace kvasir {
namespace {

constexpr uint32_t panel_cols = 512;        // of a quantised panel: 32 rows are 16 KiB
constexpr uint32_t float_panel_cols = 128;  // of a float panel: the same
constexpr uint32_t row_tokens = 4;          // inputs per pass of the row kernel
constexpr uint32_t few = max_few_inputs;    // of a pass over the rows

inline bool reads_in_place(const Activations& x) {
  const bool by_count = x.method == ProductMethod::by_count;
  return (by_count ? method_of(x.n) : x.method) == ProductMethod::few;
}

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

// ---- few inputs

template <class Isa, class Format, std::size_t tokens>
[[gnu::always_inline]] inline void row_group(const uint8_t* p, typename Isa::RowSum (&sum)[tokens],
                                             const GroupInput (&in)[tokens]) {
  typename Isa::W u[4];
  Floats<Isa, scale_count<Format>> scale, offset;
  Format::template quants<Isa>(p, u);
  Format::template scales<Isa>(p, scale, offset);
  Isa::template prepare<Format>(u);
  for (std::size_t t = 0; t < tokens; ++t)
    Isa::template row_group<Format>(sum[t], u, scale, offset, in[t]);
}

// One row of weights with inputs [first, first + tokens).
template <class Isa, class Format, std::size_t tokens>
void row_product(const uint8_t* row, const uint8_t* tail, const Activations& x, uint32_t first,
                 const PaddedGroup* padded, Output out) {
  const uint32_t groups = x.cols / group_weights;
  typename Isa::RowSum sum[tokens];
  GroupInput in[tokens];
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::size_t i = first + t;
    in[t] = {x.q + i * x.cols, x.scale + i * (x.cols / 32), x.sums + i * (x.cols / 16)};
  }
  for (uint32_t g = 0; g < groups; ++g) {
    const uint8_t* p = row + std::size_t{g} * Format::group_bytes;
    for (uint32_t b = 0; b < Format::group_bytes; b += 64) __builtin_prefetch(p + read_ahead + b);
    row_group<Isa, Format, tokens>(p, sum, in);
    for (GroupInput& each : in) each = {each.q + 256, each.scale + 8, each.sums + 16};
  }
  if (tail) {
    for (std::size_t t = 0; t < tokens; ++t) in[t] = {padded[t].q, padded[t].scale, padded[t].sums};
    row_group<Isa, Format, tokens>(tail, sum, in);
  }
  for (std::size_t t = 0; t < tokens; ++t)
    out.y[(first + t) * out.stride] = Isa::total(sum[t]) * out.scale;
}

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
  PaddedGroup padded[few];
  alignas(64) uint8_t last[Format::group_bytes] = {};
  const uint32_t whole = w.cols / group_weights * group_weights, rest = w.cols - whole;
  for (std::size_t i = 0; rest && i < x.n; ++i) {
    std::memcpy(padded[i].q, x.q + i * x.cols + whole, rest);
    std::memcpy(padded[i].scale, x.scale + (i * x.cols + whole) / 32, rest / 32 * sizeof(float));
    std::memcpy(padded[i].sums, x.sums + (i * x.cols + whole) / 16, rest / 16 * sizeof(int16_t));
  }
  for (uint32_t r = row_begin; r < row_end; ++r) {
    const auto* row = reinterpret_cast<const uint8_t*>(w.data) + r * w.row_bytes;
    const uint8_t* tail = nullptr;
    if (rest) {
      std::memcpy(last, row + whole / Format::block * Format::block_bytes,
                  rest / Format::block * Format::block_bytes);
      tail = last;
    }
    const Output y = {out.y + r, out.stride, out.scale};
    for (uint32_t i = 0; i < x.n;) {
      const uint32_t left = x.n - i;
      if (left >= 4) row_product<Isa, Format, 4>(row, tail, x, i, padded + i, y), i += 4;
      else if (left >= 2) row_product<Isa, Format, 2>(row, tail, x, i, padded + i, y), i += 2;
      else row_product<Isa, Format, 1>(row, tail, x, i, padded + i, y), i += 1;
    }
  }
}

// ---- many inputs

template <class Isa>
constexpr uint32_t panel_rows = 2 * Isa::lanes;

// Scratch memory of one panel. Shapes for quantised weights; float weights use `q` as float
// [cols][panel_rows].
template <class Isa>
struct Panel {
  alignas(64) uint8_t q[panel_cols * panel_rows<Isa>];          // [cols / 4][panel_rows][4]
  alignas(64) float scale[panel_cols / 16 * panel_rows<Isa>];   // [cols / width][panel_rows]
  alignas(64) float offset[panel_cols / 16 * panel_rows<Isa>];  // likewise
  // [panel_rows][256], before the transposition.
  alignas(64) uint8_t rows[panel_rows<Isa> * group_weights];
};

// [panel_rows][64 words] -> [64 words][panel_rows]
template <class Isa>
void transpose_group(const uint8_t* from, uint8_t* to) {
  constexpr uint32_t words = group_weights / 4;
  for (uint32_t r = 0; r < panel_rows<Isa>; r += Isa::lanes) {
    for (uint32_t c = 0; c < words; c += Isa::lanes) {
      Isa::transpose(from + (r * words + c) * 4, words * 4, to + (c * panel_rows<Isa> + r) * 4,
                     panel_rows<Isa> * 4);
    }
  }
}

// One group of panel row r.
template <class Isa, class Format>
void unpack_group(const uint8_t* p, uint32_t r, uint32_t group, Panel<Isa>& panel) {
  constexpr std::size_t n = scale_count<Format>;
  typename Isa::W u[4];
  Floats<Isa, n> scale, offset;
  Format::template quants<Isa>(p, u);
  Format::template scales<Isa>(p, scale, offset);
  Isa::template prepare<Format>(u);
  for (int j = 0; j < 4; ++j)
    Isa::store64(panel.rows + r * group_weights + 64 * static_cast<uint32_t>(j), u[j]);
  float values[n];
  Isa::store(values, scale);
  for (uint32_t i = 0; i < n; ++i) panel.scale[(group * n + i) * panel_rows<Isa> + r] = values[i];
  if constexpr (Format::has_offset) {
    Isa::store(values, offset);
    for (uint32_t i = 0; i < n; ++i)
      panel.offset[(group * n + i) * panel_rows<Isa> + r] = values[i];
  }
}

// The weights of the panel after rows [row, row + panel_rows) and columns [col, col + cols): the
// next columns, or the first ones of the next rows. Its unpacking would wait for memory otherwise.
// May lie behind the matrix.
template <class Isa>
inline const uint8_t* next_panel(const WeightView& w, uint32_t row, uint32_t col, uint32_t cols,
                                 std::size_t col_bytes) {
  const bool is_last = col + cols >= w.cols;
  return reinterpret_cast<const uint8_t*>(w.data) +
         (row + (is_last ? panel_rows<Isa> : 0)) * w.row_bytes + (is_last ? 0 : col_bytes);
}

// Unpacks rows [row, row + panel_rows) and columns [col, col + cols) into the panel. Repeats the
// last row in the place of missing ones.
template <class Isa, class Format>
void unpack(const WeightView& w, uint32_t row, uint32_t col, uint32_t cols, Panel<Isa>& panel) {
  alignas(64) uint8_t last[Format::group_bytes] = {};
  const uint8_t* next =
      next_panel<Isa>(w, row, col, cols, (col + cols) / Format::block * Format::block_bytes);
  for (uint32_t c = 0; c < cols; c += group_weights, next += Format::group_bytes) {
    for (uint32_t r = 0; r < panel_rows<Isa>; ++r) {
      for (uint32_t b = 0; b < Format::group_bytes; b += 64)
        __builtin_prefetch(next + r * w.row_bytes + b);
      const std::size_t at = row + r < w.rows ? row + r : w.rows - 1;
      const auto* p = reinterpret_cast<const uint8_t*>(w.data) + at * w.row_bytes +
                      (col + c) / Format::block * Format::block_bytes;
      if (cols - c < group_weights) {
        std::memcpy(last, p, (cols - c) / Format::block * Format::block_bytes);
        p = last;
      }
      unpack_group<Isa, Format>(p, r, c / group_weights, panel);
    }
    transpose_group<Isa>(panel.rows, panel.q + std::size_t{c} * panel_rows<Isa>);
  }
}

// The results of a tile: `tokens` inputs by panel_rows rows, of which the first `rows` exist. Later
// column chunks add to earlier ones.
template <class Isa, std::size_t tokens>
[[gnu::always_inline]] inline void store_tile(typename Isa::F (&acc)[tokens][2], Output out,
                                              uint32_t rows, bool is_first) {
  const auto scale = Isa::broadcast(&out.scale);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (auto& sum : acc[t]) sum = Isa::mul(sum, scale);
    float* y = out.y + t * out.stride;
    if (rows == panel_rows<Isa>) {
      for (uint32_t v = 0; v < 2; ++v) {
        float* to = y + v * Isa::lanes;
        Isa::store(to, is_first ? acc[t][v] : Isa::add(Isa::load(to), acc[t][v]));
      }
    } else {
      float values[panel_rows<Isa>];
      Isa::store(values, acc[t][0]);
      Isa::store(values + Isa::lanes, acc[t][1]);
      for (uint32_t r = 0; r < rows; ++r) y[r] = is_first ? values[r] : y[r] + values[r];
    }
  }
}

// The properties of a format that the tile kernel depends on: formats with equal ones share its
// code.
template <uint32_t width_, uint32_t zero_, bool is_signed_, uint32_t max_, bool has_offset_>
struct TileKind {
  static constexpr uint32_t width = width_, zero = zero_, max = max_;
  static constexpr bool is_signed = is_signed_, has_offset = has_offset_;
};

// acc += offsets of 32 / width runs times the sums of block b's inputs.
template <class Isa, class Kind, std::size_t tokens>
[[gnu::always_inline]] inline void add_offsets(typename Isa::F (&acc)[tokens][2],
                                               const float* offset, const Activations& in,
                                               uint32_t b) {
  for (uint32_t h = 0; h < 32 / Kind::width; ++h, offset += panel_rows<Isa>) {
    const auto m0 = Isa::load(offset), m1 = Isa::load(offset + Isa::lanes);
    for (std::size_t t = 0; t < tokens; ++t) {
      const int16_t* sums = in.sums + t * (in.cols / 16) + 2 * b;
      const int total = Kind::width == 32 ? sums[0] + sums[1] : sums[h];
      const float value = static_cast<float>(total) * in.scale[t * (in.cols / 32) + b];
      const auto a = Isa::broadcast(&value);
      acc[t][0] = Isa::fma(m0, a, acc[t][0]);
      acc[t][1] = Isa::fma(m1, a, acc[t][1]);
    }
  }
}

// Inputs [0, tokens) of `in` (columns of this chunk) times a panel of `cols` columns.
template <class Isa, class Kind, std::size_t tokens>
void tile(const Panel<Isa>& panel, uint32_t cols, const Activations& in, Output out, uint32_t rows,
          bool is_first) {
  using F = typename Isa::F;
  constexpr uint32_t stride = panel_rows<Isa>, runs = 32 / Kind::width;
  F acc[tokens][2];
  for (auto& pair : acc) pair[0] = pair[1] = Isa::zero();
  const uint8_t* q = panel.q;
  const float* scale = panel.scale;
  for (uint32_t b = 0; b < cols / 32; ++b, q += 32 * stride, scale += runs * stride) {
    typename Isa::I sum[tokens][2];
    Isa::template accumulate<Kind, 0>(sum, q, in.q + b * 32, in.sums + 2 * b, in.cols);
    const F s0 = Isa::load(scale), s1 = Isa::load(scale + Isa::lanes);
    F block[tokens][2];
    for (std::size_t t = 0; t < tokens; ++t) {
      block[t][0] = Isa::mul(Isa::to_float(sum[t][0]), s0);
      block[t][1] = Isa::mul(Isa::to_float(sum[t][1]), s1);
    }
    if constexpr (runs == 2) {
      Isa::template accumulate<Kind, 1>(sum, q + 16 * stride, in.q + b * 32 + 16, in.sums + 2 * b,
                                        in.cols);
      const F s2 = Isa::load(scale + stride), s3 = Isa::load(scale + stride + Isa::lanes);
      for (std::size_t t = 0; t < tokens; ++t) {
        block[t][0] = Isa::fma(Isa::to_float(sum[t][0]), s2, block[t][0]);
        block[t][1] = Isa::fma(Isa::to_float(sum[t][1]), s3, block[t][1]);
      }
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      const F a = Isa::broadcast(in.scale + t * (in.cols / 32) + b);
      acc[t][0] = Isa::fma(block[t][0], a, acc[t][0]);
      acc[t][1] = Isa::fma(block[t][1], a, acc[t][1]);
    }
    if constexpr (Kind::has_offset)
      add_offsets<Isa, Kind>(acc, panel.offset + b * runs * stride, in, b);
  }
  store_tile<Isa, tokens>(acc, out, rows, is_first);
}

// Calls f<tokens>(first) over n inputs, `most` at a time, and one smaller tile for the rest.
template <std::size_t tokens, class F>
void rest_of_tiles(uint32_t first, uint32_t left, F&& f) {
  if constexpr (tokens > 0) {
    if (left == tokens) f.template operator()<tokens>(first);
    else rest_of_tiles<tokens - 1>(first, left, f);
  }
}

template <std::size_t max_tokens, class F>
void for_tiles(uint32_t n, F&& f) {
  uint32_t i = 0;
  for (; i + max_tokens <= n; i += max_tokens) f.template operator()<max_tokens>(i);
  rest_of_tiles<max_tokens - 1>(i, n - i, f);
}

template <class Isa, class Format>
void many_products(const WeightView& w, const Activations& x, Output out, uint32_t row_begin,
                   uint32_t row_end, Panel<Isa>& panel) {
  using Kind = TileKind<Format::width, Format::zero, Format::is_signed,
                        Isa::template tile_max<Format>, Format::has_offset>;
  for (uint32_t row = row_begin; row < row_end; row += panel_rows<Isa>) {
    const uint32_t rows = row_end - row < panel_rows<Isa> ? row_end - row : panel_rows<Isa>;
    for (uint32_t col = 0; col < w.cols; col += panel_cols) {
      const uint32_t cols = w.cols - col < panel_cols ? w.cols - col : panel_cols;
      unpack<Isa, Format>(w, row, col, cols, panel);
      for_tiles<Isa::template tile_tokens<Format::width>>(x.n, [&]<std::size_t tokens>(
                                                                   std::size_t i) {
        Activations in = x;
        in.q += i * x.cols + col;
        in.scale += (i * x.cols + col) / 32;
        in.sums += (i * x.cols + col) / 16;
        tile<Isa, Kind, tokens>(
            panel, cols, in, {out.y + i * out.stride + row, out.stride, out.scale}, rows, col == 0);
      });
    }
  }
}

template <class Isa, class Format>
void products(const WeightView& w, const Activations& x, Output out, uint32_t row_begin,
              uint32_t row_end, std::byte* scratch) {
  if (reads_in_place(x)) {
    for_passes(x, out, [&](const Activations& some, Output y) {
      few_products<Isa, Format>(w, some, y, row_begin, row_end);
    });
    return;
  }
  many_products<Isa, Format>(w, x, out, row_begin, row_end,
                             *reinterpret_cast<Panel<Isa>*>(scratch));
}

// ---- dequantisation

// scale * (u - zero) is exact in a float for every format. So the only roundings are the addition
// of the offset and the scale of the matrix.
template <class Isa, class Format>
void dequantize(const uint8_t* row, const WeightView& view, float* out) {
  const uint32_t cols = view.cols;
  constexpr std::size_t n = scale_count<Format>;
  alignas(64) uint8_t last[Format::group_bytes] = {};
  alignas(64) uint8_t u[group_weights];
  float scale[n], offset[n] = {};
  for (uint32_t c = 0; c < cols; c += group_weights) {
    const uint32_t left = cols - c < group_weights ? cols - c : group_weights;
    const uint8_t* p = row + std::size_t{c} / Format::block * Format::block_bytes;
    if (left < group_weights) {
      std::memcpy(last, p, left / Format::block * Format::block_bytes);
      p = last;
    }
    typename Isa::W w[4];
    Floats<Isa, n> s, m;
    Format::template quants<Isa>(p, w);
    Format::template scales<Isa>(p, s, m);
    for (uint32_t j = 0; j < 4; ++j) Isa::store64(u + 64 * j, w[j]);
    Isa::store(scale, s);
    if constexpr (Format::has_offset) Isa::store(offset, m);
    for (uint32_t i = 0; i < left; ++i) {
      const int q =
          Format::is_signed ? static_cast<int8_t>(u[i]) : u[i] - static_cast<int>(Format::zero);
      const float product = scale[i / Format::width] * static_cast<float>(q);
      out[c + i] =
          view.scale * (Format::has_offset ? product + offset[i / Format::width] : product);
    }
  }
}

}  // namespace
}  // namespace kvasir
