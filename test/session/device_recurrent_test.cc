// Models with recurrent layers on a GPU, against the CPU: every block, every mode of attention,
// and what is done with the states. Without a GPU the cases pass and say so.
#include <algorithm>
#include <string>
#include <vector>

#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr const char* hybrids[] = {"qwen3next",  "qwen35",        "qwen35moe",         "lfm2",
                                   "lfm2moe",    "granitehybrid", "granitehybrid-moe", "falcon-h1",
                                   "nemotron_h", "nemotron_h_moe"};

std::shared_ptr<const Model> hybrid_on(const char* name, const char* device) {
  std::shared_ptr<const Model> model;
  const std::string path = FIXTURES "/models/" + std::string(name) + ".gguf";
  const Status s = Model::open(path, "", &model, {.name = device});
  REQUIRE_MESSAGE(s.ok(), s.message());
  return model;
}

SessionOptions hybrid_options(const char* strategy = "full") {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = strategy;
  o.prefill_chunk = 128;
  o.full_precision = true;
  return o;
}

struct Both {
  std::unique_ptr<Session> cpu, gpu;

  void read(std::span<const Token> tokens) {
    test::read(cpu.get(), tokens);
    test::read(gpu.get(), tokens);
  }
  void rewind(uint64_t tokens) {
    REQUIRE(cpu->rewind(tokens).ok());
    REQUIRE(gpu->rewind(tokens).ok());
  }
  Both fork() const {
    Both out;
    REQUIRE(cpu->fork(&out.cpu).ok());
    REQUIRE(gpu->fork(&out.gpu).ok());
    return out;
  }
  // Of forks: the sequences stay.
  double off() const {
    const Both forks = fork();
    return difference(logits_after(forks.gpu.get(), 9), logits_after(forks.cpu.get(), 9));
  }
};

// Steps of every size, rewinds, what was saved, and steps from there.
void check_hybrid(const char* name, const SessionOptions& options, double tolerance) {
  const auto cpu = hybrid_on(name, "cpu"), gpu = hybrid_on(name, "cuda");
  REQUIRE(gpu->device_weights().front().has_output());
  const auto tokens = some_tokens(700, 13);
  const TempFolder folder;
  Both both{open_session(cpu, options), open_session(gpu, options)};
  both.read({tokens.data(), 300});
  CHECK(both.off() < tolerance);
  both.read({tokens.data() + 300, 35});
  CHECK(both.off() < tolerance);
  for (std::size_t i = 0; i < 20; ++i) both.read({tokens.data() + 335 + i, 1});
  CHECK(both.off() < tolerance);
  const std::vector<float> expected = logits_after(both.cpu.get(), 11);
  CHECK(difference(logits_after(both.gpu.get(), 11), expected) < tolerance);
  both.rewind(355);
  CHECK(difference(logits_after(both.gpu.get(), 11), expected) < tolerance);
  both.rewind(330);
  both.read({tokens.data() + 500, 5});
  CHECK(both.off() < tolerance);
  REQUIRE(both.gpu->save(folder.file("a.kv"), nullptr, {}).ok());
  Both loaded{load(cpu, folder.file("a.kv"), options), load(gpu, folder.file("a.kv"), options)};
  CHECK(loaded.off() < tolerance);
  loaded.read({tokens.data() + 505, 90});
  CHECK(loaded.off() < tolerance);
  for (std::size_t i = 0; i < 3; ++i) loaded.read({tokens.data() + 600 + i, 1});
  CHECK(loaded.off() < tolerance);
}

}  // namespace

TEST_CASE("models with recurrent layers give on a GPU the CPU's logits, in full precision") {
  if (!device_model()) return;
  for (const char* name : hybrids) {
    CAPTURE(std::string(name));
    check_hybrid(name, hybrid_options(), 1e-3);
  }
}

// Both keep 8 bits of a page; their sums round differently now and then.
TEST_CASE("a GPU computes recurrent layers in every mode of the layers that attend") {
  if (!device_model()) return;
  for (const char* name : {"qwen35", "qwen35moe", "falcon-h1", "nemotron_h"})
    for (const char* strategy : {"bounded", "full", "quest", "window"}) {
      CAPTURE(std::string(name));
      CAPTURE(std::string(strategy));
      SessionOptions options = hybrid_options(strategy);
      options.full_precision = false;
      if (strategy != std::string("full")) options.select.budget_tokens = 3000;  // everything
      check_hybrid(name, options, 3e-2);
    }
}

TEST_CASE("sequences of one model on a GPU have states of their own") {
  if (!device_model()) return;
  const auto tokens = some_tokens(400, 13);
  for (const char* name : {"qwen35", "lfm2moe", "granitehybrid"}) {
    CAPTURE(std::string(name));
    const auto model = hybrid_on(name, "cuda");
    const auto alone = [&](Token last) {
      auto session = open_session(model, hybrid_options());
      read(session.get(), {tokens.data(), 300});
      return logits_after(session.get(), last);
    };
    const std::vector<float> expected[] = {alone(5), alone(6), alone(7)};
    auto session = open_session(model, hybrid_options());
    read(session.get(), {tokens.data(), 300});
    // A question after another, on forks and on one session, and two sessions in turn.
    std::unique_ptr<Session> forks[2];
    for (auto& fork : forks) REQUIRE(session->fork(&fork).ok());
    CHECK(logits_after(forks[0].get(), 5) == expected[0]);
    CHECK(logits_after(forks[1].get(), 6) == expected[1]);
    for (int i = 0; i < 3; ++i) {
      CHECK(logits_after(session.get(), static_cast<Token>(5 + i)) == expected[i]);
      REQUIRE(session->rewind(300).ok());
    }
    const std::vector<float> next[] = {logits_after(forks[0].get(), 8),
                                       logits_after(forks[1].get(), 8)};
    for (int i = 0; i < 2; ++i) {
      auto other = open_session(model, hybrid_options());
      read(other.get(), {tokens.data(), 300});
      (void)logits_after(other.get(), static_cast<Token>(5 + i));
      CHECK(logits_after(other.get(), 8) == next[i]);
    }
    std::unique_ptr<Session> late;
    REQUIRE(forks[0]->fork(&late).ok());
    forks[0].reset(), session.reset();
    REQUIRE(late->rewind(300).ok());
    CHECK(logits_after(late.get(), 7) == expected[2]);
  }
}

TEST_CASE("a state that is on a GPU is saved as the CPU continues it") {
  if (!device_model()) return;
  const auto tokens = some_tokens(300, 13);
  const TempFolder folder;
  for (const char* name : {"qwen3next", "lfm2", "falcon-h1"}) {
    CAPTURE(std::string(name));
    auto session = open_session(hybrid_on(name, "cuda"), hybrid_options());
    read(session.get(), {tokens.data(), 200});
    for (std::size_t i = 200; i < 210; ++i) (void)logits_after(session.get(), tokens[i]);
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    auto cpu = load(hybrid_on(name, "cpu"), folder.file("a.kv"), hybrid_options());
    CHECK(difference(logits_after(cpu.get(), 9), logits_after(session.get(), 9)) < 1e-3);
  }
}
