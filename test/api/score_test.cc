// The base of measurements: the list of strategies, and the probability of a given continuation.
#include <cmath>
#include <cstring>
#include <set>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

std::vector<float> score(kv_session* session, const std::vector<int32_t>& tokens) {
  std::vector<float> out(tokens.size());
  REQUIRE_OK(kv_session_score(session, tokens.data(), tokens.size(), out.data(), nullptr, error));
  return out;
}

kv_session_options with_strategy(const char* name) {
  kv_session_options o = small_options();
  o.decode = strategy(name);
  return o;
}

}  // namespace

TEST_CASE("strategies are listed, each opens a session, and none is named twice") {
  std::set<std::string> names;
  for (uint32_t i = 0;; ++i) {
    kv_strategy_info info{};
    info.struct_size = sizeof info;
    kv_error error{};
    const kv_status status = kv_strategy_list(i, &info, &error);
    if (status == KV_NOT_FOUND) break;
    REQUIRE(status == KV_OK);
    CHECK(info.struct_size == sizeof info);
    CHECK(names.insert(info.name).second);
    const kv_strategy* const made = strategy(info.name);
    double fraction = -1;
    const bool has_budget =
        kv_strategy_get(made, KV_PARAM_BUDGET_FRACTION, &fraction, nullptr) == KV_OK;
    CHECK((info.budget_floor > 0) == has_budget);
    if (has_budget) CHECK((fraction > 0 && fraction <= 1));
    const Session session = tiny_session(200, with_strategy(info.name));
    CHECK(ask(session.get(), "a", 2).status == KV_OK);
    if (std::strcmp(info.name, "quest") == 0) CHECK(has_budget);
    if (std::strcmp(info.name, "full") == 0 || std::strcmp(info.name, "window") == 0)
      CHECK(!has_budget);
  }
  for (const char* name : {"full", "window", "quest", "bounded"}) CHECK(names.count(name) == 1);
}

TEST_CASE("the probabilities of all tokens sum to one, and the likeliest is the next") {
  const Session session = tiny_session(300);
  const int32_t next = peek(session.get(), 1)[0];
  double sum = 0;
  float best = -INFINITY;
  int32_t likeliest = -1;
  for (int32_t token = 0; token < 259; ++token) {
    const float logarithm = score(session.get(), {token})[0];
    sum += std::exp(static_cast<double>(logarithm));
    if (logarithm > best) best = logarithm, likeliest = token;
  }
  CHECK(sum == doctest::Approx(1).epsilon(1e-5));
  CHECK(likeliest == next);
}

TEST_CASE("a continuation is scored by the logits of full attention") {
  kv_session_options o = with_strategy("full");
  o.precision = KV_PRECISION_F32;  // so that one step and token by token agree
  const Session session = tiny_session(200, o);
  const std::vector<int32_t> tokens = some_tokens(20);
  const std::vector<float> scores = score(session.get(), tokens);
  std::vector<float> logits(tokens.size() * 259);
  const Session reference = fork(session.get());
  // One token a step: with AMX, longer steps round differently.
  for (std::size_t i = 0; i < tokens.size(); ++i)
    REQUIRE_OK(kv_prefill_logits(reference.get(), &tokens[i], 1, &logits[i * 259], nullptr, error));
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    CAPTURE(i);
    const float* row = logits.data() + (i - 1) * 259;
    double sum = 0;
    for (int t = 0; t < 259; ++t) sum += std::exp(static_cast<double>(row[t]));
    CHECK(scores[i] ==
          doctest::Approx(static_cast<double>(row[tokens[i]]) - std::log(sum)).epsilon(1e-3));
  }
}

TEST_CASE("a continuation is scored through the strategy, and its reads are reported") {
  const std::vector<int32_t> tokens = some_tokens(20);
  const std::vector<float> full = score(tiny_session(400, with_strategy("full")).get(), tokens);
  const Session blind = tiny_session(400, with_strategy("window"));
  const std::vector<float> window = score(blind.get(), tokens);
  CHECK(full[0] == window[0]);  // from the logits of prefill
  CHECK(full != window);
  const kv_session_stats stats = stats_of(blind.get());
  CHECK(stats.last_steps == 20);
  CHECK(stats.last_tokens_read == 0);
  CHECK(stats.last_tokens_present > 0);
}

TEST_CASE("scoring leaves the sequence exactly where it was") {
  const Session session = tiny_session(300);
  const std::vector<int32_t> tokens = sequence(session.get()), next = peek(session.get(), 20);
  // seals pages on the way
  const std::vector<float> first = score(session.get(), some_tokens(100));
  CHECK(score(session.get(), some_tokens(100)) == first);
  CHECK(sequence(session.get()) == tokens);
  CHECK(peek(session.get(), 20) == next);
  CHECK(score(session.get(), {}).empty());
}

TEST_CASE("a continuation that does not fit is refused before any work, and a callback stops it") {
  kv_session_options o = small_options();
  o.context_tokens = 210;
  const Session session = tiny_session(200, o);
  const std::vector<int32_t> tokens = some_tokens(11);
  std::vector<float> scores(tokens.size(), 7);
  CHECK(kv_session_score(session.get(), tokens.data(), 11, scores.data(), nullptr, nullptr) ==
        KV_CONTEXT_FULL);
  kv_control call;
  kv_init(&call, sizeof call);
  call.progress = [](int32_t, uint64_t, uint64_t, void*) -> int32_t { return 1; };
  CHECK(kv_session_score(session.get(), tokens.data(), 10, scores.data(), &call, nullptr) ==
        KV_CANCELLED);
  CHECK(scores == std::vector<float>(tokens.size(), 7));
  CHECK(score(session.get(), some_tokens(10)).size() == 10);
}

TEST_CASE("the file of a sequence is the same after a score, also behind a rewind") {
  const TempFolder folder;
  const Session session = tiny_session(300, with_strategy("full"));
  REQUIRE_OK(kv_session_rewind(session.get(), 200, error));
  save(session.get(), folder.file("before.kv"));
  (void)score(session.get(), some_tokens(3));
  save(session.get(), folder.file("after.kv"));
  CHECK(read_file(folder.file("after.kv")) == read_file(folder.file("before.kv")));
}
