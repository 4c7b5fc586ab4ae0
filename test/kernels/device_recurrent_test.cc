// A GPU's operations on recurrent layers, against the reference. Without a GPU the cases pass and
// say so.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "device_support.h"
#include "device_values.h"
#include "reference/reference.h"
#include "support.h"
#include "tolerances.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::log1p(std::exp(x)); }

// States before and after steps, behind `offset` other floats; steps swap them.
struct States {
  States(std::size_t offset, const std::vector<float>& first)
      : a(offset + first.size()), b(offset + first.size()), addresses(1) {
    std::vector<float> all(offset + first.size(), 7.0f);
    std::copy(first.begin(), first.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
    a.put(all.data());
    point();
  }
  void point() {
    const DeviceStates both =
        turned ? DeviceStates{b.data(), a.data()} : DeviceStates{a.data(), b.data()};
    addresses.put(&both);
  }
  Memory<float>& next() { return turned ? a : b; }
  void turn() { turned = !turned, point(); }

  Memory<float> a, b;
  Memory<DeviceStates> addresses;
  bool turned = false;
};

constexpr std::size_t offset = 48;

void check_convolution(uint32_t taps, uint32_t channels, bool alone, Random& random) {
  const std::vector<float> weights = normals(std::size_t{taps} * channels, random),
                           bias = normals(channels, random);
  std::vector<float> state = normals(std::size_t{taps - 1} * channels, random);
  States states(offset, state);
  Memory<float> dweights(weights.data(), weights.size()), dbias(bias.data(), bias.size());
  for (const uint32_t n : {1u, 2u, 40u, 1u, 17u}) {
    CAPTURE(n);
    const std::size_t size = std::size_t{n} * channels;
    const std::vector<float> x = normals(size, random), factors = normals(size, random),
                             gates = normals(size, random);
    Memory<float> dx(x.data(), size), dfactors(factors.data(), size), dgates(gates.data(), size),
        y(size);
    OK(ops().convolve(stream(), {.n = n,
                                 .taps = taps,
                                 .channels = channels,
                                 .x = dx.data(),
                                 .factors = alone ? dfactors.data() : nullptr,
                                 .weights = dweights.data(),
                                 .bias = alone ? nullptr : dbias.data(),
                                 .gates = alone ? dgates.data() : nullptr,
                                 .silu = !alone,
                                 .states = states.addresses.data(),
                                 .offset = offset,
                                 .y = y.data()}));
    std::vector<float> inputs = x;
    for (std::size_t i = 0; alone && i < size; ++i) inputs[i] *= factors[i];
    std::vector<double> expected(size);
    reference::convolve({n, taps, channels, inputs.data(), weights.data(),
                         alone ? nullptr : bias.data(), state.data(), nullptr, nullptr, !alone},
                        expected.data());
    for (std::size_t i = 0; alone && i < size; ++i) expected[i] *= double{gates[i]};
    CHECK(relative_error(y.get().data(), expected.data(), size) < state_tolerance);
    state.insert(state.end(), inputs.begin(), inputs.end());
    state.erase(state.begin(), state.end() - static_cast<std::ptrdiff_t>((taps - 1) * channels));
    const float* kept = states.next().get().data() + offset;
    CHECK(std::equal(state.begin(), state.end(), kept));
    states.turn();
  }
}

struct HeadsShape {
  uint32_t heads, key_heads, keys, values;
  bool delta, cyclic;
};

// Weights of the heads, and a step's inputs.
struct Heads {
  Heads(const HeadsShape& s, uint32_t most, Random& random)
      : shape(s), channels(s.heads * s.values + 2 * s.key_heads * s.keys + 3),
        factors(normals(s.heads, random)), biases(normals(s.heads, random)),
        skip(normals(s.heads, random)), dfactors(s.heads), dbiases(biases.data(), s.heads),
        dskip(skip.data(), s.heads), decay(std::size_t{most} * s.heads), rate(decay.size()),
        out(std::size_t{most} * s.heads * s.values) {
    for (float& f : factors) f = -std::fabs(f) - 0.1f;
    dfactors.put(factors.data());
  }
  DeviceHeadStates of(uint32_t n, float* x, const float* alpha, const float* beta,
                      const States* states) {
    const uint32_t keys = shape.key_heads * shape.keys, inner = shape.heads * shape.values;
    DeviceHeadStates h{.n = n,
                       .heads = shape.heads,
                       .key_heads = shape.key_heads,
                       .keys = shape.keys,
                       .values = shape.values,
                       .delta = shape.delta,
                       .cyclic_keys = shape.cyclic,
                       .channels = channels,
                       .k_at = shape.delta ? keys : inner,
                       .q_at = shape.delta ? 0 : inner + keys,
                       .v_at = shape.delta ? 2 * keys : 0,
                       .x = x,
                       .alpha = alpha,
                       .beta = beta,
                       .factors = dfactors.data(),
                       .biases = dbiases.data(),
                       .skip = shape.delta ? nullptr : dskip.data(),
                       .epsilon = 1e-6f,
                       .decay = decay.data(),
                       .rate = rate.data(),
                       .offset = offset,
                       .out = out.data()};
    if (states) h.states = const_cast<States*>(states)->addresses.data();
    return h;
  }

