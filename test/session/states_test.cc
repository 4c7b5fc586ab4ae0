// States of recurrent layers: which are kept, what a step without logits costs, and what a file may
// hold.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "failing_allocations.h"
#include "latent_model.h"
#include "sequence_helpers.h"
#include "session/saved_states.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;
using format::SectionKind;

namespace {

std::shared_ptr<float[]> floats_of(const RecurrentState& states) {
  return std::shared_ptr<float[]>(new float[states.size()]());
}

void step(RecurrentState* states, float value) {
  states->prepare();
  for (uint32_t l = 0; l < states->layers(); ++l)
    std::fill_n(states->next(l), states->layer_size(), value);
  states->commit(100);
}

// States that are all in a file, whose reads are cancelled as asked.
class SlowStates final : public StateSource {
 public:
  Status read(std::size_t, std::size_t size, const Cancel* cancel, float* out) const override {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled");
    std::fill_n(out, size, 1.0f);
    return {};
  }
};

// Writes a number into state `number` of a saved file.
void with_number(const std::string& path, const std::string& to, std::size_t number, float value) {
  rewrite_section(path, to, SectionKind::recurrent, [&](std::vector<std::byte>* bytes, uint32_t*) {
    const std::size_t states = 4;
    const std::size_t size = (bytes->size() - 4096) / states;
    std::memcpy(bytes->data() + 4096 + number * size + 40, &value, sizeof value);
  });
}

}  // namespace

TEST_CASE("of a file's many states, the one that a prefix needs stays") {
  std::vector<uint64_t> saved(64);
  for (std::size_t i = 0; i < saved.size(); ++i) saved[i] = 10 * (i + 1);
  for (const uint32_t max : {1u, 4u, 32u})
    for (const uint64_t wanted : {9u, 10u, 15u, 100u, 333u, 395u, 500u, 639u, 640u}) {
      CAPTURE(max);
      CAPTURE(wanted);
      RecurrentState states(2, 8, max);
      states.restore(saved, wanted, floats_of(states), std::make_shared<SlowStates>());
      CHECK(states.tokens() == 640);
      CHECK(states.checkpoints() <= max + 1);  // one is where it goes back to
      const uint64_t expected = wanted / 10 * 10;
      CHECK(states.resume_point(wanted) == expected);
      REQUIRE(states.rewind(expected).ok());
      CHECK(states.tokens() == expected);
    }
}

TEST_CASE("the room of states counts a sequence that goes back after an answer") {
  RecurrentState states(2, 8, 4);
  for (int i = 0; i < 4; ++i) {
    step(&states, 1);
    REQUIRE(states.keep().ok());
  }
  step(&states, 2);
  const RecurrentState before(states);
  step(&states, 3), step(&states, 4);
  const uint64_t both = states.bytes() + states.size() * sizeof(float);  // the end of `before`
  CHECK(both == states.max_bytes());
}

TEST_CASE("a step of which only the first tokens may stay takes the memory of any step") {
  RecurrentState states(2, 8, 4);
  step(&states, 1);
  const uint64_t bytes = states.bytes();
  states.prepare(16);
  CHECK(states.bytes() == bytes);
  for (uint32_t l = 0; l < states.layers(); ++l)
    std::fill_n(states.next(l), states.layer_size(), 2.0f);
  states.commit(3);
  CHECK(states.bytes() == bytes);
  CHECK(states.tokens() == 103);
  CHECK(states.now(1)[7] == 2.0f);
}

TEST_CASE("states are read, checked and written until they are cancelled") {
  RecurrentState states(2, 8, 4);
  const std::vector<uint64_t> saved = {10, 20, 30};
  states.restore(saved, 30, floats_of(states), std::make_shared<SlowStates>());
  Cancel cancel;
  cancel.fire();
  const char* what = "";
  CHECK(find_wrong_state(states, &cancel, &what).code() == Code::cancelled);
  uint64_t written = 0;
  const auto write = [&](const void*, std::size_t size) { return written += size, Status(); };
  CHECK(write_states(states, &cancel, write).code() == Code::cancelled);
  CHECK(states.rewind(10, &cancel).code() == Code::cancelled);
  CHECK(states.tokens() == 30);
  CHECK(states.checkpoints() == 3);
  CHECK(find_wrong_state(states, nullptr, &what).ok());
  CHECK(what == nullptr);
  written = 0;
  REQUIRE(write_states(states, nullptr, write).ok());
  CHECK(written == states_section_bytes(states));
}

