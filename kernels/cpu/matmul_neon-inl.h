// Matrix products with NEON and its dot product of signed bytes: the primitives of matmul-inl.h.
#pragma once

#include <arm_neon.h>

#include "fill-inl.h"
#include "matmul_float-inl.h"

namespace kvasir {
namespace {

struct Neon {
  using F = float32x4_t;
  using I = int32x4_t;
  struct W {
    uint8x16_t v[4];
  };
  static constexpr uint32_t lanes = 4;
  static constexpr uint32_t row_tokens = 4, word = 4;
  static constexpr uint32_t far_bytes = max_group_bytes;  // never
  // Registers of a tile, of 32: 2 x 4 float and 2 x 4 integer accumulators, 8 of weights, an input.
  template <uint32_t>
  static constexpr std::size_t tile_tokens = 4;
  template <class Format>
  static constexpr uint32_t tile_max = 0;  // unused

  template <std::size_t n>
  struct Floats {
    float32x4_t v[n / 4];
  };

  // ---- floats ----
  static F zero() { return vdupq_n_f32(0); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F v) { vst1q_f32(p, v); }
  static F broadcast(const float* p) { return vld1q_dup_f32(p); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F to_float(I v) { return vcvtq_f32_s32(v); }
  static constexpr int32_t sum_start = 0x4b400000;
  static F scaled(I sum, F s, F start) { return fma(vreinterpretq_f32_s32(sum), s, start); }
  static F sum_to_float(I sum) {
    return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f));
  }
  static float sum(F v) { return vaddvq_f32(v); }
  static F load_f16(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
  static F load_bf16(const uint8_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
  }

  // ---- quants ----
  static W load64(const uint8_t* p) {
    return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
  }
  static void store64(uint8_t* p, const W& v) {
    for (std::size_t i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, v.v[i]);
  }
  static W load32x2(const uint8_t* p0, const uint8_t* p1) {
    return {{vld1q_u8(p0), vld1q_u8(p0 + 16), vld1q_u8(p1), vld1q_u8(p1 + 16)}};
  }
  static W mask(W v, uint8_t m) {
    for (uint8x16_t& each : v.v) each = vandq_u8(each, vdupq_n_u8(m));
    return v;
  }
  static W merge(W a, const W& b) {
    for (std::size_t i = 0; i < 4; ++i) a.v[i] = vorrq_u8(a.v[i], b.v[i]);
    return a;
  }
  // Bytes of ones where bit 16 i, 16 i + 1, ... is set.
  static uint8x16_t spread_bits(uint64_t bits, std::size_t i) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const auto byte = [&](std::size_t k) {
      return vdup_n_u8(static_cast<uint8_t>(bits >> (16 * i + 8 * k)));
    };
    return vtstq_u8(vcombine_u8(byte(0), byte(1)), bit);
  }
  static W add_where(W v, uint64_t bits, uint8_t value) {
    for (std::size_t i = 0; i < 4; ++i)
      v.v[i] = vaddq_u8(v.v[i], vandq_u8(spread_bits(bits, i), vdupq_n_u8(value)));
    return v;
  }
  static W signed_around(W v, uint64_t minus, uint8_t zero) {
    for (std::size_t i = 0; i < 4; ++i) {
      const uint8x16_t ones = spread_bits(minus, i);
      v.v[i] = vaddq_u8(vsubq_u8(veorq_u8(v.v[i], ones), ones), vdupq_n_u8(zero));
    }
    return v;
  }
  template <class At>
  static W gather(At&& at) {
    constexpr uint32_t n = 16 / sizeof(*at(0));
    const auto part = [&](uint32_t k) {
      if constexpr (n == 2) {
        return vreinterpretq_u8_u64(vcombine_u64(vld1_u64(at(k)), vld1_u64(at(k + 1))));
      } else {
        uint32x4_t v = vld1q_dup_u32(at(k));
        v = vld1q_lane_u32(at(k + 1), v, 1);
        v = vld1q_lane_u32(at(k + 2), v, 2);
        return vreinterpretq_u8_u32(vld1q_lane_u32(at(k + 3), v, 3));
      }
    };
    return {{part(0), part(n), part(2 * n), part(3 * n)}};
  }
  template <int a>
  static uint8x16_t shift(uint8x16_t v) {
    if constexpr (a > 0) return vshrq_n_u8(v, a);
    else if constexpr (a < 0) return vshlq_n_u8(v, -a);
    else return v;
  }
  template <int a>
  static W shift_right(W v) {
    for (uint8x16_t& each : v.v) each = shift<a>(each);
    return v;
  }
  template <int a, int b>
  static W spread(const uint8_t* p) {
    const uint8x16_t low = vld1q_u8(p), high = vld1q_u8(p + 16);
    return {{shift<a>(low), shift<a>(high), shift<b>(low), shift<b>(high)}};
  }
  static W nibbles(const uint8_t* p0, const uint8_t* p1) {
    const uint8x16_t a = vld1q_u8(p0), b = vld1q_u8(p1), low = vdupq_n_u8(15);
    return {{vandq_u8(a, low), vshrq_n_u8(a, 4), vandq_u8(b, low), vshrq_n_u8(b, 4)}};
  }
  static W nibbles8(const uint8_t* p) {
    W out;
    for (std::size_t i = 0; i < 2; ++i) {
      const uint8x16_t v = vld1q_u8(p + 16 * i);
      const uint64x2_t low = vreinterpretq_u64_u8(vandq_u8(v, vdupq_n_u8(15))),
                       high = vreinterpretq_u64_u8(vshrq_n_u8(v, 4));
      out.v[2 * i] = vreinterpretq_u8_u64(vzip1q_u64(low, high));
      out.v[2 * i + 1] = vreinterpretq_u8_u64(vzip2q_u64(low, high));
    }
    return out;
  }
  static W lookup(W v, const int8_t (&table)[16]) {
    const uint8x16_t t = vreinterpretq_u8_s8(vld1q_s8(table));
    for (uint8x16_t& each : v.v) each = vqtbl1q_u8(t, each);
    return v;
  }

