// Mixtures of experts on a GPU, with their experts there or on the CPU, against the CPU alone.
// Without a GPU the cases pass and say so.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::string path_of(const std::string& name) { return FIXTURES "/models/" + name + ".gguf"; }

std::shared_ptr<const Model> on_gpu(const std::string& path, uint64_t budget = 0) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model, {.name = "cuda", .budget = budget});
  REQUIRE_MESSAGE((s.ok() || (budget > 0 && s.code() == Code::no_memory)), s.message());
  return model;
}

uint32_t expert_layers(const Model& model) {
  const auto& layers = model.config().layer_configs;
  return static_cast<uint32_t>(std::count_if(layers.begin(), layers.end(),
                                             [](const LayerConfig& c) { return c.has_experts(); }));
}

enum class Where { gpu, some, cpu };

// The model with all layers and the output on the GPU, and the experts of all layers, of some or of
// none. Null where no limit of memory has that result.
std::shared_ptr<const Model> with_experts(const std::string& path, Where where) {
  if (where == Where::gpu) return on_gpu(path);
  constexpr uint64_t step = uint64_t{1} << 18;
  for (uint64_t budget = step;; budget += step) {
    const auto model = on_gpu(path, budget);
    if (!model || !model->device_weights().back().has_output()) continue;
    const uint32_t here = model->device_weights().back().expert_layers();
    if (here == expert_layers(*model)) return nullptr;
    if ((here == 0) == (where == Where::cpu)) return model;
    if (where == Where::cpu) return nullptr;
  }
}

std::vector<Token> expert_tokens(std::size_t n, uint32_t seed = 3) {
  std::vector<Token> out(n);
  uint32_t state = seed;
  for (Token& t : out) {
    state = state * 1664525u + 1013904223u;
    t = static_cast<Token>(state >> 24);
  }
  return out;
}

// Two float sums in different orders choose other experts now and then, where two are about equal:
// the median of several tokens has none.
constexpr double other_experts = 1e-2;

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// A prefill and 20 tokens by a strategy.
void check_as_cpu(const std::shared_ptr<const Model>& cpu, const std::shared_ptr<const Model>& gpu,
                  const std::string& strategy, double tolerance) {
  CAPTURE(strategy);
  const auto tokens = expert_tokens(600);
  SessionOptions o = bounded_options(128);
  o.select.strategy = strategy;
  if (strategy == "full") o.select.budget_tokens = 0;
  auto a = open_session(cpu, o), b = open_session(gpu, o);
  read(a.get(), tokens);
  read(b.get(), tokens);
  std::vector<double> differences;
  for (int i = 0; i < 20; ++i) {
    read(a.get(), {tokens.data() + i, 1}), read(b.get(), {tokens.data() + i, 1});
    std::unique_ptr<Session> fork_a, fork_b;
    REQUIRE(a->fork(&fork_a).ok());
    REQUIRE(b->fork(&fork_b).ok());
    differences.push_back(difference(logits_after(fork_b.get(), 9), logits_after(fork_a.get(), 9)));
  }
  CHECK(median(std::move(differences)) < tolerance);
}

// [tokens][vocabulary], in one step.
std::vector<float> logits_of(const std::shared_ptr<const Model>& model,
                             std::span<const Token> tokens) {
  SessionOptions o;
  o.threads = 2;
  o.prefill_chunk = 256;
  auto session = open_session(model, o);
  std::vector<float> logits(tokens.size() * model->config().vocabulary);
  uint64_t done = 0;
  const Status s = session->prefill_tokens(tokens, logits.data(), nullptr, {}, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return logits;
}

// Of the logits of each token.
void check_prefill_as_cpu(const std::shared_ptr<const Model>& cpu,
                          const std::shared_ptr<const Model>& gpu, double tolerance) {
  for (const std::size_t n : {2u, 9u, 250u}) {
    CAPTURE(n);
    const auto tokens = expert_tokens(n);
    const auto a = logits_of(cpu, tokens), b = logits_of(gpu, tokens);
    const std::size_t vocabulary = cpu->config().vocabulary;
    std::vector<double> differences;
    for (std::size_t at = 0; at < a.size(); at += vocabulary) {
      const auto row = [&](const std::vector<float>& x) {
        return std::vector<float>(&x[at], &x[at] + vocabulary);
      };
      differences.push_back(difference(row(b), row(a)));
    }
    CHECK(median(std::move(differences)) < tolerance);
  }
}

// A copy of qwen3moe whose first number of a tensor is NaN.
std::string damaged(const TempFolder& folder, const char* tensor) {
  std::string path = folder.file("damaged.gguf");
  std::filesystem::copy_file(path_of("qwen3moe"), path,
                             std::filesystem::copy_options::overwrite_existing);
  std::ifstream in(path, std::ios::binary);
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  const float nan = std::nanf("");
  std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
  out.seekp(static_cast<std::streamoff>(gguf.find_tensor(tensor)->offset));
  out.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  return path;
}

}  // namespace

