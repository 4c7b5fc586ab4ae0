// The quantised weight formats of GGUF files, for every instruction set.
//
// All have one form in groups of 256 weights (one K block, or eight blocks of 32):
//   w = scale * (u - zero) + offset,   u: 8 bits; a float scale and offset per `width` (32 or 16)
//                                      weights.
// is_gathered: decoding takes longer than products (tables of codewords, powers of three); such
// formats have less code.
// Each format decodes a group with a few primitives of the instruction set `Isa`:
//   W                       64 quants, a byte each, in the order of the weights
//   load64(p)               64 bytes in order;  load32x2(p0, p1): 32 from each
//   spread<a, b>(p)         32 bytes x: [x >> a | x >> b], negative shifts to the left; the caller
//                           masks the result
//   nibbles(p0, p1)         two blocks of 16 bytes x: [x0 & 15, x0 >> 4, x1 & 15, x1 >> 4]
//   nibbles8(p)             four blocks of 8 bytes, likewise
//   gather(at)              words of 4 or 8 bytes that at(0), at(1), ... point to
//   add_where(w, bits, x)   adds x to the bytes whose bit is set
//   signed_around(w, bits, x)   x - w where the bit is set, x + w elsewhere
//   mask(w, byte), merge(w, w), lookup(w, table)
//   Floats<8>, Floats<16>   from_halves(p, stride), from_bytes, from_exponents, from_ue4m3, times,
//                           plus: scales and offsets
// Included by one file per instruction set; everything here has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvasir {
namespace {

constexpr uint32_t group_weights = 256;

template <class T>
[[gnu::always_inline]] inline T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class Isa, std::size_t n>
using Floats = typename Isa::template Floats<n>;

// The common part of formats with 32-weight blocks: a half-precision scale first, then a
// half-precision offset in some.
template <uint32_t bytes, uint32_t zero_, bool offset_>
struct Block32 {
  static constexpr uint32_t block = 32, block_bytes = bytes, group_bytes = 8 * bytes, width = 32;
  static constexpr uint32_t zero = zero_;
  static constexpr bool has_offset = offset_, is_signed = false, is_gathered = false;

  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>& offset) {
    scale = Isa::from_halves(p, bytes);
    if constexpr (offset_) offset = Isa::from_halves(p + 2, bytes);
  }
};

template <uint32_t bytes, uint32_t zero_, uint32_t width_, bool offset_>
struct Block256 {
  static constexpr uint32_t block = 256, block_bytes = bytes, group_bytes = bytes, width = width_;
  static constexpr uint32_t zero = zero_;
  static constexpr bool has_offset = offset_, is_signed = false, is_gathered = false;
};

struct Q8_0 : Block32<34, 0, false> {
  static constexpr bool is_signed = true;
  static constexpr uint32_t max = 128;  // of |u|
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j) u[j] = Isa::load32x2(p + 68 * j + 2, p + 68 * j + 36);
  }
};

struct Q4_0 : Block32<18, 8, false> {
  static constexpr uint32_t max = 15;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j) u[j] = Isa::nibbles(p + 36 * j + 2, p + 36 * j + 20);
  }
};

struct Q4_1 : Block32<20, 0, true> {
  static constexpr uint32_t max = 15;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j) u[j] = Isa::nibbles(p + 40 * j + 4, p + 40 * j + 24);
  }
};

// The fifth bits of two neighbouring blocks, a bit per weight.
template <uint32_t block_bytes>
[[gnu::always_inline]] inline uint64_t fifth_bits(const uint8_t* p) {
  return uint64_t{load<uint32_t>(p + block_bytes)} << 32 | load<uint32_t>(p);
}

struct Q5_0 : Block32<22, 16, false> {
  static constexpr uint32_t max = 31;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j, p += 44)
      u[j] = Isa::add_where(Isa::nibbles(p + 6, p + 28), fifth_bits<22>(p + 2), 16);
  }
};

struct Q5_1 : Block32<24, 0, true> {
  static constexpr uint32_t max = 31;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j, p += 48)
      u[j] = Isa::add_where(Isa::nibbles(p + 8, p + 32), fifth_bits<24>(p + 4), 16);
  }
};

alignas(16) constexpr int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                  1,    13,   25,  38,  53,  69,  89,  113};

struct IQ4_NL : Block32<18, 0, false> {
  static constexpr bool is_signed = true;
  static constexpr uint32_t max = 127;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j)
      u[j] = Isa::lookup(Isa::nibbles(p + 36 * j + 2, p + 36 * j + 20), iq4_nl_values);
  }
};

