// The quantised weight formats of GGUF files on the device: how a unit of 32 weights is laid out
// (layout.h) and decoded.
// Every weight is  w = scale * u + offset  with u of 8 bits; a scale and an offset per 16 weights.
// Where the middle of the quants' range stands for zero, u is the quant less that middle, in the
// upper bits of a signed byte, and there is no offset.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "codes.h"
#include "layout.h"

namespace kvasir::cuda {

using Bytes = const uint8_t*;

__device__ inline float half_at(Bytes p) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(p[0] | p[1] << 8)));
}

// Scale and offset of run s (of 32 weights) of Q4_K and Q5_K: six bits each, in twelve bytes.
__device__ inline uint8_t scale_k4(Bytes p, int s) {
  return s < 4 ? p[s] & 63 : (p[s + 4] & 15) | (p[s - 4] >> 6) << 4;
}
__device__ inline uint8_t offset_k4(Bytes p, int s) {
  return s < 4 ? p[s + 4] & 63 : (p[s + 4] >> 4) | (p[s] >> 6) << 4;
}
__device__ inline int nibble(Bytes p, int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; }
__device__ inline int bit(Bytes p, int i) { return p[i / 8] >> (i % 8) & 1; }

// The constants of a format, its quant i of a block in the file (with zero and sign unchanged), and
// its scales.
template <TensorType>
struct Format;

template <TensorType type, int block_bytes_, int block_, int zero_, bool offset_>
struct Blocks {
  static constexpr int block_bytes = block_bytes_, block = block_;
  static constexpr int low = layout_of(type).low_bits, high = layout_of(type).high_bits;
  static constexpr int scale_bytes = layout_of(type).scale_bytes,
                       super_bytes = layout_of(type).super_bytes;
  static constexpr bool is_centred = zero_ != 0 && zero_ == 1 << (low + high - 1);
  static constexpr int shift = is_centred ? 8 - low - high : 0;  // of a quant in its byte
  static constexpr float unit = 1.0f / (1 << shift);             // that u counts
  static constexpr bool has_offset = offset_ || (zero_ != 0 && !is_centred);
  static constexpr bool two_scales = false;  // one per 16 weights
};

// Blocks of 32 with a half-precision scale first, and an offset in some formats.
template <TensorType type, int block_bytes_, int zero_, bool offset_>
struct Blocks32 : Blocks<type, block_bytes_, 32, zero_, offset_> {
  __device__ static void put_scales(Bytes p, int, uint8_t* to) {
    for (int i = 0; i < (offset_ ? 4 : 2); ++i) to[i] = p[i];
  }
  __device__ static void put_supers(Bytes, uint8_t*) {}
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    if constexpr (offset_) {
      out[0] = __half22float2(reinterpret_cast<const __half2*>(planes.scales)[unit]);
    } else {
      const float s = __half2float(reinterpret_cast<const __half*>(planes.scales)[unit]);
      out[0] = make_float2(s * Blocks32::unit, 0);
    }
    out[1] = out[0];
  }
};

template <>
struct Format<TensorType::q8_0> : Blocks32<TensorType::q8_0, 34, 0, false> {
  __device__ static int quant(Bytes p, int i) { return p[2 + i]; }
};
template <>
struct Format<TensorType::q4_0> : Blocks32<TensorType::q4_0, 18, 8, false> {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 2, i); }
};
template <>
struct Format<TensorType::q4_1> : Blocks32<TensorType::q4_1, 20, 0, true> {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 4, i); }
};
template <>
struct Format<TensorType::q5_0> : Blocks32<TensorType::q5_0, 22, 16, false> {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 6, i) | bit(p + 2, i) << 4; }
};
template <>
struct Format<TensorType::q5_1> : Blocks32<TensorType::q5_1, 24, 0, true> {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 8, i) | bit(p + 4, i) << 4; }
};
template <>
struct Format<TensorType::q2_k> : Blocks<TensorType::q2_k, 84, 256, 0, true> {
  static constexpr bool two_scales = true;
  __device__ static int quant(Bytes p, int i) {
    return p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
  }
  __device__ static void put_scales(Bytes p, int s, uint8_t* to) {
    for (int h = 0; h < 2; ++h) to[2 * h] = p[2 * s + h] & 15, to[2 * h + 1] = p[2 * s + h] >> 4;
  }
  __device__ static void put_supers(Bytes p, uint8_t* to) {
    for (int i = 0; i < 4; ++i) to[i] = p[80 + i];
  }
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    const float2 super = __half22float2(reinterpret_cast<const __half2*>(planes.supers)[unit / 8]);
    const uchar4 s = reinterpret_cast<const uchar4*>(planes.scales)[unit];
    out[0] = make_float2(super.x * s.x, -super.y * s.y);
    out[1] = make_float2(super.x * s.z, -super.y * s.w);
  }
};

