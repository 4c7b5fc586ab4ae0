// Encoders of one block per format, with its layout. See encode_weights.h.
#include "encode_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>

namespace kvasir {
namespace {

uint8_t byte_of(int value) { return static_cast<uint8_t>(value); }

// To half precision, ties to even.
uint16_t to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const float magnitude = std::fabs(x);
  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits
  if (magnitude < 0x1p-14f) {
    return static_cast<uint16_t>(
        sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f)));
  }
  uint32_t m = bits & 0x7fffffff;
  m += 0xfff + ((m >> 13) & 1);
  return static_cast<uint16_t>(sign | ((m >> 13) - (112u << 10)));
}

float from_f16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31;
  const uint32_t mantissa = h & 0x3ff;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::bit_cast<float>((exponent + 112) << 23 | mantissa << 13);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

// To bfloat16, ties to even.
uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void store_u16(uint16_t value, std::byte* out) { std::memcpy(out, &value, 2); }

// Stores a scale in half precision and returns the rounded value.
float store_scale(float scale, std::byte* out) {
  const uint16_t h = to_f16(scale);
  store_u16(h, out);
  return from_f16(h);
}

// round(x / scale) within [low, high]; 0 if the scale is 0.
int quantum(float x, float scale, int low, int high) {
  if (scale == 0) return 0;
  return std::clamp(static_cast<int>(std::lrint(x / scale)), low, high);
}

// The element of largest magnitude, with its sign.
float largest(const float* x, int n) {
  return *std::max_element(x, x + n, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

// f16 scale, int8 [32]
void encode_q8_0(const float* x, std::byte* out) {
  const float scale = store_scale(std::fabs(largest(x, 32)) / 127, out);
  for (int i = 0; i < 32; ++i) out[2 + i] = static_cast<std::byte>(quantum(x[i], scale, -127, 127));
}

// f16 scale, then element i in the low and i + 16 in the high half of byte i, both with 8 added
void encode_q4_0(const float* x, std::byte* out) {
  // -8 has no positive counterpart: the largest magnitude uses it
  const float scale = store_scale(largest(x, 32) / -8, out);
  for (int i = 0; i < 16; ++i) {
    const int low = quantum(x[i], scale, -8, 7) + 8;
    const int high = quantum(x[i + 16], scale, -8, 7) + 8;
    out[2 + i] = std::byte{byte_of(low | high << 4)};
  }
}

// Eight blocks of 32 with a 6-bit scale s and minimum m each: value = d * s * q - dmin * m, q in
// [0, 15].
//   f16 d, f16 dmin, 12 bytes of s and m, 4 x 32 bytes: block 2c in the low halves, block 2c + 1 in
//   the high ones
void encode_q4_k(const float* x, std::byte* out) {
  float scale[8], minimum[8];
  for (int b = 0; b < 8; ++b) {
    const auto [low, high] = std::minmax_element(x + 32 * b, x + 32 * b + 32);
    minimum[b] = std::max(0.0f, -*low);
    scale[b] = std::max(0.0f, *high + minimum[b]) / 15;
  }
  const float d = store_scale(*std::max_element(scale, scale + 8) / 63, out);
  const float dmin = store_scale(*std::max_element(minimum, minimum + 8) / 63, out + 2);
  int s[8], m[8];
  for (int b = 0; b < 8; ++b) {
    s[b] = quantum(scale[b], d, 0, 63);
    m[b] = quantum(minimum[b], dmin, 0, 63);
  }
  for (int b = 0; b < 4; ++b) {
    out[4 + b] = std::byte{byte_of(s[b] | (s[b + 4] >> 4) << 6)};
    out[8 + b] = std::byte{byte_of(m[b] | (m[b + 4] >> 4) << 6)};
    out[12 + b] = std::byte{byte_of((s[b + 4] & 15) | (m[b + 4] & 15) << 4)};
  }
  for (int i = 0; i < 128; ++i) {
    const int b = i / 32 * 2;
    const auto q = [&](int block) {
      const float shifted = x[32 * block + i % 32] + dmin * static_cast<float>(m[block]);
      return quantum(shifted, d * static_cast<float>(s[block]), 0, 15);
    };
    out[16 + i] = std::byte{byte_of(q(b) | q(b + 1) << 4)};
  }
}

// Sixteen blocks of 16 with an 8-bit scale s each: value = d * s * (q - 32), q in [0, 63].
//   low 4 bits [128], high 2 bits [64], int8 s [16], f16 d; each half of 128 elements has four
//   columns of 32
void encode_q6_k(const float* x, std::byte* out) {
  float scale[16];
  for (int b = 0; b < 16; ++b) scale[b] = largest(x + 16 * b, 16) / -32;
  const float d = store_scale(std::fabs(largest(scale, 16)) / 127, out + 208);
  int s[16];
  for (int b = 0; b < 16; ++b) {
    s[b] = quantum(scale[b], d, -127, 127);
    out[192 + b] = static_cast<std::byte>(s[b]);
  }
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 32; ++i) {
      int q[4];  // one of each column
      for (int c = 0; c < 4; ++c) {
        const int at = 128 * half + 32 * c + i;
        q[c] = quantum(x[at], d * static_cast<float>(s[at / 16]), -32, 31) + 32;
      }
      out[64 * half + i] = std::byte{byte_of((q[0] & 15) | (q[2] & 15) << 4)};
      out[64 * half + 32 + i] = std::byte{byte_of((q[1] & 15) | (q[3] & 15) << 4)};
      out[128 + 32 * half + i] =
          std::byte{byte_of(q[0] >> 4 | (q[1] >> 4) << 2 | (q[2] >> 4) << 4 | (q[3] >> 4) << 6)};
    }
  }
}

