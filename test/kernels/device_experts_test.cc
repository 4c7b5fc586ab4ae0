// The operations of a GPU on experts against the reference. Without a GPU the cases pass and say
// so.
#include <doctest/doctest.h>

#include <memory>
#include <numeric>
#include <set>

#include "device_values.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// The choices of n tokens on the device.
struct Choices {
  Choices(uint32_t n, uint32_t used, uint32_t experts)
      : chosen(std::size_t{n} * used), row_of(chosen.size()), choice_of(chosen.size()),
        tiles(DeviceExpertTile::max_count(n, used, experts)), view{n, used, experts,
                                                                   chosen.data()} {
    if (n > 1)
      view.row_of = row_of.data(), view.choice_of = choice_of.data(), view.tiles = tiles.data();
  }
  // Random ones, different within a token, with random weights. hot: all tokens choose expert 1.
  void fill(Random& random, bool hot) {
    std::vector<uint32_t> all(view.experts);
    std::iota(all.begin(), all.end(), 0u);
    for (std::size_t t = 0; t < view.n; ++t) {
      for (uint32_t i = 0; i < view.used; ++i)
        std::swap(all[i], all[i + random.below(view.experts - i)]);
      if (hot) std::swap(all[0], *std::find(all.begin(), all.end(), 1u));
      for (uint32_t i = 0; i < view.used; ++i) host.push_back({all[i], random.uniform(0, 1)});
    }
    chosen.put(host.data());
    if (view.n > 1) OK(ops().group_choices(stream(), view));
  }
  // [n][used] the row of each choice
  std::vector<std::size_t> rows() {
    std::vector<std::size_t> out(view.choices());
    std::iota(out.begin(), out.end(), std::size_t{0});
    if (view.n > 1) std::copy_n(row_of.get().data(), out.size(), out.begin());
    return out;
  }

  Memory<DeviceChoice> chosen;
  Memory<uint32_t> row_of, choice_of;
  Memory<DeviceExpertTile> tiles;
  DeviceExpertRows view;
  std::vector<DeviceChoice> host;
};

// The matrices of some experts, with biases and factors.
struct Experts {
  Experts(const Type& t, uint32_t count, uint32_t rows, uint32_t cols, Random& random)
      : w(t, count * rows, cols, random), laid_out(ops().matrix_bytes(t.type, count * rows, cols)),
        host_biases(normals(count * rows, random)), host_scales(count),
        biases(host_biases.data(), host_biases.size()),
        scales(count), matrix{t.type, count * rows, cols, laid_out.data(), w.view.scale} {
    for (float& s : host_scales) s = random.uniform(0.5f, 2);
    scales.put(host_scales.data());
    Memory<std::byte> file(w.view.data, w.bytes.size());
    OK(ops().lay_out(stream(), matrix, file.data(), 0, count * rows));
    OK(ops().wait(stream()));
  }
  Weights w;
  Memory<std::byte> laid_out;
  std::vector<float> host_biases, host_scales;
  Memory<float> biases, scales;
  DeviceMatrix matrix;
};

// Rows of inputs of experts, rounded where weights are quantised.
std::unique_ptr<DeviceInputs> inputs_of(uint32_t rows, uint32_t cols, bool quantised,
                                        Random& random) {
  auto x = std::make_unique<DeviceInputs>(rows, cols, random);
  Found found;
  if (quantised) OK(ops().quantize(stream(), x->view, found.check(1)));
  return x;
}

// The largest error of the rows' products, relative to sums of magnitudes.
double worst_error(const Experts& m, Choices* choices, DeviceInputs* x, bool quantised,
                   const float* y) {
  const uint32_t rows = m.matrix.rows / choices->view.experts, cols = m.matrix.cols;
  std::vector<double> expected(rows), weights(cols);
  const std::vector<std::size_t> row_of = choices->rows();
  if (quantised) x->q.get(), x->scale.get(), x->sums.get();
  double worst = 0;
  for (std::size_t i = 0; i < choices->view.choices(); ++i) {
    const uint32_t e = choices->host[i].expert;
    const std::size_t row = row_of[i], from = x->view.n == 1 ? 0 : row;
    WeightView w = m.w.view;
    w.rows = rows, w.data += std::size_t{e} * rows * w.row_bytes;
    Activations view{1, cols, x->host.data() + from * cols};
    if (quantised) {
      view.q = x->q.got().data() + from * cols,
      view.scale = x->scale.got().data() + from * cols / 32;
      view.sums = x->sums.got().data() + from * cols / 16;
    }
    reference::matmul(w, view, expected.data(), rows);
    for (uint32_t r = 0; r < rows; ++r) {
      reference::dequantize_row(w, r, weights.data());
      const double scale = double{m.host_scales[e]}, bias = double{m.host_biases[e * rows + r]};
      double magnitude = 1e-30 + std::fabs(bias);
      for (uint32_t c = 0; c < cols; ++c)
        magnitude += std::fabs(scale * weights[c] * double{x->host[from * cols + c]});
      const double error =
          std::fabs(double{y[row * rows + r]} - (expected[r] * scale + bias)) / magnitude;
      worst = error <= worst ? worst : error;  // NaN wins
    }
  }
  return worst;
}

