// The matrix product for float weights: F32, F16, BF16. The two methods of matmul-inl.h, with float
// inputs. Isa::load_f32, load_f16 and load_bf16 widen `lanes` weights; load_* of one value are the
// scalar forms.
#pragma once

#include "matmul_many-inl.h"

namespace kvasir {
namespace {

template <class Isa>
struct F32 {
  static constexpr uint32_t bytes = 4;
  static typename Isa::F load(const uint8_t* p) {
    return Isa::load(reinterpret_cast<const float*>(p));
  }
};
template <class Isa>
struct F16 {
  static constexpr uint32_t bytes = 2;
  static typename Isa::F load(const uint8_t* p) { return Isa::load_f16(p); }
};
template <class Isa>
struct BF16 {
  static constexpr uint32_t bytes = 2;
  static typename Isa::F load(const uint8_t* p) { return Isa::load_bf16(p); }
};

// The first `count` values (fewer than a vector), then zeros.
template <class Isa, class Format>
typename Isa::F load_part(const uint8_t* p, uint32_t count) {
  alignas(64) uint8_t padded[Isa::lanes * 4] = {};
  std::memcpy(padded, p, count * Format::bytes);
  return Format::load(padded);
}

template <class Isa, class Format, std::size_t tokens>
void float_row_product(const uint8_t* row, const Activations& x, uint32_t first, Output out) {
  using F = typename Isa::F;
  constexpr uint32_t lanes_ = Isa::lanes, step = 4 * lanes_;
  F sum[tokens][4];
  for (auto& each : sum) each[0] = each[1] = each[2] = each[3] = Isa::zero();
  const float* in = x.f32 + std::size_t{first} * x.cols;
  uint32_t c = 0;
  for (; c + step <= x.cols; c += step) {
    for (uint32_t j = 0; j < 4; ++j) {
      const F w = Format::load(row + (c + j * lanes_) * Format::bytes);
      for (std::size_t t = 0; t < tokens; ++t)
        sum[t][j] = Isa::fma(w, Isa::load(in + t * x.cols + c + j * lanes_), sum[t][j]);
    }
  }
  for (; c < x.cols; c += lanes_) {
    const uint32_t count = x.cols - c < lanes_ ? x.cols - c : lanes_;
    const F w = load_part<Isa, Format>(row + c * Format::bytes, count);
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto* p = reinterpret_cast<const uint8_t*>(in + t * x.cols + c);
      sum[t][0] = Isa::fma(w, load_part<Isa, F32<Isa>>(p, count), sum[t][0]);
    }
  }
  for (std::size_t t = 0; t < tokens; ++t) {
    const F all = Isa::add(Isa::add(sum[t][0], sum[t][1]), Isa::add(sum[t][2], sum[t][3]));
    out.y[(first + t) * out.stride] = Isa::sum(all) * out.scale;
  }
}

template <class Isa, class Format>
void few_float_products(const WeightView& w, const Activations& x, Output out, uint32_t row_begin,
                        uint32_t row_end) {
  for (uint32_t r = row_begin; r < row_end; ++r) {
    const auto* row = reinterpret_cast<const uint8_t*>(w.data) + r * w.row_bytes;
    const Output y = {out.y + r, out.stride, out.scale};
    for (uint32_t i = 0; i < x.n;) {
      const uint32_t left = x.n - i;
      if (left >= 4) float_row_product<Isa, Format, 4>(row, x, i, y), i += 4;
      else if (left >= 2) float_row_product<Isa, Format, 2>(row, x, i, y), i += 2;
      else float_row_product<Isa, Format, 1>(row, x, i, y), i += 1;
    }
  }
}

// A panel of cols <= float_panel_cols columns into panel.q as float [cols][panel_rows].
template <class Isa, class Format>
void unpack_floats(const WeightView& w, const PanelPlace& at_panel, Panel<Isa>& panel) {
  const auto [begin, end, row, col, cols] = at_panel;
  constexpr uint32_t part = group_weights / 4;  // columns that fit panel.rows as floats
  const uint8_t* next = next_panel<Isa>(w, at_panel, 1, Format::bytes);
  for (uint32_t c = 0; c < cols; c += part, next += part * Format::bytes) {
    for (uint32_t r = 0; r < panel_rows<Isa>; ++r) {
      for (uint32_t b = 0; b < part * Format::bytes; b += 64)
        __builtin_prefetch(next + r * w.row_bytes + b);
      const std::size_t at = row + r < w.rows ? row + r : w.rows - 1;
      const auto* p =
          reinterpret_cast<const uint8_t*>(w.data) + at * w.row_bytes + (col + c) * Format::bytes;
      auto* to = reinterpret_cast<float*>(panel.rows + r * group_weights);
      for (uint32_t i = 0; i < part && c + i < cols; i += Isa::lanes) {
        const uint32_t left = cols - c - i;
        Isa::store(to + i, left >= Isa::lanes
                               ? Format::load(p + i * Format::bytes)
                               : load_part<Isa, Format>(p + i * Format::bytes, left));
      }
    }
    transpose_group<Isa>(panel.rows, panel.q + std::size_t{c} * panel_rows<Isa> * 4);
  }
}

template <class Isa, std::size_t tokens>
void float_tile(const Panel<Isa>& panel, uint32_t cols, const float* in, uint32_t in_stride,
                Output out, uint32_t rows, bool is_first) {
  using F = typename Isa::F;
  F acc[tokens][2];
  for (auto& pair : acc) pair[0] = pair[1] = Isa::zero();
  const auto* weights = reinterpret_cast<const float*>(panel.q);
  for (uint32_t c = 0; c < cols; ++c, weights += panel_rows<Isa>) {
    const F w0 = Isa::load(weights), w1 = Isa::load(weights + Isa::lanes);
    for (std::size_t t = 0; t < tokens; ++t) {
      const F a = Isa::broadcast(in + t * in_stride + c);
      acc[t][0] = Isa::fma(w0, a, acc[t][0]);
      acc[t][1] = Isa::fma(w1, a, acc[t][1]);
    }
  }
  store_tile<Isa, tokens>(acc, out, rows, is_first);
}

template <class Isa, class Format>
void many_float_products(const WeightView& w, const Activations& x, Output out, uint32_t row_begin,
                         uint32_t row_end, Panel<Isa>& panel) {
  static_assert(float_panel_cols * 4 <= panel_cols);
  for_panels<Isa>(w, row_begin, row_end, float_panel_cols, [&](const PanelPlace& at) {
    const uint32_t left = at.end - at.row, rows = left < panel_rows<Isa> ? left : panel_rows<Isa>;
    unpack_floats<Isa, Format>(w, at, panel);
    for_tiles<Isa::template tile_tokens<32>>(x.n, [&]<std::size_t tokens>(std::size_t i) {
      float_tile<Isa, tokens>(panel, at.cols, x.f32 + i * x.cols + at.col, x.cols,
                              {out.y + i * out.stride + at.row, out.stride, out.scale}, rows,
                              at.col == 0);
    });
  });
}

template <class Isa, class Format>
void float_products(const WeightView& w, const Activations& x, Output out, uint32_t row_begin,
                    uint32_t row_end, std::byte* scratch) {
  if (reads_in_place(x)) {
    for_passes(x, out, [&](const Activations& some, Output y) {
      few_float_products<Isa, Format>(w, some, y, row_begin, row_end);
    });
    return;
  }
  many_float_products<Isa, Format>(w, x, out, row_begin, row_end,
                                   *reinterpret_cast<Panel<Isa>*>(scratch));
}

template <class Isa, class Format>
void widen(const uint8_t* row, const WeightView& view, float* out) {
  const auto scale = Isa::broadcast(&view.scale);
  float values[Isa::lanes];
  for (uint32_t c = 0; c < view.cols; c += Isa::lanes) {
    const uint32_t count = view.cols - c < Isa::lanes ? view.cols - c : Isa::lanes;
    Isa::store(values, Isa::mul(load_part<Isa, Format>(row + c * Format::bytes, count), scale));
    std::memcpy(out + c, values, count * sizeof(float));
  }
}

// ---- the table

// The format of a type, as a value.
template <class Format_>
struct FormatOf {
  using Format = Format_;
};

// Calls f(FormatOf<...>()) for a quantised type, g(FormatOf<...>()) for a float type.
template <class Isa, class Quantised, class Float>
[[gnu::always_inline]] inline void with_format(TensorType type, Quantised&& f, Float&& g) {
  switch (type) {
    case TensorType::f32:
      return g(FormatOf<F32<Isa>>());
    case TensorType::f16:
      return g(FormatOf<F16<Isa>>());
    case TensorType::bf16:
      return g(FormatOf<BF16<Isa>>());
    case TensorType::q8_0:
      return f(FormatOf<Q8_0>());
    case TensorType::q4_0:
      return f(FormatOf<Q4_0>());
    case TensorType::q4_1:
      return f(FormatOf<Q4_1>());
    case TensorType::q5_0:
      return f(FormatOf<Q5_0>());
    case TensorType::q5_1:
      return f(FormatOf<Q5_1>());
    case TensorType::q2_k:
      return f(FormatOf<Q2_K>());
    case TensorType::q3_k:
      return f(FormatOf<Q3_K>());
    case TensorType::q4_k:
      return f(FormatOf<Q4_K>());
    case TensorType::q5_k:
      return f(FormatOf<Q5_K>());
    case TensorType::q6_k:
      return f(FormatOf<Q6_K>());
    case TensorType::iq4_nl:
      return f(FormatOf<IQ4_NL>());
    case TensorType::iq4_xs:
      return f(FormatOf<IQ4_XS>());
    case TensorType::mxfp4:
      return f(FormatOf<MXFP4>());
    case TensorType::nvfp4:
      return f(FormatOf<NVFP4>());
    case TensorType::iq3_s:
      return f(FormatOf<IQ3_S>());
    case TensorType::iq3_xxs:
      return f(FormatOf<IQ3_XXS>());
    case TensorType::iq2_s:
      return f(FormatOf<IQ2_S>());
    case TensorType::iq2_xs:
      return f(FormatOf<IQ2_XS>());
    case TensorType::iq2_xxs:
      return f(FormatOf<IQ2_XXS>());
    case TensorType::iq1_s:
      return f(FormatOf<IQ1_S>());
    case TensorType::iq1_m:
      return f(FormatOf<IQ1_M>());
    case TensorType::tq1_0:
      return f(FormatOf<TQ1_0>());
    case TensorType::tq2_0:
      return f(FormatOf<TQ2_0>());
  }
}

template <class Isa>
void matmul(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
            uint32_t row_begin, uint32_t row_end, std::byte* scratch) {
  const Output out = {y, y_stride, w.scale};
  const RowRange range = {row_begin, row_end};
  with_format<Isa>(
      w.type,
      [&](auto of) { products<Isa, typename decltype(of)::Format>(w, x, out, range, scratch); },
      [&](auto of) {
        float_products<Isa, typename decltype(of)::Format>(w, x, out, row_begin, row_end, scratch);
      });
}

// The same for a set with byte products of its own. `others` computes float weights, and rows of
// formats that take longer to decode than to multiply.
template <class Isa>
void byte_matmul(const WeightView& w, const Activations& x, Output out, RowRange range,
                 std::byte* scratch, const Kernels& others) {
  const auto by_others = [&] {
    others.matmul(w, x, out.y, out.stride, range.begin, range.end, scratch);
  };
  with_format<Isa>(
      w.type,
      [&](auto of) {
        using Format = typename decltype(of)::Format;
        if (!reads_in_place(x)) {
          many_products<Isa, KindOf<Isa, Format>>(w, decoder_of<Isa, Format>, x, out, range,
                                                  *reinterpret_cast<Panel<Isa>*>(scratch));
        } else if (x.lanes) {
          lane_products<Isa, KindOf<Isa, Format>>(w, decoder_of<Isa, Format>, x, out, range);
        } else if constexpr (Format::is_gathered) {
          by_others();
        } else {
          products<Isa, Format>(w, x, out, range, scratch);
        }
      },
      [&](auto) { by_others(); });
}

// The same for a set with products of many inputs alone.
template <class Isa>
void many_matmul(const WeightView& w, const Activations& x, Output out, RowRange range,
                 std::byte* scratch, const Kernels& others) {
  const auto by_others = [&] {
    others.matmul(w, x, out.y, out.stride, range.begin, range.end, scratch);
  };
  if (reads_in_place(x)) return by_others();
  with_format<Isa>(
      w.type,
      [&](auto of) {
        using Format = typename decltype(of)::Format;
        many_products<Isa, KindOf<Isa, Format>>(w, decoder_of<Isa, Format>, x, out, range,
                                                *reinterpret_cast<Panel<Isa>*>(scratch));
      },
      [&](auto) { by_others(); });
}

template <class Isa>
void dequantize_row(const WeightView& w, uint32_t row, float* out) {
  const auto* p = reinterpret_cast<const uint8_t*>(w.data) + row * w.row_bytes;
  with_format<Isa>(
      w.type,
      [&](auto of) {
        using Format = typename decltype(of)::Format;
        dequantize<KindOf<Isa, Format>>(p, decoder_of<Isa, Format>, w, out);
      },
      [&](auto of) { widen<Isa, typename decltype(of)::Format>(p, w, out); });
}

template <class Isa>
std::size_t matmul_scratch(TensorType, ProductMethod) {
  return sizeof(Panel<Isa>);
}

template <class Isa>
void fill_matmul(Kernels& k) {
  k.matmul = matmul<Isa>;
  k.matmul_scratch = matmul_scratch<Isa>;
  k.lane_bytes = [](uint32_t, uint32_t) { return std::size_t{0}; };
  k.to_lanes = [](const Activations&, uint32_t, uint32_t, std::byte*) {};
  k.tile_bytes = [](uint32_t, uint32_t) { return std::size_t{0}; };
  k.to_tiles = [](const Activations&, uint32_t, uint32_t, std::byte*) {};
  if constexpr (Isa::has_lanes) k.lane_bytes = lane_bytes<Isa>, k.to_lanes = to_lanes<Isa>;
  k.matmul_rows = panel_rows<Isa>;
  k.dequantize_row = dequantize_row<Isa>;
}

}  // namespace
}  // namespace kvasir