  const HeadsShape shape;
  const uint32_t channels;
  std::vector<float> factors, biases, skip;
  Memory<float> dfactors, dbiases, dskip, decay, rate, out;
};

// The reference's heads after a step, from the very q, k, rates and state of the device.
void check_heads(const DeviceHeadStates& h, const float* x, const Heads& heads, const float* before,
                 const float* after) {
  const std::size_t matrix = h.matrix_size(), size = std::size_t{h.keys} * h.values;
  std::vector<double> state(size), out(std::size_t{h.n} * h.values);
  double worst = 0;
  for (uint32_t head = 0; head < h.heads; ++head) {
    const std::size_t key =
        (h.cyclic_keys ? head % h.key_heads : head / (h.heads / h.key_heads)) * h.keys;
    StateStep s;
    s.n = h.n, s.keys = h.keys, s.values = h.values, s.corrects = h.delta;
    s.from = before + head * matrix;
    s.k = x + h.k_at + key, s.q = x + h.q_at + key, s.v = x + h.v_at + head * h.values;
    s.decay = heads.decay.got().data() + head, s.rate = heads.rate.got().data() + head;
    s.key_stride = s.value_stride = h.channels, s.rate_stride = h.heads, s.out_stride = h.values;
    reference::advance_state(s, state.data(), out.data());
    std::vector<float> found_state(size), found(out.size());
    for (std::size_t r = 0; r < h.keys; ++r)
      for (std::size_t c = 0; c < h.values; ++c)
        found_state[r * h.values + c] =
            after[head * matrix + (c / state_panel * h.keys + r) * state_panel + c % state_panel];
    for (std::size_t t = 0; t < h.n; ++t)
      for (std::size_t c = 0; c < h.values; ++c) {
        found[t * h.values + c] = heads.out.got()[(t * h.heads + head) * h.values + c];
        if (h.skip)
          out[t * h.values + c] += double{heads.skip[head]} * double{s.v[t * h.channels + c]};
      }
    worst = std::max({worst, relative_error(found_state.data(), state.data(), size),
                      relative_error(found.data(), out.data(), out.size())});
  }
  CHECK(worst < state_tolerance);
}

void check_rates(const DeviceHeadStates& h, const std::vector<float>& alpha,
                 const std::vector<float>& beta, const std::vector<float>& x, const Heads& heads,
                 const float* prepared) {
  double worst = 0;
  const auto compare = [&](float found, double expected) {
    const double error = std::fabs(double{found} - expected) / std::max(std::fabs(expected), 1e-3);
    worst = error <= worst ? worst : error;
  };
  for (std::size_t i = 0; i < std::size_t{h.n} * h.heads; ++i) {
    const std::size_t head = i % h.heads;
    const double soft = softplus(double{alpha[i]} + double{heads.biases[head]});
    compare(heads.rate.got()[i], h.delta ? sigmoid(double{beta[i]}) : soft);
    compare(heads.decay.got()[i], std::exp(double{heads.factors[head]} * soft));
  }
  CHECK(worst < 4e-6);
  worst = 0;
  for (std::size_t t = 0; t < h.n; ++t)
    for (std::size_t c = 0; c < h.channels; ++c) {
      const bool is_q = c >= h.q_at && c < h.q_at + h.key_heads * h.keys,
                 is_k = c >= h.k_at && c < h.k_at + h.key_heads * h.keys;
      const std::size_t at = t * h.channels + c;
      if (!h.delta || !(is_q || is_k)) {
        CHECK(prepared[at] == x[at]);
        continue;
      }
      const std::size_t begin = at - (c - (is_q ? h.q_at : h.k_at)) % h.keys;
      double sum = 1e-6;
      for (std::size_t i = begin; i < begin + h.keys; ++i) sum += double{x[i]} * double{x[i]};
      compare(prepared[at], double{x[at]} / std::sqrt(is_q ? sum * h.keys : sum));
    }
  CHECK(worst < 1e-4);  // of the smallest numbers
}

// Steps one after another, each from the state that the one before left.
void check_steps(const HeadsShape& shape, Random& random) {
  constexpr uint32_t most = 70;
  Heads heads(shape, most, random);
  const std::size_t matrix = std::size_t{state_panels(shape.values)} * shape.keys * state_panel;
  std::vector<float> state(shape.heads * matrix);
  for (std::size_t i = 0; i < state.size(); ++i) {
    const std::size_t at = i % matrix,
                      column = at / state_panel / shape.keys * state_panel + at % state_panel;
    state[i] = column < shape.values ? random.normal() : 0;
  }
  States states(offset, state);
  for (const uint32_t n : {1u, 3u, 70u, 1u, 16u}) {
    CAPTURE(n);
    std::vector<float> x = normals(std::size_t{n} * heads.channels, random);
    if (!shape.delta)
      for (float& v : x) v *= 1 / std::sqrt(static_cast<float>(shape.keys));
    const std::vector<float> alpha = normals(std::size_t{n} * shape.heads, random),
                             beta = normals(alpha.size(), random);
    Memory<float> dx(x.data(), x.size()), dalpha(alpha.data(), alpha.size()),
        dbeta(beta.data(), beta.size());
    DeviceHeadStates h = heads.of(n, dx.data(), dalpha.data(), dbeta.data(), &states);
    OK(ops().prepare_heads(stream(), h));
    OK(ops().advance_heads(stream(), h));
    const float* prepared = dx.get().data();
    (void)heads.decay.get(), (void)heads.rate.get(), (void)heads.out.get();
    check_rates(h, alpha, beta, x, heads, prepared);
    const float* after = states.next().get().data() + offset;
    check_heads(h, prepared, heads, state.data(), after);
    state.assign(after, after + state.size());
    states.turn();
  }
}

// One step, or the same tokens in several.
void check_division(const HeadsShape& shape, Random& random) {
  constexpr uint32_t n = 50;
  Heads heads(shape, n, random);
  const std::size_t matrix = std::size_t{state_panels(shape.values)} * shape.keys * state_panel;
  const std::vector<float> x = normals(std::size_t{n} * heads.channels, random),
                           alpha = normals(std::size_t{n} * shape.heads, random),
                           beta = normals(alpha.size(), random), zeros(shape.heads * matrix);
  Memory<float> dalpha(alpha.data(), alpha.size()), dbeta(beta.data(), beta.size());
  std::vector<float> last[2];
  const std::vector<uint32_t> divisions[2] = {{n}, {1, 20, 3, 17, 9}};
  for (std::size_t i = 0; i < 2; ++i) {
    States states(offset, zeros);
    Memory<float> dx(x.data(), x.size());
    uint32_t at = 0;
    for (const uint32_t count : divisions[i]) {
      const DeviceHeadStates h =
          heads.of(count, dx.data() + std::size_t{at} * heads.channels,
                   dalpha.data() + at * shape.heads, dbeta.data() + at * shape.heads, &states);
      OK(ops().prepare_heads(stream(), h));
      OK(ops().advance_heads(stream(), h));
      at += count;
      states.turn();
    }
    REQUIRE(at == n);
    states.turn();
    const float* state = states.next().get().data() + offset;
    last[i].assign(state, state + zeros.size());
  }
  CHECK(last[0] == last[1]);
}

// A step of which any first tokens may stay has the bits of steps of one token each.
void check_each(const HeadsShape& shape, Random& random) {
  constexpr uint32_t n = max_alone, taps = 4;
  Heads heads(shape, n, random);
  const std::size_t matrix = std::size_t{state_panels(shape.values)} * shape.keys * state_panel,
                    inputs = std::size_t{taps - 1} * heads.channels,
                    size = offset + inputs + shape.heads * matrix;
  const std::vector<float> x = normals(std::size_t{n} * heads.channels, random),
                           alpha = normals(std::size_t{n} * shape.heads, random),
                           beta = normals(alpha.size(), random), first = normals(size, random),
                           weights = normals(std::size_t{taps} * heads.channels, random);
  Memory<float> dx(x.data(), x.size()), dalpha(alpha.data(), alpha.size()),
      dbeta(beta.data(), beta.size()), dweights(weights.data(), weights.size()), y(x.size());
  std::vector<std::vector<float>> found[2];
  std::vector<float> outs[2];
  for (const bool each : {false, true}) {
    std::vector<std::unique_ptr<Memory<float>>> states;
    for (uint32_t t = 0; t <= n; ++t)
      states.push_back(std::make_unique<Memory<float>>(first.data(), size));
    std::vector<DeviceStates> both(n);
    for (uint32_t t = 0; t < n; ++t) both[t] = {states[t]->data(), states[t + 1]->data()};
    Memory<DeviceStates> addresses(both.data(), n);
    const auto run = [&](uint32_t at, uint32_t count) {
      OK(ops().convolve(stream(), {.n = count,
                                   .taps = taps,
                                   .channels = heads.channels,
                                   .x = dx.data() + std::size_t{at} * heads.channels,
                                   .weights = dweights.data(),
                                   .silu = true,
                                   .states = addresses.data() + at,
                                   .each = each,
                                   .offset = offset,
                                   .y = y.data() + std::size_t{at} * heads.channels}));
      DeviceHeadStates h =
          heads.of(count, y.data() + std::size_t{at} * heads.channels,
                   dalpha.data() + at * shape.heads, dbeta.data() + at * shape.heads, nullptr);
      h.states = addresses.data() + at, h.each = each, h.offset = offset + inputs;
      h.out += std::size_t{at} * shape.heads * shape.values;
      OK(ops().prepare_heads(stream(), h));
      OK(ops().advance_heads(stream(), h));
    };
    if (each) run(0, n);
    for (uint32_t t = 0; t < n && !each; ++t) run(t, 1);
    for (const auto& state : states)
      found[each].emplace_back(state->get().data(), state->get().data() + size);
    const float* const out = heads.out.get().data();
    outs[each].assign(out, out + std::size_t{n} * shape.heads * shape.values);
  }
  CHECK(found[0] == found[1]);
  CHECK(outs[0] == outs[1]);
}

// As quantize() rounds them.
void check_rounded_alike(Memory<float>* floats, Memory<int8_t>* q, Memory<float>* scale,
                         Memory<int16_t>* sums) {
  const std::size_t size = q->size();
  Memory<int8_t> own_q(size);
  Memory<float> own_scale(scale->size());
  Memory<int16_t> own_sums(sums->size());
  Found found;
  const DeviceActivations own{1,
                              static_cast<uint32_t>(size),
                              floats->data(),
                              own_q.data(),
                              own_scale.data(),
                              own_sums.data()};
  OK(ops().quantize(stream(), own, found.check(3)));
  const auto alike = [](auto& a, auto& b) {
    return std::equal(a.get().data(), a.get().data() + a.size(), b.get().data());
  };
  CHECK(alike(own_q, *q));
  CHECK(alike(own_scale, *scale));
  CHECK(alike(own_sums, *sums));
}

void check_gates(uint32_t cols, uint32_t groups, bool first, bool with_norm, Random& random) {
  const uint32_t rows = 6 * groups;
  const std::size_t size = std::size_t{rows} * cols;
  std::vector<float> x = normals(size, random);
  const std::vector<float> gates = normals(size, random),
                           weights = normals(std::size_t{groups} * cols, random);
  Memory<float> dx(x.data(), size), dgates(gates.data(), size),
      dweights(weights.data(), weights.size());
  Found found;
  const bool rounds = cols % 32 == 0;
  Memory<int8_t> q(size);
  Memory<float> scale(size / 32);
  Memory<int16_t> sums(size / 16);
  const DeviceGatedNorm g{.rows = rows,
                          .cols = cols,
                          .x = dx.data(),
                          .gates = dgates.data(),
                          .weights = with_norm ? dweights.data() : nullptr,
                          .groups_of_weights = groups,
                          .gates_first = first,
                          .epsilon = 1e-5f,
                          .q = rounds ? q.data() : nullptr,
                          .scale = scale.data(),
                          .sums = sums.data()};
  OK(ops().gate_heads(stream(), g, found.check(3)));
  std::vector<double> expected(size);
  for (std::size_t r = 0; r < rows; ++r) {
    double sum = 0;
    const auto gate = [&](std::size_t i) { return double{gates[i]} * sigmoid(double{gates[i]}); };
    for (std::size_t i = r * cols; i < (r + 1) * cols; ++i) {
      const double v = double{x[i]} * (first ? gate(i) : 1);
      sum += v * v;
    }
    const double factor = with_norm ? 1 / std::sqrt(sum / cols + 1e-5) : 1;
    for (std::size_t i = r * cols; i < (r + 1) * cols; ++i)
      expected[i] = double{x[i]} * gate(i) * factor *
                    (with_norm ? double{weights[r % groups * cols + i % cols]} : 1);
  }
  CHECK(relative_error(dgates.get().data(), expected.data(), size) < 2e-6);
  if (rounds) check_rounded_alike(&dgates, &q, &scale, &sums);
  CHECK(found.get() == no_mark);
  x[size - 1] = NAN;
  dx.put(x.data());
  OK(ops().gate_heads(stream(), g, found.check(3)));
  CHECK(found.get() == 3);
}

}  // namespace

