// Whole models that are mixtures of experts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "helpers.h"
#include "resident.h"
#include "temp_folder.h"
#include "text/text_fixtures.h"

using namespace kvasir;

namespace {

constexpr const char* models[] = {"qwen3moe", "qwen2moe", "bailingmoe2", "glm4moe-mtp"};

std::string path_of(const std::string& name) { return FIXTURES "/models/" + name + ".gguf"; }

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

TEST_CASE("mixtures of experts: one thread and several give the same bits") {
  for (const char* name : models) {
    CAPTURE(name);
    const auto model = test::open_model(path_of(name));
    for (const std::size_t n : {1u, 7u, 100u}) {
      CAPTURE(n);
      const auto tokens = test::some_tokens(n, 5);
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
      auto tokens = test::some_tokens(n, 5), others = test::some_tokens(n, 6);
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
      const Status s =
          session->prefill_tokens(test::some_tokens(n, 1), nullptr, nullptr, {}, &done);
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
  const auto tokens = test::some_tokens(240, 9);
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

TEST_CASE("opening a mixture of experts and a token of it read the pages of few experts" *
          doctest::skip(!std::filesystem::exists("/proc/self/smaps"))) {
  constexpr uint32_t width = 256, inner = 256, count = 64, used = 2;
  const test::TestVocabulary vocabulary = test::byte_vocabulary();
  test::GgufBuilder b = test::bpe_file(vocabulary);
  b.key("general.architecture", "qwen3moe");
  for (const auto& [key, value] :
       {std::pair("block_count", 1u), std::pair("embedding_length", width),
        std::pair("context_length", 512u), std::pair("attention.head_count", 1u),
        std::pair("attention.key_length", 32u), std::pair("attention.value_length", 32u),
        std::pair("feed_forward_length", inner), std::pair("expert_count", count),
        std::pair("expert_used_count", used), std::pair("expert_feed_forward_length", inner)})
    b.key(std::string("qwen3moe.") + key, value);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<float> numbers(1009);
  for (float& x : numbers) x = normal(random);
  const auto add = [&](const char* name, std::vector<uint64_t> dims) {
    std::size_t n = 1;
    for (const uint64_t d : dims) n *= d;
    std::vector<std::byte> bytes(n * sizeof(float));
    for (std::size_t i = 0; i < n; ++i)
      std::memcpy(&bytes[i * sizeof(float)], &numbers[i % numbers.size()], sizeof(float));
    b.tensor(std::string(name) + ".weight", std::move(dims), TensorType::f32, std::move(bytes));
  };
  add("token_embd", {width, vocabulary.tokens.size()}), add("output_norm", {width});
  for (const char* norm : {"blk.0.attn_norm", "blk.0.ffn_norm"}) add(norm, {width});
  for (const char* norm : {"blk.0.attn_q_norm", "blk.0.attn_k_norm"}) add(norm, {32});
  for (const char* name : {"blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"}) add(name, {width, 32});
  add("blk.0.attn_output", {32, width}), add("blk.0.ffn_gate_inp", {width, count});
  for (const char* name : {"blk.0.ffn_gate_exps", "blk.0.ffn_up_exps"})
    add(name, {width, inner, count});
  add("blk.0.ffn_down_exps", {inner, width, count});

  TempFolder folder;
  const std::string path = folder.file("experts.gguf");
  const std::vector<std::byte> bytes = b.build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  const auto model = test::open_model(path);
  // The system maps up to 2 MiB around a page that is touched.
  CHECK(resident_of("experts.gguf") < bytes.size() / 2);
  const auto session = test::open_session(model);
  test::read(session.get(), std::vector<Token>{'a'});
  CHECK(resident_of("experts.gguf") < bytes.size() / 4 * 3);
}