TEST_CASE("a GPU that has the experts of all layers, of some or of none gives the CPU's logits") {
  if (!device_model()) return;
  // Dense layers, shared experts, windows, biases and other activations, experts whose input is
  // weighted, experts next to a dense network.
  for (const char* name :
       {"qwen3moe", "bailingmoe2", "qwen2moe", "glm4moe-mtp", "gpt-oss", "llama4", "gemma4-moe"}) {
    CAPTURE(std::string(name));
    const auto cpu = open_model(path_of(name));
    for (const Where where : {Where::gpu, Where::some, Where::cpu}) {
      CAPTURE(static_cast<int>(where));
      const auto gpu = with_experts(path_of(name), where);
      if (!gpu) {
        CHECK(where != Where::gpu);  // small weights: the GPU's memory is taken in large blocks
        continue;
      }
      REQUIRE(gpu->device_weights().front().has_output());
      check_prefill_as_cpu(cpu, gpu, other_experts);
      for (const char* strategy : {"bounded", "quest", "full"}) {
        if (where == Where::some && strategy != std::string("bounded")) continue;
        check_as_cpu(cpu, gpu, strategy, other_experts);
      }
    }
  }
}

TEST_CASE("a GPU computes experts of quantised weights as the CPU does") {
  if (!device_model()) return;
  for (const char* name : {"qwen3moe-mxfp4", "qwen3moe-q4_k", "qwen3moe-iq4_xs"}) {
    CAPTURE(std::string(name));
    const auto cpu = open_model(path_of(name)), gpu = on_gpu(path_of(name));
    REQUIRE(gpu->device_weights().front().expert_layers() == expert_layers(*gpu));
    check_prefill_as_cpu(cpu, gpu, rounding);
    check_as_cpu(cpu, gpu, "bounded", rounding);
  }
}

TEST_CASE("the plan and the statistics say which layers' experts are on the GPU") {
  if (!device_model()) return;
  const std::string path = path_of("qwen3moe");
  for (const Where where : {Where::gpu, Where::some, Where::cpu}) {
    CAPTURE(static_cast<int>(where));
    const auto model = with_experts(path, where);
    if (!model) continue;
    const auto session = open_session(model, bounded_options(128));
    read(session.get(), expert_tokens(3));
    const std::string name = model->device_names();
    const uint32_t end = model->device_weights().front().experts_end();
    const std::string to = ", experts " + name + " up to layer " + std::to_string(end - 1);
    const std::string from = ", experts cpu from layer " + std::to_string(end);
    CHECK(says(*session, ", experts " + name) == (where != Where::cpu));
    CHECK(says(*session, ", experts cpu") == (where != Where::gpu));
    CHECK(says(*session, to + from) == (where == Where::some));
    CHECK(says(*session, "\"expert_layers\":" +
                             std::to_string(model->device_weights().front().expert_layers())));
  }
  const auto cpu = open_session(open_model(path), bounded_options(128));
  CHECK_FALSE(says(*cpu, ", experts"));
  CHECK_FALSE(says(*open_session(device_model()), "expert_layers"));
}

TEST_CASE("on a GPU a token's result does not depend on the tokens that it shares experts with") {
  if (!device_model()) return;
  for (const char* name : {"qwen2moe", "qwen3moe-mxfp4"}) {
    CAPTURE(std::string(name));
    const auto model = on_gpu(path_of(name));
    for (const std::size_t n : {6u, 40u}) {  // attention of longer steps has scales in common
      CAPTURE(n);
      auto tokens = expert_tokens(n), others = expert_tokens(n, 6);
      const std::size_t same = n / 2;
      std::copy_n(tokens.begin(), same, others.begin());
      auto a = logits_of(model, tokens), b = logits_of(model, others);
      REQUIRE(a != b);
      a.resize(same * model->config().vocabulary);
      b.resize(a.size());
      CHECK(a == b);
    }
  }
}

TEST_CASE("experts that make NaN fail a step of a GPU by name, and leave the sequence") {
  if (!device_model()) return;
  const TempFolder folder;
  for (const char* tensor : {"blk.1.ffn_gate_inp.weight", "blk.1.ffn_up_exps.weight"}) {
    CAPTURE(std::string(tensor));
    const std::string path = damaged(folder, tensor);
    for (const Where where : {Where::gpu, Where::cpu}) {
      const auto model = with_experts(path, where);
      if (!model) continue;
      const auto session = open_session(model, bounded_options(128));
      for (const std::size_t n : {1u, 300u}) {
        if (n == 1 && tensor != std::string("blk.1.ffn_gate_inp.weight")) continue;  // not chosen
        uint64_t done = 7;
        const Status s = session->prefill_tokens(expert_tokens(n), nullptr, nullptr, {}, &done);
        CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
        CHECK(std::string(s.message()).find("layer 1 made NaN or infinity") == 0);
        CHECK(session->tokens().empty());
      }
    }
  }
}