// Q3_K and Q6_K: a signed scale per 16 weights, no offset except the zero.
template <class F>
__device__ inline void scales_signed(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
  const float super =
      __half2float(reinterpret_cast<const __half*>(planes.supers)[unit / 8]) * F::unit;
  const char2 s = reinterpret_cast<const char2*>(planes.scales)[unit];
  out[0] = make_float2(super * s.x, 0), out[1] = make_float2(super * s.y, 0);
}

template <>
struct Format<TensorType::q3_k> : Blocks<TensorType::q3_k, 110, 256, 4, false> {
  static constexpr bool two_scales = true;
  __device__ static int quant(Bytes p, int i) {
    return (p[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) | (p[i % 32] >> (i / 32) & 1)
                                                                           << 2;
  }
  __device__ static void put_scales(Bytes p, int s, uint8_t* to) {
    for (int h = 0; h < 2; ++h) {
      const int at = 2 * s + h, low = at < 8 ? p[96 + at] & 15 : p[96 + at - 8] >> 4,
                top = p[104 + at % 4] >> (at / 4 * 2) & 3;
      to[h] = static_cast<uint8_t>(low + 16 * top - 32);
    }
  }
  __device__ static void put_supers(Bytes p, uint8_t* to) { to[0] = p[108], to[1] = p[109]; }
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    scales_signed<Format>(planes, unit, out);
  }
};

template <>
struct Format<TensorType::q6_k> : Blocks<TensorType::q6_k, 210, 256, 32, false> {
  static constexpr bool two_scales = true;
  __device__ static int quant(Bytes p, int i) {
    const int part = i / 128, quarter = i % 128 / 32, l = i % 32,
              byte = p[part * 64 + quarter % 2 * 32 + l];
    return (quarter < 2 ? byte & 15 : byte >> 4) | (p[128 + part * 32 + l] >> (quarter * 2) & 3)
                                                       << 4;
  }
  __device__ static void put_scales(Bytes p, int s, uint8_t* to) {
    to[0] = p[192 + 2 * s], to[1] = p[193 + 2 * s];
  }
  __device__ static void put_supers(Bytes p, uint8_t* to) { to[0] = p[208], to[1] = p[209]; }
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    scales_signed<Format>(planes, unit, out);
  }
};

// Q4_K and Q5_K: scale and offset of six bits per 32 weights.
template <TensorType type, int block_bytes_>
struct BlocksK4 : Blocks<type, block_bytes_, 256, 0, true> {
  __device__ static void put_scales(Bytes p, int s, uint8_t* to) {
    to[0] = scale_k4(p + 4, s), to[1] = offset_k4(p + 4, s);
  }
  __device__ static void put_supers(Bytes p, uint8_t* to) {
    for (int i = 0; i < 4; ++i) to[i] = p[i];
  }
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    const float2 super = __half22float2(reinterpret_cast<const __half2*>(planes.supers)[unit / 8]);
    const uchar2 s = reinterpret_cast<const uchar2*>(planes.scales)[unit];
    out[0] = out[1] = make_float2(super.x * s.x, -super.y * s.y);
  }
};
template <>
struct Format<TensorType::q4_k> : BlocksK4<TensorType::q4_k, 144> {
  __device__ static int quant(Bytes p, int i) {
    const int byte = p[16 + i / 64 * 32 + i % 32];
    return i / 32 % 2 ? byte >> 4 : byte & 15;
  }
};
template <>
struct Format<TensorType::q5_k> : BlocksK4<TensorType::q5_k, 176> {
  __device__ static int quant(Bytes p, int i) {
    const int byte = p[48 + i / 64 * 32 + i % 32];
    return (i / 32 % 2 ? byte >> 4 : byte & 15) | (p[16 + i % 32] >> (i / 32) & 1) << 4;
  }
};

