// Attention and store kernels for any CPU: vectors of one lane.
#include <cmath>

#include "attention_fill-inl.h"

namespace kvasir {
namespace {

struct Scalar {
  static constexpr uint32_t lanes = 1, row_block = 4, scan_rows = 2, key_columns = 4,
                            row_columns = 4;
  static constexpr int32_t key_offset = 0;
  using F = float;
  using I = int32_t;
  using B = int32_t;
  using K = int32_t;

  static F set(float x) { return x; }
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static I iset(int32_t x) { return x; }
  static I iload(const int32_t* p) { return *p; }
  static void istore(int32_t* p, I x) { *p = x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F residue(F a, F b, F x) { return static_cast<F>(double{a} * double{b} - double{x}); }
  static float sum(F x) { return x; }
  static float largest(F x) { return x; }
  static F ceil(F x) { return std::ceil(x); }
  static F to_float(I x) { return static_cast<F>(x); }
  static I to_int(F x) { return static_cast<I>(std::lrint(x)); }
  // 1.5 * 2^23: leaves no fraction bits.
  static F round(F x) { return (x + 12582912.0f) - 12582912.0f; }
  static F finite_or_zero(F x) { return std::isfinite(x) ? x : 0; }
  static F select_less(F a, F b, F x, F y) { return a < b ? x : y; }
  static F iota() { return 0; }
  static F scale_by_pow2(F p, F n) {
    const uint32_t bits = n < -126 ? 0 : static_cast<uint32_t>(to_int(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
  }

  static int32_t byte(int32_t four, int i) { return static_cast<int8_t>(four >> (8 * i)); }
  static K keys(const int8_t* p) { return load_four(p); }
  static B four(int32_t x) { return x; }
  static I dot_keys(I acc, K k, B q) {
    return acc + byte(k, 0) * byte(q, 0) + byte(k, 1) * byte(q, 1) + byte(k, 2) * byte(q, 2) +
           byte(k, 3) * byte(q, 3);
  }
  static I fold(const I* x) { return *x; }
  using N = int32_t;
  static void nibbles(const int8_t* p, N& low, N& high) {
    const int32_t x = load_four(p);
    low = x & 0x0f0f0f0f;
    high = x >> 4 & 0x0f0f0f0f;
  }
  static I dot_nibbles(I acc, N u, I q4) { return dot_keys(acc, u, q4); }
  static I imax(I a, I b) { return a > b ? a : b; }
  static B bytes(const int8_t* p) { return load_four(p); }
  static B key_bytes(const int8_t* keys, uint32_t d) {
    const int8_t* k = keys + d / 4 * 16 + d % 4;
    const int8_t four[] = {k[0], k[4], k[8], k[12]};
    return load_four(four);
  }
  struct W {
    I products;
    void add(int32_t high, int32_t low, B v) {
      products += 128 * dot_keys(0, v, high) + dot_keys(0, v, low);
    }
    I total() const { return products; }
  };
  static void store_bytes(int8_t* p, I x) {
    *p = static_cast<int8_t>(x < -128 ? -128 : x > 127 ? 127 : x);
  }
  static void store_weights(uint8_t* high, uint8_t* low, const I* w) {
    for (uint32_t i = 0; i < 4; ++i) {
      high[i] = static_cast<uint8_t>(w[i] >> 7 & 127);
      low[i] = static_cast<uint8_t>(w[i] & 127);
    }
  }
  static void transpose(const float* from, std::size_t, uint32_t, float* to, std::size_t) {
    *to = *from;
  }
  static uint32_t at_least(const float* p, float threshold) { return *p >= threshold ? 1 : 0; }
  static I count_at_least(I counts, const float* p, float threshold) {
    return counts + (*p >= threshold ? 1 : 0);
  }
  static uint32_t isum(I x) { return static_cast<uint32_t>(x); }
};

}  // namespace

void fill_attention_scalar(Kernels& k) { fill_attention<Scalar>(k); }

}  // namespace kvasir