// Numbers of two exponent bits and one mantissa bit, doubled, plus 16: E2M1 of the OCP Microscaling
// Formats.
alignas(16) constexpr int8_t e2m1_values[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                16, 15, 14, 13, 12, 10, 8,  4};

// The bytes p[0], p[stride] to p[7 * stride].
template <uint32_t stride>
[[gnu::always_inline]] inline uint64_t eight_bytes(const uint8_t* p) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < 8; ++i) bytes |= uint64_t{p[i * stride]} << (8 * i);
  return bytes;
}

// Exponent of the scale, quants [16] of 4 bits. Scales under 2^-126 count as zero: subnormal floats
// are slow, and files have them in blocks of zeros. Zero and maximum are those of Q5_0, whose tile
// it shares.
struct MXFP4 : Block32<17, 16, false> {
  static constexpr uint32_t max = 31;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j)
      u[j] = Isa::lookup(Isa::nibbles(p + 34 * j + 1, p + 34 * j + 18), e2m1_values);
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    scale = Isa::from_exponents(eight_bytes<17>(p));
  }
};

// Blocks of 64: four scales of four exponent bits and three mantissa bits, each for twice the scale
// of 16 weights; quants of 4 bits, 8 bytes per 16 weights.
struct NVFP4 {
  static constexpr uint32_t block = 64, block_bytes = 36, group_bytes = 4 * 36, width = 16;
  static constexpr uint32_t zero = 16, max = 31;
  static constexpr bool has_offset = false, is_signed = false, is_gathered = false;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j) u[j] = Isa::lookup(Isa::nibbles8(p + 36 * j + 4), e2m1_values);
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>&) {
    const uint64_t low = uint64_t{load<uint32_t>(p + 36)} << 32 | load<uint32_t>(p),
                   high = uint64_t{load<uint32_t>(p + 108)} << 32 | load<uint32_t>(p + 72);
    scale = Isa::times(Isa::from_ue4m3(low, high), 0.5f);
  }
};

// Nibble i of four bytes becomes byte i.
[[gnu::always_inline]] inline uint64_t spread_nibbles(uint32_t nibbles) {
  uint64_t v = nibbles;
  v = (v | v << 16) & 0x0000ffff0000ffff;
  v = (v | v << 8) & 0x00ff00ff00ff00ff;
  return (v | v << 4) & 0x0f0f0f0f0f0f0f0f;
}

// Bits 2 i and 2 i + 1 become the low bits of byte i.
[[gnu::always_inline]] inline uint64_t spread_pairs(uint16_t pairs) {
  uint64_t v = pairs;
  v = (v | v << 24) & 0x000000ff000000ff;
  v = (v | v << 12) & 0x000f000f000f000f;
  return (v | v << 6) & 0x0303030303030303;
}

// half d, high pairs of eight scales, low nibbles [4] of them, quants [128] of 4 bits
struct IQ4_XS : Block256<136, 0, 32, false> {
  static constexpr bool is_signed = true;
  static constexpr uint32_t max = 127;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j)
      u[j] = Isa::lookup(Isa::nibbles(p + 32 * j + 8, p + 32 * j + 24), iq4_nl_values);
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    const uint64_t bits =
        spread_nibbles(load<uint32_t>(p + 4)) | spread_pairs(load<uint16_t>(p + 2)) << 4;
    scale = Isa::times(Isa::plus(Isa::from_bytes(bits), -32.0f), Isa::half(p));
  }
};

// scales [16] (low nibble scale, high nibble offset), quants [64] of 2 bits, half d, half dmin
struct Q2_K : Block256<84, 0, 16, true> {
  static constexpr uint32_t max = 3;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int i = 0; i < 2; ++i) {
      u[2 * i] = Isa::mask(Isa::template spread<0, 2>(p + 16 + 32 * i), 3);
      u[2 * i + 1] = Isa::mask(Isa::template spread<4, 6>(p + 16 + 32 * i), 3);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>& offset) {
    constexpr uint64_t low = 0x0f0f0f0f0f0f0f0f;
    const uint64_t a = load<uint64_t>(p), b = load<uint64_t>(p + 8);
    scale = Isa::times(Isa::from_bytes(a & low, b & low), Isa::half(p + 80));
    offset = Isa::times(Isa::from_bytes(a >> 4 & low, b >> 4 & low), -Isa::half(p + 82));
  }
};

