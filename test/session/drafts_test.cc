// Answers with drafts: they are those of decoding alone, to the bit, whatever the drafts are.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "draft_helpers.h"
#include "failing_allocations.h"
#include "sequence_helpers.h"
#include "session/drafter.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Outcome {
  std::string text;
  Answer answer;
  std::vector<Token> tokens;  // of the sequence
  std::vector<float> after;   // logits after one token more
  DraftCounts drafts;
};

Outcome answer_of(Session* session, const GenerateOptions& options) {
  Outcome out;
  const Status s = session->generate(
      "", options, [&](std::string_view t) { return out.text += t, 0; }, &out.answer);
  REQUIRE_MESSAGE(s.ok(), s.message());
  out.drafts = session->stats().drafts;
  out.tokens.assign(session->tokens().begin(), session->tokens().end());
  out.after = test::logits_after(session, 100);
  return out;
}

void check_same(const Outcome& a, const Outcome& b) {
  CHECK(a.text == b.text);
  CHECK(a.tokens == b.tokens);
  CHECK(a.answer.reason == b.answer.reason);
  CHECK(a.answer.answer_tokens == b.answer.answer_tokens);
  CHECK(a.after == b.after);
}

GenerateOptions long_answer(uint32_t tokens = 200) {
  GenerateOptions options;
  options.max_tokens = tokens;
  options.keep = true;
  return options;
}

SessionOptions undrafted() {
  SessionOptions options;
  options.lookup_tokens = 0;
  return options;
}

}  // namespace

TEST_CASE("an answer with drafts has the bits of one without, however many are accepted") {
  for (const char* name :
       {"llama-fused", "qwen35-mtp", "qwen3next", "granitehybrid", "lfm2moe", "glm4moe-mtp",
        "gemma3", "gpt-oss", "deepseek2-v3", "qwen3moe-q4_k", "llama-q4_k_m"}) {
    CAPTURE(name);
    for (const bool full_precision : {false, true}) {
      CAPTURE(full_precision);
      SessionOptions options;
      options.full_precision = full_precision;
      options.drafts_always = true;
      options.lookup_tokens = 0;
      const Outcome alone = answer_of(fresh(name, 150, options).get(), long_answer());
      CHECK(alone.drafts.drafted == 0);
      for (const uint32_t right : {0u, 5u, 8u}) {
        CAPTURE(right);
        const auto session = fresh(name, 150, options);
        session->draft_by(scripted_drafts(*session, alone.tokens, right));
        const Outcome drafted = answer_of(session.get(), long_answer());
        check_same(drafted, alone);
        CHECK(drafted.drafts.drafted > 0);
        if (right == 8 && alone.answer.answer_tokens > 20)
          CHECK(drafted.drafts.accepted > alone.answer.answer_tokens / 2);
        if (right == 0 && alone.answer.answer_tokens > 100) CHECK(drafted.drafts.drafted > 70);
      }
    }
  }
}

TEST_CASE("sampled answers with drafts have the bits of those without, penalties included") {
  GenerateOptions options = long_answer(120);
  options.sampling.temperature = 0.9f;
  options.sampling.top_p = 0.95f;
  options.sampling.repetition_penalty = 1.2f;
  for (const char* name : {"qwen35-mtp", "llama-fused"})
    for (const uint64_t seed : {1u, 2u, 3u}) {
      CAPTURE(name);
      CAPTURE(seed);
      options.sampling.seed = seed;
      const Outcome alone = answer_of(fresh(name, 90, undrafted()).get(), options);
      const auto session = fresh(name, 90, SessionOptions{.drafts_always = true});
      session->draft_by(scripted_drafts(*session, alone.tokens, 6));
      const Outcome drafted = answer_of(session.get(), options);
      check_same(drafted, alone);
      if (alone.answer.answer_tokens > 20) CHECK(drafted.drafts.accepted > 0);
    }
}

