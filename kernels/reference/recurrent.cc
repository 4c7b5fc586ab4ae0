// The operations of recurrent layers in scalar double precision.
#include <cmath>
#include <vector>

#include "reference.h"

namespace kvasir::reference {

static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void sigmoid_gate(const float* x, const float* gate, std::size_t n, double* y) {
  for (std::size_t i = 0; i < n; ++i) y[i] = double{x[i]} * sigmoid(double{gate[i]});
}

void convolve(const Convolution& c, double* y) {
  const std::size_t channels = c.channels, before = c.taps - 1;
  for (std::size_t t = 0; t < c.n; ++t)
    for (std::size_t i = 0; i < channels; ++i) {
      double sum = c.bias ? double{c.bias[i]} : 0;
      for (std::size_t tap = 0; tap < c.taps; ++tap) {
        const float* x =
            t + tap < before ? c.from + (t + tap) * channels : c.x + (t + tap - before) * channels;
        sum += double{c.weights[tap * channels + i]} * double{x[i]};
      }
      y[t * channels + i] = c.silu ? sum * sigmoid(sum) : sum;
    }
}

static std::size_t in_panels(const StateStep& s, std::size_t row, std::size_t column) {
  return (column / state_panel * s.keys + row) * state_panel + column % state_panel;
}

void advance_state(const StateStep& s, double* state, double* out) {
  const std::size_t keys = s.keys, values = s.values;
  for (std::size_t r = 0; r < keys; ++r)
    for (std::size_t c = 0; c < values; ++c)
      state[r * values + c] = double{s.from[in_panels(s, r, c)]};
  for (std::size_t t = 0; t < s.n; ++t) {
    const float *k = s.k + t * s.key_stride, *q = s.q + t * s.key_stride;
    const double decay = double{s.decay[t * s.rate_stride]},
                 rate = double{s.rate[t * s.rate_stride]};
    for (std::size_t c = 0; c < values; ++c) {
      double known = 0, sum = 0;
      for (std::size_t r = 0; r < keys; ++r) known += state[r * values + c] * double{k[r]};
      const double change =
          rate * (double{s.v[t * s.value_stride + c]} - (s.corrects ? decay * known : 0));
      for (std::size_t r = 0; r < keys; ++r) {
        double& m = state[r * values + c];
        m = decay * m + double{k[r]} * change;
        sum += m * double{q[r]};
      }
      out[t * s.out_stride + c] = sum;
    }
  }
}

}  // namespace kvasir::reference
