// The elementwise operations for every instruction set: plain loops over sixteen lanes that
// compilers vectorise. There are no fused operations and the lanes' order is fixed, so every
// instruction set gives the same bits. Included by one file per instruction set; everything here
// has internal linkage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/kernels.h"

namespace kvasir {
namespace {

constexpr std::size_t lanes = 16;

// Sum of sixteen lanes by halving.
inline float sum_lanes(float (&v)[lanes]) {
  for (std::size_t half = lanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) v[j] += v[j + half];
  }
  return v[0];
}

// Below this a block counts as zero: 127 / amax must stay finite.
constexpr float smallest_amax = 0x1p-100f;

// One block of 32: q = round(x * 127 / amax), ties to even. NaNs become -127, so that |q| <= 127
// always.
inline void quantize_block(const float* __restrict x, int8_t* __restrict q, float* scale,
                           int16_t* sums) {
  float top[lanes];
  for (std::size_t j = 0; j < lanes; ++j) {
    const float a = std::fabs(x[j]), b = std::fabs(x[j + lanes]);
    top[j] = a > b ? a : b;
  }
  for (std::size_t half = lanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) top[j] = top[j] > top[j + half] ? top[j] : top[j + half];
  }
  const float amax = top[0];
  const float inverse = amax > smallest_amax ? 127.0f / amax : 0.0f;
  *scale = amax > smallest_amax ? amax / 127.0f : 0.0f;
  for (std::size_t h = 0; h < 2; ++h) {
    int32_t total = 0;
    for (std::size_t j = 0; j < lanes; ++j) {
      // Adding 1.5 * 2^23 leaves the rounded value in the low bits of the float.
      constexpr float magic = 12582912.0f;
      float shifted = x[h * lanes + j] * inverse;
      shifted = shifted > -127.0f ? shifted : -127.0f;
      shifted = (shifted < 127.0f ? shifted : 127.0f) + magic;
      int32_t bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      const int32_t value = bits - 0x4b400000;
      q[h * lanes + j] = static_cast<int8_t>(value);
      total += value;
    }
    sums[h] = static_cast<int16_t>(total);
  }
}

void quantize(const float* x, uint32_t n, uint32_t cols, int8_t* q, float* scale, int16_t* sums) {
  const std::size_t blocks = std::size_t{n} * (cols / 32);
  for (std::size_t b = 0; b < blocks; ++b)
    quantize_block(x + b * 32, q + b * 32, scale + b, sums + b * 2);
}

void rms_norm(const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols,
              float* y) {
  for (uint32_t i = 0; i < n; ++i, x += cols, y += cols) {
    float sum[lanes] = {};
    uint32_t c = 0;
    for (; c + lanes <= cols; c += lanes) {
      for (std::size_t j = 0; j < lanes; ++j) sum[j] += x[c + j] * x[c + j];
    }
    for (std::size_t j = 0; c < cols; ++c, ++j) sum[j] += x[c] * x[c];
    const float factor = 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(cols) + epsilon);
    if (weight) {
      for (c = 0; c < cols; ++c) y[c] = x[c] * factor * weight[c];
    } else {
      for (c = 0; c < cols; ++c) y[c] = x[c] * factor;
    }
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, uint32_t n,
                uint32_t cols, float* y) {
  for (uint32_t i = 0; i < n; ++i, x += cols, y += cols) {
    float sum[lanes] = {}, squares[lanes] = {};
    uint32_t c = 0;
    for (; c + lanes <= cols; c += lanes) {
      for (std::size_t j = 0; j < lanes; ++j) sum[j] += x[c + j];
    }
    for (std::size_t j = 0; c < cols; ++c, ++j) sum[j] += x[c];
    const float mean = sum_lanes(sum) / static_cast<float>(cols);
    for (c = 0; c + lanes <= cols; c += lanes) {
      for (std::size_t j = 0; j < lanes; ++j) squares[j] += (x[c + j] - mean) * (x[c + j] - mean);
    }
    for (std::size_t j = 0; c < cols; ++c, ++j) squares[j] += (x[c] - mean) * (x[c] - mean);
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(cols) + epsilon);
    for (c = 0; c < cols; ++c) {
      const float scaled = (x[c] - mean) * factor * weight[c];
      y[c] = bias ? scaled + bias[c] : scaled;
    }
  }
}

void rope(float* x, uint32_t n_heads, std::size_t stride, uint32_t rotary_dim, const float* cos,
          const float* sin, bool neox) {
  const uint32_t half = rotary_dim / 2;
  for (uint32_t h = 0; h < n_heads; ++h, x += stride) {
    if (neox) {
      float* __restrict low = x;
      float* __restrict high = x + half;
      for (uint32_t i = 0; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a * cos[i] - b * sin[i];
        high[i] = a * sin[i] + b * cos[i];
      }
    } else {
      for (uint32_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = a * sin[i] + b * cos[i];
      }
    }
  }
}

