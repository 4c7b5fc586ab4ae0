// Matrix products with AVX-512 and its byte dot product (VNNI): the primitives of matmul-inl.h.
#pragma once

#include <immintrin.h>

#include "fill-inl.h"
#include "matmul_float-inl.h"

namespace kvasir {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using W = __m512i;
  static constexpr uint32_t lanes = 16;
  static constexpr uint32_t row_tokens = 4, word = 4;
  // On Zen 4 Q8_0 and Q6_K gain a tenth or more by that, Q4_K loses.
  static constexpr uint32_t far_bytes = 200;
  // Registers of a tile, of 32: 2 x 6 float and 2 x 6 integer accumulators, weights, an input. With
  // two scales in 32 columns there are 2 x 4 of each and of the block's float sums.
  template <uint32_t width>
  static constexpr std::size_t tile_tokens = width == 32 ? 6 : 4;
  template <class Format>
  static constexpr uint32_t tile_max = 0;  // unused

  template <std::size_t n>
  struct FloatsOf;
  template <std::size_t n>
  using Floats = typename FloatsOf<n>::type;

  // ---- floats ----
  static F zero() { return _mm512_setzero_ps(); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static constexpr int32_t sum_start = 0x4b400000;
  static F scaled(I sum, F s, F start) { return fma(_mm512_castsi512_ps(sum), s, start); }
  static F sum_to_float(I sum) {
    return _mm512_sub_ps(_mm512_castsi512_ps(sum), _mm512_set1_ps(12582912.0f));
  }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  static F load_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const uint8_t* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }

  // ---- quants ----
  static __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static __m256i load32(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static W load64(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void store64(uint8_t* p, W v) { _mm512_storeu_si512(p, v); }
  static W load32x2(const uint8_t* p0, const uint8_t* p1) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load32(p0)), load32(p1), 1);
  }
  static W mask(W v, uint8_t m) {
    return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(m)));
  }
  static W merge(W a, W b) { return _mm512_or_si512(a, b); }
  static W add_where(W v, uint64_t bits, uint8_t value) {
    return _mm512_mask_add_epi8(v, bits, v, _mm512_set1_epi8(static_cast<char>(value)));
  }
  static W signed_around(W v, uint64_t minus, uint8_t zero) {
    const W zeros = _mm512_set1_epi8(static_cast<char>(zero));
    return _mm512_mask_sub_epi8(_mm512_add_epi8(zeros, v), minus, zeros, v);
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
    const __m256i low = _mm256_set_m128i(gather16(at, n), gather16(at, 0)),
                  high = _mm256_set_m128i(gather16(at, 3 * n), gather16(at, 2 * n));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  template <int a>
  static W shift_right(W v) {
    return _mm512_srli_epi16(v, a);
  }
  template <int a, int b>
  static W spread(const uint8_t* p) {
    const W v = _mm512_broadcast_i64x4(load32(p));
    if constexpr (a >= 0 && b >= 0) {
      return _mm512_srlv_epi16(v,
                               _mm512_inserti64x4(_mm512_set1_epi16(a), _mm256_set1_epi16(b), 1));
    } else {
      static_assert(a <= 0 && b <= 0);
      return _mm512_sllv_epi16(v,
                               _mm512_inserti64x4(_mm512_set1_epi16(-a), _mm256_set1_epi16(-b), 1));
    }
  }
  static W nibbles(const uint8_t* p0, const uint8_t* p1) {
    const W v = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(load16(p0)), 0xff00, load16(p1));
    const W shifts = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0,
                                      0x0004000400040004, 0x0004000400040004, 0, 0);
    return mask(_mm512_srlv_epi16(v, shifts), 15);
  }
  static W nibbles8(const uint8_t* p) {
    const W v = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3),
                                         _mm512_castsi256_si512(load32(p)));
    return mask(_mm512_srlv_epi64(v, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4)), 15);
  }
  static W lookup(W v, const int8_t (&table)[16]) {
    return _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(load16(reinterpret_cast<const uint8_t*>(table))), v);
  }

  // ---- scales ----
  static float half(const uint8_t* p) { return _cvtsh_ss(kvasir::load<uint16_t>(p)); }
  static __m256 from_halves(const uint8_t* p, uint32_t stride) {
    const auto at = [&](uint32_t i) { return kvasir::load<short>(p + i * stride); };
    return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
  }
  static __m256 from_bytes(uint64_t v) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(v))));
  }
  static __m512 from_bytes(uint64_t low, uint64_t high) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
        _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low))));
  }
  // 2^(e - 128) of each byte e; 0 for e < 2, where that is subnormal.
  static __m256 from_exponents(uint64_t v) {
    const __m128i e = _mm_subs_epu8(_mm_cvtsi64_si128(static_cast<long long>(v)), _mm_set1_epi8(1));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(e), 23));
  }
  // The floats of four exponent bits and three mantissa bits, as half-precision numbers 2^8 too
  // small. 0x7f is not a number; files mean zero.
  static __m512 from_ue4m3(uint64_t low, uint64_t high) {
    const __m128i v = _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low)),
                  nan = _mm_set1_epi8(0x7f);
    const __m128i bits = _mm_and_si128(_mm_andnot_si128(_mm_cmpeq_epi8(v, nan), v), nan);
    return times(_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 7)), 256);
  }
  static __m512 from_signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p)));
  }
  static __m256 times(__m256 v, float f) { return _mm256_mul_ps(v, _mm256_set1_ps(f)); }
  static __m512 times(__m512 v, float f) { return _mm512_mul_ps(v, _mm512_set1_ps(f)); }
  static __m256 plus(__m256 v, float f) { return _mm256_add_ps(v, _mm256_set1_ps(f)); }
  static __m512 plus(__m512 v, float f) { return _mm512_add_ps(v, _mm512_set1_ps(f)); }
  static void store(float* p, __m256 v) { _mm256_storeu_ps(p, v); }

  // ---- products ---- vpdpbusd multiplies unsigned by signed bytes, so signed weights are shifted
  // up by 128, and the zero point is subtracted through the sums of the inputs.
  template <class Format>
  static constexpr int bias = Format::is_signed ? 128 : static_cast<int>(Format::zero);

  template <class Format>
  static void prepare(W (&u)[4]) {
    if constexpr (Format::is_signed) {
      for (W& each : u) each = _mm512_xor_si512(each, _mm512_set1_epi8(-128));
    }
  }

  template <class Format>
  static void prepare_panel(W (&u)[4]) {
    prepare<Format>(u);
  }

  // The lanes are those of Avx2: blocks, or the first and the second halves of blocks. A register
  // has the blocks of two rows, or the halves of one.
  template <class Format>
  static constexpr uint32_t row_pair = Format::width == 32 ? 2 : 1;

  struct RowSum {
    F f = zero();
  };

  static __m256 low_half(__m512 v) { return _mm512_castps512_ps256(v); }
  static __m256 high_half(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }
  static __m512 both(__m256 low, __m256 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static __m512 twice(__m256 v) { return _mm512_broadcast_f32x8(v); }
  static float sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  template <class Format>
  static void totals(F v, float* out) {
    if constexpr (Format::width == 32) out[0] = sum(low_half(v)), out[1] = sum(high_half(v));
    else out[0] = sum(_mm256_add_ps(low_half(v), high_half(v)));
  }
  template <class Format>
  static void row_totals(const RowSum& s, float* out) {
    totals<Format>(s.f, out);
  }

  // a * the sums of the halves of blocks, first + first or second + second in the lanes of a block.
  static __m256i sums_times(const int16_t* sums, int first, int second) {
    return _mm256_madd_epi16(load32(reinterpret_cast<const uint8_t*>(sums)),
                             _mm256_set1_epi32((first & 0xffff) | second * 65536));
  }
  // a * the input's sum in each lane.
  template <class Format>
  static I lane_sums(const int16_t* sums, int a) {
    if constexpr (Format::width == 32) return _mm512_broadcast_i64x4(sums_times(sums, a, a));
    else
      return _mm512_inserti64x4(_mm512_castsi256_si512(sums_times(sums, a, 0)),
                                sums_times(sums, 0, a), 1);
  }

  // sum + scale * products (+ the input's sum * offset)
  template <class Format>
  static F add_products(F sum, I products, F scale, F offset, const float* in_scale,
                        const int16_t* in_sums) {
    const F in = twice(_mm256_loadu_ps(in_scale));
    sum = fma(to_float(products), mul(scale, in), sum);
    if constexpr (Format::has_offset)
      sum = fma(mul(to_float(lane_sums<Format>(in_sums, 1)), in), offset, sum);
    return sum;
  }

  // Of a group of one row: [first halves of blocks 0 2 4 6][second halves][1 3 5 7][likewise].
  static I half_sums(const W (&u)[4], const int8_t* q) {
    I d[4];
    for (int j = 0; j < 4; ++j)
      d[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u[j], _mm512_loadu_si512(q + 64 * j));
    const I a = iadd(_mm512_unpacklo_epi32(d[0], d[1]), _mm512_unpackhi_epi32(d[0], d[1]));
    const I b = iadd(_mm512_unpacklo_epi32(d[2], d[3]), _mm512_unpackhi_epi32(d[2], d[3]));
    return iadd(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }

  // Scales of halves of blocks, the first ones before the second ones.
  static F by_half(F v) {
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), v);
  }

  template <class Format, class Groups>
  [[gnu::always_inline]] static inline void row_group(RowSum& sum, const Groups& w,
                                                      const GroupInput& in) {
    I products;
    F scale, offset = zero();
    if constexpr (Format::width == 32) {
      const I a = half_sums(w.u[0], in.q), b = half_sums(w.u[1], in.q);
      products = iadd(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
      products = _mm512_permutexvar_epi32(
          _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), products);
      scale = both(w.scale[0], w.scale[1]);
      if constexpr (Format::has_offset) offset = both(w.offset[0], w.offset[1]);
    } else {
      products = _mm512_permutexvar_epi32(
          _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15),
          half_sums(w.u[0], in.q));
      scale = by_half(w.scale[0]);
      if constexpr (Format::has_offset) offset = by_half(w.offset[0]);
    }
    if constexpr (bias<Format> != 0)
      products = iadd(products, lane_sums<Format>(in.sums, -bias<Format>));
    sum.f = add_products<Format>(sum.f, products, scale, offset, in.scale, in.sums);
  }

  // ---- products of several inputs: see matmul_lanes-inl.h. Two registers of sums.
  static constexpr bool has_lanes = true;
  static constexpr uint8_t lane_block[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  template <class Kind>
  static constexpr uint32_t lane_rows = Kind::width == 32 ? 4 : 2;

  struct LaneSum {
    F f[2];
  };
  template <class Kind>
  struct LaneWeights {
    static constexpr std::size_t words = Kind::width / 4;
    I w[2][words];
    F scale[2], offset[2];
  };

  // Word k of [first halves of blocks 0 2 4 6][second halves][1 3 5 7][likewise].
  template <class Kind>
  static void half_words(const Group& group, I (&out)[4]) {
    W u[4];
    for (int j = 0; j < 4; ++j) u[j] = load64(group.u + 64 * j);
    prepare<Kind>(u);
    const I a = _mm512_unpacklo_epi32(u[0], u[1]), b = _mm512_unpackhi_epi32(u[0], u[1]);
    const I c = _mm512_unpacklo_epi32(u[2], u[3]), d = _mm512_unpackhi_epi32(u[2], u[3]);
    out[0] = _mm512_unpacklo_epi64(a, c), out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d), out[3] = _mm512_unpackhi_epi64(b, d);
  }

  template <class Kind>
  static F lane_scales(const float* p, const float* q) {
    if constexpr (Kind::width == 32) {
      const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
      return both(_mm256_permutevar8x32_ps(_mm256_load_ps(p), order),
                  _mm256_permutevar8x32_ps(_mm256_load_ps(q), order));
    } else {
      return _mm512_permutexvar_ps(
          _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15),
          _mm512_load_ps(p));
    }
  }

  template <class Kind>
  [[gnu::always_inline]] static inline void lane_weights(const Group* groups,
                                                         LaneWeights<Kind>& out) {
    for (int v = 0; v < 2; ++v) {
      constexpr bool wide = Kind::width == 32;
      const Group& first = groups[wide ? 2 * v : v];
      const Group& second = groups[wide ? 2 * v + 1 : v];
      I a[4];
      half_words<Kind>(first, a);
      if constexpr (wide) {
        I b[4];
        half_words<Kind>(second, b);
        for (int k = 0; k < 4; ++k) {
          out.w[v][2 * k] = _mm512_shuffle_i32x4(a[k], b[k], 0x88);
          out.w[v][2 * k + 1] = _mm512_shuffle_i32x4(a[k], b[k], 0xdd);
        }
      } else {
        for (int k = 0; k < 4; ++k) out.w[v][k] = _mm512_shuffle_i32x4(a[k], a[k], 0xd8);
      }
      out.scale[v] = lane_scales<Kind>(first.scale, second.scale);
      if constexpr (Kind::has_offset)
        out.offset[v] = lane_scales<Kind>(first.offset, second.offset);
    }
  }

  template <class Kind, class Input>
  [[gnu::always_inline]] static inline void lane_group(LaneSum& sum, const LaneWeights<Kind>& w,
                                                       const Input& in) {
    I products[2];
    products[0] = bias<Kind> != 0 ? lane_sums<Kind>(in.sums, -bias<Kind>) : _mm512_setzero_si512();
    products[1] = products[0];
#pragma GCC unroll 8
    for (std::size_t k = 0; k < LaneWeights<Kind>::words; ++k) {
      I a;
      if constexpr (Kind::width == 32)
        a = _mm512_broadcast_i64x4(load32(reinterpret_cast<const uint8_t*>(in.q) + 32 * k));
      else a = _mm512_load_si512(in.q + 64 * k);
      products[0] = _mm512_dpbusd_epi32(products[0], w.w[0][k], a);
      products[1] = _mm512_dpbusd_epi32(products[1], w.w[1][k], a);
    }
    for (std::size_t v = 0; v < 2; ++v)
      sum.f[v] =
          add_products<Kind>(sum.f[v], products[v], w.scale[v], w.offset[v], in.scale, in.sums);
  }

  template <class Kind>
  static void lane_totals(const LaneSum& s, float* out) {
    const I order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    constexpr int rows = Kind::width == 32 ? 2 : 1;
    for (int v = 0; v < 2; ++v) totals<Kind>(_mm512_permutexvar_ps(order, s.f[v]), out + rows * v);
  }

  template <class Kind>
  static constexpr int tile_bias = bias<Kind>;

  static I pair_sums(const int16_t* p, int first, int second) {
    return _mm512_madd_epi16(_mm512_loadu_si512(p),
                             _mm512_set1_epi32((first & 0xffff) | second * 65536));
  }
  static I iset(int32_t v) { return _mm512_set1_epi32(v); }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static void istore(int32_t* p, I v) { _mm512_storeu_si512(p, v); }

  template <class Kind, std::size_t tokens>
  [[gnu::always_inline]] static inline void accumulate(I (&sum)[tokens][2], const uint8_t* panel,
                                                       const int8_t* q, uint32_t cols) {
    for (uint32_t k = 0; k < Kind::width / 4; ++k) {
      const I w0 = _mm512_load_si512(panel + k * 128), w1 = _mm512_load_si512(panel + k * 128 + 64);
      for (std::size_t t = 0; t < tokens; ++t) {
        const I a = _mm512_set1_epi32(kvasir::load<int>(q + t * cols + 4 * k));
        sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], w0, a);
        sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], w1, a);
      }
    }
  }

  // 16 x 16 words.
  static void transpose(const uint8_t* from, std::size_t from_stride, uint8_t* to,
                        std::size_t to_stride) {
    I r[16], t[16];
    for (std::size_t i = 0; i < 16; ++i) r[i] = load64(from + i * from_stride);
    for (int i = 0; i < 16; i += 4) {
      const I a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
      const I c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]),
              d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
      t[i] = _mm512_unpacklo_epi64(a, c);
      t[i + 1] = _mm512_unpackhi_epi64(a, c);
      t[i + 2] = _mm512_unpacklo_epi64(b, d);
      t[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    // t[4g + k]: column 4l + k of rows 4g .. 4g + 3 in 128-bit lane l.
    for (std::size_t k = 0; k < 4; ++k) {
      const I a = _mm512_shuffle_i32x4(t[k], t[4 + k], 0x88),
              b = _mm512_shuffle_i32x4(t[8 + k], t[12 + k], 0x88);
      const I c = _mm512_shuffle_i32x4(t[k], t[4 + k], 0xdd),
              d = _mm512_shuffle_i32x4(t[8 + k], t[12 + k], 0xdd);
      store64(to + k * to_stride, _mm512_shuffle_i32x4(a, b, 0x88));
      store64(to + (4 + k) * to_stride, _mm512_shuffle_i32x4(c, d, 0x88));
      store64(to + (8 + k) * to_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
      store64(to + (12 + k) * to_stride, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
  }
};

template <>
struct Avx512::FloatsOf<8> {
  using type = __m256;
};
template <>
struct Avx512::FloatsOf<16> {
  using type = __m512;
};

}  // namespace
}  // namespace kvasir