// ---- formats whose quants are indices of a table of bytes

// Four indices below 16, a byte each, to their numbers.
template <uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3>
__device__ inline uint32_t look_up_16(uint32_t indices) {
  const uint32_t at =
      (indices & 0xf) | (indices >> 4 & 0xf0) | (indices >> 8 & 0xf00) | (indices >> 12 & 0xf000);
  const uint32_t low = __byte_perm(w0, w1, at & 0x7777), high = __byte_perm(w2, w3, at & 0x7777);
  return __byte_perm(low, high, 0x3210 | (at & 0x8888) >> 1);
}
// Below 8.
template <uint32_t w0, uint32_t w1>
__device__ inline uint32_t look_up_8(uint32_t indices) {
  return __byte_perm(
      w0, w1,
      (indices & 0x7) | (indices >> 4 & 0x70) | (indices >> 8 & 0x700) | (indices >> 12 & 0x7000));
}

// -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
struct TableIQ4 {
  __device__ static uint32_t look_up(uint32_t u) {
    return look_up_16<0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535>(u);
  }
};
// 0 1 2 3, 4 6 8 12, and their negatives
struct TableE2M1 {
  __device__ static uint32_t look_up(uint32_t u) {
    return look_up_16<0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc>(u);
  }
};
// 1 3 5 7, 9 11 13 15, and their negatives
struct TableIQ3S {
  __device__ static uint32_t look_up(uint32_t u) {
    return look_up_16<0x07050301, 0x0f0d0b09, 0xf9fbfdff, 0xf1f3f5f7>(u);
  }
};
// 4 12 20 28, 36 44 52 62, and their negatives
struct TableIQ3XXS {
  __device__ static uint32_t look_up(uint32_t u) {
    return look_up_16<0x1c140c04, 0x3e342c24, 0xe4ecf4fc, 0xc2ccd4dc>(u);
  }
};
// 8 25 43, and their negatives
struct TableIQ2 {
  __device__ static uint32_t look_up(uint32_t u) { return look_up_8<0x002b1908, 0x00d5e7f8>(u); }
};
// 8 g - 1 of g = -1 0 1, and 8 g + 1
struct TableIQ1 {
  __device__ static uint32_t look_up(uint32_t u) { return look_up_8<0x0007fff7, 0x000901f9>(u); }
};

template <>
struct Format<TensorType::iq4_nl> : Blocks32<TensorType::iq4_nl, 18, 0, false>, TableIQ4 {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 2, i); }
};

// The scale 2^(e - 128) is a bfloat16. e < 2 counts as zero, as on the CPU.
template <>
struct Format<TensorType::mxfp4> : Blocks<TensorType::mxfp4, 17, 32, 0, false>, TableE2M1 {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 1, i); }
  __device__ static void put_scales(Bytes p, int, uint8_t* to) {
    const int bits = p[0] < 2 ? 0 : (p[0] - 1) << 7;
    to[0] = static_cast<uint8_t>(bits), to[1] = static_cast<uint8_t>(bits >> 8);
  }
  __device__ static void put_supers(Bytes, uint8_t*) {}
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    const uint32_t bits = reinterpret_cast<const uint16_t*>(planes.scales)[unit];
    out[0] = out[1] = make_float2(__uint_as_float(bits << 16), 0);
  }
};

// Scales of four exponent bits and three mantissa bits, as half-precision numbers 2^8 too small;
// they are twice the scale. 0x7f is not a number; files mean zero.
template <>
struct Format<TensorType::nvfp4> : Blocks<TensorType::nvfp4, 36, 64, 0, false>, TableE2M1 {
  static constexpr bool two_scales = true;
  __device__ static int quant(Bytes p, int i) {
    const int byte = p[4 + i / 16 * 8 + i % 8];
    return i % 16 < 8 ? byte & 15 : byte >> 4;
  }
  __device__ static void put_scales(Bytes p, int s, uint8_t* to) {
    for (int h = 0; h < 2; ++h) to[h] = p[2 * s + h] == 0x7f ? 0 : p[2 * s + h];
  }
  __device__ static void put_supers(Bytes, uint8_t*) {}
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    const uint32_t both = reinterpret_cast<const uint16_t*>(planes.scales)[unit];
    const auto scale = [](uint32_t code) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>((code & 0x7f) << 7))) * 128;
    };
    out[0] = make_float2(scale(both), 0), out[1] = make_float2(scale(both >> 8), 0);
  }
};

