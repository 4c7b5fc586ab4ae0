// Vectors of AVX-512 with VNNI: 16 lanes, int8 dot products in one instruction.
#pragma once

#include <immintrin.h>

#include "attention_common.h"

namespace kvasir {
namespace {

struct Avx512 {
  static constexpr uint32_t lanes = 16, row_block = 6, scan_rows = 8, key_columns = 4,
                            row_columns = 4;
  static constexpr int32_t key_offset = 128;  // vpdpbusd takes one unsigned operand
  using F = __m512;
  using I = __m512i;
  using B = __m512i;
  using K = __m512i;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static I iset(int32_t x) { return _mm512_set1_epi32(x); }
  static I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void istore(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F residue(F a, F b, F x) { return _mm512_fmsub_ps(a, b, x); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static F ceil(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
  static F round(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I to_int(F x) { return _mm512_cvtps_epi32(x); }
  static F finite_or_zero(F x) {
    const __mmask16 finite =
        _mm512_cmp_ps_mask(_mm512_abs_ps(x), set(__builtin_inff()), _CMP_LT_OQ);
    return _mm512_maskz_mov_ps(finite, x);
  }
  static F select_less(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  static F iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static F scale_by_pow2(F p, F n) { return _mm512_scalef_ps(p, n); }

  static K keys(const int8_t* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  }
  static B four(int32_t x) { return _mm512_set1_epi32(x); }
  static I dot_keys(I acc, K k, B q) { return _mm512_dpbusd_epi32(acc, k, q); }
  // Exchanges halves, then quarters, so that each step needs one shuffle and one blend.
  static I fold(const I* x) {
    const auto halves = [](I a, I b) {
      // [a0 a1 b2 b3] + [a2 a3 b0 b1]
      return _mm512_add_epi32(_mm512_mask_blend_epi64(0xf0, a, b),
                              _mm512_shuffle_i64x2(a, b, 0x4e));
    };
    const I a = halves(x[0], x[2]), b = halves(x[1], x[3]);
    const I other = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 8, 9, 6, 7, 12, 13), b);
    // [a0 b1 a2 b3] + [a1 b0 a3 b2]
    return _mm512_add_epi32(_mm512_mask_blend_epi64(0xcc, a, b), other);
  }

  using N = __m512i;
  static void nibbles(const int8_t* p, N& low, N& high) {
    const __m512i x = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    low = _mm512_and_si512(x, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
  }
  static I dot_nibbles(I acc, N u, I q4) { return _mm512_dpbusd_epi32(acc, u, q4); }
  static I imax(I a, I b) { return _mm512_max_epi32(a, b); }

  static int32_t sum_bytes(const int8_t* p, uint32_t n) {
    __m256i sums = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += 32) {
      sums = _mm256_dpbusd_epi32(sums, _mm256_set1_epi8(1),
                                 _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)));
    }
    return _mm512_reduce_add_epi32(_mm512_zextsi256_si512(sums));
  }

  static B bytes(const int8_t* p) { return _mm512_loadu_si512(p); }
  static B key_bytes(const int8_t* keys, uint32_t d) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_shuffle_epi8(bytes(keys + d * 4), _mm512_broadcast_i32x4(order));
  }
  struct W {
    I high_products = _mm512_setzero_si512(), low_products = _mm512_setzero_si512();
    void add(int32_t high, int32_t low, B v) {
      high_products = _mm512_dpbusd_epi32(high_products, _mm512_set1_epi32(high), v);
      low_products = _mm512_dpbusd_epi32(low_products, _mm512_set1_epi32(low), v);
    }
    I total() const { return _mm512_add_epi32(_mm512_slli_epi32(high_products, 7), low_products); }
  };

  static void store_bytes(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x));
  }
  // Packing works within 128-bit lanes; one permutation of 32-bit groups puts the bytes back in
  // order.
  static void store_weights(uint8_t* high, uint8_t* low, const I* w) {
    const __m512i first = _mm512_packs_epi32(w[0], w[1]), second = _mm512_packs_epi32(w[2], w[3]);
    const __m512i seven_bits = _mm512_set1_epi16(127);
    const __m512i upper =
        _mm512_packus_epi16(_mm512_srli_epi16(first, 7), _mm512_srli_epi16(second, 7));
    const __m512i lower = _mm512_packus_epi16(_mm512_and_si512(first, seven_bits),
                                              _mm512_and_si512(second, seven_bits));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, upper));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, lower));
  }

  // Rows i, i + 4, i + 8, i + 12 of a 128-bit column share a register. Transposing 4 x 4 within its
  // lanes gives four whole output rows.
  static void transpose(const float* from, std::size_t stride, uint32_t valid, float* to,
                        std::size_t to_stride) {
    const float* rows[16];
    for (uint32_t i = 0; i < 16; ++i) rows[i] = from + smaller(i, valid - 1) * stride;
    for (uint32_t column = 0; column < 16; column += 4, to += 4 * to_stride) {
      __m512 x[4];
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) {
        const __m128 a = _mm_loadu_ps(rows[i] + column), b = _mm_loadu_ps(rows[i + 4] + column);
        const __m128 c = _mm_loadu_ps(rows[i + 8] + column),
                     d = _mm_loadu_ps(rows[i + 12] + column);
        x[i] = _mm512_insertf32x4(
            _mm512_insertf32x4(_mm512_insertf32x4(_mm512_castps128_ps512(a), b, 1), c, 2), d, 3);
      }
      const __m512 x01 = _mm512_unpacklo_ps(x[0], x[1]), y01 = _mm512_unpackhi_ps(x[0], x[1]);
      const __m512 x23 = _mm512_unpacklo_ps(x[2], x[3]), y23 = _mm512_unpackhi_ps(x[2], x[3]);
      store(to, _mm512_shuffle_ps(x01, x23, 0x44));
      store(to + to_stride, _mm512_shuffle_ps(x01, x23, 0xee));
      store(to + 2 * to_stride, _mm512_shuffle_ps(y01, y23, 0x44));
      store(to + 3 * to_stride, _mm512_shuffle_ps(y01, y23, 0xee));
    }
  }

  static uint32_t at_least(const float* p, float threshold) {
    return _mm512_cmp_ps_mask(load(p), set(threshold), _CMP_GE_OQ);
  }
  static I count_at_least(I counts, const float* p, float threshold) {
    return _mm512_mask_add_epi32(counts, _mm512_cmp_ps_mask(load(p), set(threshold), _CMP_GE_OQ),
                                 counts, iset(1));
  }
  static uint32_t isum(I x) { return static_cast<uint32_t>(_mm512_reduce_add_epi32(x)); }
};

}  // namespace
}  // namespace kvasir