TEST_CASE("a draft is accepted as often as the sampler draws it") {
  // Over many seeds: token d is drafted; the shares of what stands there are those without drafts.
  const auto session = fresh("llama-fused", 40, SessionOptions{.drafts_always = true});
  GenerateOptions options = long_answer(3);
  options.keep = false;
  options.sampling.temperature = 3;
  options.sampling.top_k = 3;
  std::vector<Token> likely;  // an answer of one seed
  {
    GenerateOptions kept = options;
    kept.keep = true;
    likely = answer_of(fresh("llama-fused", 40).get(), kept).tokens;
  }
  std::map<std::string, int> alone, drafted;
  uint64_t accepted = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    options.sampling.seed = seed;
    session->draft_by({});
    std::string first, second;
    Answer answer;
    const auto into = [](std::string* to) {
      return [to](std::string_view t) { return *to += t, 0; };
    };
    REQUIRE(session->generate("", options, into(&first), &answer).ok());
    ++alone[first];
    session->draft_by(scripted_drafts(*session, likely, 8));
    REQUIRE(session->generate("", options, into(&second), &answer).ok());
    ++drafted[second];
    accepted += session->stats().drafts.accepted;
  }
  CHECK(alone == drafted);
  CHECK(alone.size() > 5);
  CHECK(accepted > 30);
}

TEST_CASE("the MTP layer's logits are the reference's, token by token and in chunks") {
  // Reference: the PyTorch model of tools/scripts/train with the fixture's weights, in float64.
  const auto model = fixture("qwen35-mtp");
  const std::size_t vocabulary = model->config().vocabulary;
  std::ifstream in(FIXTURES "/models/fixtures.json");
  std::vector<Token> tokens;
  for (const auto& fixture : nlohmann::json::parse(in))
    if (fixture["model"] == "qwen35-mtp.gguf") tokens = fixture["tokens"].get<std::vector<Token>>();
  REQUIRE(tokens.size() == 200);
  std::vector<float> expected(24 * vocabulary);
  std::ifstream(FIXTURES "/models/qwen35-mtp.next.f32", std::ios::binary)
      .read(reinterpret_cast<char*>(expected.data()),
            static_cast<std::streamsize>(expected.size() * sizeof(float)));
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  for (const uint32_t chunk : {1u, 8u, 80u}) {
    CAPTURE(chunk);
    std::unique_ptr<Drafter> drafter;
    REQUIRE(Drafter::create(model, 256, true, pool.get(), &drafter).ok());
    std::unique_ptr<Forward> forward;
    REQUIRE(Forward::create(model, 256, pool.get(), &forward).ok());
    KvStore store(model->store_shape(), KvStore::keep_all);
    std::optional<RecurrentState> states = make_states(model->config(), 0);
    DraftState drafts = drafter->make_state(0, KvStore::keep_all);
    double off = 0, norm = 0;
    for (std::size_t at = 0; at < 192; at += chunk) {
      ForwardStep step;
      step.tokens = std::span(tokens).subspan(at, std::min<std::size_t>(chunk, 192 - at));
      REQUIRE(drafter->begin_step(at, &drafts, &step).ok());
      step.accept = [&](uint32_t* kept) { return drafter->end_step(step, *kept, &drafts); };
      const Status s = forward->run(step, {store, nullptr, &*states});
      REQUIRE_MESSAGE(s.ok(), s.message());
      const std::size_t end = at + step.size();
      if (end % 8 != 0) continue;
      Array<Token> drafted;
      DraftState copy(drafts);
      REQUIRE(drafter->draft(end, tokens[end], 1, nullptr, &copy, &drafted).ok());
      REQUIRE(drafted.size() == 1);
      const float* reference = &expected[(end / 8 - 1) * vocabulary];
      for (std::size_t i = 0; i < vocabulary; ++i) {
        off += std::pow(static_cast<double>(drafter->logits()[i] - reference[i]), 2);
        norm += std::pow(static_cast<double>(reference[i]), 2);
      }
    }
    CHECK(norm > 0);
    CHECK(std::sqrt(off / norm) < 2e-5);
  }
}