// The code of the nearest number of two exponent bits and one mantissa bit to x / scale; a code
// stands for twice its number.
int e2m1_code(float x, float scale) {
  constexpr float middles[] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10};
  if (scale == 0) return 0;
  const float magnitude = std::fabs(x / scale);
  const auto code = std::upper_bound(std::begin(middles), std::end(middles), magnitude);
  return static_cast<int>(code - middles) | (x < 0 ? 8 : 0);
}

// exponent e of the scale 2^(e - 128), then codes as in Q4_0
void encode_mxfp4(const float* x, std::byte* out) {
  const float top = std::fabs(largest(x, 32));
  const int e = top > 0 ? std::max(0, std::ilogb(top) - 2 + 127) : 0;
  out[0] = std::byte{byte_of(e)};
  const float scale = std::ldexp(1.0f, e - 128);
  for (int i = 0; i < 16; ++i)
    out[1 + i] = std::byte{byte_of(e2m1_code(x[i], scale) | e2m1_code(x[i + 16], scale) << 4)};
}

// To an unsigned number of four exponent bits and three mantissa bits, at most 448.
uint8_t to_ue4m3(float x) {
  if (x < 0x1p-6f) return byte_of(static_cast<int>(std::lrint(x * 0x1p9f)));
  const int exponent = std::ilogb(x);
  const auto code = static_cast<int>(std::lrint(std::ldexp(x, 3 - exponent)));  // 8 to 16
  return byte_of(std::min((exponent + 6) * 8 + code, 0x7e));
}