struct Case {
  uint32_t n, used, experts;
  bool hot;
};
constexpr Case cases[] = {{1, 1, 1, false}, {1, 4, 9, false},  {2, 1, 3, false},
                          {3, 2, 5, false}, {16, 4, 9, false}, {90, 3, 4, true}};

}  // namespace

TEST_CASE("a device chooses the reference's experts, with its weights, in every way of choosing") {
  if (!stream()) return;
  Random random(1);
  for (const Gating gating : {Gating::softmax, Gating::sigmoid, Gating::softmax_chosen}) {
    for (const uint32_t experts : {1u, 8u, 40u, 128u, 1000u}) {
      for (uint32_t i = 0; i < 12; ++i) {
        const bool grouped = experts % 4 == 0 && i % 2 == 1;
        const uint32_t n = 1 + random.below(9), used = std::min(experts / (grouped ? 2 : 1), 1 + i);
        const std::vector<float> bias = normals(experts, random);
        std::vector<float> logits = normals(std::size_t{n} * experts, random);
        if (i % 3 == 2)  // ties
          for (float& x : logits) x = std::round(x);
        Memory<float> device_bias(bias.data(), experts),
            device_logits(logits.data(), logits.size());
        DeviceRouting r{experts,
                        used,
                        grouped ? 4u : 1u,
                        grouped ? 2u : 1u,
                        gating,
                        i % 4 < 2,
                        i == 5,
                        1.0f + static_cast<float>(i % 5) / 4,
                        i % 3 == 1 ? bias.data() : nullptr};
        CAPTURE(static_cast<int>(gating));
        CAPTURE(experts);
        CAPTURE(i);
        std::vector<DeviceChoice> expected(std::size_t{n} * used);
        for (std::size_t t = 0; t < n; ++t)
          reference::route(r, &logits[t * experts], &expected[t * used]);
        Choices choices(n, used, experts);
        Found found;
        if (r.bias) r.bias = device_bias.data();
        OK(ops().route(stream(), r, device_logits.data(), found.check(1), choices.view));
        // Up to a thousand probabilities are summed in float.
        const Guarded<DeviceChoice>& made = choices.chosen.get();
        for (std::size_t c = 0; c < expected.size(); ++c) {
          REQUIRE(made[c].expert == expected[c].expert);
          REQUIRE(std::fabs(made[c].weight - expected[c].weight) <=
                  2e-5f * std::fabs(expected[c].weight) + 1e-30f);
        }
        CHECK(found.get() == no_mark);
      }
    }
  }
}

TEST_CASE("a router's NaN or infinity is found, and the chosen experts exist and differ") {
  if (!stream()) return;
  Random random(2);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const bool all : {false, true}) {
      constexpr uint32_t n = 3, used = 6, experts = 24;
      std::vector<float> logits = normals(n * experts, random);
      if (all) std::fill(logits.begin(), logits.end(), bad);
      logits[experts + 5] = bad;
      Memory<float> device_logits(logits.data(), logits.size());
      Choices choices(n, used, experts);
      Found found;
      const DeviceRouting r{experts, used, 4, 2, Gating::softmax, true, false, 1, nullptr};
      DeviceCheck check = found.check(7);
      check.limit = INFINITY;
      OK(ops().route(stream(), r, device_logits.data(), check, choices.view));
      CHECK(found.get() == 7);
      const Guarded<DeviceChoice>& made = choices.chosen.get();
      for (uint32_t t = 0; t < n; ++t) {
        std::set<uint32_t> its;
        for (uint32_t i = 0; i < used; ++i) its.insert(made[t * used + i].expert);
        CHECK(its.size() == used);
        CHECK(*its.rbegin() < experts);
      }
    }
  }
}

