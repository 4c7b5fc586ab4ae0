// GGUF's IQ formats whose quants are indices of codewords (grids.h), and the ternary TQ formats.
#pragma once

#include "formats.h"
#include "grids.h"

namespace kvasir {
namespace {

// Bit 7 of each byte becomes the parity of the other seven bits.
[[gnu::always_inline]] inline uint64_t even_signs(uint64_t signs) {
  uint64_t parity = signs ^ signs >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return signs | (parity & 0x0101010101010101) << 7;
}

// The signs of 64 weights, a bit each, set for minus. Bits 7 k to 7 k + 6 of each half of `packed`
// are those of weights 8 k to 8 k + 6 of the half; the eighth sign makes their number even.
[[gnu::always_inline]] inline uint64_t unpack_signs(uint64_t packed) {
  return even_signs((packed & 0x0000007f0000007f) | (packed & 0x00003f8000003f80) << 1 |
                    (packed & 0x001fc000001fc000) << 2 | (packed & 0x0fe000000fe00000) << 3);
}

// The IQ2 formats: codewords of eight numbers up to 43, and their signs. Zero and maximum serve
// IQ3_XXS too, so that the formats share a tile.
template <uint32_t bytes, uint32_t width>
struct BlockIQ2 : Block256<bytes, 64, width, false> {
  static constexpr bool is_gathered = true;
  static constexpr uint32_t max = 127;
};

// half d, then 8 bytes per 32 weights: four indices, and a word of 28 bits of signs and 4 of scale
struct IQ2_XXS : BlockIQ2<66, 32> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint8_t* q = p + 16 * j + 2;
      const auto words =
          Isa::gather([&](uint32_t k) { return &iq2_xxs_grid.words[q[k + k / 4 * 4]]; });
      const uint64_t signs = uint64_t{load<uint32_t>(q + 12)} << 32 | load<uint32_t>(q + 4);
      u[j] = Isa::signed_around(words, unpack_signs(signs), 64);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    const uint64_t nibbles = eight_bytes<8>(p + 9) >> 4 & 0x0f0f0f0f0f0f0f0f;
    scale = Isa::times(Isa::plus(Isa::from_bytes(nibbles), 0.5f), Isa::half(p) * 0.25f);
  }
};

// IQ2_XS and IQ2_S: half a byte of scale per 16 weights.
template <class Isa>
[[gnu::always_inline]] inline void scales_iq2(const uint8_t* nibbles, float d,
                                              Floats<Isa, 16>& scale) {
  scale = Isa::from_bytes(spread_nibbles(load<uint32_t>(nibbles)),
                          spread_nibbles(load<uint32_t>(nibbles + 4)));
  scale = Isa::times(Isa::plus(scale, 0.5f), d * 0.25f);
}

// half d, per 8 weights a word of 9 bits of index and 7 of signs [32], scales [8]
struct IQ2_XS : BlockIQ2<74, 16> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint8_t* q = p + 16 * j + 2;
      const auto words = Isa::gather(
          [&](uint32_t k) { return &iq2_xs_grid.words[load<uint16_t>(q + 2 * k) & 511]; });
      const uint64_t signs = signs_of(load<uint64_t>(q)) | signs_of(load<uint64_t>(q + 8)) << 32;
      u[j] = Isa::signed_around(words, even_signs(signs), 64);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>&) {
    scales_iq2<Isa>(p + 66, Isa::half(p), scale);
  }

 private:
  // The upper seven bits of each of four words, a byte each.
  static uint64_t signs_of(uint64_t words) {
    uint64_t v = words >> 9 & 0x007f007f007f007f;
    v = (v | v >> 8) & 0x0000ffff0000ffff;
    return (v | v >> 16) & 0x00000000ffffffff;
  }
};

// half d, low bytes [32] of indices, signs [32], high pairs [8] of indices, scales [8]
struct IQ2_S : BlockIQ2<82, 16> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t high = load<uint16_t>(p + 2 * j + 66);
      const auto words = Isa::gather([&](uint32_t k) {
        return &iq2_s_grid.words[p[8 * j + k + 2] | (high >> 2 * k & 3) << 8];
      });
      u[j] = Isa::signed_around(words, load<uint64_t>(p + 8 * j + 34), 64);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>&) {
    scales_iq2<Isa>(p + 74, Isa::half(p), scale);
  }
};

// half d, indices [64], per 32 weights a word [8] of 28 bits of signs and 4 of scale
struct IQ3_XXS : Block256<98, 64, 32, false> {
  static constexpr bool is_gathered = true;
  static constexpr uint32_t max = 127;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const auto words =
          Isa::gather([&](uint32_t k) { return &iq3_xxs_grid.words[p[16 * j + k + 2]]; });
      u[j] = Isa::signed_around(words, unpack_signs(load<uint64_t>(p + 8 * j + 66)), 64);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    const uint64_t nibbles = eight_bytes<4>(p + 69) >> 4 & 0x0f0f0f0f0f0f0f0f;
    scale = Isa::times(Isa::plus(Isa::from_bytes(nibbles), 0.5f), Isa::half(p) * 0.5f);
  }
};

// half d, low bytes [64] of indices, their high bits [8], signs [32], scales [4] of two nibbles.
// Zero and maximum are those of Q5_0.
struct IQ3_S : Block256<110, 16, 32, false> {
  static constexpr bool is_gathered = true;
  static constexpr uint32_t max = 31;
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t high = load<uint16_t>(p + 2 * j + 66);
      const auto words = Isa::gather(
          [&](uint32_t k) { return &iq3_s_grid.words[p[16 * j + k + 2] | (high >> k & 1) << 8]; });
      u[j] = Isa::signed_around(words, load<uint64_t>(p + 8 * j + 74), 16);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    const uint64_t odd = spread_nibbles(load<uint32_t>(p + 106)) << 1 | 0x0101010101010101;
    scale = Isa::times(Isa::from_bytes(odd), Isa::half(p));
  }
};