float from_ue4m3(uint8_t code) {
  const int exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

// four scales of 16 numbers each; then 8 bytes for each 16, with number i in the low and i + 8 in
// the high half of byte i
void encode_nvfp4(const float* x, std::byte* out) {
  for (int b = 0; b < 4; ++b) {
    const float* from = x + 16 * b;
    const uint8_t code = to_ue4m3(std::fabs(largest(from, 16)) / 6);
    out[b] = std::byte{code};
    const float scale = from_ue4m3(code) / 2;
    for (int i = 0; i < 8; ++i)
      out[4 + 8 * b + i] =
          std::byte{byte_of(e2m1_code(from[i], scale) | e2m1_code(from[i + 8], scale) << 4)};
  }
}

// The index of the nearest of IQ4's numbers to x / scale.
int iq4_code(float x, float scale) {
  constexpr float numbers[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
  if (scale == 0) return 0;
  const auto nearer = [&](float a, float b) {
    return std::fabs(a - x / scale) < std::fabs(b - x / scale);
  };
  return static_cast<int>(std::min_element(std::begin(numbers), std::end(numbers), nearer) -
                          numbers);
}

// Eight blocks of 32 with a 6-bit scale s each: value = d * (s - 32) * number.
//   f16 d, high pairs of s, low nibbles of s [4], 8 x 16 codes as in Q4_0
void encode_iq4_xs(const float* x, std::byte* out) {
  float scale[8];
  for (int b = 0; b < 8; ++b) scale[b] = largest(x + 32 * b, 32) / -127;
  const float d = store_scale(largest(scale, 8) / -32, out);
  uint16_t high = 0;
  for (int b = 0; b < 8; ++b) {
    const int s = quantum(scale[b], d, -32, 31) + 32;
    high = static_cast<uint16_t>(high | (s >> 4) << (2 * b));
    std::byte& low = out[4 + b / 2];
    low = std::byte{byte_of((b % 2 ? std::to_integer<int>(low) : 0) | (s & 15) << (b % 2 * 4))};
    const float unit = d * static_cast<float>(s - 32);
    const float* from = x + 32 * b;
    for (int i = 0; i < 16; ++i)
      out[8 + 16 * b + i] =
          std::byte{byte_of(iq4_code(from[i], unit) | iq4_code(from[i + 16], unit) << 4)};
  }
  store_u16(high, out + 2);
}

// ---- formats of codebooks: random codes in place of the nearest, which a search would find

// rms: of the weights of random bytes with d = 1.
struct RandomBlock {
  TensorType type;
  std::size_t bytes, d_at;
  float rms;
};

void store_iq1_m_scale(uint16_t d, std::byte* scales) {  // in the top nibbles of four words
  for (int i = 0; i < 4; ++i) {
    std::byte& top = scales[2 * i + 1];
    top = (top & std::byte{15}) | std::byte{byte_of((d >> (4 * i) & 15) << 4)};
  }
}

void random_block(const RandomBlock& block, const float* x, std::byte* out) {
  double squares = 0;
  uint64_t state = 0;
  for (int i = 0; i < 256; ++i) {
    squares += double{x[i]} * double{x[i]};
    state = (state ^ std::bit_cast<uint32_t>(x[i])) * 0x9e3779b97f4a7c15u;
  }
  for (std::size_t i = 0; i < block.bytes; ++i) {  // SplitMix64
    uint64_t bits = state += 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    out[i] = static_cast<std::byte>(bits >> 56);
  }
  const uint16_t d = to_f16(static_cast<float>(std::sqrt(squares / 256)) / block.rms);
  if (block.type == TensorType::tq2_0)  // codes 0 to 2 only
    for (std::size_t i = 0; i < 64; ++i) out[i] &= ~((out[i] & out[i] >> 1 & std::byte{0x55}) << 1);
  if (block.type == TensorType::iq1_m) store_iq1_m_scale(d, out + block.d_at);
  else store_u16(d, out + block.d_at);
}

constexpr RandomBlock random_blocks[] = {
    {TensorType::iq2_xxs, 66, 0, 53.5f}, {TensorType::iq2_xs, 74, 0, 55.7f},
    {TensorType::iq2_s, 82, 0, 56.4f},   {TensorType::iq3_xxs, 98, 0, 143.5f},
    {TensorType::iq3_s, 110, 0, 140},    {TensorType::iq1_s, 50, 0, 7.18f},
    {TensorType::iq1_m, 56, 48, 7.21f},  {TensorType::tq1_0, 54, 52, 0.817f},
    {TensorType::tq2_0, 66, 64, 0.707f}};

const RandomBlock* random_block_of(TensorType type) {
  const auto* at = std::find_if(std::begin(random_blocks), std::end(random_blocks),
                                [&](const RandomBlock& block) { return block.type == type; });
  return at == std::end(random_blocks) ? nullptr : at;
}

void encode_f32(const float* x, std::byte* out) { std::memcpy(out, x, 4); }
void encode_f16(const float* x, std::byte* out) { store_u16(to_f16(*x), out); }
void encode_bf16(const float* x, std::byte* out) { store_u16(to_bf16(*x), out); }

using EncodeBlock = void (*)(const float* x, std::byte* out);

EncodeBlock encoder(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return encode_f32;
    case TensorType::f16:
      return encode_f16;
    case TensorType::bf16:
      return encode_bf16;
    case TensorType::q8_0:
      return encode_q8_0;
    case TensorType::q4_0:
      return encode_q4_0;
    case TensorType::q4_k:
      return encode_q4_k;
    case TensorType::q6_k:
      return encode_q6_k;
    case TensorType::iq4_xs:
      return encode_iq4_xs;
    case TensorType::mxfp4:
      return encode_mxfp4;
    case TensorType::nvfp4:
      return encode_nvfp4;
    default:
      return nullptr;
  }
}

}  // namespace

bool can_encode(TensorType type) { return encoder(type) || random_block_of(type); }

void encode_weights(TensorType type, const float* x, std::size_t n, std::byte* out) {
  const TensorTypeInfo* info = tensor_type_info(type);
  const EncodeBlock encode = encoder(type);
  const RandomBlock* random = random_block_of(type);
  for (std::size_t i = 0; i < n; i += info->block_elements, out += info->block_bytes) {
    if (encode) encode(x + i, out);
    else random_block(*random, x + i, out);
  }
}

}  // namespace kvasir
