// Answers with drafts by lookup: they are those of decoding alone, to the bit.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "draft_helpers.h"
#include "sequence_helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t most = SessionOptions::max_lookup_tokens;

SessionOptions with_lookup(uint32_t tokens, const std::string& strategy = {}) {
  SessionOptions options;
  options.lookup_tokens = tokens;
  options.drafts_always = true;
  if (!strategy.empty()) options.select.strategy = strategy;
  return options;
}

GenerateOptions answer_options(uint32_t tokens, float temperature = 0) {
  GenerateOptions options;
  options.max_tokens = tokens;
  options.keep = true;
  options.sampling.temperature = temperature;
  options.sampling.seed = 11;
  return options;
}

// A text that repeats itself, with changes.
std::vector<Token> repeated(std::size_t n) {
  std::vector<Token> tokens = some_tokens(n);
  for (std::size_t i = 40; i < n; ++i)
    if (i % 23 != 0) tokens[i] = tokens[i - 40];
  return tokens;
}

std::unique_ptr<Session> opened(const std::string& name, std::size_t tokens,
                                const SessionOptions& options) {
  auto session = open_session(fixture(name), options);
  read(session.get(), repeated(tokens));
  return session;
}

// Two answers of both, and what follows them.
DraftCounts check_same_answers(Session* drafts, Session* alone, const GenerateOptions& options) {
  DraftCounts counts;
  for (int turn = 0; turn < 2; ++turn) {
    CHECK(ask(drafts, "", options) == ask(alone, "", options));
    CHECK(alone->stats().drafts.drafted == 0);
    counts.looked_up += drafts->stats().drafts.looked_up;
    counts.lookup_accepted += drafts->stats().drafts.lookup_accepted;
  }
  CHECK(std::equal(drafts->tokens().begin(), drafts->tokens().end(), alone->tokens().begin(),
                   alone->tokens().end()));
  CHECK(logits_after(drafts, 100) == logits_after(alone, 100));
  return counts;
}

}  // namespace

TEST_CASE("answers drafted by lookup have the bits of those without, greedy and sampled") {
  uint64_t accepted = 0;
  for (const char* name :
       {"llama-fused", "qwen35-mtp", "qwen3next", "granitehybrid", "lfm2moe", "gemma3", "gemma3n",
        "gpt-oss", "deepseek2-v3", "qwen3moe-q4_k", "llama-q4_k_m"}) {
    CAPTURE(std::string(name));
    for (const float temperature : {0.0f, 0.7f}) {
      CAPTURE(temperature);
      const auto drafts = opened(name, 200, with_lookup(most)),
                 alone = opened(name, 200, with_lookup(0));
      const DraftCounts counts =
          check_same_answers(drafts.get(), alone.get(), answer_options(150, temperature));
      accepted += counts.lookup_accepted;
      if (temperature == 0) CHECK(counts.looked_up > 0);
    }
  }
  CHECK(accepted > 1000);
}

TEST_CASE("answers drafted by lookup have the same bits where a strategy selects for each token") {
  for (const char* strategy : {"quest", "bounded", "flat", "window", "filter-layers", "infllm"})
    for (const char* name : {"llama-fused", "qwen35-mtp"}) {
      CAPTURE(std::string(strategy));
      CAPTURE(std::string(name));
      SessionOptions on = with_lookup(most, strategy), off = with_lookup(0, strategy);
      on.select.budget_tokens = off.select.budget_tokens = 64;
      const auto drafts = opened(name, 900, on), alone = opened(name, 900, off);
      const DraftCounts counts = check_same_answers(drafts.get(), alone.get(), answer_options(100));
      if (drafts->stats().drafts.off != DraftsOff::strategy) CHECK(counts.looked_up > 0);
    }
}

