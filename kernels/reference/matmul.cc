// Matrix products in scalar double precision, and the meaning of each weight format, one weight at
// a time.
#include <cmath>
#include <cstring>
#include <vector>

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

// Weight i of a block of 32.
double q8_0(Bytes p, uint32_t i) { return half(p) * static_cast<int8_t>(p[2 + i]); }
double q4_0(Bytes p, uint32_t i) { return half(p) * (nibble(p + 2, i) - 8); }
double q4_1(Bytes p, uint32_t i) { return half(p) * nibble(p + 4, i) + half(p + 2); }
double q5_0(Bytes p, uint32_t i) { return half(p) * (nibble(p + 6, i) + 16 * bit(p + 2, i) - 16); }
double q5_1(Bytes p, uint32_t i) {
  return half(p) * (nibble(p + 8, i) + 16 * bit(p + 4, i)) + half(p + 2);
}
double iq4_nl(Bytes p, uint32_t i) {
  static constexpr int values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
  return half(p) * values[nibble(p + 2, i)];
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
    out[c] = f.weight(p + std::size_t{c / f.block} * f.bytes, c % f.block);
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