  // ---- scales ----
  static float half(const uint8_t* p) { return static_cast<float>(kvasir::load<__fp16>(p)); }
  static Floats<8> from_halves(const uint8_t* p, uint32_t stride) {
    uint16_t h[8];
    for (uint32_t i = 0; i < 8; ++i) h[i] = kvasir::load<uint16_t>(p + i * stride);
    return {{vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))),
             vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 4)))}};
  }
  static Floats<8> from_bytes(uint64_t v) {
    const uint16x8_t wide = vmovl_u8(vcreate_u8(v));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))}};
  }
  static Floats<16> from_bytes(uint64_t low, uint64_t high) {
    const Floats<8> a = from_bytes(low), b = from_bytes(high);
    return {{a.v[0], a.v[1], b.v[0], b.v[1]}};
  }
  // 2^(e - 128) of each byte e; 0 for e < 2, where that is subnormal.
  static Floats<8> from_exponents(uint64_t v) {
    const uint16x8_t e = vmovl_u8(vqsub_u8(vcreate_u8(v), vdup_n_u8(1)));
    return {{vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(e)), 23)),
             vreinterpretq_f32_u32(vshlq_n_u32(vmovl_high_u16(e), 23))}};
  }
  // The floats of four exponent bits and three mantissa bits, as half-precision numbers 2^8 too
  // small. 0x7f is not a number; files mean zero.
  static Floats<16> from_ue4m3(uint64_t low, uint64_t high) {
    const uint8x16_t v = vcombine_u8(vcreate_u8(low), vcreate_u8(high)), nan = vdupq_n_u8(0x7f);
    const uint8x16_t bits = vandq_u8(vbicq_u8(v, vceqq_u8(v, nan)), nan);
    const uint16x8_t a = vshll_n_u8(vget_low_u8(bits), 7), b = vshll_high_n_u8(bits, 7);
    const auto widen = [](uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); };
    return times(Floats<16>{{widen(vget_low_u16(a)), widen(vget_high_u16(a)),
                             widen(vget_low_u16(b)), widen(vget_high_u16(b))}},
                 256);
  }
  static Floats<16> from_signed_bytes(const uint8_t* p) {
    const int8x16_t v = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t a = vmovl_s8(vget_low_s8(v)), b = vmovl_high_s8(v);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))), vcvtq_f32_s32(vmovl_high_s16(a)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))), vcvtq_f32_s32(vmovl_high_s16(b))}};
  }
  template <std::size_t n>
  static Floats<n> times(Floats<n> v, float f) {
    for (float32x4_t& each : v.v) each = vmulq_n_f32(each, f);
    return v;
  }
  template <std::size_t n>
  static Floats<n> plus(Floats<n> v, float f) {
    for (float32x4_t& each : v.v) each = vaddq_f32(each, vdupq_n_f32(f));
    return v;
  }
  template <std::size_t n>
  static void store(float* p, const Floats<n>& v) {
    for (std::size_t i = 0; i < n / 4; ++i) vst1q_f32(p + 4 * i, v.v[i]);
  }

  // ---- products ----
  // Quants become signed bytes around zero: both sides of the dot product are signed.
  template <class Format>
  static void prepare(W (&u)[4]) {
    if constexpr (Format::zero != 0) {
      for (W& w : u) {
        for (uint8x16_t& each : w.v) each = vsubq_u8(each, vdupq_n_u8(Format::zero));
      }
    }
  }

  template <class Format>
  static void prepare_panel(W (&u)[4]) {
    prepare<Format>(u);
  }

  static constexpr bool has_lanes = false;
  template <class Format>
  static constexpr uint32_t row_pair = 1;

  // A lane is a run of `width` weights.
  struct RowSum {
    F f[4] = {zero(), zero(), zero(), zero()};
  };
  template <class Format>
  static void row_totals(const RowSum& s, float* out) {
    *out = sum(add(add(s.f[0], s.f[1]), add(s.f[2], s.f[3])));
  }

  // The sums of the products of 16 columns, or 32.
  template <std::size_t quarters>
  static I run_products(const uint8x16_t* w, const int8_t* q) {
    I products = vdupq_n_s32(0);
    for (std::size_t i = 0; i < quarters; ++i)
      products = vdotq_s32(products, vreinterpretq_s8_u8(w[i]), vld1q_s8(q + 16 * i));
    return products;
  }

  template <class Format, class Groups>
  [[gnu::always_inline]] static inline void row_group(RowSum& sum, const Groups& w,
                                                      const GroupInput& in) {
    constexpr bool wide = Format::width == 32;
    constexpr std::size_t vectors = scale_count<Format> / 4, quarters = wide ? 2 : 1;
    const float32x4_t in_scale[2] = {vld1q_f32(in.scale), vld1q_f32(in.scale + 4)};
    float32x4_t in_scales[vectors];
    if constexpr (wide) {
      in_scales[0] = in_scale[0], in_scales[1] = in_scale[1];
    } else {
      for (std::size_t i = 0; i < 2; ++i) {
        in_scales[2 * i] = vzip1q_f32(in_scale[i], in_scale[i]);
        in_scales[2 * i + 1] = vzip2q_f32(in_scale[i], in_scale[i]);
      }
    }
    for (std::size_t i = 0; i < vectors; ++i) {
      I d[4];
      for (std::size_t k = 0; k < 4; ++k) {
        const std::size_t at = quarters * (4 * i + k);  // in 16 columns
        d[k] = run_products<quarters>(&w.u[0][at / 4].v[at % 4], in.q + 16 * at);
      }
      const I products = vpaddq_s32(vpaddq_s32(d[0], d[1]), vpaddq_s32(d[2], d[3]));
      sum.f[i] = fma(to_float(products), mul(w.scale[0].v[i], in_scales[i]), sum.f[i]);
      if constexpr (Format::has_offset) {
        I sums;
        if constexpr (wide) sums = vpaddlq_s16(vld1q_s16(in.sums + 8 * i));
        else sums = vmovl_s16(vld1_s16(in.sums + 4 * i));
        sum.f[i] = fma(mul(to_float(sums), in_scales[i]), w.offset[0].v[i], sum.f[i]);
      }
    }
  }

  template <class Kind>
  static constexpr int tile_bias = 0;

  static I pair_sums(const int16_t* p, int first, int second) {
    const int16x4x2_t v = vld2_s16(p);
    return vmlal_n_s16(vmull_n_s16(v.val[0], static_cast<int16_t>(first)), v.val[1],
                       static_cast<int16_t>(second));
  }
  static I iset(int32_t v) { return vdupq_n_s32(v); }
  static I iadd(I a, I b) { return vaddq_s32(a, b); }
  static void istore(int32_t* p, I v) { vst1q_s32(p, v); }

  // Four columns of an input are one lane of a register with sixteen.
  template <class Kind, std::size_t tokens>
  [[gnu::always_inline]] static inline void accumulate(I (&sum)[tokens][2], const uint8_t* panel,
                                                       const int8_t* q, uint32_t cols) {
    for (uint32_t k = 0; k < Kind::width; k += 16) {
      int8x16_t w[8];
      for (uint32_t i = 0; i < 8; ++i) w[i] = vreinterpretq_s8_u8(vld1q_u8(panel + k * 8 + 16 * i));
      for (std::size_t t = 0; t < tokens; ++t) {
        const int8x16_t a = vld1q_s8(q + t * cols + k);
        for (uint32_t v = 0; v < 2; ++v) {
          sum[t][v] = vdotq_laneq_s32(sum[t][v], w[v], a, 0);
          sum[t][v] = vdotq_laneq_s32(sum[t][v], w[2 + v], a, 1);
          sum[t][v] = vdotq_laneq_s32(sum[t][v], w[4 + v], a, 2);
          sum[t][v] = vdotq_laneq_s32(sum[t][v], w[6 + v], a, 3);
        }
      }
    }
  }

  // 4 x 4 words.
  static void transpose(const uint8_t* from, std::size_t from_stride, uint8_t* to,
                        std::size_t to_stride) {
    uint32x4_t r[4];
    for (std::size_t i = 0; i < 4; ++i)
      r[i] = vreinterpretq_u32_u8(vld1q_u8(from + i * from_stride));
    const uint32x4x2_t a = vtrnq_u32(r[0], r[1]), b = vtrnq_u32(r[2], r[3]);
    const auto put = [&](std::size_t i, uint64x2_t v) {
      vst1q_u8(to + i * to_stride, vreinterpretq_u8_u64(v));
    };
    for (std::size_t i = 0; i < 2; ++i) {
      put(i, vtrn1q_u64(vreinterpretq_u64_u32(a.val[i]), vreinterpretq_u64_u32(b.val[i])));
      put(i + 2, vtrn2q_u64(vreinterpretq_u64_u32(a.val[i]), vreinterpretq_u64_u32(b.val[i])));
    }
  }
};

}  // namespace
}  // namespace kvasir