// A signed byte of scale per 32 weights, or per 16, times 1 / divisor of the half-precision super
// scale. Formats have scale_of(p, i): the scale of weight i.
template <TensorType type, int block_bytes_, int divisor, bool two_scales_>
struct BlocksTable : Blocks<type, block_bytes_, 256, 0, false> {
  static constexpr bool two_scales = two_scales_;
  __device__ static void put_scales(Bytes p, int s, uint8_t* to) {
    for (int h = 0; h < 2; ++h)
      to[h] = static_cast<uint8_t>(Format<type>::scale_of(p, 32 * s + 16 * h));
  }
  __device__ static void put_supers(Bytes p, uint8_t* to) { to[0] = p[0], to[1] = p[1]; }
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    const float super =
        __half2float(reinterpret_cast<const __half*>(planes.supers)[unit / 8]) * (1.0f / divisor);
    const char2 s = reinterpret_cast<const char2*>(planes.scales)[unit];
    out[0] = make_float2(super * s.x, 0), out[1] = make_float2(super * s.y, 0);
  }
};

template <>
struct Format<TensorType::iq4_xs> : BlocksTable<TensorType::iq4_xs, 136, 1, false>, TableIQ4 {
  __device__ static int quant(Bytes p, int i) { return nibble(p + 8 + i / 32 * 16, i % 32); }
  __device__ static int scale_of(Bytes p, int i) {
    const int b = i / 32, low = p[4 + b / 2] >> (b % 2 * 4) & 15,
              high = p[2 + b / 4] >> (b % 4 * 2) & 3;
    return (low | high << 4) - 32;
  }
};

// Index k of a codeword's numbers, and whether the number is negative.
__device__ inline int iq2_code(int codeword, int k, int minus) {
  return (codeword >> 2 * k & 3) | minus << 2;
}
__device__ inline int iq3_code(int codeword, int k, int minus) {
  return (codeword >> 4 * k & 15) | minus << 3;
}
// Sign k of seven bits and of an eighth that makes the number of minus signs even.
__device__ inline int even_sign(int bits, int k) {
  return k < 7 ? bits >> k & 1 : __popc(bits & 127) & 1;
}
__device__ inline int word_at(Bytes p) { return p[0] | p[1] << 8; }
// Nibble i, low ones first, and the odd number that it stands for.
__device__ inline int odd_nibble(Bytes p, int i) { return 2 * (p[i / 2] >> (i % 2 * 4) & 15) + 1; }

template <>
struct Format<TensorType::iq3_s> : BlocksTable<TensorType::iq3_s, 110, 1, false>, TableIQ3S {
  __device__ static int quant(Bytes p, int i) {
    const int at = p[2 + i / 4] | bit(p + 66, i / 4) << 8;
    return iq3_code(iq3_s_device.words[at], i % 4, bit(p + 74, i));
  }
  __device__ static int scale_of(Bytes p, int i) { return odd_nibble(p + 106, i / 32); }
};

// IQ3_XXS and IQ2_XXS: a word of four times seven signs and a nibble of scale; its upper half is
// at p + 2.
__device__ inline int signs_at(Bytes p, int group) {
  return static_cast<int>((static_cast<uint32_t>(word_at(p + 2)) << 16 | word_at(p)) >> 7 * group) &
         127;
}

template <>
struct Format<TensorType::iq3_xxs> : BlocksTable<TensorType::iq3_xxs, 98, 4, false>, TableIQ3XXS {
  __device__ static int quant(Bytes p, int i) {
    const int minus = even_sign(signs_at(p + 66 + i / 32 * 4, i % 32 / 8), i % 8);
    return iq3_code(iq3_xxs_device.words[p[2 + i / 4]], i % 4, minus);
  }
  __device__ static int scale_of(Bytes p, int i) { return odd_nibble(p + 69 + i / 32 * 4, 1); }
};