TEST_CASE("missing logits are computed once, however often tokens are scored or asked") {
  const std::vector<Token> tokens = some_tokens(5, 9);
  std::vector<float> first(tokens.size()), second(tokens.size()), expected(tokens.size());
  REQUIRE(fresh("qwen35", 390)->score(tokens, expected.data(), nullptr, {}).ok());
  const auto session = fresh("qwen35", 400);
  REQUIRE(session->rewind(390).ok());
  uint64_t reported = 0;
  const auto report = [&](uint64_t, uint64_t total) {
    return reported = std::max(reported, total), 0;
  };
  REQUIRE(session->score(tokens, first.data(), nullptr, report).ok());
  CHECK(again(*session) == 390);
  CHECK(reported == 390);
  REQUIRE(session->score(tokens, second.data(), nullptr, {}).ok());
  CHECK(again(*session) == 390);
  CHECK(first == expected);
  CHECK(second == expected);
  // The same at the end of a sequence without logits, whose last token is computed again.
  TempFolder folder;
  save(session.get(), folder.file("a.kv"));
  rewrite_section(folder.file("a.kv"), folder.file("b.kv"), SectionKind::logits,
                  [](std::vector<std::byte>* bytes, uint32_t*) { bytes->clear(); });
  const auto without = loaded("qwen35", folder.file("b.kv"));
  for (int i = 0; i < 2; ++i) {
    reported = 0;
    REQUIRE(without->score(tokens, second.data(), nullptr, report).ok());
    CHECK(again(*without) == 390);
    CHECK(reported == (i == 0 ? 390 : tokens.size()));
    CHECK(second == expected);
  }
  // a callback stops it, and the next call does it
  const auto later = loaded("qwen35", folder.file("b.kv"), 0, SessionOptions{.prefill_chunk = 128});
  const auto stop = [](uint64_t, uint64_t) { return 1; };
  CHECK(later->score(tokens, second.data(), nullptr, stop).code() == Code::cancelled);
  CHECK(later->tokens().size() == 390);
  REQUIRE(later->score(tokens, second.data(), nullptr, {}).ok());
}

TEST_CASE("memory that ends while the document's state is kept is an error with a name") {
  // Allocations outside the step throw in both; those of the kept state only in `first`.
  const auto thrown_of = [](Session& session) {
    int thrown = 0;
    bool reached = true;
    for (long at = 0; reached; ++at) {
      const auto fork = fork_of(session);
      {
        const FailingAllocations failing(at, true);
        Token token = 0;
        bool end = false;
        try {
          (void)fork->next({}, nullptr, &token, &end);
        } catch (const std::bad_alloc&) {
          ++thrown;
        }
        reached = failing.reached();
      }
    }
    return thrown;
  };
  const auto first = fresh("qwen35", 100), second = fresh("qwen35", 100);
  (void)continue_with(second.get(), 1);
  REQUIRE(second->rewind(100).ok());
  CHECK(thrown_of(*first) == thrown_of(*second));
}

TEST_CASE("a number in a saved state that no step can follow is found where it is read") {
  TempFolder folder;
  const auto session = fresh("qwen35", 3100, SessionOptions{.prefill_chunk = 256});
  const std::string path = folder.file("a.kv"), damaged = folder.file("b.kv");
  save(session.get(), path);  // states after 1024, 2048 and 3072 tokens, and at the end
  for (const float value : {3e38f, -1e30f, std::numeric_limits<float>::infinity()}) {
    CAPTURE(value);
    const std::string expected = "section 'recurrent' holds a number";
    with_number(path, damaged, 3, value);
    std::unique_ptr<Session> other;
    Status s = Session::load(fixture("qwen35"), damaged, {}, false, nullptr, {}, &other);
    CHECK(s.code() == Code::corrupt);
    CHECK_MESSAGE(std::string(s.message()).find(expected) != std::string::npos, s.message());
    with_number(path, damaged, 1, value);  // a checkpoint is read when it is needed
    other = loaded("qwen35", damaged);
    for (const bool saves : {true, false}) {
      s = saves ? other->save(folder.file("c.kv"), nullptr, {}) : other->rewind(2500);
      CHECK(s.code() == Code::corrupt);
      CHECK_MESSAGE(std::string(s.message()).find(expected) != std::string::npos, s.message());
      CHECK(std::string(s.message()).find("nothing was loaded") == std::string::npos);
      CHECK(other->tokens().size() == 3100);
    }
  }
  with_number(path, damaged, 1, 9e29f);
  CHECK(loaded("qwen35", damaged)->rewind(2500).ok());
}

TEST_CASE("a chunk has the tokens whose rows fit, where values are parts of keys") {
  TempFolder folder;
  LatentSize size;
  size.layers = 40;  // 40 rows of 576 floats, once a token
  const auto model = open_model(save_latent_model(folder.file("a.gguf"), size, random_heads(size)));
  CHECK(open_session(model)->stats().prefill_chunk == 512);
}

TEST_CASE("a second prefill for representatives needs room for the states of both, and no more") {
  TempFolder folder;
  SessionOptions options;
  options.prefill_chunk = 128;
  options.memory.spill_folder = folder.path();
  options.select.strategy = "full";
  const auto model = fixture("falcon-h1");
  const uint64_t state = model->config().state_size() * sizeof(float);
  // What the second prefill needs. The first sequence takes about as much.
  KvStore second(model->store_shape(), 64);
  MemoryBudget budget;
  budget.step_tokens = 128, budget.states = 2 * state;
  REQUIRE(second.set_budget(budget, 0).ok());
  const uint64_t needed = second.min_bytes(1300);
  const auto fits = [&](uint64_t bytes) {
    options.memory.bytes = bytes;
    const auto session = fresh("falcon-h1", 1300, options);
    SelectOptions select;
    select.strategy = "infllm";
    REQUIRE(session->set_select(select).ok());
    const Status s = session->prepare(nullptr, {});
    CHECK_MESSAGE((s.ok() || s.code() == Code::limit), s.message());
    CHECK(session->store().representatives().known() == s.ok());
    return s.ok();
  };
  CHECK(!fits(2 * needed - 16 * state));
  CHECK(fits(2 * needed));
}