TEST_CASE("a device groups choices by experts, in their order, and cuts the groups into tiles") {
  if (!stream()) return;
  Random random(3);
  for (const Case& c : {Case{2, 1, 1, false}, Case{7, 3, 5, false}, Case{300, 2, 3, true},
                        Case{130, 8, 1000, false}, Case{65, 1, 2, false}}) {
    CAPTURE(c.n);
    CAPTURE(c.used);
    CAPTURE(c.experts);
    Choices choices(c.n, c.used, c.experts);
    choices.fill(random, c.hot);
    std::vector<std::size_t> order(choices.view.choices());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return choices.host[a].expert < choices.host[b].expert;
    });
    choices.choice_of.get(), choices.row_of.get(), choices.tiles.get();
    bool in_order = true;
    for (std::size_t row = 0; row < order.size(); ++row) {
      in_order &= choices.choice_of.got()[row] == order[row];
      in_order &= choices.row_of.got()[order[row]] == row;
    }
    CHECK(in_order);
    std::size_t next = 0;
    bool ended = false;
    for (std::size_t i = 0; i < choices.view.max_tiles(); ++i) {
      const DeviceExpertTile tile = choices.tiles.got()[i];
      ended |= tile.rows == 0;
      REQUIRE((tile.rows == 0) == ended);
      REQUIRE(tile.rows <= DeviceExpertTile::max_rows);
      if (!ended) REQUIRE(tile.first == next);
      for (uint32_t r = 0; r < tile.rows; ++r)
        REQUIRE(choices.host[order[next++]].expert == tile.expert);
    }
    CHECK(next == order.size());
  }
}

TEST_CASE("a device gathers the inputs of choices, multiplied by their weights if asked") {
  if (!stream()) return;
  Random random(4);
  for (const Case& c : cases) {
    for (const bool weighs : {false, true}) {
      constexpr uint32_t cols = 96;
      Choices choices(c.n, c.used, c.experts);
      choices.fill(random, c.hot);
      const auto x = inputs_of(c.n, cols, true, random);
      DeviceInputs rows(static_cast<uint32_t>(choices.view.choices()), cols, random);
      OK(ops().gather_inputs(stream(), choices.view, x->view, weighs, rows.view));
      rows.x.get(), rows.q.get(), rows.scale.get(), rows.sums.get();
      x->q.get(), x->scale.get(), x->sums.get();
      const std::vector<std::size_t> row_of = choices.rows();
      bool same = true;
      for (std::size_t i = 0; i < choices.view.choices(); ++i) {
        const std::size_t row = row_of[i], from = i / c.used;
        const float weight = weighs ? choices.host[i].weight : 1.0f;
        for (std::size_t k = 0; k < cols; ++k) {
          same &= rows.x.got()[row * cols + k] == x->host[from * cols + k] * weight;
          same &= rows.q.got()[row * cols + k] == x->q.got()[from * cols + k];
          same &= rows.scale.got()[(row * cols + k) / 32] ==
                  x->scale.got()[(from * cols + k) / 32] * weight;
          same &= rows.sums.got()[(row * cols + k) / 16] == x->sums.got()[(from * cols + k) / 16];
        }
      }
      CHECK(same);
    }
  }
}

TEST_CASE("a device's products of experts of every format agree with the reference") {
  if (!stream()) return;
  Random random(5);
  for (const Type& t : types) {
    for (const Case& c : cases) {
      CAPTURE(std::string(t.name));
      CAPTURE(c.n);
      CAPTURE(c.used);
      const bool quantised = t.block != 1;
      const uint32_t cols = (quantised ? t.block : 20) * (1 + random.below(t.block == 256 ? 3 : 9)),
                     rows = 1 + random.below(90);
      Choices choices(c.n, c.used, c.experts);
      choices.fill(random, c.hot);
      Experts one(t, c.experts, rows, cols, random), other(t, c.experts, rows + 7, cols, random);
      const auto count = static_cast<uint32_t>(choices.view.choices());
      for (const uint32_t inputs : {count, 1u}) {
        if (inputs == 1 && c.n > 1) continue;
        const auto x = inputs_of(inputs, cols, quantised, random);
        Memory<float> y(std::size_t{count} * rows), z(std::size_t{count} * (rows + 7));
        const std::vector<DeviceExpertProduct> products = {
            {one.matrix, one.biases.data(), one.scales.data(), y.data()},
            {other.matrix, other.biases.data(), other.scales.data(), z.data()}};
        OK(ops().multiply_experts(stream(), products, choices.view, x->view));
        CHECK(worst_error(one, &choices, x.get(), quantised, y.get().data()) < 1e-6);
        CHECK(worst_error(other, &choices, x.get(), quantised, z.get().data()) < 1e-6);
      }
    }
  }
}

