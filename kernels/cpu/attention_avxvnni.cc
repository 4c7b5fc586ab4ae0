// The attention and store kernels with int8 products, by AVX-VNNI: the byte dot product in 256-bit
// registers. Integer sums are exact, so scores and outputs have the bits of AVX2.
#include "attention_avx2-inl.h"

namespace kvasir {
namespace {

struct AvxVnni : Avx2 {
  // acc + the sums of four products of unsigned u and signed s.
  static I dot(I acc, I u, I s) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(acc, u, s);
#else  // a build of the tests, for CPUs whose instruction is AVX-512's
    return _mm256_dpbusd_epi32(acc, u, s);
#endif
  }
  static I dot_keys(I acc, K k, B q) { return dot(acc, k.magnitude, _mm256_sign_epi8(q, k.value)); }
  static I dot_nibbles(I acc, N u, I q4) { return dot(acc, u, q4); }
  // One accumulator, since two need more registers than there are: the upper parts times 128 as in
  // AVX2.
  struct W {
    I products = _mm256_setzero_si256();
    void add(int32_t high, int32_t low, B v) {
      const __m256i upper = _mm256_maddubs_epi16(_mm256_set1_epi32(high), v);
      products = _mm256_add_epi32(products, _mm256_madd_epi16(upper, _mm256_set1_epi16(128)));
      products = dot(products, _mm256_set1_epi32(low), v);
    }
    I total() const { return products; }
  };
};

}  // namespace

void fill_attention_avxvnni(Kernels& k) {
  fill_attention_avx2(k);
  k.attend_pages = attend_pages<AvxVnni>;
  k.score_tokens = score_tokens<AvxVnni>;
  k.score_keys = score_keys<AvxVnni>;
  k.score_bounds = score_bounds<AvxVnni>;
  k.score_sketch = score_sketch<AvxVnni>;
  k.raise_by_sketch = raise_by_sketch<AvxVnni>;
}

}  // namespace kvasir