// high bits [32], quants [64] of 2 bits, scales [12] of 6 bits, half d
struct Q3_K : Block256<110, 4, 16, false> {
  static constexpr uint32_t max = 7;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    const uint8_t* q = p + 32;
    u[0] = Isa::merge(Isa::mask(Isa::template spread<0, 2>(q), 3),
                      Isa::mask(Isa::template spread<-2, -1>(p), 4));
    u[1] = Isa::merge(Isa::mask(Isa::template spread<4, 6>(q), 3),
                      Isa::mask(Isa::template spread<0, 1>(p), 4));
    u[2] = Isa::merge(Isa::mask(Isa::template spread<0, 2>(q + 32), 3),
                      Isa::mask(Isa::template spread<2, 3>(p), 4));
    u[3] = Isa::merge(Isa::mask(Isa::template spread<4, 6>(q + 32), 3),
                      Isa::mask(Isa::template spread<4, 5>(p), 4));
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>&) {
    // Bytes 0-7 hold the low four bits of scales 0-7 and 8-15; bytes 8-11 hold two high bits of
    // each, four scales per byte.
    constexpr uint64_t low = 0x0f0f0f0f0f0f0f0f, high = 0x3030303030303030;
    const uint64_t a = load<uint64_t>(p + 96), c = load<uint32_t>(p + 104);
    const uint64_t c0 = c << 4 | c << 34;  // high bits of scales 0-3, then of 4-7
    const uint64_t c1 = c | c << 30;       // of 8-11, then of 12-15
    scale = Isa::from_bytes((a & low) | (c0 & high), (a >> 4 & low) | (c1 & high));
    scale = Isa::times(Isa::plus(scale, -32.0f), Isa::half(p + 108));
  }
};

// The twelve bytes of Q4_K and Q5_K: eight scales and eight offsets of 6 bits.
template <class Isa>
[[gnu::always_inline]] inline void scales_k4(const uint8_t* p, Floats<Isa, 8>& scale,
                                             Floats<Isa, 8>& offset) {
  constexpr uint32_t low6 = 0x3f3f3f3f, low4 = 0x0f0f0f0f, high2 = 0x30303030;
  const uint32_t a = load<uint32_t>(p + 4), b = load<uint32_t>(p + 8), c = load<uint32_t>(p + 12);
  const uint64_t scales = uint64_t{(c & low4) | (a >> 2 & high2)} << 32 | (a & low6);
  const uint64_t offsets = uint64_t{(c >> 4 & low4) | (b >> 2 & high2)} << 32 | (b & low6);
  scale = Isa::times(Isa::from_bytes(scales), Isa::half(p));
  offset = Isa::times(Isa::from_bytes(offsets), -Isa::half(p + 2));
}

// half d, half dmin, scales [12], quants [128] of 4 bits
struct Q4_K : Block256<144, 0, 32, true> {
  static constexpr uint32_t max = 15;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j) u[j] = Isa::mask(Isa::template spread<0, 4>(p + 16 + 32 * j), 15);
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>& offset) {
    scales_k4<Isa>(p, scale, offset);
  }
};

// half d, half dmin, scales [12], fifth bits [32], quants [128] of 4 bits
struct Q5_K : Block256<176, 0, 32, true> {
  static constexpr uint32_t max = 31;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int j = 0; j < 4; ++j) u[j] = Isa::mask(Isa::template spread<0, 4>(p + 48 + 32 * j), 15);
    const uint8_t* h = p + 16;
    u[0] = Isa::merge(u[0], Isa::mask(Isa::template spread<-4, -3>(h), 16));
    u[1] = Isa::merge(u[1], Isa::mask(Isa::template spread<-2, -1>(h), 16));
    u[2] = Isa::merge(u[2], Isa::mask(Isa::template spread<0, 1>(h), 16));
    u[3] = Isa::merge(u[3], Isa::mask(Isa::template spread<2, 3>(h), 16));
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>& offset) {
    scales_k4<Isa>(p, scale, offset);
  }
};

// low nibbles [128], high two bits [64], scales int8 [16], half d
struct Q6_K : Block256<210, 32, 16, false> {
  static constexpr uint32_t max = 63;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (int i = 0; i < 2; ++i) {
      const auto low = Isa::load64(p + 64 * i);
      const uint8_t* h = p + 128 + 32 * i;
      u[2 * i] = Isa::merge(Isa::mask(low, 15), Isa::mask(Isa::template spread<-4, -2>(h), 0x30));
      u[2 * i + 1] = Isa::merge(Isa::mask(Isa::template shift_right<4>(low), 15),
                                Isa::mask(Isa::template spread<0, 2>(h), 0x30));
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>&) {
    scale = Isa::times(Isa::from_signed_bytes(p + 192), Isa::half(p + 208));
  }
};

}  // namespace
}  // namespace kvasir