TEST_CASE("a shared expert after the chosen ones has the bits of its own product") {
  if (!stream()) return;
  Random random(9);
  for (const Type& t : types) {
    CAPTURE(std::string(t.name));
    constexpr uint32_t used = 3, experts = 5, rows = 70;
    const bool quantised = t.block != 1;
    const uint32_t cols = quantised ? 2 * t.block : 64;
    Choices choices(1, used, experts);
    choices.fill(random, false);
    Experts chosen(t, experts, rows, cols, random), shared(t, 1, rows, cols, random);
    for (const uint32_t inputs : {1u, used + 1}) {  // one for all, or each its own
      const auto x = inputs_of(inputs, cols, quantised, random);
      Memory<float> y((used + 1) * rows), own(rows);
      const std::vector<DeviceExpertProduct> product = {
          {chosen.matrix, chosen.biases.data(), chosen.scales.data(), y.data(), shared.matrix}};
      OK(ops().multiply_experts(stream(), product, choices.view, x->view));
      const std::vector<DeviceProduct> alone = {{shared.matrix, nullptr, own.data()}};
      OK(ops().matmul(stream(), alone, input_of(x->view, inputs - 1), false));
      const Guarded<float>& made = y.get();
      const Guarded<float>& expected = own.get();
      CHECK(std::equal(expected.data(), expected.data() + rows, made.data() + used * rows));
      CHECK(worst_error(chosen, &choices, x.get(), quantised, made.data()) < 1e-6);
    }
  }
}

TEST_CASE("the tokens that share an expert do not change a bit of a token's product") {
  if (!stream()) return;
  Random random(6);
  for (const Type& t : types) {
    CAPTURE(std::string(t.name));
    constexpr uint32_t experts = 3, many = 150, rows = 70;
    const uint32_t cols = t.block == 1 ? 64 : 2 * t.block;
    Experts m(t, experts, rows, cols, random);
    const auto x = inputs_of(many, cols, t.block != 1, random);  // a row each: of expert 1
    std::vector<float> alone;
    for (const uint32_t n : {2u, 9u, 65u, many}) {
      CAPTURE(n);
      Choices choices(n, 1, experts);
      choices.host.assign(n, {1, 1.0f});
      choices.chosen.put(choices.host.data());
      OK(ops().group_choices(stream(), choices.view));
      DeviceActivations some = x->view;
      some.n = n;
      Memory<float> y(std::size_t{n} * rows);
      const DeviceExpertProduct product{m.matrix, m.biases.data(), m.scales.data(), y.data()};
      OK(ops().multiply_experts(stream(), {&product, 1}, choices.view, some));
      const Guarded<float>& made = y.get();
      if (alone.empty()) alone.assign(made.data(), made.data() + 2 * rows);
      CHECK(std::equal(alone.begin(), alone.end(), made.data()));
    }
  }
}

TEST_CASE("a device adds the experts' outputs by their weights, and the shared expert's") {
  if (!stream()) return;
  Random random(7);
  for (const Case& c : cases) {
    for (uint32_t way = 0; way < 8; ++way) {
      CAPTURE(c.n);
      CAPTURE(c.used);
      CAPTURE(way);
      constexpr uint32_t cols = 301;
      Choices choices(c.n, c.used, c.experts);
      choices.fill(random, c.hot);
      const std::vector<float> rows = normals(choices.view.choices() * cols, random),
                               shared = normals(std::size_t{c.n} * cols, random),
                               gate = normals(c.n, random), before = normals(shared.size(), random);
      Memory<float> device_rows(rows.data(), rows.size()),
          device_shared(shared.data(), shared.size()), device_gate(gate.data(), c.n),
          y(before.data(), before.size());
      DeviceExpertSum sum{device_rows.data(), way % 2 == 0, nullptr, nullptr, 0.75f, way >= 4};
      if (way >= 2) sum.shared = device_shared.data();
      if (way >= 4) sum.shared_gate = device_gate.data();
      OK(ops().sum_experts(stream(), choices.view, sum, {c.n, cols, y.data()}));
      std::vector<double> expected(before.size());
      const std::vector<std::size_t> row_of = choices.rows();
      for (std::size_t t = 0; t < c.n; ++t)
        for (std::size_t k = 0; k < cols; ++k) {
          double total = 0;
          for (std::size_t i = t * c.used; i < (t + 1) * c.used; ++i)
            total += (sum.weighs ? double{choices.host[i].weight} : 1.0) *
                     double{rows[row_of[i] * cols + k]};
          if (sum.shared)
            total += double{shared[t * cols + k]} *
                     (sum.shared_gate ? 1 / (1 + std::exp(-double{gate[t]})) : 1.0);
          expected[t * cols + k] = 0.75 * total + (sum.add ? double{before[t * cols + k]} : 0.0);
        }
      CHECK(relative_error(y.get().data(), expected.data(), expected.size()) < 1e-6);
    }
  }
}