TEST_CASE("a GPU's convolutions of recurrent layers match the reference and keep their inputs") {
  if (!gpu()) return;
  Random random(41);
  for (const uint32_t taps : {2u, 4u, 16u})
    for (const uint32_t channels : {5u, 64u, 300u})
      for (const bool alone : {false, true}) {
        CAPTURE(taps);
        CAPTURE(channels);
        CAPTURE(alone);
        check_convolution(taps, channels, alone, random);
      }
}

TEST_CASE("a GPU's states of recurrent layers match the reference, step after step") {
  if (!gpu()) return;
  Random random(42);
  for (const HeadsShape& shape :
       {HeadsShape{4, 2, 128, 128, true, false}, HeadsShape{4, 2, 128, 128, true, true},
        HeadsShape{6, 3, 16, 20, true, true}, HeadsShape{2, 1, 7, 33, true, false},
        HeadsShape{3, 1, 256, 64, false, false}, HeadsShape{4, 1, 128, 64, false, false},
        HeadsShape{4, 2, 64, 16, false, false}, HeadsShape{2, 2, 200, 8, false, false}}) {
    CAPTURE(shape.keys);
    CAPTURE(shape.values);
    CAPTURE(shape.delta);
    check_steps(shape, random);
    check_division(shape, random);
    check_each(shape, random);
  }
}

