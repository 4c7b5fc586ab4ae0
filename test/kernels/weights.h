// Random weights of every format.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "support.h"

namespace kvasir::test {

struct Type {
  TensorType type;
  const char* name;
  uint32_t block, bytes;
  // offsets of half-precision numbers in a block, which must be finite
  std::vector<uint32_t> halves;
};

inline const Type types[] = {
    {TensorType::f32, "F32", 1, 4, {}},
    {TensorType::f16, "F16", 1, 2, {}},
    {TensorType::bf16, "BF16", 1, 2, {}},
    {TensorType::q8_0, "Q8_0", 32, 34, {0}},
    {TensorType::q4_0, "Q4_0", 32, 18, {0}},
    {TensorType::q4_1, "Q4_1", 32, 20, {0, 2}},
    {TensorType::q5_0, "Q5_0", 32, 22, {0}},
    {TensorType::q5_1, "Q5_1", 32, 24, {0, 2}},
    {TensorType::q2_k, "Q2_K", 256, 84, {80, 82}},
    {TensorType::q3_k, "Q3_K", 256, 110, {108}},
    {TensorType::q4_k, "Q4_K", 256, 144, {0, 2}},
    {TensorType::q5_k, "Q5_K", 256, 176, {0, 2}},
    {TensorType::q6_k, "Q6_K", 256, 210, {208}},
    {TensorType::iq4_nl, "IQ4_NL", 32, 18, {0}},
    {TensorType::iq4_xs, "IQ4_XS", 256, 136, {0}},
    {TensorType::mxfp4, "MXFP4", 32, 17, {}},
    {TensorType::nvfp4, "NVFP4", 64, 36, {}},
    {TensorType::iq3_s, "IQ3_S", 256, 110, {0}},
    {TensorType::iq3_xxs, "IQ3_XXS", 256, 98, {0}},
    {TensorType::iq2_s, "IQ2_S", 256, 82, {0}},
    {TensorType::iq2_xs, "IQ2_XS", 256, 74, {0}},
    {TensorType::iq2_xxs, "IQ2_XXS", 256, 66, {0}},
    {TensorType::iq1_s, "IQ1_S", 256, 50, {0}},
    {TensorType::iq1_m, "IQ1_M", 256, 56, {}},
    {TensorType::tq1_0, "TQ1_0", 256, 54, {52}},
    {TensorType::tq2_0, "TQ2_0", 256, 66, {64}},
};

inline const Type& type_of(const char* name) {
  return *std::find_if(std::begin(types), std::end(types),
                       [&](const Type& t) { return std::string(t.name) == name; });
}

// Random bits, but numbers where the format has numbers, and a random scale of the matrix, which
// rounds nothing. The last byte of the matrix is the last of the array, so that a sanitizer sees a
// read beyond it; `shift` unaligns the beginning.
struct Weights {
  Weights(const Type& t, uint32_t rows, uint32_t cols, Random& random, std::size_t shift = 0) {
    const std::size_t row_bytes = std::size_t{cols / t.block} * t.bytes;
    bytes.resize(shift + rows * row_bytes);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.next() >> 56);
    for (std::size_t b = shift; b < bytes.size(); b += t.bytes)
      put_numbers(t, bytes.data() + b, random);
    view = {reinterpret_cast<const std::byte*>(bytes.data()) + shift, t.type, rows, cols, row_bytes,
            std::ldexp(1.0f, static_cast<int>(random.below(4)) - 2)};
  }

  static void put_numbers(const Type& t, uint8_t* p, Random& random) {
    for (uint32_t at : t.halves) put_half(p + at, random, 5);
    switch (t.type) {
      case TensorType::f32: {
        const float v = random.normal();
        std::memcpy(p, &v, 4);
        break;
      }
      case TensorType::bf16: {
        const float v = random.normal();
        std::memcpy(p, reinterpret_cast<const uint8_t*>(&v) + 2, 2);
        break;
      }
      case TensorType::f16:
        put_half(p, random, 15);
        break;
      case TensorType::mxfp4:  // an exponent; now and then one that counts as zero
        *p = static_cast<uint8_t>(random.below(16) == 0 ? random.below(2) : 120 + random.below(4));
        break;
      case TensorType::iq1_m: {  // a half in the top nibbles of four words
        uint8_t d[2];
        put_half(d, random, 5);
        for (uint32_t i = 0; i < 4; ++i) {
          uint8_t& top = p[49 + 2 * i];
          top = static_cast<uint8_t>((top & 15) | (d[i / 2] >> (i % 2 * 4) & 15) << 4);
        }
        break;
      }
      default:
        break;
    }
  }

  // A random half of magnitude 2^(top - 15) or up to eight times less; now and then subnormal or
  // zero.
  static void put_half(uint8_t* p, Random& random, uint32_t top) {
    const uint32_t exponent = random.below(16) == 0 ? 0 : top - random.below(4);
    const uint32_t bits =
        random.below(64) == 0 ? 0 : random.below(2) << 15 | exponent << 10 | random.below(1024);
    p[0] = static_cast<uint8_t>(bits);
    p[1] = static_cast<uint8_t>(bits >> 8);
  }

  std::vector<uint8_t> bytes;
  WeightView view;
};

}  // namespace kvasir::test