// The IQ1 formats: codewords of eight numbers g of -1, 0 and 1. A weight is scale * (8 g + delta)
// with delta of -1 or 1 per 8 or 32 weights. A byte of a codeword is 8 g + 15, and 2 is added for a
// delta of 1. Zero and maximum are those of Q5_0.
template <uint32_t bytes, uint32_t width>
struct BlockIQ1 : Block256<bytes, 16, width, false> {
  static constexpr bool is_gathered = true;
  static constexpr uint32_t max = 31;
};

// half d, low bytes [32] of indices, per 32 weights a word [8]: four times 3 high bits of an index,
// 3 bits of scale, a bit for a negative delta
struct IQ1_S : BlockIQ1<50, 32> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t both = load<uint32_t>(p + 4 * j + 34);
      const auto words = Isa::gather([&](uint32_t k) {
        return &iq1_grid.words[p[8 * j + k + 2] | (both >> (k / 4 * 16 + k % 4 * 3) & 7) << 8];
      });
      const auto negative = [&](uint32_t shift) {  // all bits of the top bit
        return static_cast<uint32_t>(static_cast<int32_t>(both << shift) >> 31);
      };
      const uint64_t positive = ~(uint64_t{negative(0)} << 32 | negative(16));
      u[j] = Isa::add_where(words, positive, 2);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    const uint64_t odd = (eight_bytes<2>(p + 35) >> 3 & 0x0e0e0e0e0e0e0e0e) | 0x0101010101010101;
    scale = Isa::times(Isa::from_bytes(odd), Isa::half(p) * 0.125f);
  }
};

// low bytes [32] of indices, nibbles [32] of 3 high bits of an index and a bit for a negative
// delta, words [4] of four scales of 3 bits and 4 bits of half d
struct IQ1_M : BlockIQ1<56, 16> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t nibbles = load<uint32_t>(p + 4 * j + 32);
      const auto words = Isa::gather(
          [&](uint32_t k) { return &iq1_grid.words[p[8 * j + k] | (nibbles >> 4 * k & 7) << 8]; });
      const uint64_t positive = (~spread_nibbles(nibbles) >> 3 & 0x0101010101010101) * 255;
      u[j] = Isa::add_where(words, positive, 2);
    }
  }
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 16>& scale, Floats<Isa, 16>&) {
    const uint64_t words = load<uint64_t>(p + 48);
    const auto d = static_cast<uint16_t>((words >> 12 & 0x000f) | (words >> 24 & 0x00f0) |
                                         (words >> 36 & 0x0f00) | (words >> 48 & 0xf000));
    scale = Isa::from_bytes(odd_scales(words), odd_scales(words >> 32));
    scale = Isa::times(scale, Isa::half(reinterpret_cast<const uint8_t*>(&d)) * 0.125f);
  }

 private:
  // 2 s + 1 of each of the eight scales in the low two words.
  static uint64_t odd_scales(uint64_t words) {
    const uint64_t v = (words & 0xfff) | (words & 0x0fff0000) << 16;
    const uint64_t scales = (v & 0x0000000700000007) | (v & 0x0000003800000038) << 5 |
                            (v & 0x000001c0000001c0) << 10 | (v & 0x00000e0000000e00) << 15;
    return scales << 1 | 0x0101010101010101;
  }
};

// The TQ formats: ternary quants, one half d for 256 weights.
template <uint32_t bytes>
struct BlockTQ : Block256<bytes, 1, 32, false> {
  static constexpr bool is_gathered = true;
  static constexpr uint32_t max = 3;
  template <class Isa>
  static void scales(const uint8_t* p, Floats<Isa, 8>& scale, Floats<Isa, 8>&) {
    scale = Isa::times(Isa::from_bytes(0x0101010101010101), Isa::half(p + bytes - 2));
  }
};

// The leading digits after the point of bytes / 256 in base 3: digit k of byte i goes to
// out[n * k + i].
template <uint32_t digits, uint32_t n>
[[gnu::always_inline]] inline void unpack_ternary(const uint8_t* bytes, uint8_t* out) {
  for (uint32_t k = 0, power = 1; k < digits; ++k, power *= 3) {
    for (uint32_t i = 0; i < n; ++i)
      out[n * k + i] = static_cast<uint8_t>((bytes[i] * power & 255) * 3 >> 8);
  }
}

// five digits of 32 bytes, five of 16, four of 4; half d
struct TQ1_0 : BlockTQ<54> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    alignas(64) uint8_t out[256];
    unpack_ternary<5, 32>(p, out);
    unpack_ternary<5, 16>(p + 32, out + 160);
    unpack_ternary<4, 4>(p + 48, out + 240);
    for (uint32_t j = 0; j < 4; ++j) u[j] = Isa::load64(out + 64 * j);
  }
};

// quants [64] of 2 bits, half d
struct TQ2_0 : BlockTQ<66> {
  template <class Isa>
  static void quants(const uint8_t* p, typename Isa::W (&u)[4]) {
    for (uint32_t i = 0; i < 2; ++i) {
      u[2 * i] = Isa::mask(Isa::template spread<0, 2>(p + 32 * i), 3);
      u[2 * i + 1] = Isa::mask(Isa::template spread<4, 6>(p + 32 * i), 3);
    }
  }
};

}  // namespace
}  // namespace kvasir
