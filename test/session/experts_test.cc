// Routing and a layer of experts, against plain implementations.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "engine/cpu_experts.h"
#include "engine/expert_routing.h"

using namespace kvasir;

namespace {

using Choices = std::vector<ExpertChoice>;

// By the definition, in double precision, by sorting.
Choices plain_choice(const ExpertConfig& c, const std::vector<float>& logits,
                     const std::vector<float>& bias) {
  const uint32_t n = c.count;
  std::vector<double> p(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  for (double& x : p) {
    if (c.gating == Gating::softmax) x = std::exp(x) / sum;
    if (c.gating == Gating::sigmoid) x = 1 / (1 + std::exp(-x));
  }
  std::vector<double> score = p;
  if (c.chooses_by_logits) score.assign(logits.begin(), logits.end());
  for (uint32_t e = 0; e < n; ++e) score[e] += bias.empty() ? 0.0 : static_cast<double>(bias[e]);

  const auto best_first = [](const std::vector<double>& values) {
    std::vector<uint32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return values[a] > values[b]; });
    return order;
  };
  const uint32_t size = n / c.groups;
  std::vector<double> groups;
  for (uint32_t g = 0; g < c.groups; ++g) {
    std::vector<double> in(score.begin() + g * size, score.begin() + (g + 1) * size);
    std::sort(in.rbegin(), in.rend());
    groups.push_back(in[0] + (size > 1 ? in[1] : 0));
  }
  std::vector<uint32_t> kept = best_first(groups);
  kept.resize(c.groups_used);

  Choices out;
  for (const uint32_t e : best_first(score)) {
    if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) continue;
    if (out.size() < c.used) out.push_back({e, 0});
  }
  double total = 0, chosen = 0;
  for (const ExpertChoice& e : out) total += std::exp(p[e.expert]), chosen += p[e.expert];
  for (ExpertChoice& e : out) {
    double weight = p[e.expert];
    if (c.gating == Gating::softmax_chosen) weight = std::exp(weight) / total;
    if (c.normalise) weight /= std::max(chosen, 6.1e-5);
    e.weight = static_cast<float>(weight * static_cast<double>(c.scale));
  }
  return out;
}

Choices choice(const ExpertConfig& c, std::vector<float> logits, const std::vector<float>& bias) {
  std::vector<float> scores(2 * c.count);
  Choices out(c.used);
  choose_experts(c, bias.empty() ? nullptr : bias.data(), logits.data(), scores.data(), out.data());
  return out;
}

void check_same(const Choices& a, const Choices& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].expert == b[i].expert);
    CHECK(a[i].weight == doctest::Approx(b[i].weight).epsilon(1e-5));
  }
}

}  // namespace

TEST_CASE("experts are chosen and weighed as the definition says, by every gating and grouping") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const Gating gating : {Gating::softmax, Gating::sigmoid, Gating::softmax_chosen})
    for (const uint32_t groups : {1u, 2u, 4u, 8u, 32u})
      for (const bool normalise : {false, true})
        for (const bool biased : {false, true}) {
          if (gating == Gating::softmax_chosen && normalise) continue;  // already
          ExpertConfig c;
          c.count = 32, c.used = groups == 32 ? 4 : 6;
          c.gating = gating, c.normalise = normalise;
          c.groups = groups, c.groups_used = groups == 32 ? 9 : (groups + 1) / 2 + (groups == 8);
          c.scale = normalise ? 2.5f : 1;
          c.chooses_by_logits = gating == Gating::sigmoid && !biased && !normalise;
          for (int i = 0; i < 50; ++i) {
            std::vector<float> logits(c.count), bias(biased ? c.count : 0);
            for (float& x : logits) x = 2 * normal(random);
            for (float& x : bias) x = normal(random) / 4;
            check_same(choice(c, logits, bias), plain_choice(c, logits, bias));
          }
        }
}

TEST_CASE("equal experts and equal groups are chosen by their number, never one twice") {
  ExpertConfig c;
  c.count = 8, c.used = 3, c.groups = 4, c.groups_used = 2;
  const auto experts = [&](const std::vector<float>& logits) {
    std::vector<uint32_t> out;
    for (const ExpertChoice& e : choice(c, logits, {})) out.push_back(e.expert);
    return out;
  };
  CHECK(experts(std::vector<float>(8, 1.5f)) == std::vector<uint32_t>{0, 1, 2});
  CHECK(experts({0, 0, 3, 1, 1, 3, 0, 0}) == std::vector<uint32_t>{2, 5, 3});
  // Infinitely unlikely experts: their probabilities are zeros, which are equal.
  CHECK(experts({-3e38f, -3e38f, -3e38f, 3e38f, -3e38f, -3e38f, -3e38f, -3e38f}) ==
        std::vector<uint32_t>{3, 0, 1});
}