TEST_CASE("answers drafted by the MTP layer have the bits of those without") {
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"})
    for (const uint32_t n : {1u, 3u})
      for (const float temperature : {0.0f, 1.0f}) {
        CAPTURE(name);
        CAPTURE(n);
        CAPTURE(temperature);
        GenerateOptions options = long_answer();
        options.sampling.temperature = temperature;
        SessionOptions drafting = undrafted();
        drafting.draft_tokens = n, drafting.drafts_always = true;
        const Outcome alone = answer_of(fresh(name, 100, undrafted()).get(), options);
        const auto session = fresh(name, 100, drafting);
        const Outcome drafted = answer_of(session.get(), options);
        check_same(drafted, alone);
        CHECK(drafted.drafts.drafted >= std::min<uint64_t>(24, alone.answer.answer_tokens / 4));
        CHECK(session->stats_json().find("\"last_drafted\"") != std::string::npos);
      }
}

TEST_CASE("a session that does not draft pays nothing; one that cannot says so") {
  SessionOptions options;
  options.draft_tokens = 2;
  std::unique_ptr<Session> session;
  const auto refused = [&](const std::string& name, const char* why, Code code) {
    const Status s = Session::open(fixture(name), options, &session);
    CHECK(s.code() == code);
    CHECK_MESSAGE(std::string(s.message()).find(why) != std::string::npos, s.message());
  };
  refused("qwen35", "has no MTP layer", Code::unsupported);
  options.draft_tokens = 4;
  refused("qwen35-mtp", "use up to 3", Code::bad_argument);
  CHECK(fresh("qwen35-mtp", 100, undrafted())->stats_json().find("draft") == std::string::npos);
}

TEST_CASE("drafts that do not pay by the clock pause, and the answer is the same") {
  static uint64_t time = 0;
  const Outcome alone = answer_of(fresh("llama-fused", 150, undrafted()).get(), long_answer());
  REQUIRE(alone.answer.answer_tokens > 100);
  SessionOptions options;
  options.clock = [] { return time; };
  // A step with drafts takes as long as so many others: fewer than the tokens it keeps, or more.
  for (const uint32_t factor : {1u, 2u, 40u}) {
    CAPTURE(factor);
    const auto session = fresh("llama-fused", 150, options);
    const auto good = scripted_drafts(*session, alone.tokens, 7);
    session->draft_by([&](Token next, uint32_t count, Array<Token>* out) {
      good(next, count, out);
      time += factor - 1;
    });
    GenerateOptions ticking = long_answer();
    std::string text;
    Answer answer;
    REQUIRE(session
                ->generate(
                    "", ticking, [&](std::string_view t) { return text += t, 0; }, &answer)
                .ok());
    CHECK(text == alone.text);
    const DraftCounts drafts = session->stats().drafts;
    CHECK(drafts.drafted > 0);
    if (factor == 40) CHECK(drafts.off == DraftsOff::slower);
  }
}

TEST_CASE("what the MTP layer keeps counts under the memory limit, and is left out without room") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"}) {
    CAPTURE(name);
    std::string log;
    SessionOptions plain = undrafted(), drafting;
    plain.prefill_chunk = 128;
    plain.memory.spill_folder = folder.path();
    drafting = plain;
    drafting.draft_tokens = 2, drafting.drafts_always = true;
    drafting.log = [&](int, const char* line) { log += line; };
    const Outcome alone = answer_of(fresh(name, 3000, plain).get(), long_answer(40));
    const auto unbounded = fresh(name, 3000, drafting);
    save(unbounded.get(), path);
    const Outcome free = answer_of(unbounded.get(), long_answer(40));
    check_same(free, alone);

    // What a sequence of 3100 tokens needs with drafts, and without.
    MemoryBudget budget = unbounded->store().budget();
    KvStore store(unbounded->store().shape(), 64);
    budget.step_tokens = 128, budget.bytes = uint64_t{1} << 40;
    store.drop_representatives();
    REQUIRE(store.set_budget(budget, 0).ok());
    const uint64_t needed = store.min_bytes(3100);
    store.count_drafts({});
    const uint64_t without = store.min_bytes(3100);
    REQUIRE(without + 100'000 < needed);
    const auto with_limit = [&](uint64_t bytes, bool loads) {
      CAPTURE(bytes);
      log.clear();
      SessionOptions options = drafting;
      options.memory.bytes = bytes;
      const auto session = loads ? loaded(name, path, 0, options) : fresh(name, 3000, options);
      CHECK(session->stats().private_bytes <= bytes);
      const auto fork = fork_of(*session);
      GenerateOptions dropped = long_answer(40);
      dropped.keep = false;
      (void)test::ask(session.get(), "", dropped);
      CHECK(session->stats().private_bytes <= bytes);
      Outcome outcome = answer_of(session.get(), long_answer(40));
      CHECK(outcome.text == alone.text);
      CHECK(session->stats().private_bytes <= bytes);
      CHECK(session->stats().draft_tokens == 2);
      CHECK(answer_of(fork.get(), long_answer(40)).text == alone.text);
      return outcome.drafts;
    };
    for (const bool loads : {false, true}) {
      CAPTURE(loads);
      const uint64_t tables = loads ? 200'000 : 0;  // of the file
      const DraftCounts some = with_limit(needed + tables, loads);
      CHECK(some.drafted == free.drafts.drafted);
      CHECK(some.accepted == free.drafts.accepted);
      CHECK(log.find("memory_limit has no room") == std::string::npos);
      const DraftCounts none = with_limit(without + tables / 4 + 40'000, loads);
      CHECK(none.drafted == 0);
      CHECK(none.off == DraftsOff::memory);
      CHECK_MESSAGE(log.find("memory_limit has no room") != std::string::npos, log);
    }
  }
}

