// Matrix products with AVX2, FMA and F16C: the primitives of matmul-inl.h.
#pragma once

#include <immintrin.h>

#include "fill-inl.h"
#include "matmul_float-inl.h"

namespace kvasir {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  struct W {
    __m256i v[2];
  };
  static constexpr uint32_t lanes = 8;
  static constexpr uint32_t row_tokens = 4, word = 4;
  static constexpr uint32_t far_bytes = 220;  // here Q6_K loses a tenth on Zen 4
  template <uint32_t>
  // 2 x 2 float and 2 x 2 integer accumulators, 2 x 2 of 16 bits, weights: 14 of 16 registers.
  static constexpr std::size_t tile_tokens = 2;

  template <class Format>
  static constexpr uint32_t tile_max = Format::max;

  template <std::size_t n>
  struct Floats {
    __m256 v[n / 8];
  };

  // ---- floats ----
  static F zero() { return _mm256_setzero_ps(); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static constexpr int32_t sum_start = 0x4b400000;
  static F scaled(I sum, F s, F start) { return fma(_mm256_castsi256_ps(sum), s, start); }
  static F sum_to_float(I sum) {
    return _mm256_sub_ps(_mm256_castsi256_ps(sum), _mm256_set1_ps(12582912.0f));
  }
  static float sum(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static F load_f16(const uint8_t* p) { return _mm256_cvtph_ps(load16(p)); }
  static F load_bf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
  }

  // ---- quants ----
  static __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static __m256i load32(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static W load64(const uint8_t* p) { return {{load32(p), load32(p + 32)}}; }
  static void store64(uint8_t* p, const W& v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.v[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), v.v[1]);
  }
  static W load32x2(const uint8_t* p0, const uint8_t* p1) { return {{load32(p0), load32(p1)}}; }
  static W mask(const W& v, uint8_t m) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(m));
    return {{_mm256_and_si256(v.v[0], all), _mm256_and_si256(v.v[1], all)}};
  }
  static W merge(const W& a, const W& b) {
    return {{_mm256_or_si256(a.v[0], b.v[0]), _mm256_or_si256(a.v[1], b.v[1])}};
  }
  // Bytes of ones where the bit is set.
  static __m256i spread_bits(uint32_t bits) {
    const __m256i byte =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i mine = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte);
    return _mm256_cmpeq_epi8(_mm256_and_si256(mine, bit), bit);
  }
  static __m256i add_where(__m256i v, uint32_t bits, uint8_t value) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(value));
    return _mm256_add_epi8(v, _mm256_and_si256(spread_bits(bits), all));
  }
  static W add_where(const W& v, uint64_t bits, uint8_t value) {
    return {{add_where(v.v[0], static_cast<uint32_t>(bits), value),
             add_where(v.v[1], static_cast<uint32_t>(bits >> 32), value)}};
  }
  static __m256i signed_around(__m256i v, uint32_t minus, uint8_t zero) {
    const __m256i ones = spread_bits(minus);
    return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(v, ones), ones),
                           _mm256_set1_epi8(static_cast<char>(zero)));
  }
  static W signed_around(const W& v, uint64_t minus, uint8_t zero) {
    return {{signed_around(v.v[0], static_cast<uint32_t>(minus), zero),
             signed_around(v.v[1], static_cast<uint32_t>(minus >> 32), zero)}};
  }
  // 16 bytes of words at(k), at(k + 1) and so on.
  template <class At>
  static __m128i gather16(At&& at, uint32_t k) {
    const auto load8 = [&](uint32_t i) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(i)));
    };
    const auto load4 = [&](uint32_t i) { return kvasir::load<int>(at(i)); };
    if constexpr (sizeof(*at(k)) == 8) return _mm_unpacklo_epi64(load8(k), load8(k + 1));
    else return _mm_setr_epi32(load4(k), load4(k + 1), load4(k + 2), load4(k + 3));
  }
  template <class At>
  static W gather(At&& at) {
    constexpr uint32_t n = 16 / sizeof(*at(0));
    return {{_mm256_set_m128i(gather16(at, n), gather16(at, 0)),
             _mm256_set_m128i(gather16(at, 3 * n), gather16(at, 2 * n))}};
  }
  template <int a>
  static __m256i shift(__m256i v) {
    if constexpr (a >= 0) return _mm256_srli_epi16(v, a);
    else return _mm256_slli_epi16(v, -a);
  }
  template <int a>
  static W shift_right(const W& v) {
    return {{shift<a>(v.v[0]), shift<a>(v.v[1])}};
  }
  template <int a, int b>
  static W spread(const uint8_t* p) {
    const __m256i v = load32(p);
    return {{shift<a>(v), shift<b>(v)}};
  }
  static __m256i nibbles(const uint8_t* p) {
    const __m128i v = load16(p);
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
  }
  static W nibbles(const uint8_t* p0, const uint8_t* p1) { return {{nibbles(p0), nibbles(p1)}}; }
  static __m256i nibbles_by_8(const uint8_t* p) {
    const __m256i v = _mm256_permute4x64_epi64(_mm256_castsi128_si256(load16(p)), 0x50);
    return _mm256_and_si256(_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 4, 0, 4)),
                            _mm256_set1_epi8(15));
  }
  static W nibbles8(const uint8_t* p) { return {{nibbles_by_8(p), nibbles_by_8(p + 16)}}; }
  static W lookup(const W& v, const int8_t (&table)[16]) {
    const __m256i t = _mm256_broadcastsi128_si256(load16(reinterpret_cast<const uint8_t*>(table)));
    return {{_mm256_shuffle_epi8(t, v.v[0]), _mm256_shuffle_epi8(t, v.v[1])}};
  }

  // ---- scales ----
  static float half(const uint8_t* p) { return _cvtsh_ss(kvasir::load<uint16_t>(p)); }
  static Floats<8> from_halves(const uint8_t* p, uint32_t stride) {
    const auto at = [&](uint32_t i) { return kvasir::load<short>(p + i * stride); };
    return {
        {_mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)))}};
  }
  static __m256 from_8_bytes(uint64_t v) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(v))));
  }
  static Floats<8> from_bytes(uint64_t v) { return {{from_8_bytes(v)}}; }
  static Floats<16> from_bytes(uint64_t low, uint64_t high) {
    return {{from_8_bytes(low), from_8_bytes(high)}};
  }
  // 2^(e - 128) of each byte e; 0 for e < 2, where that is subnormal.
  static Floats<8> from_exponents(uint64_t v) {
    const __m128i e = _mm_subs_epu8(_mm_cvtsi64_si128(static_cast<long long>(v)), _mm_set1_epi8(1));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(e), 23))}};
  }
  // The floats of four exponent bits and three mantissa bits, as half-precision numbers 2^8 too
  // small. 0x7f is not a number; files mean zero.
  static Floats<16> from_ue4m3(uint64_t low, uint64_t high) {
    const __m128i v = _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low)),
                  nan = _mm_set1_epi8(0x7f);
    const __m128i bits = _mm_and_si128(_mm_andnot_si128(_mm_cmpeq_epi8(v, nan), v), nan);
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 7);
    return times(Floats<16>{{_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                             _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))}},
                 256);
  }
  static Floats<16> from_signed_bytes(const uint8_t* p) {
    const __m128i v = load16(p);
    return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)),
             _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))}};
  }
  template <std::size_t n>
  static Floats<n> times(Floats<n> v, float f) {
    for (__m256& each : v.v) each = _mm256_mul_ps(each, _mm256_set1_ps(f));
    return v;
  }
  template <std::size_t n>
  static Floats<n> plus(Floats<n> v, float f) {
    for (__m256& each : v.v) each = _mm256_add_ps(each, _mm256_set1_ps(f));
    return v;
  }
  template <std::size_t n>
  static void store(float* p, const Floats<n>& v) {
    for (std::size_t i = 0; i < n / 8; ++i) _mm256_storeu_ps(p + 8 * i, v.v[i]);
  }

  // ---- products ---- vpmaddubsw multiplies unsigned by signed bytes and saturates pairs at 32767.
  // Quants of up to 7 bits fit; their zero point is subtracted through the sums of the inputs.
  // Signed weights move their sign to the input (128 * 127 * 2 = 32512).
  template <class Format>
  static void prepare(W (&)[4]) {}
  template <class Format>
  static void prepare_panel(W (&)[4]) {}

  // Sums of pairs of products in 16 bits.
  template <class Format>
  static __m256i pairs(__m256i w, __m256i a) {
    if constexpr (Format::is_signed)
      return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
    else return _mm256_maddubs_epi16(w, a);
  }
  static __m256i widen_pairs(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

  // A lane of a register is a block, or in formats with two scales a half of one: register 0 has
  // the first halves, register 1 the second ones.
  template <class Format>
  static constexpr uint32_t row_pair = 1;

  struct RowSum {
    F f[2] = {zero(), zero()};
  };

  template <class Format>
  static void row_totals(const RowSum& s, float* out) {
    *out = sum(Format::width == 32 ? s.f[0] : add(s.f[0], s.f[1]));
  }

  // first * the sum of a block's first half + second * the other one's.
  static I sums_times(const int16_t* sums, int first, int second) {
    return _mm256_madd_epi16(load32(sums), _mm256_set1_epi32((first & 0xffff) | second * 65536));
  }
  // a * the input's sum in each lane of register h.
  template <class Format>
  static I lane_sums(const int16_t* sums, uint32_t h, int a) {
    if constexpr (Format::width == 32) return sums_times(sums, a, a);
    else return h == 0 ? sums_times(sums, a, 0) : sums_times(sums, 0, a);
  }

  // sum + scale * products (+ the input's sum * offset)
  template <class Format>
  static F add_products(F sum, I products, F scale, F offset, F in_scale, const int16_t* in_sums,
                        uint32_t h) {
    sum = fma(to_float(products), mul(scale, in_scale), sum);
    if constexpr (Format::has_offset)
      sum = fma(mul(to_float(lane_sums<Format>(in_sums, h, 1)), in_scale), offset, sum);
    return sum;
  }

  // Scales of the halves h of blocks, of those of all halves.
  static F by_half(const Floats<16>& v, uint32_t h) {
    const F mixed =
        h == 0 ? _mm256_shuffle_ps(v.v[0], v.v[1], 0x88) : _mm256_shuffle_ps(v.v[0], v.v[1], 0xdd);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
  }
  static F by_half(const Floats<8>& v, uint32_t) { return v.v[0]; }

  template <class Format, class Groups>
  [[gnu::always_inline]] static inline void row_group(RowSum& sum, const Groups& w,
                                                      const GroupInput& in) {
    row_group<Format>(sum, w, in,
                      [](__m256i u, __m256i a) { return widen_pairs(pairs<Format>(u, a)); });
  }

  // dot(w, a): in each lane the sum of four products.
  template <class Format, class Groups, class Dot>
  [[gnu::always_inline]] static inline void row_group(RowSum& sum, const Groups& w,
                                                      const GroupInput& in, Dot&& dot) {
    I d[8];
    for (uint32_t b = 0; b < 8; ++b) d[b] = dot(w.u[0][b / 2].v[b % 2], load32(in.q + 32 * b));
    const I low = _mm256_hadd_epi32(_mm256_hadd_epi32(d[0], d[1]), _mm256_hadd_epi32(d[2], d[3])),
            high = _mm256_hadd_epi32(_mm256_hadd_epi32(d[4], d[5]), _mm256_hadd_epi32(d[6], d[7]));
    I products[2] = {_mm256_permute2x128_si256(low, high, 0x20),
                     _mm256_permute2x128_si256(low, high, 0x31)};
    constexpr bool wide = Format::width == 32;
    if constexpr (wide) products[0] = iadd(products[0], products[1]);
    const F in_scale = load(in.scale);
    for (uint32_t h = 0; h < (wide ? 1 : 2); ++h) {
      if constexpr (Format::zero != 0)
        products[h] =
            iadd(products[h], lane_sums<Format>(in.sums, h, -static_cast<int>(Format::zero)));
      F offset = zero();
      if constexpr (Format::has_offset) offset = by_half(w.offset[0], h);
      sum.f[h] = add_products<Format>(sum.f[h], products[h], by_half(w.scale[0], h), offset,
                                      in_scale, in.sums, h);
    }
  }

  // ---- products of several inputs: see matmul_lanes-inl.h. Four registers of sums: of four rows,
  // or of two rows with two halves.
  static constexpr bool has_lanes = true;
  static constexpr uint8_t lane_block[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  template <class Kind>
  static constexpr uint32_t lane_rows = Kind::width == 32 ? 4 : 2;

  struct LaneSum {
    F f[4];
  };
  template <class Kind>
  struct LaneWeights {
    I w[lane_rows<Kind>][8];  // word k of every block
    F scale[4], offset[4];
  };

  template <class Kind>
  [[gnu::always_inline]] static inline void lane_weights(const Group* groups,
                                                         LaneWeights<Kind>& out) {
    constexpr uint32_t halves = 32 / Kind::width;
    const auto scales = [](const float* p, uint32_t h) {
      return halves == 1 ? load(p) : by_half(Floats<16>{{load(p), load(p + 8)}}, h);
    };
    for (uint32_t r = 0; r < lane_rows<Kind>; ++r) {
      transpose(groups[r].u, 32, reinterpret_cast<uint8_t*>(out.w[r]), 32);
      for (uint32_t h = 0; h < halves; ++h) {
        out.scale[r * halves + h] = scales(groups[r].scale, h);
        if constexpr (Kind::has_offset) out.offset[r * halves + h] = scales(groups[r].offset, h);
      }
    }
  }

  // start + the products of words [first, first + Kind::width / 4) of all blocks.
  template <class Kind>
  [[gnu::always_inline]] static inline I lane_products(I start, const I* w, const int8_t* q,
                                                       uint32_t first) {
    constexpr uint32_t fits = 32767 / (2 * 127 * Kind::max), words = Kind::width / 4;
    constexpr uint32_t steps = fits >= 8 ? 8 : fits >= 4 ? 4 : fits >= 2 ? 2 : 1;
    constexpr uint32_t step = steps < words ? steps : words;
#pragma GCC unroll 8
    for (uint32_t k = first; k < first + words; k += step) {
      I part;
#pragma GCC unroll 8
      for (uint32_t i = 0; i < step; ++i) {
        const I p = pairs<Kind>(w[k + i], load32(q + lane_word(k + i)));
        part = i == 0 ? p : _mm256_add_epi16(part, p);
      }
      start = iadd(start, widen_pairs(part));
    }
    return start;
  }

  template <class Kind, class Input>
  [[gnu::always_inline]] static inline void lane_group(LaneSum& sum, const LaneWeights<Kind>& w,
                                                       const Input& in) {
    lane_group<Kind, static_cast<int>(Kind::zero)>(
        sum, w, in, [](I start, const I* u, const int8_t* q, uint32_t first) {
          return lane_products<Kind>(start, u, q, first);
        });
  }

  template <class Kind, int bias, class Input, class Products>
  [[gnu::always_inline]] static inline void lane_group(LaneSum& sum, const LaneWeights<Kind>& w,
                                                       const Input& in, Products&& products) {
    constexpr uint32_t halves = 32 / Kind::width;
    const F in_scale = load(in.scale);
#pragma GCC unroll 2
    for (uint32_t h = 0; h < halves; ++h) {
      const I start = bias == 0 ? _mm256_setzero_si256() : lane_sums<Kind>(in.sums, h, -bias);
#pragma GCC unroll 4
      for (uint32_t r = 0; r < lane_rows<Kind>; ++r) {
        F& to = sum.f[r * halves + h];
        to = add_products<Kind>(to, products(start, w.w[r], in.q, 4 * h), w.scale[r * halves + h],
                                w.offset[r * halves + h], in_scale, in.sums, h);
      }
    }
  }

  template <class Kind>
  static void lane_totals(const LaneSum& s, float* out) {
    for (uint32_t r = 0; r < lane_rows<Kind>; ++r)
      out[r] = sum(Kind::width == 32 ? s.f[r] : add(s.f[2 * r], s.f[2 * r + 1]));
  }

  template <class Kind>
  static constexpr int tile_bias = static_cast<int>(Kind::zero);

  static I pair_sums(const int16_t* p, int first, int second) {
    return _mm256_madd_epi16(load32(p), _mm256_set1_epi32((first & 0xffff) | second * 65536));
  }
  static I iset(int32_t v) { return _mm256_set1_epi32(v); }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static void istore(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<I*>(p), v); }

  template <class Kind, std::size_t tokens>
  [[gnu::always_inline]] static inline void accumulate(I (&sum)[tokens][2], const uint8_t* panel,
                                                       const int8_t* q, uint32_t cols) {
    // The steps of four columns that fit 16 bits before they are widened.
    constexpr uint32_t fits = 32767 / (2 * 127 * Kind::max);
    constexpr uint32_t steps = fits >= 8 ? 8 : fits >= 4 ? 4 : fits >= 2 ? 2 : 1;
    constexpr uint32_t step = steps * 4 < Kind::width ? steps : Kind::width / 4;
    for (uint32_t k = 0; k < Kind::width / 4; k += step) {
      I part[tokens][2];
      for (uint32_t i = 0; i < step; ++i) {
        const I w0 = load32(panel + (k + i) * 64), w1 = load32(panel + (k + i) * 64 + 32);
        for (std::size_t t = 0; t < tokens; ++t) {
          const I a = _mm256_set1_epi32(kvasir::load<int>(q + t * cols + 4 * (k + i)));
          const I p0 = pairs<Kind>(w0, a), p1 = pairs<Kind>(w1, a);
          part[t][0] = i == 0 ? p0 : _mm256_add_epi16(part[t][0], p0);
          part[t][1] = i == 0 ? p1 : _mm256_add_epi16(part[t][1], p1);
        }
      }
      for (std::size_t t = 0; t < tokens; ++t) {
        sum[t][0] = _mm256_add_epi32(sum[t][0], widen_pairs(part[t][0]));
        sum[t][1] = _mm256_add_epi32(sum[t][1], widen_pairs(part[t][1]));
      }
    }
  }

  // 8 x 8 words.
  static void transpose(const uint8_t* from, std::size_t from_stride, uint8_t* to,
                        std::size_t to_stride) {
    I r[8], t[8];
    for (std::size_t i = 0; i < 8; ++i) r[i] = load32(from + i * from_stride);
    for (int i = 0; i < 8; i += 4) {
      const I a = _mm256_unpacklo_epi32(r[i], r[i + 1]), b = _mm256_unpackhi_epi32(r[i], r[i + 1]);
      const I c = _mm256_unpacklo_epi32(r[i + 2], r[i + 3]),
              d = _mm256_unpackhi_epi32(r[i + 2], r[i + 3]);
      t[i] = _mm256_unpacklo_epi64(a, c);
      t[i + 1] = _mm256_unpackhi_epi64(a, c);
      t[i + 2] = _mm256_unpacklo_epi64(b, d);
      t[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      _mm256_storeu_si256(reinterpret_cast<I*>(to + k * to_stride),
                          _mm256_permute2x128_si256(t[k], t[4 + k], 0x20));
      _mm256_storeu_si256(reinterpret_cast<I*>(to + (4 + k) * to_stride),
                          _mm256_permute2x128_si256(t[k], t[4 + k], 0x31));
    }
  }
};

}  // namespace
}  // namespace kvasir