// e^x within two units in the last place for x in [-87, 88]; clamped outside; NaNs stay NaN. e^x =
// 2^n e^r, |r| <= ln(2) / 2, with ln 2 in two parts so that r is exact to the last bit; e^r by its
// Taylor series.
[[gnu::always_inline]] inline float exp_clamped(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float shifted = x * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = (p * r) * r + r;
  p = p + 1.0f;
  uint32_t bits, exponent;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&exponent, &p, sizeof exponent);
  exponent += bits << 23;  // multiplies by 2^n: the bits of `magic` itself shift out
  std::memcpy(&p, &exponent, sizeof p);
  return p;
}

// Each function of a gate alone.
struct Silu {
  float operator()(float x) const { return x / (1.0f + exp_clamped(-x)); }
};
struct Gelu {  // by tanh(z) = 2 / (1 + e^-2z) - 1
  float operator()(float x) const {
    return x / (1.0f + exp_clamped(-1.59576912160573071f * (x + 0.044715f * x * x * x)));
  }
};
struct ReluSquared {
  float operator()(float x) const {
    const float positive = x > 0 ? x : x == x ? 0.0f : x;
    return positive * positive;
  }
};

template <class F>
void activate_by(F f, float* __restrict gate, const float* __restrict up, std::size_t n) {
  if (up) {
    for (std::size_t i = 0; i < n; ++i) gate[i] = f(gate[i]) * up[i];
  } else {
    for (std::size_t i = 0; i < n; ++i) gate[i] = f(gate[i]);
  }
}

void clamped_silu(float* __restrict gate, const float* __restrict up, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const float g = gate[i] > 7.0f ? 7.0f : gate[i];
    float u = up[i] > 7.0f ? 7.0f : up[i];
    u = u < -7.0f ? -7.0f : u;
    gate[i] = g / (1.0f + exp_clamped(-1.702f * g)) * (u + 1.0f);
  }
}

void activate(Activation f, float* gate, const float* up, std::size_t n) {
  switch (f) {
    case Activation::silu:
      return activate_by(Silu(), gate, up, n);
    case Activation::gelu:
      return activate_by(Gelu(), gate, up, n);
    case Activation::relu_squared:
      return activate_by(ReluSquared(), gate, up, n);
    case Activation::clamped_silu:
      return clamped_silu(gate, up, n);
  }
}

void softcap(float* x, float cap, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i)
    x[i] = cap * (1.0f - 2.0f / (1.0f + exp_clamped(2.0f * (x[i] / cap))));
}

void add(float* __restrict x, const float* __restrict y, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] += y[i];
}

void sigmoid_gate(float* __restrict x, const float* __restrict gate, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= 1.0f / (1.0f + exp_clamped(-gate[i]));
}

// y = sum of taps, of one token. rows[i]: the inputs of tap i.
inline void convolve_token(const Convolution& c, const float* const* rows, float* __restrict y,
                           uint32_t begin, uint32_t end) {
  for (uint32_t i = begin; i < end; ++i) y[i] = c.bias ? c.bias[i] : 0.0f;
  for (uint32_t tap = 0; tap < c.taps; ++tap) {
    const float* __restrict w = c.weights + std::size_t{tap} * c.channels;
    const float* __restrict x = rows[tap];
    for (uint32_t i = begin; i < end; ++i) y[i] += w[i] * x[i];
  }
  if (c.silu) activate_by(Silu(), y + begin, nullptr, end - begin);
}

void convolve(const Convolution& c, uint32_t begin, uint32_t end) {
  const uint32_t before = c.taps - 1;
  // The inputs of token t, counted from the oldest that the state has.
  const auto row = [&](uint32_t t) {
    return t < before ? c.from + std::size_t{t} * c.channels
                      : c.x + std::size_t{t - before} * c.channels;
  };
  for (uint32_t t = 0; t < c.n; ++t) {
    const float* rows[max_taps];
    for (uint32_t tap = 0; tap < c.taps; ++tap) rows[tap] = row(t + tap);
    convolve_token(c, rows, c.y + std::size_t{t} * c.channels, begin, end);
  }
  for (uint32_t t = 0; t < before; ++t)
    std::memcpy(c.to + std::size_t{t} * c.channels + begin, row(c.n + t) + begin,
                (end - begin) * sizeof(float));
}

void fill_elementwise(Kernels& k) {
  k.quantize = quantize;
  k.rms_norm = rms_norm;
  k.layer_norm = layer_norm;
  k.rope = rope;
  k.activate = activate;
  k.softcap = softcap;
  k.add = add;
  k.sigmoid_gate = sigmoid_gate;
  k.convolve = convolve;
}

}  // namespace
}  // namespace kvasir
