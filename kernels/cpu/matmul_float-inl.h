// The matrix product for float weights: F32, F16, BF16. The two methods of matmul-inl.h, with float
// inputs. Isa::load_f32, load_f16 and load_bf16 widen `lanes` weights; load_* of one value are the
// scalar forms.
#pragma once

#include "matmul-inl.h"

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

// Rows [row, row + panel_rows) and columns [col, col + cols), cols <= float_panel_cols, into
// panel.q as float [cols][panel_rows].
template <class Isa, class Format>
void unpack_floats(const WeightView& w, uint32_t row, uint32_t col, uint32_t cols,
                   Panel<Isa>& panel) {
  constexpr uint32_t part = group_weights / 4;  // columns that fit panel.rows as floats
  const uint8_t* next = next_panel<Isa>(w, row, col, cols, std::size_t{col + cols} * Format::bytes);
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
  for (uint32_t row = row_begin; row < row_end; row += panel_rows<Isa>) {
    const uint32_t rows = row_end - row < panel_rows<Isa> ? row_end - row : panel_rows<Isa>;
    for (uint32_t col = 0; col < w.cols; col += float_panel_cols) {
      const uint32_t cols = w.cols - col < float_panel_cols ? w.cols - col : float_panel_cols;
      unpack_floats<Isa, Format>(w, row, col, cols, panel);
      for_tiles<Isa::template tile_tokens<32>>(x.n, [&]<std::size_t tokens>(std::size_t i) {
        float_tile<Isa, tokens>(panel, cols, x.f32 + i * x.cols + col, x.cols,
                                {out.y + i * out.stride + row, out.stride, out.scale}, rows,
                                col == 0);
      });
    }
  }
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

template <class Isa>
void matmul(const WeightView& w, const Activations& x, float* y, std::size_t y_stride,
            uint32_t row_begin, uint32_t row_end, std::byte* scratch) {
  const Output out = {y, y_stride, w.scale};
  switch (w.type) {
    case TensorType::f32:
      return float_products<Isa, F32<Isa>>(w, x, out, row_begin, row_end, scratch);
    case TensorType::f16:
      return float_products<Isa, F16<Isa>>(w, x, out, row_begin, row_end, scratch);
    case TensorType::bf16:
      return float_products<Isa, BF16<Isa>>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q8_0:
      return products<Isa, Q8_0>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q4_0:
      return products<Isa, Q4_0>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q4_1:
      return products<Isa, Q4_1>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q5_0:
      return products<Isa, Q5_0>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q5_1:
      return products<Isa, Q5_1>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q2_k:
      return products<Isa, Q2_K>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q3_k:
      return products<Isa, Q3_K>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q4_k:
      return products<Isa, Q4_K>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q5_k:
      return products<Isa, Q5_K>(w, x, out, row_begin, row_end, scratch);
    case TensorType::q6_k:
      return products<Isa, Q6_K>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq4_nl:
      return products<Isa, IQ4_NL>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq4_xs:
      return products<Isa, IQ4_XS>(w, x, out, row_begin, row_end, scratch);
    case TensorType::mxfp4:
      return products<Isa, MXFP4>(w, x, out, row_begin, row_end, scratch);
    case TensorType::nvfp4:
      return products<Isa, NVFP4>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq3_s:
      return products<Isa, IQ3_S>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq3_xxs:
      return products<Isa, IQ3_XXS>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq2_s:
      return products<Isa, IQ2_S>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq2_xs:
      return products<Isa, IQ2_XS>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq2_xxs:
      return products<Isa, IQ2_XXS>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq1_s:
      return products<Isa, IQ1_S>(w, x, out, row_begin, row_end, scratch);
    case TensorType::iq1_m:
      return products<Isa, IQ1_M>(w, x, out, row_begin, row_end, scratch);
    case TensorType::tq1_0:
      return products<Isa, TQ1_0>(w, x, out, row_begin, row_end, scratch);
    case TensorType::tq2_0:
      return products<Isa, TQ2_0>(w, x, out, row_begin, row_end, scratch);
  }
}

template <class Isa>
void dequantize_row(const WeightView& w, uint32_t row, float* out) {
  const auto* p = reinterpret_cast<const uint8_t*>(w.data) + row * w.row_bytes;
  switch (w.type) {
    case TensorType::f32:
      return widen<Isa, F32<Isa>>(p, w, out);
    case TensorType::f16:
      return widen<Isa, F16<Isa>>(p, w, out);
    case TensorType::bf16:
      return widen<Isa, BF16<Isa>>(p, w, out);
    case TensorType::q8_0:
      return dequantize<Isa, Q8_0>(p, w, out);
    case TensorType::q4_0:
      return dequantize<Isa, Q4_0>(p, w, out);
    case TensorType::q4_1:
      return dequantize<Isa, Q4_1>(p, w, out);
    case TensorType::q5_0:
      return dequantize<Isa, Q5_0>(p, w, out);
    case TensorType::q5_1:
      return dequantize<Isa, Q5_1>(p, w, out);
    case TensorType::q2_k:
      return dequantize<Isa, Q2_K>(p, w, out);
    case TensorType::q3_k:
      return dequantize<Isa, Q3_K>(p, w, out);
    case TensorType::q4_k:
      return dequantize<Isa, Q4_K>(p, w, out);
    case TensorType::q5_k:
      return dequantize<Isa, Q5_K>(p, w, out);
    case TensorType::q6_k:
      return dequantize<Isa, Q6_K>(p, w, out);
    case TensorType::iq4_nl:
      return dequantize<Isa, IQ4_NL>(p, w, out);
    case TensorType::iq4_xs:
      return dequantize<Isa, IQ4_XS>(p, w, out);
    case TensorType::mxfp4:
      return dequantize<Isa, MXFP4>(p, w, out);
    case TensorType::nvfp4:
      return dequantize<Isa, NVFP4>(p, w, out);
    case TensorType::iq3_s:
      return dequantize<Isa, IQ3_S>(p, w, out);
    case TensorType::iq3_xxs:
      return dequantize<Isa, IQ3_XXS>(p, w, out);
    case TensorType::iq2_s:
      return dequantize<Isa, IQ2_S>(p, w, out);
    case TensorType::iq2_xs:
      return dequantize<Isa, IQ2_XS>(p, w, out);
    case TensorType::iq2_xxs:
      return dequantize<Isa, IQ2_XXS>(p, w, out);
    case TensorType::iq1_s:
      return dequantize<Isa, IQ1_S>(p, w, out);
    case TensorType::iq1_m:
      return dequantize<Isa, IQ1_M>(p, w, out);
    case TensorType::tq1_0:
      return dequantize<Isa, TQ1_0>(p, w, out);
    case TensorType::tq2_0:
      return dequantize<Isa, TQ2_0>(p, w, out);
  }
}

template <class Isa>
std::size_t matmul_scratch(TensorType, uint32_t) {
  return sizeof(Panel<Isa>);
}

template <class Isa>
void fill_matmul(Kernels& k) {
  k.matmul = matmul<Isa>;
  k.matmul_scratch = matmul_scratch<Isa>;
  k.matmul_rows = panel_rows<Isa>;
  k.dequantize_row = dequantize_row<Isa>;
}

}  // namespace
}  // namespace kvasir