template <>
struct Format<TensorType::iq2_xxs> : BlocksTable<TensorType::iq2_xxs, 66, 8, false>, TableIQ2 {
  __device__ static int quant(Bytes p, int i) {
    Bytes q = p + 2 + i / 32 * 8;
    const int minus = even_sign(signs_at(q + 4, i % 32 / 8), i % 8);
    return iq2_code(iq2_xxs_device.words[q[i % 32 / 8]], i % 8, minus);
  }
  __device__ static int scale_of(Bytes p, int i) { return odd_nibble(p + 9 + i / 32 * 8, 1); }
};

template <>
struct Format<TensorType::iq2_xs> : BlocksTable<TensorType::iq2_xs, 74, 8, true>, TableIQ2 {
  __device__ static int quant(Bytes p, int i) {
    const int q = word_at(p + 2 + i / 8 * 2);
    return iq2_code(iq2_xs_device.words[q & 511], i % 8, even_sign(q >> 9, i % 8));
  }
  __device__ static int scale_of(Bytes p, int i) { return odd_nibble(p + 66, i / 16); }
};

template <>
struct Format<TensorType::iq2_s> : BlocksTable<TensorType::iq2_s, 82, 8, true>, TableIQ2 {
  __device__ static int quant(Bytes p, int i) {
    const int at = p[2 + i / 8] | (p[66 + i / 32] >> (i % 32 / 8 * 2) & 3) << 8;
    return iq2_code(iq2_s_device.words[at], i % 8, bit(p + 34, i));
  }
  __device__ static int scale_of(Bytes p, int i) { return odd_nibble(p + 74, i / 16); }
};

template <>
struct Format<TensorType::iq1_s> : BlocksTable<TensorType::iq1_s, 50, 8, false>, TableIQ1 {
  __device__ static int quant(Bytes p, int i) {
    const int high = word_at(p + 34 + i / 32 * 2),
              at = p[2 + i / 8] | (high >> (i % 32 / 8 * 3) & 7) << 8;
    return iq2_code(iq1_device.words[at], i % 8, ~high >> 15 & 1);
  }
  __device__ static int scale_of(Bytes p, int i) { return 2 * (p[35 + i / 32 * 2] >> 4 & 7) + 1; }
};

template <>
struct Format<TensorType::iq1_m> : BlocksTable<TensorType::iq1_m, 56, 8, true>, TableIQ1 {
  __device__ static int quant(Bytes p, int i) {
    const int high = p[32 + i / 16] >> (i % 16 / 8 * 4), at = p[i / 8] | (high & 7) << 8;
    return iq2_code(iq1_device.words[at], i % 8, ~high >> 3 & 1);
  }
  __device__ static int scale_of(Bytes p, int i) {
    return 2 * (word_at(p + 48 + i / 64 * 2) >> (i % 64 / 16 * 3) & 7) + 1;
  }
  __device__ static void put_supers(Bytes p, uint8_t* to) {  // top nibbles of four words
    to[0] = static_cast<uint8_t>(p[49] >> 4 | (p[51] & 0xf0));
    to[1] = static_cast<uint8_t>(p[53] >> 4 | (p[55] & 0xf0));
  }
};

// ---- ternary formats: one half-precision scale per 256 weights, which each unit repeats

