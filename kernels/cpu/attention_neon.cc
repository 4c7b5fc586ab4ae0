// Attention and store kernels for NEON with dot products (ARMv8.2): 4 lanes, int8 dot products in
// one instruction.
#include <arm_neon.h>

#include "attention_fill-inl.h"

namespace kvasir {
namespace {

struct Neon {
  static constexpr uint32_t lanes = 4, row_block = 6, scan_rows = 4, key_columns = 4,
                            row_columns = 4;
  static constexpr int32_t key_offset = 0;
  using F = float32x4_t;
  using I = int32x4_t;
  using B = int8x16_t;
  using K = int8x16_t;

  static F set(float x) { return vdupq_n_f32(x); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static I iset(int32_t x) { return vdupq_n_s32(x); }
  static I iload(const int32_t* p) { return vld1q_s32(p); }
  static void istore(int32_t* p, I x) { vst1q_s32(p, x); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F max(F a, F b) { return vmaxq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F residue(F a, F b, F x) { return vnegq_f32(vfmsq_f32(x, a, b)); }
  static float sum(F x) { return vaddvq_f32(x); }
  static float largest(F x) { return vmaxvq_f32(x); }
  static F ceil(F x) { return vrndpq_f32(x); }
  static F round(F x) { return vrndnq_f32(x); }
  static F to_float(I x) { return vcvtq_f32_s32(x); }
  static I to_int(F x) { return vcvtnq_s32_f32(x); }
  static F finite_or_zero(F x) {
    const uint32x4_t finite = vcltq_f32(vabsq_f32(x), set(__builtin_inff()));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), finite));
  }
  static F select_less(F a, F b, F x, F y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
  static F iota() {
    const float indices[4] = {0, 1, 2, 3};
    return load(indices);
  }
  // An exponent field of 0 makes the power 0.
  static F scale_by_pow2(F p, F n) {
    const I exponent = vaddq_s32(to_int(max(n, set(-127.0f))), iset(127));
    return mul(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  }

  static B four(int32_t x) { return vreinterpretq_s8_s32(vdupq_n_s32(x)); }
  static K keys(const int8_t* p) { return vld1q_s8(p); }
  static I dot_keys(I acc, K k, B q) { return vdotq_s32(acc, k, q); }
  static I fold(const I* x) { return *x; }

  using N = int8x16_t;
  static void nibbles(const int8_t* p, N& low, N& high) {
    const uint8x16_t x = vreinterpretq_u8_s8(vld1q_s8(p));
    low = vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15)));
    high = vreinterpretq_s8_u8(vshrq_n_u8(x, 4));
  }
  static I dot_nibbles(I acc, N u, I q4) { return vdotq_s32(acc, u, vreinterpretq_s8_s32(q4)); }
  static I imax(I a, I b) { return vmaxq_s32(a, b); }

  static B bytes(const int8_t* p) { return vld1q_s8(p); }
  static B key_bytes(const int8_t* keys, uint32_t d) {
    static constexpr uint8_t order[] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return vqtbl1q_s8(bytes(keys + d * 4), vld1q_u8(order));
  }
  struct W {
    I high_products = vdupq_n_s32(0), low_products = vdupq_n_s32(0);
    void add(int32_t high, int32_t low, B v) {
      high_products = vdotq_s32(high_products, v, four(high));
      low_products = vdotq_s32(low_products, v, four(low));
    }
    I total() const { return vaddq_s32(vshlq_n_s32(high_products, 7), low_products); }
  };

  static void store_bytes(int8_t* p, I x) {
    const int16x4_t words = vqmovn_s32(x);
    const int8x8_t narrow = vqmovn_s16(vcombine_s16(words, words));
    const int32_t bytes = vget_lane_s32(vreinterpret_s32_s8(narrow), 0);
    std::memcpy(p, &bytes, sizeof bytes);
  }
  static void store_weights(uint8_t* high, uint8_t* low, const I* w) {
    const int16x8_t first = vcombine_s16(vqmovn_s32(w[0]), vqmovn_s32(w[1]));
    const int16x8_t second = vcombine_s16(vqmovn_s32(w[2]), vqmovn_s32(w[3]));
    const int16x8_t seven_bits = vdupq_n_s16(127);
    vst1q_u8(high, vcombine_u8(vqshrun_n_s16(first, 7), vqshrun_n_s16(second, 7)));
    vst1q_u8(low, vcombine_u8(vqmovun_s16(vandq_s16(first, seven_bits)),
                              vqmovun_s16(vandq_s16(second, seven_bits))));
  }

  static void transpose(const float* from, std::size_t stride, uint32_t valid, float* to,
                        std::size_t to_stride) {
    float32x4_t x[4];
    for (uint32_t i = 0; i < 4; ++i) x[i] = load(from + smaller(i, valid - 1) * stride);
    const float32x4x2_t x01 = vtrnq_f32(x[0], x[1]), x23 = vtrnq_f32(x[2], x[3]);
    store(to, vcombine_f32(vget_low_f32(x01.val[0]), vget_low_f32(x23.val[0])));
    store(to + to_stride, vcombine_f32(vget_low_f32(x01.val[1]), vget_low_f32(x23.val[1])));
    store(to + 2 * to_stride, vcombine_f32(vget_high_f32(x01.val[0]), vget_high_f32(x23.val[0])));
    store(to + 3 * to_stride, vcombine_f32(vget_high_f32(x01.val[1]), vget_high_f32(x23.val[1])));
  }

  static uint32_t at_least(const float* p, float threshold) {
    const uint32_t bit_values[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgeq_f32(load(p), set(threshold)), vld1q_u32(bit_values)));
  }
  static I count_at_least(I counts, const float* p, float threshold) {
    return vsubq_s32(counts, vreinterpretq_s32_u32(vcgeq_f32(load(p), set(threshold))));
  }
  static uint32_t isum(I x) { return static_cast<uint32_t>(vaddvq_s32(x)); }
};

}  // namespace

void fill_attention_neon(Kernels& k) { fill_attention<Neon>(k); }

}  // namespace kvasir
