// Matrix products in scalar double precision, and the meaning of each weight format, one weight at
// a time.
#include <cmath>
#include <cstring>
#include <vector>

#include "../codebooks.h"
#include "reference.h"

namespace kvasir::reference {
namespace {

using Bytes = const uint8_t*;

double half(Bytes p) {
  const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                           : exponent == 31 ? (fraction ? NAN : INFINITY)
                                            : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

int nibble(Bytes p, uint32_t i) {  // blocks of 32: the low nibbles first, then the high ones
  return i < 16 ? p[i] & 15 : p[i - 16] >> 4;
}

int bit(Bytes p, uint32_t i) { return p[i / 8] >> (i % 8) & 1; }

// Twice the number of a sign, two exponent bits and a mantissa bit.
int e2m1_doubled(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const int magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return code & 8 ? -magnitude : magnitude;
}

// Weight i of a block of 32.
double q8_0(Bytes p, uint32_t i) { return half(p) * static_cast<int8_t>(p[2 + i]); }
double q4_0(Bytes p, uint32_t i) { return half(p) * (nibble(p + 2, i) - 8); }
double q4_1(Bytes p, uint32_t i) { return half(p) * nibble(p + 4, i) + half(p + 2); }
double q5_0(Bytes p, uint32_t i) { return half(p) * (nibble(p + 6, i) + 16 * bit(p + 2, i) - 16); }
double q5_1(Bytes p, uint32_t i) {
  return half(p) * (nibble(p + 8, i) + 16 * bit(p + 4, i)) + half(p + 2);
}
constexpr int iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
double iq4_nl(Bytes p, uint32_t i) { return half(p) * iq4_values[nibble(p + 2, i)]; }
double mxfp4(Bytes p, uint32_t i) {  // scales under 2^-126 count as zero
  return p[0] < 2 ? 0 : std::ldexp(e2m1_doubled(nibble(p + 1, i)), p[0] - 128);
}

// Weight i of a block of 256.
double q2_k(Bytes p, uint32_t i) {
  const int q = p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3, scales = p[i / 16];
  return half(p + 80) * (scales & 15) * q - half(p + 82) * (scales >> 4);
}

double q3_k(Bytes p, uint32_t i) {
  const int q = p[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
  const int high = p[i % 32] >> (i / 32) & 1;
  const uint32_t s = i / 16;
  const int low = s < 8 ? p[96 + s] & 15 : p[96 + s - 8] >> 4,
            top = p[104 + s % 4] >> (s / 4 * 2) & 3;
  return half(p + 108) * (low + 16 * top - 32) * (q + 4 * high - 4);
}

// Scale and offset of run s (of 32 weights) of Q4_K and Q5_K: six bits each, packed in twelve
// bytes.
void scale_k4(Bytes packed, uint32_t s, int* scale, int* offset) {
  if (s < 4) {
    *scale = packed[s] & 63;
    *offset = packed[s + 4] & 63;
  } else {
    *scale = (packed[s + 4] & 15) + 16 * (packed[s - 4] >> 6);
    *offset = (packed[s + 4] >> 4) + 16 * (packed[s] >> 6);
  }
}

double q4_k(Bytes p, uint32_t i) {
  const uint32_t run = i / 32;
  const int byte = p[16 + run / 2 * 32 + i % 32], q = run % 2 ? byte >> 4 : byte & 15;
  int scale, offset;
  scale_k4(p + 4, run, &scale, &offset);
  return half(p) * scale * q - half(p + 2) * offset;
}

double q5_k(Bytes p, uint32_t i) {
  const uint32_t run = i / 32;
  const int byte = p[48 + run / 2 * 32 + i % 32], q = run % 2 ? byte >> 4 : byte & 15;
  const int high = p[16 + i % 32] >> run & 1;
  int scale, offset;
  scale_k4(p + 4, run, &scale, &offset);
  return half(p) * scale * (q + 16 * high) - half(p + 2) * offset;
}

double q6_k(Bytes p, uint32_t i) {
  const uint32_t part = i / 128, quarter = i % 128 / 32, l = i % 32;
  const int byte = p[part * 64 + quarter % 2 * 32 + l], low = quarter < 2 ? byte & 15 : byte >> 4;
  const int high = p[128 + part * 32 + l] >> (quarter * 2) & 3;
  return half(p + 208) * static_cast<int8_t>(p[192 + i / 16]) * (low + 16 * high - 32);
}

double iq4_xs(Bytes p, uint32_t i) {
  const uint32_t b = i / 32;
  const int low = p[4 + b / 2] >> (b % 2 * 4) & 15, high = (p[2] | p[3] << 8) >> (2 * b) & 3;
  return half(p) * (low + 16 * high - 32) * iq4_values[nibble(p + 8 + 16 * b, i % 32)];
}

// Number k of codeword i: of eight, of 2 bits each; of four, of 4 bits each.
int of_8(const char* book, const int8_t* levels, uint32_t i, uint32_t k) {
  return levels[codeword(book, i) >> (2 * k) & 3];
}
int of_4(const char* book, const int8_t* levels, uint32_t i, uint32_t k) {
  return levels[codeword(book, i) >> (4 * k) & 15];
}

// Sign k of eight: those of seven bits, and one that makes the number of minus signs even.
int even_sign(uint32_t bits, uint32_t k) {
  if (k < 7) return bits >> k & 1 ? -1 : 1;
  int sign = 1;
  for (uint32_t i = 0; i < 7; ++i)
    if (bits >> i & 1) sign = -sign;
  return sign;
}

uint32_t word16(Bytes p) { return p[0] | static_cast<uint32_t>(p[1]) << 8; }
uint32_t word32(Bytes p) { return word16(p) | word16(p + 2) << 16; }

// IQ2_XXS: index l of block b is its byte l; then signs and scale.
double iq2_xxs(Bytes p, uint32_t i) {
  const uint32_t b = i / 32, l = i % 32 / 8, k = i % 8;
  const Bytes q = p + 2 + 8 * b;
  const uint32_t aux = word32(q + 4);
  return half(p) * (0.5 + (aux >> 28)) * 0.25 * of_8(iq2_xxs_codes, iq2_levels, q[l], k) *
         even_sign(aux >> (7 * l) & 127, k);
}

// IQ2_XS and IQ2_S: a nibble per 16 weights.
double scale_iq2(Bytes p, Bytes scales, uint32_t i) {
  return half(p) * (0.5 + (scales[i / 32] >> (i % 32 / 16 * 4) & 15)) * 0.25;
}
double iq2_xs(Bytes p, uint32_t i) {
  const uint32_t q = word16(p + 2 + i / 8 * 2), k = i % 8;
  return scale_iq2(p, p + 66, i) * of_8(iq2_xs_codes, iq2_levels, q & 511, k) *
         even_sign(q >> 9, k);
}
double iq2_s(Bytes p, uint32_t i) {
  const uint32_t high = p[66 + i / 32] >> (i % 32 / 8 * 2) & 3;
  const int number = of_8(iq2_s_codes, iq2_levels, p[2 + i / 8] | high << 8, i % 8);
  return scale_iq2(p, p + 74, i) * (bit(p + 34, i) ? -number : number);
}

double iq3_xxs(Bytes p, uint32_t i) {
  const uint32_t aux = word32(p + 66 + i / 32 * 4);
  return half(p) * (0.5 + (aux >> 28)) * 0.5 *
         of_4(iq3_xxs_codes, iq3_xxs_levels, p[2 + i / 4], i % 4) *
         even_sign(aux >> (i % 32 / 8 * 7) & 127, i % 8);
}

double iq3_s(Bytes p, uint32_t i) {
  const auto high = static_cast<uint32_t>(bit(p + 66, i / 4));
  const int number = of_4(iq3_s_codes, iq3_s_levels, p[2 + i / 4] | high << 8, i % 4);
  const int scale = p[106 + i / 64] >> (i % 64 / 32 * 4) & 15;
  return half(p) * (1 + 2 * scale) * (bit(p + 74, i) ? -number : number);
}

double iq1_s(Bytes p, uint32_t i) {
  const uint32_t h = word16(p + 34 + i / 32 * 2), high = h >> (i % 32 / 8 * 3) & 7;
  const int number = of_8(iq1_codes, iq1_levels, p[2 + i / 8] | high << 8, i % 8);
  return half(p) * (2 * (h >> 12 & 7) + 1) * (number + (h >> 15 ? -0.125 : 0.125));
}

double iq1_m(Bytes p, uint32_t i) {
  uint8_t d[2] = {};
  for (uint32_t k = 0; k < 4; ++k)
    d[k / 2] = static_cast<uint8_t>(d[k / 2] | (p[49 + 2 * k] >> 4) << (k % 2 * 4));
  const uint32_t h = p[32 + i / 16] >> (i % 16 / 8 * 4) & 15;
  const int number = of_8(iq1_codes, iq1_levels, p[i / 8] | (h & 7) << 8, i % 8);
  const uint32_t scale = word16(p + 48 + i / 64 * 2) >> (i % 64 / 16 * 3) & 7;
  return half(d) * (2 * scale + 1) * (number + (h & 8 ? -0.125 : 0.125));
}

// A digit in base 3 of byte / 256; digit 0 is the first one after the point.
int ternary(int byte, uint32_t digit) {
  for (uint32_t k = 0; k < digit; ++k) byte = byte * 3 & 255;
  return byte * 3 >> 8;
}
double tq1_0(Bytes p, uint32_t i) {
  const int digit = i < 160   ? ternary(p[i % 32], i / 32)
                    : i < 240 ? ternary(p[32 + i % 16], (i - 160) / 16)
                              : ternary(p[48 + i % 4], (i - 240) / 4);
  return half(p + 52) * (digit - 1);
}
double tq2_0(Bytes p, uint32_t i) {
  return half(p + 64) * ((p[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) - 1);
}

// A block of 64: scales of four exponent bits and three mantissa bits, 0x7f counts as zero.
double nvfp4(Bytes p, uint32_t i) {
  const int s = p[i / 16], exponent = s >> 3 & 15, mantissa = s & 7;
  const double scale = s == 0x7f       ? 0
                       : exponent == 0 ? std::ldexp(mantissa, -9)
                                       : std::ldexp(8 + mantissa, exponent - 10);
  const int byte = p[4 + i / 16 * 8 + i % 8];
  return scale * e2m1_doubled(i % 16 < 8 ? byte & 15 : byte >> 4) / 2;
}

double f32(Bytes p, uint32_t) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return double{value};
}

double f16(Bytes p, uint32_t) { return half(p); }

double bf16(Bytes p, uint32_t) {
  const uint32_t bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return double{value};
}

struct Format {
  uint32_t block, bytes;
  double (*weight)(Bytes, uint32_t);
};

Format format(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return {1, 4, f32};
    case TensorType::f16:
      return {1, 2, f16};
    case TensorType::bf16:
      return {1, 2, bf16};
    case TensorType::q8_0:
      return {32, 34, q8_0};
    case TensorType::q4_0:
      return {32, 18, q4_0};
    case TensorType::q4_1:
      return {32, 20, q4_1};
    case TensorType::q5_0:
      return {32, 22, q5_0};
    case TensorType::q5_1:
      return {32, 24, q5_1};
    case TensorType::iq4_nl:
      return {32, 18, iq4_nl};
    case TensorType::iq4_xs:
      return {256, 136, iq4_xs};
    case TensorType::mxfp4:
      return {32, 17, mxfp4};
    case TensorType::nvfp4:
      return {64, 36, nvfp4};
    case TensorType::iq3_s:
      return {256, 110, iq3_s};
    case TensorType::iq3_xxs:
      return {256, 98, iq3_xxs};
    case TensorType::iq2_s:
      return {256, 82, iq2_s};
    case TensorType::iq2_xs:
      return {256, 74, iq2_xs};
    case TensorType::iq2_xxs:
      return {256, 66, iq2_xxs};
    case TensorType::iq1_s:
      return {256, 50, iq1_s};
    case TensorType::iq1_m:
      return {256, 56, iq1_m};
    case TensorType::tq1_0:
      return {256, 54, tq1_0};
    case TensorType::tq2_0:
      return {256, 66, tq2_0};
    case TensorType::q2_k:
      return {256, 84, q2_k};
    case TensorType::q3_k:
      return {256, 110, q3_k};
    case TensorType::q4_k:
      return {256, 144, q4_k};
    case TensorType::q5_k:
      return {256, 176, q5_k};
    case TensorType::q6_k:
      return {256, 210, q6_k};
  }
  return {};
}

}  // namespace

void dequantize_row(const WeightView& w, uint32_t row, double* out) {
  const Format f = format(w.type);
  const Bytes p = reinterpret_cast<Bytes>(w.data) + row * w.row_bytes;
  for (uint32_t c = 0; c < w.cols; ++c)
    out[c] = double{w.scale} * f.weight(p + std::size_t{c / f.block} * f.bytes, c % f.block);
}

void matmul(const WeightView& w, const Activations& x, double* y, std::size_t y_stride) {
  const bool is_quantized = format(w.type).block != 1;
  std::vector<double> weights(w.cols);
  for (uint32_t r = 0; r < w.rows; ++r) {
    dequantize_row(w, r, weights.data());
    for (std::size_t i = 0; i < x.n; ++i) {
      double sum = 0;
      for (std::size_t c = 0; c < w.cols; ++c) {
        const std::size_t at = i * x.cols + c;
        sum += weights[c] * (is_quantized ? double{x.scale[at / 32]} * x.q[at] : double{x.f32[at]});
      }
      y[i * y_stride + r] = sum;
    }
  }
}

}  // namespace kvasir::reference