template <TensorType type, int block_bytes_>
struct BlocksTernary : Blocks<type, block_bytes_, 256, 1, false> {
  __device__ static void put_scales(Bytes p, int, uint8_t* to) {
    to[0] = p[block_bytes_ - 2], to[1] = p[block_bytes_ - 1];
  }
  __device__ static void put_supers(Bytes, uint8_t*) {}
  __device__ static void scales(const Planes& planes, std::size_t unit, float2 (&out)[2]) {
    const float s = __half2float(reinterpret_cast<const __half*>(planes.scales)[unit]);
    out[0] = out[1] = make_float2(s, -s);
  }
};
template <>
struct Format<TensorType::tq1_0> : BlocksTernary<TensorType::tq1_0, 54> {
  __device__ static int quant(Bytes p, int i) {
    // 32 bytes of five digits, 16 of five, 4 of four
    int byte = i < 160 ? p[i % 32] : i < 240 ? p[32 + i % 16] : p[48 + i % 4];
    for (int k = i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4; k > 0; --k)
      byte = byte * 3 & 255;
    return byte * 3 >> 8;
  }
};
template <>
struct Format<TensorType::tq2_0> : BlocksTernary<TensorType::tq2_0, 66> {
  __device__ static int quant(Bytes p, int i) {
    return p[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
  }
};

// Four quants, a byte each, to the four u of the weights.
template <TensorType type>
__device__ inline uint32_t numbers_of(uint32_t quants) {
  using F = Format<type>;
  if constexpr (is_table(type)) return F::look_up(quants);
  else if constexpr (F::is_centred) return quants << F::shift ^ 0x80808080;
  else return quants;
}

// The 32 numbers u of a unit in order, four per word.
template <TensorType type>
__device__ inline void load_quants(const Planes& planes, std::size_t unit, uint32_t (&u)[8]) {
  using F = Format<type>;
  if constexpr (F::low == 8) {
    const uint4* p = reinterpret_cast<const uint4*>(planes.low) + 2 * unit;
    const uint4 a = __ldg(p), b = __ldg(p + 1);
    u[0] = a.x, u[1] = a.y, u[2] = a.z, u[3] = a.w, u[4] = b.x, u[5] = b.y, u[6] = b.z, u[7] = b.w;
  } else if constexpr (F::low == 4) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(planes.low) + unit);
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) u[k] = w[k] & 0x0f0f0f0f, u[k + 4] = w[k] >> 4 & 0x0f0f0f0f;
  } else {
    const uint2 a = __ldg(reinterpret_cast<const uint2*>(planes.low) + unit);
#pragma unroll
    for (int k = 0; k < 8; ++k) u[k] = (k < 4 ? a.x : a.y) >> 2 * (k % 4) & 0x03030303;
  }
  if constexpr (F::high == 1) {
    const uint32_t h = __ldg(reinterpret_cast<const uint32_t*>(planes.high) + unit);
#pragma unroll
    for (int k = 0; k < 8; ++k) u[k] |= (h >> k & 0x01010101) << F::low;
  } else if constexpr (F::high == 2) {
    const uint2 h = __ldg(reinterpret_cast<const uint2*>(planes.high) + unit);
#pragma unroll
    for (int k = 0; k < 8; ++k) u[k] |= ((k < 4 ? h.x : h.y) >> 2 * (k % 4) & 0x03030303) << F::low;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) u[k] = numbers_of<type>(u[k]);
}

// Copies unit `unit` of the file's blocks to the planes.
template <TensorType type>
__device__ inline void lay_out_unit(Bytes file, std::size_t from, const Planes& to,
                                    std::size_t unit) {
  using F = Format<type>;
  constexpr int units = F::block / 32;
  Bytes p = file + from / units * F::block_bytes;
  const int s = static_cast<int>(from % units);
  uint8_t low[F::low * 4] = {}, high[F::high ? F::high * 4 : 1] = {};
  for (int i = 0; i < 32; ++i) {
    const int q = F::quant(p, 32 * s + i), k = i / 4, b = i % 4;
    if constexpr (F::low == 8) low[i] = static_cast<uint8_t>(q);
    if constexpr (F::low == 4) low[i % 16] |= static_cast<uint8_t>((q & 15) << (i < 16 ? 0 : 4));
    if constexpr (F::low == 2) low[k / 4 * 4 + b] |= static_cast<uint8_t>((q & 3) << 2 * (k % 4));
    if constexpr (F::high == 1) high[b] |= static_cast<uint8_t>((q >> F::low & 1) << k);
    if constexpr (F::high == 2)
      high[k / 4 * 4 + b] |= static_cast<uint8_t>((q >> F::low & 3) << 2 * (k % 4));
  }
  for (int i = 0; i < F::low * 4; ++i) to.low[unit * (F::low * 4) + i] = low[i];
  for (int i = 0; i < F::high * 4; ++i) to.high[unit * (F::high * 4) + i] = high[i];
  F::put_scales(p, s, to.scales + unit * F::scale_bytes);
  if (F::super_bytes && s == 0) F::put_supers(p, to.supers + unit / 8 * F::super_bytes);
}

}  // namespace kvasir::cuda