TEST_CASE("weights of zeros stay zeros when they are normalised") {
  ExpertConfig c;
  c.count = 4, c.used = 2, c.normalise = true, c.gating = Gating::sigmoid;
  for (const ExpertChoice& e : choice(c, std::vector<float>(4, -200.0f), {})) CHECK(e.weight == 0);
}

namespace {

// A layer of experts with random weights, and its plain product in double precision.
class PlainLayer {
 public:
  PlainLayer(const LayerConfig& layer, bool biased, bool scaled) : c_(layer.experts) {
    config.width = width;
    config.layer_configs = {layer};
    weights.layers.resize(1);
    ExpertWeights& w = weights.layers[0].experts;
    w.router = linear(c_.count, width, biased);
    if (biased) w.selection_bias = floats(c_.count, 0.3f);
    if (layer.gated) w.gate = matrices(c_.width, width, biased, scaled);
    w.up = matrices(c_.width, width, biased, scaled);
    w.down = matrices(width, c_.width, biased, scaled);
    if (c_.shared_width == 0) return;
    if (layer.gated) w.shared_gate = linear(c_.shared_width, width, biased);
    w.shared_up = linear(c_.shared_width, width, biased);
    w.shared_down = linear(width, c_.shared_width, biased);
    if (scaled) w.shared_router = floats(width, 0.1f);
  }

  std::vector<double> run(const float* x) const {
    const ExpertWeights& w = weights.layers[0].experts;
    std::vector<float> logits;
    for (const double y : product(w.router.w, w.router.bias, 0, 1, widened(x, 1)))
      logits.push_back(static_cast<float>(y));
    std::vector<double> out(width);
    for (const ExpertChoice& choice :
         plain_choice(c_, logits, {w.selection_bias.begin(), w.selection_bias.end()})) {
      const auto weight = static_cast<double>(choice.weight);
      const auto part = [&](const ExpertMatrices& m, const std::vector<double>& in) {
        return product(m.of(choice.expert), m.biases, choice.expert,
                       m.scales.empty() ? 1.0 : static_cast<double>(m.scales[choice.expert]), in);
      };
      const auto in = widened(x, c_.weighs_input ? weight : 1);
      add(part(w.down, activated(w.gate.first.data ? part(w.gate, in) : part(w.up, in),
                                 w.gate.first.data ? part(w.up, in) : std::vector<double>())),
          c_.weighs_input ? 1 : weight, &out);
    }
    if (c_.shared_width == 0) return out;
    const auto part = [&](const Linear& m, const std::vector<double>& in) {
      return product(m.w, m.bias, 0, 1, in);
    };
    double gate = 0;
    for (std::size_t i = 0; i < w.shared_router.size(); ++i)
      gate += static_cast<double>(w.shared_router[i]) * static_cast<double>(x[i]);
    const auto in = widened(x, 1);
    add(part(w.shared_down,
             activated(w.shared_gate.w.data ? part(w.shared_gate, in) : part(w.shared_up, in),
                       w.shared_gate.w.data ? part(w.shared_up, in) : std::vector<double>())),
        w.shared_router.empty() ? 1 : 1 / (1 + std::exp(-gate)), &out);
    return out;
  }

  static constexpr uint32_t width = 40;
  ModelConfig config;
  Weights weights;

