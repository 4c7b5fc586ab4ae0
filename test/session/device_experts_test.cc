// Mixtures of experts whose mixers are on a GPU and whose experts are on the CPU, against those of
// the CPU alone. Without a GPU the cases pass and say so.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::string path_of(const std::string& name) { return FIXTURES "/models/" + name + ".gguf"; }

std::shared_ptr<const Model> on_gpu(const std::string& path) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model, {.name = "cuda"});
  REQUIRE_MESSAGE(s.ok(), s.message());
  return model;
}

std::vector<Token> some_tokens(std::size_t n) {
  std::vector<Token> out(n);
  uint32_t state = 3;
  for (Token& t : out) {
    state = state * 1664525u + 1013904223u;
    t = static_cast<Token>(state >> 24);
  }
  return out;
}

// Two float sums in different orders choose other experts now and then, where two are about equal:
// the median of several tokens has none.
constexpr double other_experts = 1e-2;

}  // namespace

TEST_CASE(
    "a GPU computes all of a mixture of experts but the experts, and gives the CPU's logits") {
  if (!device_model()) return;
  const auto tokens = some_tokens(600);
  for (const char* name : {"qwen3moe", "bailingmoe2", "qwen2moe"}) {  // one has a dense layer too
    CAPTURE(std::string(name));
    const auto cpu = open_model(path_of(name)), gpu = on_gpu(path_of(name));
    REQUIRE(gpu->device_weights().front().has_output());
    for (const char* strategy : {"bounded", "quest", "full"}) {
      CAPTURE(std::string(strategy));
      SessionOptions o = bounded_options(128);
      o.select.strategy = strategy;
      if (strategy == std::string("full")) o.select.budget_tokens = 0;
      auto a = open_session(cpu, o), b = open_session(gpu, o);
      read(a.get(), tokens);
      read(b.get(), tokens);
      CHECK(difference(logits_after(b.get(), 7), logits_after(a.get(), 7)) < other_experts);
      std::vector<double> differences;
      for (int i = 0; i < 20; ++i) {
        read(a.get(), {tokens.data() + i, 1}), read(b.get(), {tokens.data() + i, 1});
        std::unique_ptr<Session> fork_a, fork_b;
        REQUIRE(a->fork(&fork_a).ok());
        REQUIRE(b->fork(&fork_b).ok());
        differences.push_back(
            difference(logits_after(fork_b.get(), 9), logits_after(fork_a.get(), 9)));
      }
      std::nth_element(differences.begin(), differences.begin() + 10, differences.end());
      CHECK(differences[10] < other_experts);
      CHECK(b->stats_json().find(", experts cpu") != std::string::npos);
      CHECK(a->stats_json().find(", experts cpu") == std::string::npos);
    }
  }
}

TEST_CASE("experts that make NaN fail a step whose mixers are on a GPU, and leave the sequence") {
  if (!device_model()) return;
  const TempFolder folder;
  const std::string path = folder.file("damaged.gguf");
  std::filesystem::copy_file(path_of("qwen3moe"), path);
  {
    std::ifstream in(path, std::ios::binary);
    std::vector<std::byte> bytes(std::filesystem::file_size(path));
    in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    Gguf gguf;
    REQUIRE(Gguf::parse(bytes, &gguf).ok());
    const float nan = std::nanf("");
    std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(gguf.find_tensor("blk.1.ffn_gate_inp.weight")->offset));
    out.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  }
  const auto session = open_session(on_gpu(path), bounded_options(128));
  for (const std::size_t n : {1u, 300u}) {
    uint64_t done = 7;
    const Status s = session->prefill_tokens(some_tokens(n), nullptr, nullptr, {}, &done);
    CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
    CHECK(std::string(s.message()).find("layer 1 made NaN or infinity") == 0);
    CHECK(session->tokens().empty());
  }
}