TEST_CASE("the MTP layer's rows follow rewinds, forks, other answers and loads") {
  SessionOptions drafting = undrafted();
  drafting.draft_tokens = 2, drafting.drafts_always = true;
  TempFolder folder;
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"}) {
    CAPTURE(name);
    const auto session = fresh(name, 150, drafting);
    GenerateOptions options = long_answer(40);
    const Outcome first = answer_of(session.get(), options);
    // A rewind restores pages, in which numbers are rounded: as without drafts.
    const auto alone = fresh(name, 150);
    check_same(answer_of(alone.get(), options), first);
    REQUIRE(session->rewind(150).ok());
    REQUIRE(alone->rewind(150).ok());
    const Outcome again = answer_of(session.get(), options);
    check_same(again, answer_of(alone.get(), options));
    CHECK(again.drafts.drafted > 0);
    REQUIRE(session->rewind(97).ok());
    REQUIRE(alone->rewind(97).ok());
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    const Outcome mine = answer_of(session.get(), options), forked = answer_of(fork.get(), options);
    check_same(mine, forked);
    CHECK(mine.drafts.drafted == forked.drafts.drafted);
    check_same(mine, answer_of(alone.get(), options));

    const auto saved = fresh(name, 150, drafting);
    REQUIRE(saved->save(folder.file("a.kv"), nullptr, {}).ok());
    std::unique_ptr<Session> loaded;
    REQUIRE(Session::load(fixture(name), folder.file("a.kv"), drafting, true, nullptr, {}, &loaded)
                .ok());
    CHECK(loaded->stats().drafts_first == 1);
    const Outcome after = answer_of(loaded.get(), options);
    CHECK(after.tokens == first.tokens);
    CHECK(after.after == first.after);
    CHECK(after.drafts.drafted == first.drafts.drafted);
    CHECK(after.drafts.accepted == first.drafts.accepted);
  }
}

void kvasir::test::check_draft_faults(Session* session, GenerateOptions options,
                                      const std::string& text) {
  const std::size_t tokens = session->tokens().size();
  const auto answers_as_before = [&] {
    CHECK(test::ask(session, "", options) == text);
    CHECK(session->stats().drafts.drafted > 0);
  };
  uint32_t failures = 0, cancelled = 0;
  bool failed = true;
  for (long first = 1; failed; first += 3) {
    REQUIRE(first < 5000);
    Answer answer;
    Status s;
    {
      const FailingAllocations failing(first, true);
      try {
        s = session->generate(
            "", options, [](std::string_view) { return 0; }, &answer);
      } catch (const std::bad_alloc&) {
        s = Status::error(Code::no_memory, "out of memory");
      }
    }
    failed = !s.ok();
    failures += failed;
    if (failed) CHECK(s.code() == Code::no_memory);
    CHECK(session->tokens().size() == tokens);
    if (first % 5 == 0) answers_as_before();
  }
  CHECK(failures > 3);
  answers_as_before();
  Cancel cancel;
  GenerateOptions cancelling = options;
  cancelling.cancel = &cancel;
  for (int after = 1; after < 8; ++after) {
    cancel.reset();
    int calls = 0;
    Answer answer;
    const Status s = session->generate(
        "", cancelling, [&](std::string_view) { return ++calls == after ? cancel.fire(), 0 : 0; },
        &answer);
    if (!s.ok()) CHECK(s.code() == Code::cancelled);
    cancelled += !s.ok();
    CHECK(session->tokens().size() == tokens);
  }
  CHECK(cancelled > 3);
  answers_as_before();
}