TEST_CASE("a GPU's gates of recurrent layers and of attention match the reference") {
  if (!gpu()) return;
  Random random(43);
  for (const uint32_t cols : {8u, 128u, 513u})
    for (const uint32_t groups : {1u, 3u})
      for (const bool first : {false, true}) {
        CAPTURE(cols);
        CAPTURE(first);
        check_gates(cols, groups, first, true, random);
        check_gates(cols, groups, first, false, random);
      }
  for (const uint32_t n : {1u, 7u}) {
    DeviceInputs x(n, 96, random);
    const std::vector<float> gates = normals(x.host.size(), random);
    Memory<float> dgates(gates.data(), gates.size());
    Found found;
    OK(ops().sigmoid_gate(stream(), x.x.data(), dgates.data(), found.check(2), x.view));
    std::vector<double> expected(x.host.size());
    reference::sigmoid_gate(x.host.data(), gates.data(), expected.size(), expected.data());
    CHECK(relative_error(x.x.get().data(), expected.data(), expected.size()) < 1e-6);
    CHECK(found.get() == no_mark);
    (void)x.q.get(), (void)x.scale.get();
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const float scale = x.scale.got()[i / 32];
      worst = std::max(worst,
                       std::fabs(static_cast<double>(x.q.got()[i]) * double{scale} - expected[i]) /
                           std::max(double{scale}, 1e-30));
    }
    CHECK(worst < 0.51);
  }
}