TEST_CASE("a lookup follows rewinds, forks, loads and a limit of memory") {
  TempFolder folder;
  for (const char* name : {"llama-fused", "gemma3", "qwen35-mtp"}) {
    CAPTURE(std::string(name));
    const auto drafts = opened(name, 300, with_lookup(most)),
               alone = opened(name, 300, with_lookup(0));
    CHECK(check_same_answers(drafts.get(), alone.get(), answer_options(150)).looked_up > 0);
    REQUIRE(drafts->rewind(250).ok());
    REQUIRE(alone->rewind(250).ok());
    const auto fork = fork_of(*drafts), other = fork_of(*alone);
    CHECK(check_same_answers(drafts.get(), alone.get(), answer_options(150)).looked_up > 0);
    CHECK(check_same_answers(fork.get(), other.get(), answer_options(150)).looked_up > 0);
    save(fork.get(), folder.file("a.kv"));
    const auto from_file = loaded(name, folder.file("a.kv"), 0, with_lookup(most)),
               plain = loaded(name, folder.file("a.kv"), 0, with_lookup(0));
    CHECK(check_same_answers(from_file.get(), plain.get(), answer_options(150)).looked_up > 0);

    SessionOptions limited = with_lookup(most);
    limited.prefill_chunk = 128;
    limited.memory.spill_folder = folder.path();
    KvStore store(fixture(name)->store_shape(), 64);
    MemoryBudget budget = drafts->store().budget();
    budget.step_tokens = 128, budget.bytes = uint64_t{1} << 40;
    store.drop_representatives();
    REQUIRE(store.set_budget(budget, 0).ok());
    limited.memory.bytes = store.min_bytes(3100) + 50'000;
    SessionOptions limited_alone = limited;
    limited_alone.lookup_tokens = 0;
    const auto small = opened(name, 3000, limited), small_alone = opened(name, 3000, limited_alone);
    CHECK(check_same_answers(small.get(), small_alone.get(), answer_options(150)).looked_up > 0);
    CHECK(small->stats().private_bytes <= limited.memory.bytes);
  }
}

TEST_CASE("failed allocations and cancels within a step of lookup leave the sequence as it was") {
  for (const char* name : {"gemma3", "qwen35-mtp"}) {
    CAPTURE(std::string(name));
    SessionOptions on = with_lookup(most);
    on.threads = 1;
    GenerateOptions options = answer_options(150);
    options.keep = false;
    const auto session = opened(name, 200, on);
    check_draft_faults(session.get(), options,
                       ask(opened(name, 200, with_lookup(0)).get(), "", options));
  }
}

TEST_CASE("a session looks up by itself, says what was accepted, and can be asked not to") {
  const auto by_default = opened("llama-fused", 200, {});
  (void)ask(by_default.get(), "", answer_options(150));
  CHECK(by_default->stats().lookup_tokens == most);
  CHECK(by_default->stats_json().find("\"last_looked_up\"") != std::string::npos);
  const auto never = opened("llama-fused", 200, with_lookup(0));
  (void)ask(never.get(), "", answer_options(150));
  CHECK(never->stats().drafts.drafted == 0);
  CHECK(never->stats_json().find("looked_up") == std::string::npos);
  SessionOptions too_many;
  too_many.lookup_tokens = most + 1;
  std::unique_ptr<Session> session;
  CHECK(Session::open(fixture("llama-fused"), too_many, &session).code() == Code::bad_argument);
}

TEST_CASE("what an answer reads counts the tokens that it has") {
  uint64_t rejected = 0;
  for (const char* name : {"llama-fused", "gemma3", "qwen35-mtp", "qwen3moe-q4_k"}) {
    CAPTURE(std::string(name));
    const auto drafts = opened(name, 200, with_lookup(most)),
               alone = opened(name, 200, with_lookup(0));
    Answer with, without;
    const auto ignore = [](std::string_view) { return 0; };
    REQUIRE(drafts->generate("", answer_options(150), ignore, &with).ok());
    REQUIRE(alone->generate("", answer_options(150), ignore, &without).ok());
    const DraftCounts counts = drafts->stats().drafts;
    rejected += counts.looked_up - counts.lookup_accepted;
    CHECK(with.read.tokens_read == without.read.tokens_read);
    CHECK(with.read.tokens_present == without.read.tokens_present);
    CHECK(drafts->stats().last_steps == alone->stats().last_steps);
  }
  CHECK(rejected > 20);
}
