// The vector type of the attention and store kernels for AVX2 with FMA: 8 lanes, int8 products in
// pairs by vpmaddubsw.
//
// vpmaddubsw saturates its 16-bit sums of two; no value here is outside +-127 and the unsigned
// sides are at most 127, so 2 * 127 * 127 < 2^15 always fits.
#pragma once

#include <immintrin.h>

#include "attention_fill-inl.h"

namespace kvasir {
namespace {

struct Avx2 {
  static constexpr uint32_t lanes = 8, row_block = 4, scan_rows = 4, key_columns = 2,
                            row_columns = 2;
  static constexpr int32_t key_offset = 0;
  using F = __m256;
  using I = __m256i;
  using B = __m256i;
  struct K {
    __m256i value, magnitude;
  };

  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static I iset(int32_t x) { return _mm256_set1_epi32(x); }
  static I iload(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void istore(int32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F residue(F a, F b, F x) { return _mm256_fmsub_ps(a, b, x); }
  static float sum(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float largest(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static F ceil(F x) { return _mm256_ceil_ps(x); }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static I to_int(F x) { return _mm256_cvtps_epi32(x); }
  static F finite_or_zero(F x) {
    const F magnitude = _mm256_andnot_ps(set(-0.0f), x);
    return _mm256_and_ps(x, _mm256_cmp_ps(magnitude, set(__builtin_inff()), _CMP_LT_OQ));
  }
  static F select_less(F a, F b, F x, F y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
  // An exponent field of 0 makes the power 0.
  static F scale_by_pow2(F p, F n) {
    const I exponent = _mm256_add_epi32(to_int(max(n, set(-127.0f))), iset(127));
    return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }

  static K keys(const int8_t* p) {
    const __m256i value = bytes(p);
    return {value, _mm256_abs_epi8(value)};
  }
  // Moves the key's sign to the query, so that the key can be the unsigned operand.
  static I dot_keys(I acc, K k, B q) {
    const __m256i pairs = _mm256_maddubs_epi16(k.magnitude, _mm256_sign_epi8(q, k.value));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static B four(int32_t x) { return _mm256_set1_epi32(x); }
  static I fold(const I* x) {  // [a0 b1] + [a1 b0]
    return _mm256_add_epi32(_mm256_blend_epi32(x[0], x[1], 0xf0),
                            _mm256_permute2x128_si256(x[0], x[1], 0x21));
  }

  using N = __m256i;
  static void nibbles(const int8_t* p, N& low, N& high) {
    const __m256i x = bytes(p), mask = _mm256_set1_epi8(15);
    low = _mm256_and_si256(x, mask);
    high = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
  }
  static I dot_nibbles(I acc, N u, I q4) {
    const __m256i pairs = _mm256_maddubs_epi16(u, q4);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static I imax(I a, I b) { return _mm256_max_epi32(a, b); }

  static B bytes(const int8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static B key_bytes(const int8_t* keys, uint32_t d) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_shuffle_epi8(bytes(keys + d * 4), _mm256_broadcastsi128_si256(order));
  }
  struct W {
    I products = _mm256_setzero_si256();
    void add(int32_t high, int32_t low, B v) {
      const __m256i upper = _mm256_maddubs_epi16(_mm256_set1_epi32(high), v);
      const __m256i lower = _mm256_maddubs_epi16(_mm256_set1_epi32(low), v);
      products = _mm256_add_epi32(products, _mm256_madd_epi16(upper, _mm256_set1_epi16(128)));
      products = _mm256_add_epi32(products, _mm256_madd_epi16(lower, _mm256_set1_epi16(1)));
    }
    I total() const { return products; }
  };

  static void store_bytes(int8_t* p, I x) {
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  // Packing works within 128-bit lanes; one permutation of 32-bit groups puts the bytes back in
  // order.
  static void store_weights(uint8_t* high, uint8_t* low, const I* w) {
    const __m256i first = _mm256_packs_epi32(w[0], w[1]), second = _mm256_packs_epi32(w[2], w[3]);
    const __m256i seven_bits = _mm256_set1_epi16(127);
    const __m256i upper =
        _mm256_packus_epi16(_mm256_srli_epi16(first, 7), _mm256_srli_epi16(second, 7));
    const __m256i lower = _mm256_packus_epi16(_mm256_and_si256(first, seven_bits),
                                              _mm256_and_si256(second, seven_bits));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high),
                        _mm256_permutevar8x32_epi32(upper, order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm256_permutevar8x32_epi32(lower, order));
  }

  // Rows i and i + 4 of a 128-bit column share a register. Transposing 4 x 4 within its lanes gives
  // four whole output rows.
  static void transpose(const float* from, std::size_t stride, uint32_t valid, float* to,
                        std::size_t to_stride) {
    const float* rows[8];
    for (uint32_t i = 0; i < 8; ++i) rows[i] = from + smaller(i, valid - 1) * stride;
    for (uint32_t column = 0; column < 8; column += 4, to += 4 * to_stride) {
      __m256 x[4];
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i)
        x[i] = _mm256_loadu2_m128(rows[i + 4] + column, rows[i] + column);
      const __m256 x01 = _mm256_unpacklo_ps(x[0], x[1]), y01 = _mm256_unpackhi_ps(x[0], x[1]);
      const __m256 x23 = _mm256_unpacklo_ps(x[2], x[3]), y23 = _mm256_unpackhi_ps(x[2], x[3]);
      store(to, _mm256_shuffle_ps(x01, x23, 0x44));
      store(to + to_stride, _mm256_shuffle_ps(x01, x23, 0xee));
      store(to + 2 * to_stride, _mm256_shuffle_ps(y01, y23, 0x44));
      store(to + 3 * to_stride, _mm256_shuffle_ps(y01, y23, 0xee));
    }
  }

  static uint32_t at_least(const float* p, float threshold) {
    return static_cast<uint32_t>(
        _mm256_movemask_ps(_mm256_cmp_ps(load(p), set(threshold), _CMP_GE_OQ)));
  }
  static I count_at_least(I counts, const float* p, float threshold) {
    return _mm256_sub_epi32(
        counts, _mm256_castps_si256(_mm256_cmp_ps(load(p), set(threshold), _CMP_GE_OQ)));
  }
  static uint32_t isum(I x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1))));
  }
};

}  // namespace

}  // namespace kvasir