 private:
  Array<float> floats(std::size_t n, float size) {
    std::normal_distribution<float> normal(0, size);
    Array<float> out(n);
    for (float& x : out) x = normal(random_);
    return out;
  }
  WeightView view(uint32_t matrices, uint32_t rows, uint32_t cols) {
    memory_.push_back(floats(std::size_t{matrices} * rows * cols, 0.3f));
    return {reinterpret_cast<const std::byte*>(memory_.back().data()), TensorType::f32, rows, cols,
            cols * sizeof(float)};
  }
  Linear linear(uint32_t rows, uint32_t cols, bool biased) {
    return {view(1, rows, cols), biased ? floats(rows, 0.3f) : Array<float>()};
  }
  ExpertMatrices matrices(uint32_t rows, uint32_t cols, bool biased, bool scaled) {
    ExpertMatrices m;
    m.first = view(c_.count, rows, cols);
    m.stride = m.first.row_bytes * rows;
    if (biased) m.biases = floats(std::size_t{c_.count} * rows, 0.3f);
    if (scaled) m.scales = floats(c_.count, 1);
    return m;
  }
  static std::vector<double> widened(const float* x, double factor) {
    std::vector<double> out(x, x + width);
    for (double& v : out) v *= factor;
    return out;
  }
  static std::vector<double> product(const WeightView& w, const Array<float>& biases,
                                     uint32_t expert, double scale, const std::vector<double>& x) {
    std::vector<double> y(w.rows);
    const auto* numbers = reinterpret_cast<const float*>(w.data);
    for (std::size_t r = 0; r < w.rows; ++r) {
      for (std::size_t c = 0; c < w.cols; ++c)
        y[r] += static_cast<double>(numbers[r * w.cols + c]) * x[c];
      y[r] *= scale;
      if (!biases.empty()) y[r] += static_cast<double>(biases[expert * std::size_t{w.rows} + r]);
    }
    return y;
  }
  std::vector<double> activated(std::vector<double> g, const std::vector<double>& u) const {
    const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
    const Activation f = config.layer_configs[0].activation;
    for (std::size_t i = 0; i < g.size(); ++i) {
      const double x = f == Activation::clamped_silu ? std::min(g[i], 7.0) : g[i];
      if (f == Activation::silu) g[i] = x * sigmoid(x);
      if (f == Activation::gelu)
        g[i] =
            x / 2 * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
      if (f == Activation::relu_squared) g[i] = x > 0 ? x * x : 0;
      if (f == Activation::clamped_silu)
        g[i] = x * sigmoid(1.702 * x) * (std::clamp(u[i], -7.0, 7.0) + 1);
      else if (!u.empty()) g[i] *= u[i];
    }
    return g;
  }
  static void add(const std::vector<double>& x, double weight, std::vector<double>* out) {
    for (std::size_t i = 0; i < x.size(); ++i) (*out)[i] += weight * x[i];
  }

  std::mt19937 random_{11};
  const ExpertConfig c_;
  std::vector<Array<float>> memory_;
};

}  // namespace

TEST_CASE("a layer of experts is the sum of its definition, with every feature") {
  struct Features {
    const char* name;
    Activation activation;
    bool gated, biased, scaled, weighs_input;
    uint32_t shared;
  };
  for (const Features& f :
       {Features{"plain", Activation::silu, true, false, false, false, 0},
        Features{"gpt-oss", Activation::clamped_silu, true, true, false, false, 0},
        Features{"shared and gated", Activation::silu, true, false, true, false, 72},
        Features{"llama4", Activation::silu, true, false, false, true, 20},
        Features{"gemma4", Activation::gelu, true, false, true, false, 0},
        Features{"nemotron", Activation::relu_squared, false, true, false, false, 50}}) {
    CAPTURE(f.name);
    LayerConfig layer;
    layer.activation = f.activation, layer.gated = f.gated;
    layer.experts = {.count = 12, .used = 3, .width = 28, .shared_width = f.shared};
    layer.experts.weighs_input = f.weighs_input;
    const PlainLayer plain(layer, f.biased, f.scaled);
    std::unique_ptr<ThreadPool> pool;
    REQUIRE(ThreadPool::create(2, &pool).ok());
    CpuExperts experts(plain.config, plain.weights, 0, pool.get());
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (const uint32_t n : {1u, 30u, 3u, 9u}) {
      CAPTURE(n);
      std::vector<float> x(n * plain.width), y(x.size());
      for (float& v : x) v = normal(random);
      REQUIRE(experts.run(0, {n, x.data(), x.data(), 1e30f}, CancelLatch(nullptr), y.data()));
      double difference = 0, norm = 0;
      for (uint32_t t = 0; t < n; ++t) {
        const std::vector<double> expected = plain.run(x.data() + t * plain.width);
        for (uint32_t i = 0; i < plain.width; ++i) {
          difference += std::pow(static_cast<double>(y[t * plain.width + i]) - expected[i], 2);
          norm += std::pow(expected[i], 2);
        }
      }
      CHECK(std::sqrt(difference / norm) < 2e-6);
    }
  }
}
