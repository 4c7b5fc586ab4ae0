// The operations on recurrent layers, by the CPU's kernels.
#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/device_operations.h"
#include "emulated.h"
#include "state.h"
#include "work.h"

namespace kvasir::emulated {
namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

void note(const float* x, std::size_t n, const DeviceCheck& check) {
  if (!std::all_of(x, x + n, [&](float v) { return std::fabs(v) < check.limit; }))
    *check.first = std::min(*check.first, check.mark);
}

int sigmoid_gate(DeviceStream* s, const float* x, const float* gate, const DeviceCheck& check,
                 const DeviceActivations& out) {
  return enqueue(s, [=] {
    const std::size_t size = std::size_t{out.n} * out.cols;
    Aligned<float> y(size);
    std::copy_n(x, size, y.get());
    cpu().sigmoid_gate(y.get(), gate, size);
    note(y.get(), size, check);
    if (out.f32) std::copy_n(y.get(), size, out.f32);
    if (out.q) cpu().quantize(y.get(), out.n, out.cols, out.q, out.scale, out.sums);
    return 0;
  });
}

// Calls f(states, first, n) for the parts of n tokens after which there is a state.
template <class F>
void for_states(const DeviceStates* states, bool each, uint32_t n, F f) {
  if (!each) return f(*states, 0u, n);
  for (uint32_t t = 0; t < n; ++t)
    f(DeviceStates{t == 0 ? states->from : states[t - 1].to, states[t].to}, t, 1u);
}

int convolve(DeviceStream* s, const DeviceConvolution& c) {
  return enqueue(s, [=] {
    const std::size_t size = std::size_t{c.n} * c.channels;
    Aligned<float> x(size);
    for (std::size_t i = 0; i < size; ++i) x[i] = c.factors ? c.x[i] * c.factors[i] : c.x[i];
    for_states(c.states, c.each, c.n, [&](const DeviceStates& own, uint32_t first, uint32_t n) {
      const std::size_t at = std::size_t{first} * c.channels;
      cpu().convolve({n, c.taps, c.channels, x.get() + at, c.weights, c.bias, own.from + c.offset,
                      own.to + c.offset, c.y + at, c.silu},
                     0, c.channels);
    });
    for (std::size_t i = 0; c.gates && i < size; ++i) c.y[i] *= c.gates[i];
    return 0;
  });
}

void normalise(const DeviceHeadStates& h, float* heads, float power) {
  const auto keys = static_cast<float>(h.keys);
  const std::vector<float> weights(h.keys, std::pow(keys, power));
  cpu().rms_norm(heads, weights.data(), h.epsilon / keys, h.key_heads, h.keys, heads);
}

int prepare_heads(DeviceStream* s, const DeviceHeadStates& h) {
  return enqueue(s, [=] {
    for (std::size_t t = 0; t < h.n; ++t) {
      for (std::size_t head = 0, i = t * h.heads; head < h.heads; ++head, ++i) {
        const float soft = softplus(h.alpha[i] + h.biases[head]);
        h.rate[i] = h.delta ? sigmoid(h.beta[i]) : soft;
        h.decay[i] = std::exp(h.factors[head] * soft);
      }
      if (!h.delta) continue;
      normalise(h, h.x + t * h.channels + h.q_at, -1);
      normalise(h, h.x + t * h.channels + h.k_at, -0.5f);
    }
    return 0;
  });
}

int advance_heads(DeviceStream* s, const DeviceHeadStates& h) {
  if (h.keys > max_device_keys) return refused;
  return enqueue(s, [=] {
    for (std::size_t head = 0; head < h.heads; ++head) {
      const std::size_t matrix = h.offset + head * h.matrix_size(),
                        key =
                            (h.cyclic_keys ? head % h.key_heads : head / (h.heads / h.key_heads)) *
                            h.keys;
      for_states(h.states, h.each, h.n, [&](const DeviceStates& own, uint32_t first, uint32_t n) {
        const float* const x = h.x + std::size_t{first} * h.channels;
        StateStep step;
        step.n = n, step.keys = h.keys, step.values = h.values, step.corrects = h.delta;
        step.from = own.from + matrix, step.to = own.to + matrix;
        step.k = x + h.k_at + key, step.q = x + h.q_at + key;
        step.v = x + h.v_at + head * h.values;
        step.key_stride = step.value_stride = h.channels;
        step.rate_stride = h.heads, step.out_stride = std::size_t{h.heads} * h.values;
        step.decay = h.decay + std::size_t{first} * h.heads + head;
        step.rate = h.rate + std::size_t{first} * h.heads + head;
        step.out = h.out + first * step.out_stride + head * h.values;
        cpu().advance_state(step, 0, state_panels(h.values));
        for (std::size_t t = 0; h.skip && t < n; ++t)
          for (std::size_t i = 0; i < h.values; ++i)
            step.out[t * step.out_stride + i] += h.skip[head] * step.v[t * h.channels + i];
      });
    }
    return 0;
  });
}

int gate_heads(DeviceStream* s, const DeviceGatedNorm& g, const DeviceCheck& check) {
  return enqueue(s, [=] {
    Aligned<float> x(g.cols);
    for (std::size_t r = 0; r < g.rows; ++r) {
      const float* own = g.x + r * g.cols;
      float* gates = g.gates + r * g.cols;
      const float* weights = g.weights ? g.weights + r % g.groups_of_weights * g.cols : nullptr;
      note(own, g.cols, check);
      std::copy_n(own, g.cols, x.get());
      const auto norm = [&](float* row) {
        if (weights) cpu().rms_norm(row, weights, g.epsilon, 1, g.cols, row);
      };
      if (!g.gates_first) norm(x.get());
      cpu().activate(Activation::silu, gates, x.get(), g.cols);
      if (g.gates_first) norm(gates);
    }
    if (!g.q) return 0;
    note(g.gates, std::size_t{g.rows} * g.cols, check);
    cpu().quantize(g.gates, g.rows, g.cols, g.q, g.scale, g.sums);
    return 0;
  });
}

}  // namespace

void fill_recurrent(DeviceKernels* k) {
#define KVASIR_FILL(name) k->name = name;
  KVASIR_DEVICE_RECURRENT(KVASIR_FILL)
#undef KVASIR_FILL
}

}  // namespace kvasir::emulated