TEST_CASE("failed allocations and cancels within drafting leave the sequence as it was") {
  SessionOptions drafting = undrafted();
  drafting.draft_tokens = 3, drafting.threads = 1, drafting.drafts_always = true;
  for (const char* name : {"qwen35-mtp", "glm4moe-mtp"}) {
    CAPTURE(name);
    GenerateOptions options = long_answer(12);
    options.keep = false;
    const auto reference = fresh(name, 90, drafting), session = fresh(name, 90, drafting);
    check_draft_faults(session.get(), options, test::ask(reference.get(), "", options));
  }
}

TEST_CASE("an MTP block that contradicts the model is refused by name, where it is asked for") {
  std::ifstream in(FIXTURES "/models/qwen35-mtp.gguf", std::ios::binary);
  const std::string file((std::istreambuf_iterator<char>(in)), {});
  TempFolder folder;
  const auto opened = [&](const std::string& bytes) {
    std::ofstream(folder.file("a.gguf"), std::ios::binary | std::ios::trunc) << bytes;
    const auto model = test::open_model(folder.file("a.gguf"));
    std::unique_ptr<Session> session;
    CHECK(Session::open(model, {}, &session).ok());
    SessionOptions options;
    options.draft_tokens = 1;
    return Session::open(model, options, &session);
  };
  REQUIRE(opened(file).ok());
  // A tensor under another name is missing, and is one without a place.
  const auto renamed = [&](const std::string& from, char last) {
    std::string bytes = file;
    const std::size_t at = bytes.find(from);
    REQUIRE(at != std::string::npos);
    bytes[at + from.size() - 1] = last;
    return opened(bytes);
  };
  for (const std::string name :
       {"blk.4.nextn.eh_proj.weight", "blk.4.nextn.enorm.weight", "blk.4.nextn.hnorm.weight",
        "blk.4.nextn.shared_head_norm.weight", "blk.4.attn_q.weight", "blk.4.ffn_down.weight"}) {
    CAPTURE(name);
    const Status s = renamed(name, 'x');
    CHECK(s.code() == Code::corrupt);
    CHECK_MESSAGE(std::string(s.message()).find(name) != std::string::npos, s.message());
  }
  // Dimensions that are swapped, and numbers that are not finite.
  std::string bytes = file;
  const std::string projection = "blk.4.nextn.eh_proj.weight";
  const std::size_t at = bytes.find(projection) + projection.size() + 4;
  uint64_t dims[2];
  std::memcpy(dims, &bytes[at], sizeof dims);
  std::swap(dims[0], dims[1]);
  std::memcpy(&bytes[at], dims, sizeof dims);
  Status s = opened(bytes);
  CHECK(s.code() == Code::corrupt);
  CHECK_MESSAGE(std::string(s.message()).find("64 x 128") != std::string::npos, s.message());
  std::vector<std::byte> raw(file.size());
  std::memcpy(raw.data(), file.data(), file.size());
  Gguf gguf;
  REQUIRE(Gguf::parse(raw, &gguf).ok());
  bytes = file;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(&bytes[gguf.find_tensor("blk.4.nextn.hnorm.weight")->offset], &nan, sizeof nan);
  s = opened(bytes);
  CHECK(s.code() == Code::corrupt);
  CHECK_MESSAGE(std::string(s.message()).find("hnorm") != std::string::npos, s.message());
}
