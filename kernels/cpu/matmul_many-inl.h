// The matrix product for many inputs: see matmul-inl.h. What depends on a format is behind its
// Decoder.
#pragma once

#include "matmul_lanes-inl.h"

namespace kvasir {
namespace {

template <class Isa>
constexpr uint32_t panel_rows = 2 * Isa::lanes;

// Scratch memory of one panel. Shapes for quantised weights; float weights use `q` as float
// [cols][panel_rows].
template <class Isa>
struct Panel {
  alignas(64) uint8_t q[panel_cols * panel_rows<Isa>];          // [cols / word][panel_rows][word]
  alignas(64) float scale[panel_cols / 16 * panel_rows<Isa>];   // [cols / width][panel_rows]
  alignas(64) float offset[panel_cols / 16 * panel_rows<Isa>];  // likewise
  // [panel_rows][256], before the transposition.
  alignas(64) uint8_t rows[panel_rows<Isa> * group_weights];
};

// [panel_rows][words] -> [words][panel_rows]
template <class Isa>
void transpose_group(const uint8_t* from, uint8_t* to) {
  constexpr uint32_t words = group_weights / Isa::word;
  for (uint32_t r = 0; r < panel_rows<Isa>; r += Isa::lanes) {
    for (uint32_t c = 0; c < words; c += Isa::lanes * 4 / Isa::word) {
      Isa::transpose(from + (r * words + c) * Isa::word, group_weights,
                     to + (c * panel_rows<Isa> + r) * Isa::word, panel_rows<Isa> * Isa::word);
    }
  }
}

// A group of panel row r.
template <class Isa, class Kind>
[[gnu::always_inline]] inline void unpack_group(const Group& from, uint32_t r, uint32_t group,
                                                Panel<Isa>& panel) {
  constexpr std::size_t n = scale_count<Kind>;
  typename Isa::W u[4];
  for (uint32_t j = 0; j < 4; ++j) u[j] = Isa::load64(from.u + 64 * j);
  Isa::template prepare_panel<Kind>(u);
  for (uint32_t j = 0; j < 4; ++j) Isa::store64(panel.rows + r * group_weights + 64 * j, u[j]);
  const std::size_t at = std::size_t{group} * n * panel_rows<Isa> + r;
  for (uint32_t i = 0; i < n; ++i) panel.scale[at + i * panel_rows<Isa>] = from.scale[i];
  if constexpr (Kind::has_offset)
    for (uint32_t i = 0; i < n; ++i) panel.offset[at + i * panel_rows<Isa>] = from.offset[i];
}

// The panel [row, row + panel_rows) x [col, col + cols) of rows [begin, end). Each range of columns
// is taken for all these rows, so that the columns of the inputs stay in the second-level cache.
struct PanelPlace {
  uint32_t begin, end, row, col, cols;
};

// The weights of the next panel. Its unpacking would wait for memory otherwise. May lie behind the
// matrix.
template <class Isa>
inline const uint8_t* next_panel(const WeightView& w, const PanelPlace& at, uint32_t block,
                                 uint32_t block_bytes) {
  const bool is_last = at.row + panel_rows<Isa> >= at.end;
  const uint32_t row = is_last ? at.begin : at.row + panel_rows<Isa>,
                 col = is_last ? at.col + at.cols : at.col;
  return reinterpret_cast<const uint8_t*>(w.data) + row * w.row_bytes +
         std::size_t{col} / block * block_bytes;
}

// Calls f(place) for all panels of rows [begin, end), a few rows of panels at a time: their outputs
// stay in the cache too.
template <class Isa, class F>
void for_panels(const WeightView& w, uint32_t begin, uint32_t end, uint32_t most_cols, F&& f) {
  constexpr uint32_t most_rows = 4 * panel_rows<Isa>;
  for (; begin < end; begin += most_rows) {
    const uint32_t stop = end - begin < most_rows ? end : begin + most_rows;
    for (uint32_t col = 0; col < w.cols; col += most_cols) {
      const uint32_t cols = w.cols - col < most_cols ? w.cols - col : most_cols;
      for (uint32_t row = begin; row < stop; row += panel_rows<Isa>)
        f(PanelPlace{begin, stop, row, col, cols});
    }
  }
}

// Unpacks a panel. Repeats the last row in the place of missing ones.
template <class Isa, class Kind>
void unpack(const WeightView& w, const Decoder& format, const PanelPlace& at_panel,
            Panel<Isa>& panel) {
  const auto [begin, end, row, col, cols] = at_panel;
  alignas(64) uint8_t last[max_group_bytes] = {};
  Group group;
  const uint8_t* next = next_panel<Isa>(w, at_panel, format.block, format.block_bytes);
  for (uint32_t c = 0; c < cols; c += group_weights, next += format.group_bytes) {
    for (uint32_t r = 0; r < panel_rows<Isa>; ++r) {
      for (uint32_t b = 0; b < format.group_bytes; b += 64)
        __builtin_prefetch(next + r * w.row_bytes + b);
      const std::size_t at = row + r < w.rows ? row + r : w.rows - 1;
      const auto* p = reinterpret_cast<const uint8_t*>(w.data) + at * w.row_bytes +
                      std::size_t{col + c} / format.block * format.block_bytes;
      if (cols - c < group_weights) {
        std::memcpy(last, p, (cols - c) / format.block * format.block_bytes);
        p = last;
      }
      format.decode(p, group);
      unpack_group<Isa, Kind>(group, r, c / group_weights, panel);
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
#pragma GCC unroll 16
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

constexpr uint32_t panel_blocks = panel_cols / 32;

// What a tile needs of the sums of its inputs, for each run of `width` columns.
//
// Where multiply-adds are fused, the integer sums start at sum_start: the bits of the float
// 3 * 2^22. |sum| < 2^22, so their bits are those of the float x = 3 * 2^22 + sum. Then
// fma(x, s, s * -3 * 2^22) is sum * s, rounded once, and needs no conversion. s has at most 22 bits
// in every format, so s * 3 * 2^22 is exact.
template <class Isa, class Kind, std::size_t tokens>
struct Sums {
  static constexpr uint32_t runs = 32 / Kind::width;
  static constexpr int bias = Isa::template tile_bias<Kind>;
  static constexpr std::size_t starts = bias != 0 ? tokens : 1,
                               offsets = Kind::has_offset ? tokens : 1;

  Sums(const Activations& in, uint32_t blocks) {
    if constexpr (bias == 0 && !Kind::has_offset) return;
    for (std::size_t t = 0; t < tokens; ++t) {
      const int16_t* sums = in.sums + t * (in.cols / 16);
      const float* scale = in.scale + t * (in.cols / 32);
      uint32_t b = 0;
      for (; b + Isa::lanes <= blocks; b += Isa::lanes) put(t, b, sums + 2 * b, scale + b);
      if (b == blocks) continue;
      int16_t last_sums[2 * Isa::lanes] = {};
      float last_scale[Isa::lanes] = {};
      std::memcpy(last_sums, sums + 2 * b, (blocks - b) * 2 * sizeof *sums);
      std::memcpy(last_scale, scale + b, (blocks - b) * sizeof *scale);
      put(t, b, last_sums, last_scale);
    }
  }

  // The initial value of the sums of token t, block b.
  typename Isa::I start_of(std::size_t t, uint32_t b, uint32_t run) const {
    if constexpr (bias == 0) return Isa::iset(Isa::sum_start);
    else return Isa::iset(start[run][t][b]);
  }

  // -bias * the inputs' sum + sum_start
  alignas(64) int32_t start[runs][starts][panel_blocks];
  // the inputs' sum * their scale, the factor of a run's offset
  alignas(64) float offset[runs][offsets][panel_blocks];

 private:
  void put(std::size_t t, uint32_t b, const int16_t* sums, const float* scale) {
    for (uint32_t run = 0; run < runs; ++run) {
      const int first = run == 0, second = runs == 1 || run == 1;
      if constexpr (bias != 0) {
        const auto sum = Isa::pair_sums(sums, -bias * first, -bias * second);
        Isa::istore(start[run][t] + b, Isa::iadd(sum, Isa::iset(Isa::sum_start)));
      }
      if constexpr (Kind::has_offset) {
        const auto sum = Isa::to_float(Isa::pair_sums(sums, first, second));
        Isa::store(offset[run][t] + b, Isa::mul(sum, Isa::load(scale)));
      }
    }
  }
};

// Inputs [0, tokens) of `in` (columns of this chunk) times a panel of `cols` columns.
template <class Isa, class Kind, std::size_t tokens>
void tile(const Panel<Isa>& panel, uint32_t cols, const Activations& in, Output out, uint32_t rows,
          bool is_first) {
  using F = typename Isa::F;
  constexpr uint32_t stride = panel_rows<Isa>, runs = 32 / Kind::width;
  constexpr float minus_start = -12582912.0f;
  const Sums<Isa, Kind, tokens> sums(in, cols / 32);
  F acc[tokens][2];
#pragma GCC unroll 16
  for (auto& pair : acc) pair[0] = pair[1] = Isa::zero();
  const uint8_t* q = panel.q;
  const float* scale = panel.scale;
  for (uint32_t b = 0; b < cols / 32; ++b, scale += runs * stride) {
    F block[tokens][2];
    for (uint32_t run = 0; run < runs; ++run, q += Kind::width * stride) {
      typename Isa::I sum[tokens][2];
#pragma GCC unroll 16
      for (std::size_t t = 0; t < tokens; ++t) sum[t][0] = sum[t][1] = sums.start_of(t, b, run);
      Isa::template accumulate<Kind>(sum, q, in.q + b * 32 + run * Kind::width, in.cols);
      for (uint32_t v = 0; v < 2; ++v) {
        const F s = Isa::load(scale + run * stride + v * Isa::lanes),
                start = Isa::mul(s, Isa::broadcast(&minus_start));
#pragma GCC unroll 16
        for (std::size_t t = 0; t < tokens; ++t) {
          block[t][v] = run == 0 ? Isa::scaled(sum[t][v], s, start)
                                 : Isa::fma(Isa::sum_to_float(sum[t][v]), s, block[t][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (std::size_t t = 0; t < tokens; ++t) {
      const F a = Isa::broadcast(in.scale + t * (in.cols / 32) + b);
      for (uint32_t v = 0; v < 2; ++v) acc[t][v] = Isa::fma(block[t][v], a, acc[t][v]);
    }
    if constexpr (Kind::has_offset) {
      for (uint32_t run = 0; run < runs; ++run) {
        const float* offset = panel.offset + (b * runs + run) * stride;
        const F m0 = Isa::load(offset), m1 = Isa::load(offset + Isa::lanes);
#pragma GCC unroll 16
        for (std::size_t t = 0; t < tokens; ++t) {
          const F a = Isa::broadcast(&sums.offset[run][t][b]);
          acc[t][0] = Isa::fma(m0, a, acc[t][0]);
          acc[t][1] = Isa::fma(m1, a, acc[t][1]);
        }
      }
    }
  }
  store_tile<Isa, tokens>(acc, out, rows, is_first);
}

// Calls f<tokens>(first) over n inputs: max_tokens at a time, and powers of two for the rest.
template <std::size_t tokens, class F>
void rest_of_tiles(uint32_t first, uint32_t n, F&& f) {
  if constexpr (tokens > 0) {
    if (first + tokens <= n) {
      f.template operator()<tokens>(first);
      first += tokens;
    }
    rest_of_tiles<tokens / 2>(first, n, f);
  }
}

template <std::size_t max_tokens, class F>
void for_tiles(uint32_t n, F&& f) {
  constexpr std::size_t half = max_tokens > 8 ? 8 : max_tokens > 4 ? 4 : max_tokens > 2 ? 2 : 1;
  uint32_t i = 0;
  for (; i + max_tokens <= n; i += max_tokens) f.template operator()<max_tokens>(i);
  rest_of_tiles<half>(i, n, f);
}

template <class Isa, class Kind>
void many_products(const WeightView& w, const Decoder& format, const Activations& x, Output out,
                   RowRange range, Panel<Isa>& panel) {
  for_panels<Isa>(w, range.begin, range.end, panel_cols, [&](const PanelPlace& at) {
    const uint32_t left = at.end - at.row, rows = left < panel_rows<Isa> ? left : panel_rows<Isa>;
    unpack<Isa, Kind>(w, format, at, panel);
    for_tiles<Isa::template tile_tokens<Kind::width>>(x.n, [&]<std::size_t tokens>(std::size_t i) {
      Activations in = x;
      in.q += i * x.cols + at.col;
      in.scale += (i * x.cols + at.col) / 32;
      in.sums += (i * x.cols + at.col) / 16;
      tile<Isa, Kind, tokens>(panel, at.cols, in,
                              {out.y + i * out.stride + at.row, out.stride, out.scale}, rows,
                              at.col == 0);
    });
  });
}

template <class Isa, class Format>
void products(const WeightView& w, const Activations& x, Output out, RowRange range,
              std::byte* scratch) {
  if (reads_in_place(x)) {
    if constexpr (Isa::has_lanes)
      if (x.lanes)
        return lane_products<Isa, KindOf<Isa, Format>>(w, decoder_of<Isa, Format>, x, out, range);
    for_passes(x, out, [&](const Activations& some, Output y) {
      few_products<Isa, Format>(w, some, y, range.begin, range.end);
    });
    return;
  }
  many_products<Isa, KindOf<Isa, Format>>(w, decoder_of<Isa, Format>, x, out, range,
                                          *reinterpret_cast<Panel<Isa>*>(scratch));
}

// ---- dequantisation

// scale * (u - zero) is exact in a float for every format. So the only roundings are the addition
// of the offset and the scale of the matrix.
template <class Kind>
void dequantize(const uint8_t* row, const Decoder& format, const WeightView& view, float* out) {
  alignas(64) uint8_t last[max_group_bytes] = {};
  Group group;
  for (uint32_t c = 0; c < view.cols; c += group_weights) {
    const uint32_t left = view.cols - c < group_weights ? view.cols - c : group_weights;
    const uint8_t* p = row + std::size_t{c} / format.block * format.block_bytes;
    if (left < group_weights) {
      std::memcpy(last, p, left / format.block * format.block_bytes);
      p = last;
    }
    format.decode(p, group);
    for (uint32_t i = 0; i < left; ++i) {
      const int u = group.u[i];
      const int q = Kind::is_signed ? static_cast<int8_t>(u) : u - static_cast<int>(Kind::zero);
      const float product = group.scale[i / Kind::width] * static_cast<float>(q);
      out[c + i] =
          view.scale * (Kind::has_offset ? product + group.offset[i / Kind::width] : product);
    }
  }
}

}  // namespace
}  // namespace kvasir
