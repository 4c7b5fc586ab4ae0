// Mixtures of experts: routing against a plain implementation, and whole models.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "engine/cpu_experts.h"
#include "engine/expert_routing.h"
#include "helpers.h"
#include "temp_folder.h"

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

constexpr const char* models[] = {"qwen3moe", "qwen2moe", "bailingmoe2", "glm4moe-mtp"};

std::string path_of(const std::string& name) { return FIXTURES "/models/" + name + ".gguf"; }

std::vector<Token> some_tokens(std::size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Token> out(n);
  for (Token& t : out) t = static_cast<Token>(random() % 256);
  return out;
}

// [tokens][vocabulary], in one step.
std::vector<float> logits_of(std::shared_ptr<const Model> model, std::span<const Token> tokens,
                             uint32_t threads) {
  SessionOptions o;
  o.threads = threads;
  o.prefill_chunk = 256;
  auto session = test::open_session(model, o);
  std::vector<float> logits(tokens.size() * model->config().vocabulary);
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, logits.data(), nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return logits;
}

// A copy of a model's file whose tensor has so many numbers of this 16- or 32-bit pattern.
template <class Bits>
void damage(const std::string& model, const std::string& tensor, Bits bits, std::size_t count,
            const std::string& path) {
  std::ifstream in(path_of(model), std::ios::binary);
  std::vector<std::byte> bytes(std::filesystem::file_size(path_of(model)));
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  const GgufTensor* t = gguf.find_tensor(tensor);
  REQUIRE(t);
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(&bytes[t->offset + i * sizeof bits], &bits, sizeof bits);
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
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

TEST_CASE("mixtures of experts: one thread and several give the same bits") {
  for (const char* name : models) {
    CAPTURE(name);
    const auto model = test::open_model(path_of(name));
    for (const std::size_t n : {1u, 7u, 100u}) {
      CAPTURE(n);
      const auto tokens = some_tokens(n, 5);
      const std::vector<float> one = logits_of(model, tokens, 1);
      CHECK(logits_of(model, tokens, 2) == one);
      CHECK(logits_of(model, tokens, 5) == one);
    }
  }
}

TEST_CASE(
    "mixtures of experts: a token's result does not depend on the tokens it shares experts "
    "with") {
  for (const char* name : models) {
    CAPTURE(name);
    const auto model = test::open_model(path_of(name));
    for (const std::size_t n : {6u, 12u, 200u}) {  // every method of products
      CAPTURE(n);
      auto tokens = some_tokens(n, 5), others = some_tokens(n, 6);
      const std::size_t same = n / 2;
      std::copy_n(tokens.begin(), same, others.begin());
      auto a = logits_of(model, tokens, 2), b = logits_of(model, others, 2);
      REQUIRE(a != b);
      a.resize(same * model->config().vocabulary);
      b.resize(a.size());
      CHECK(a == b);
    }
  }
}

TEST_CASE("a router or an expert that makes NaN or infinity fails the step by name") {
  TempFolder folder;
  const std::string path = folder.file("a.gguf");
  const auto check = [&](const char* name) {
    CAPTURE(name);
    const auto session = test::open_session(test::open_model(path));
    for (const std::size_t n : {1u, 40u}) {
      uint64_t done = 7;
      const Status s = session->prefill_tokens(some_tokens(n, 1), nullptr, nullptr, {}, &done);
      CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
      CHECK(std::string(s.message()).find("layer 1 made NaN or infinity") == 0);
      CHECK(session->tokens().empty());
    }
  };
  const auto model = test::open_model(path_of("qwen3moe"));
  const std::size_t width = model->config().width;
  const ExpertConfig& e = model->config().layer(1).experts;
  const auto of = [](const char* name) { return std::string("blk.1.ffn_") + name + ".weight"; };
  damage("qwen3moe", of("gate_inp"), std::nanf(""), width, path);  // of one expert
  check("NaN of a router");
  damage("qwen3moe", of("gate_inp"), 3e38f, width * e.count, path);
  check("a router of large numbers");
  for (const char* matrix : {"gate_exps", "up_exps", "down_exps"})
    for (const uint16_t bits : {uint16_t{0x7e00}, uint16_t{0x7c00}}) {  // NaN, infinity
      damage("qwen3moe", of(matrix), bits, width * e.width * e.count, path);
      check(matrix);
    }
}

TEST_CASE("a step of experts can be cancelled at any time, and then continued") {
  const auto model = test::open_model(path_of("qwen2moe"));
  const auto tokens = some_tokens(240, 9);
  SessionOptions o;
  o.threads = 2;
  o.prefill_chunk = 120;
  const auto whole = test::open_session(model, o);
  test::read(whole.get(), tokens);
  const std::vector<float> expected = test::logits_after(whole.get(), 3);
  for (int i = 0; i < 20; ++i) {
    const auto session = test::open_session(model, o);
    Cancel cancel;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(300 * i));
      cancel.fire();
    });
    uint64_t done = 0;
    const Status s = session->prefill_tokens(tokens, nullptr, &cancel, {}, &done);
    other.join();
    CHECK((s.ok() || s.code() == Code::cancelled));
    CHECK(done % 120 == 0);
    REQUIRE(session->tokens().size() == done);
    test::read(session.get(), std::span<const Token>(tokens).subspan(done));
    CHECK(test::logits_after(session.get(), 3) == expected);
  }
}

