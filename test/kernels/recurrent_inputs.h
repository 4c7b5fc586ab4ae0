// Random inputs of the recurrent kernels.
#pragma once

#include <algorithm>
#include <utility>

#include "support.h"

namespace kvasir::test {

inline void fill_normal(Guarded<float>& a, Random& random, float scale = 1) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal() * scale;
}

// A convolution of n tokens with its state.
struct ConvolutionInputs {
  ConvolutionInputs(Random& random, uint32_t n_, uint32_t taps, uint32_t channels, bool biased)
      : x(std::size_t{n_} * channels), weights(std::size_t{taps} * channels), bias(channels),
        from((taps - 1) * channels), to((taps - 1) * channels), y(std::size_t{n_} * channels) {
    for (Guarded<float>* a : {&x, &weights, &bias, &from}) fill_normal(*a, random);
    c = {n_,          taps,      channels, x.data(), weights.data(), biased ? bias.data() : nullptr,
         from.data(), to.data(), y.data(), biased};
  }
  bool intact() const { return to.guards_intact() && y.guards_intact(); }

  Guarded<float> x, weights, bias, from, to, y;
  Convolution c;
};

// A head of n tokens: keys of length 1, decays below 1.
struct StateInputs {
  StateInputs(Random& random, uint32_t n, uint32_t keys, uint32_t values, bool corrects)
      : k(n * stride(keys)), q(n * stride(keys)), v(n * stride(values)), decay(n * 3), rate(n * 3),
        from(std::size_t{state_panels(values)} * keys * state_panel), to(from.size()),
        out(n * stride(values)) {
    fill_normal(k, random, 1 / std::sqrt(static_cast<float>(keys)));
    for (Guarded<float>* a : {&q, &v}) fill_normal(*a, random);
    for (std::size_t i = 0; i < decay.size(); ++i)
      decay[i] = random.uniform(0.5f, 1), rate[i] = random.uniform(0, 1);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const std::size_t column = i / state_panel / keys * state_panel + i % state_panel;
      from[i] = column < values ? random.normal() : 0;  // padding is zero
    }
    s.n = n, s.keys = keys, s.values = values, s.corrects = corrects;
    s.from = from.data(), s.to = to.data(), s.k = k.data(), s.q = q.data(), s.v = v.data();
    s.decay = decay.data(), s.rate = rate.data(), s.out = out.data();
    s.key_stride = stride(keys), s.value_stride = s.out_stride = stride(values), s.rate_stride = 3;
  }
  static std::size_t stride(uint32_t cols) { return cols + 5; }
  uint32_t panels() const { return state_panels(s.values); }
  bool intact() const { return to.guards_intact() && out.guards_intact(); }
  // Number `row`, `column` of the state after the step.
  float at(std::size_t row, std::size_t column) const {
    return to[(column / state_panel * s.keys + row) * state_panel + column % state_panel];
  }

  Guarded<float> k, q, v, decay, rate, from, to, out;
  StateStep s;
};

}  // namespace kvasir::test
