// The elementwise operations for every instruction set: loops over sixteen lanes that compilers
// vectorise, and vector types of the compiler where they do not. There are no fused operations and
// the lanes' order is fixed, so every instruction set gives the same bits. Included by one file per
// instruction set; everything here has internal linkage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

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

// Registers of floats, and of their integers and bytes.
#if defined(__AVX512F__)
constexpr std::size_t register_lanes = 16;
#elif defined(__AVX2__)
constexpr std::size_t register_lanes = 8;
#else
constexpr std::size_t register_lanes = 4;
#endif
constexpr std::size_t registers = lanes / register_lanes;
typedef float FloatRegister __attribute__((vector_size(4 * register_lanes)));
typedef uint32_t BitsRegister __attribute__((vector_size(4 * register_lanes)));
typedef int32_t IntRegister __attribute__((vector_size(4 * register_lanes)));
typedef int8_t AllBytes __attribute__((vector_size(4 * register_lanes)));
typedef int8_t LowBytes __attribute__((vector_size(register_lanes)));
// As it lies in memory. A copy by memcpy would go through the stack.
typedef float UnalignedFloats
    __attribute__((vector_size(4 * register_lanes), aligned(4), may_alias));

// At most a register from `n` floats on, and back.
inline FloatRegister load_register(const float* p, std::size_t n = register_lanes) {
  if (n >= register_lanes) return *reinterpret_cast<const UnalignedFloats*>(p);
  FloatRegister v = {};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
inline void store_register(float* p, FloatRegister v, std::size_t n = register_lanes) {
  if (n >= register_lanes) *reinterpret_cast<UnalignedFloats*>(p) = v;
  else std::memcpy(p, &v, n * sizeof(float));
}

template <std::size_t distance, class V, std::size_t... i>
[[gnu::always_inline]] inline V rotate_lanes(V v, std::index_sequence<i...>) {
  return __builtin_shufflevector(v, v, ((i + distance) % sizeof...(i))...);
}
template <std::size_t... i>
[[gnu::always_inline]] inline LowBytes low_bytes(IntRegister v, std::index_sequence<i...>) {
  const auto bytes = (AllBytes)v;
  return __builtin_shufflevector(bytes, bytes, (4 * i)...);
}
constexpr auto all_lanes = std::make_index_sequence<register_lanes>();

// f of sixteen lanes, by halving.
template <std::size_t half = register_lanes / 2, class V, class F>
[[gnu::always_inline]] inline auto fold_register(V v, F f) {
  if constexpr (half == 0) return v[0];
  else return fold_register<half / 2>(f(v, rotate_lanes<half>(v, all_lanes)), f);
}
template <class V, class F>
[[gnu::always_inline]] inline auto fold_lanes(V (&v)[registers], F f) {
  for (std::size_t half = registers / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) v[i] = f(v[i], v[i + half]);
  return fold_register(v[0], f);
}

// Below this a block counts as zero: 127 / amax must stay finite.
constexpr float smallest_amax = 0x1p-100f;

// One block of 32: q = round(x * 127 / amax), ties to even. NaNs become -127, so that |q| <= 127
// always. Compilers do not vectorise it as a loop.
inline void quantize_block(const float* __restrict x, int8_t* __restrict q, float* scale,
                           int16_t* sums) {
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  const auto absolute = [](FloatRegister v) { return (FloatRegister)((IntRegister)v & INT32_MAX); };
  FloatRegister v[2 * registers], top[registers];
  for (std::size_t i = 0; i < 2 * registers; ++i) v[i] = load_register(x + i * register_lanes);
  for (std::size_t i = 0; i < registers; ++i)
    top[i] = larger(absolute(v[i]), absolute(v[i + registers]));
  const float amax = fold_lanes(top, larger);
  const float inverse = amax > smallest_amax ? 127.0f / amax : 0.0f;
  *scale = amax > smallest_amax ? amax / 127.0f : 0.0f;
  const FloatRegister most = FloatRegister{} + 127.0f;
  for (std::size_t h = 0; h < 2; ++h) {
    IntRegister value[registers];
    for (std::size_t i = 0; i < registers; ++i) {
      FloatRegister f = v[h * registers + i] * inverse;
      f = f > -most ? f : -most;
      f = f < most ? f : most;
      // Adding 1.5 * 2^23 leaves the rounded value in the low bits of the float.
      value[i] = (IntRegister)(f + 12582912.0f) - 0x4b400000;
      const LowBytes bytes = low_bytes(value[i], all_lanes);
      std::memcpy(q + h * lanes + i * register_lanes, &bytes, sizeof bytes);
    }
    sums[h] = static_cast<int16_t>(fold_lanes(value, [](auto a, auto b) { return a + b; }));
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
[[gnu::always_inline]] inline FloatRegister exp_clamped(FloatRegister x) {
  const FloatRegister lowest = FloatRegister{} - 87.0f, highest = FloatRegister{} + 88.0f;
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const FloatRegister shifted = x * 1.44269504088896341f + magic;
  const FloatRegister n = shifted - magic;
  const FloatRegister r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  FloatRegister p = FloatRegister{} + 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = (p * r) * r + r;
  p = p + 1.0f;
  // multiplies by 2^n: the bits of `magic` itself shift out
  return (FloatRegister)((BitsRegister)p + ((BitsRegister)shifted << 23));
}

// Each function of a gate alone.
struct Silu {
  FloatRegister operator()(FloatRegister x) const { return x / (1.0f + exp_clamped(-x)); }
};
struct Gelu {  // by tanh(z) = 2 / (1 + e^-2z) - 1
  FloatRegister operator()(FloatRegister x) const {
    return x / (1.0f + exp_clamped(-1.59576912160573071f * (x + 0.044715f * x * x * x)));
  }
};
struct ReluSquared {
  FloatRegister operator()(FloatRegister x) const {
    const FloatRegister zero = {}, positive = x < zero ? zero : x;  // a NaN stays one
    return positive * positive;
  }
};
// Of a gate and what it multiplies.
struct ClampedSilu {
  FloatRegister operator()(FloatRegister gate, FloatRegister up) const {
    const FloatRegister most = FloatRegister{} + 7.0f, g = gate > most ? most : gate;
    FloatRegister u = up > most ? most : up;
    u = u < -most ? -most : u;
    return g / (1.0f + exp_clamped(-1.702f * g)) * (u + 1.0f);
  }
};

// x[i] = f(x[i]), f(x[i], y[i])
template <class F>
[[gnu::always_inline]] inline void for_all(float* x, std::size_t n, F f) {
  for (std::size_t i = 0; i < n; i += register_lanes)
    store_register(x + i, f(load_register(x + i, n - i)), n - i);
}
template <class F>
[[gnu::always_inline]] inline void for_all(float* x, const float* y, std::size_t n, F f) {
  for (std::size_t i = 0; i < n; i += register_lanes)
    store_register(x + i, f(load_register(x + i, n - i), load_register(y + i, n - i)), n - i);
}

template <class F>
void activate_by(F f, float* gate, const float* up, std::size_t n) {
  if (up) for_all(gate, up, n, [f](FloatRegister g, FloatRegister u) { return f(g) * u; });
  else for_all(gate, n, f);
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
      return for_all(gate, up, n, ClampedSilu());
  }
}

void softcap(float* x, float cap, std::size_t n) {
  for_all(x, n, [cap](FloatRegister v) {
    return cap * (1.0f - 2.0f / (1.0f + exp_clamped(2.0f * (v / cap))));
  });
}

void add(float* __restrict x, const float* __restrict y, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] += y[i];
}

void sigmoid_gate(float* x, const float* gate, std::size_t n) {
  for_all(x, gate, n,
          [](FloatRegister v, FloatRegister g) { return v * (1.0f / (1.0f + exp_clamped(-g))); });
}

// y = sum of taps, of one token. rows[i]: the inputs of tap i.
inline void convolve_token(const Convolution& c, const float* const* rows, float* __restrict y,
                           uint32_t begin, uint32_t end) {
  for (uint32_t i = begin; i < end; i += register_lanes) {
    const uint32_t n = end - i;
    FloatRegister sum = c.bias ? load_register(c.bias + i, n) : FloatRegister{};
    for (uint32_t tap = 0; tap < c.taps; ++tap)
      sum += load_register(c.weights + std::size_t{tap} * c.channels + i, n) *
             load_register(rows[tap] + i, n);
    store_register(y + i, sum, n);
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