TEST_CASE("experts of a file that contradict themselves are refused by name") {
  const auto file = [](const char* architecture) {
    test::GgufBuilder b;
    b.key("general.architecture", architecture);
    const std::string at = std::string(architecture) + ".";
    for (const auto& [key, value] :
         {std::pair("block_count", 4u), std::pair("embedding_length", 64u),
          std::pair("context_length", 512u), std::pair("attention.head_count", 4u),
          std::pair("attention.head_count_kv", 2u), std::pair("feed_forward_length", 96u),
          std::pair("expert_count", 8u), std::pair("expert_used_count", 2u)})
      b.key(at + key, value);
    return b;
  };
  const auto read = [](const test::GgufBuilder& b, ModelConfig* out) {
    const std::vector<std::byte> bytes = b.build();
    Gguf gguf;
    REQUIRE(Gguf::parse(bytes, &gguf).ok());
    return ModelConfig::read(gguf, out);
  };
  ModelConfig c;
  REQUIRE(read(file("llama"), &c).ok());  // Mixtral
  for (const LayerConfig& layer : c.layer_configs) {
    CHECK(layer.experts.count == 8);
    CHECK(layer.experts.used == 2);
    CHECK(layer.experts.width == 96);
    CHECK(layer.experts.shared_width == 0);
    CHECK(layer.experts.normalise);
    CHECK_FALSE(layer.has_dense());
  }
  REQUIRE(read(file("ernie4_5-moe")
                   .key("ernie4_5-moe.leading_dense_block_count", 1u)
                   .key("ernie4_5-moe.interleave_moe_layer_step", 2u)
                   .key("ernie4_5-moe.expert_feed_forward_length", 32u)
                   .key("ernie4_5-moe.expert_shared_count", 2u),
               &c)
              .ok());
  for (uint32_t l = 0; l < 4; ++l) CHECK(c.layer(l).has_experts() == (l % 2 == 1));
  CHECK(c.layer(1).experts.width == 32);
  CHECK(c.layer(1).experts.shared_width == 64);

  const auto check_refused = [&](const test::GgufBuilder& b, const std::string& text) {
    CAPTURE(text);
    ModelConfig out;
    const Status s = read(b, &out);
    CHECK_FALSE(s.ok());
    CHECK_MESSAGE(std::string(s.message()).find(text) != std::string::npos, s.message());
  };
  const auto groups = [&](uint32_t count, uint32_t used) {
    return file("bailingmoe2")
        .key("bailingmoe2.expert_group_count", count)
        .key("bailingmoe2.expert_group_used_count", used);
  };
  CHECK(read(groups(4, 1), &c).ok());
  check_refused(groups(8, 1), "chooses 2 of 8 experts in 1 of 8 groups");
  check_refused(groups(3, 2), "chooses 2 of 8 experts in 2 of 3 groups");
  check_refused(groups(2, 3), "expert_group_used_count");
  check_refused(file("llama").key("llama.expert_gating_func", 4u), "expert_gating_func");
  check_refused(file("llama").key("llama.expert_weights_scale", std::nanf("")),
                "expert_weights_scale");
}
