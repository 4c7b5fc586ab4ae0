// The first tokens of a saved document as a sequence of their own: no strategy attends the tokens
// after them.
#include <algorithm>
#include <cmath>

#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint64_t prefix_tokens = 2300, common_tokens = 2500, all_tokens = 3000;

SessionOptions choosing(const char* strategy, uint64_t budget = 256) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = strategy;
  o.select.budget_tokens = budget;
  o.select.dense_layers = 1;
  return o;
}

std::vector<Token> first(uint64_t n) { return book_tokens(n); }

// A saved document, made once: book_tokens(common_tokens) and then the book's next tokens, or
// (`other`) these in reverse.
const std::string& saved(bool other) {
  static TempFolder folder;
  static std::string paths[2];
  std::string& path = paths[other];
  if (path.empty()) {
    path = folder.file(other ? "b.kv" : "a.kv");
    auto tokens = book_tokens(all_tokens);
    if (other) std::reverse(tokens.begin() + common_tokens, tokens.end());
    auto session = open_session(mini_model(), choosing("full"));
    read(session.get(), tokens);
    REQUIRE(session->save(path, nullptr, {}).ok());
  }
  return path;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double apart = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    apart += std::pow(a[i] - b[i], 2), size += std::pow(b[i], 2);
  return std::sqrt(apart / size);
}

// Bits of everything that an answer depends on: its tokens, then the logits behind them.
struct Course {
  std::vector<Token> tokens;
  std::vector<float> logits;
  bool operator==(const Course&) const = default;
};
Course course(Session* session) {
  Course c;
  // a step, as a question is: the logits after the last token alone are made by another
  logits_after(session, 100);
  c.tokens = continue_with(session, 12);
  c.logits = logits_after(session, c.tokens.back());
  return c;
}

}  // namespace

TEST_CASE("tokens after a prefix do not change its bits" * doctest::test_suite("slow")) {
  for (const char* strategy :
       {"full", "window", "quest", "flat", "dipr", "filter-layers", "snapkv"}) {
    CAPTURE(strategy);
    auto one = load_session(saved(false), choosing(strategy), prefix_tokens),
         two = load_session(saved(true), choosing(strategy), prefix_tokens);
    CHECK(one->tokens().size() == prefix_tokens);
    CHECK(one->store().window_count() == 92);  // as prefill leaves it
    CHECK(one->store().pages().private_bytes() < one->store().pages().mapped_bytes());
    CHECK(course(one.get()) == course(two.get()));
  }
}

TEST_CASE("strategies whose structures know more than the prefix choose within it, and as well" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  const char* const strategies[] = {"bounded", "infllm", "hnsw", "ood", "ivf"};
  auto whole = load_session(saved(false), choosing("full"));
  for (const char* strategy : strategies) {
    REQUIRE(whole->set_select(choosing(strategy).select).ok());
    REQUIRE(whole->prepare(nullptr, {}).ok());
  }
  REQUIRE(whole->save(folder.file("with.kv"), nullptr, {}).ok());
  SessionOptions o = choosing("full");
  o.compare = CompareLevel::attention;
  auto fresh = open_session(mini_model(), o);
  read(fresh.get(), first(prefix_tokens));
  const auto next = book_tokens(prefix_tokens + 8);
  // mean share of the exact attention that is read
  const auto mass = [&](Session* session, const char* strategy) {
    SelectOptions select = choosing(strategy).select;
    select.dense_layers = 0;  // which it were depends on when they were measured
    REQUIRE(session->set_select(select).ok());
    float logs[8];
    REQUIRE(session->score(std::span(next).last(8), logs, nullptr, {}).ok());
    const std::string stats = session->stats_json();
    double sum = 0, n = 0;
    for (std::size_t at = 0; (at = stats.find("\"mass\":", at)) != std::string::npos; ++n)
      sum += std::stod(stats.substr(at += 7));
    REQUIRE(n > 0);
    return sum / n;
  };
  auto prefix = load_session(folder.file("with.kv"), o, prefix_tokens);
  for (const char* strategy : strategies) {
    CAPTURE(strategy);
    const double has = mass(prefix.get(), strategy), wanted = mass(fresh.get(), strategy);
    // the sketch was found for a longer text, by the queries of its end
    CHECK(has > wanted - 0.05);
  }
}

TEST_CASE(
    "a prefix equals its prefill: exactly where nothing in full precision was lost, nearly "
    "elsewhere" *
    doctest::test_suite("slow")) {
  auto fresh_course = [](uint64_t n, SessionOptions o) {
    auto fresh = open_session(mini_model(), o);
    read(fresh.get(), first(n));
    return course(fresh.get());
  };
  const SessionOptions full = choosing("full", 0);
  // nothing was sealed then: all of it is read again
  for (uint64_t n : {uint64_t{1}, uint64_t{50}, uint64_t{95}}) {
    CAPTURE(n);
    CHECK((course(load_session(saved(false), full, n).get()) == fresh_course(n, full)));
  }
  const uint64_t sealed = load_session(saved(false), full)->store().sealed_tokens();
  // the file's window has it
  CHECK(course(load_session(saved(false), full, sealed + 70).get()) ==
        fresh_course(sealed + 70, full));
  auto fresh = open_session(mini_model(), full);
  read(fresh.get(), first(prefix_tokens));
  const double apart =
      distance(logits_after(load_session(saved(false), full, prefix_tokens).get(), 100),
               logits_after(fresh.get(), 100));
  CHECK(apart < 0.05);
  CHECK(apart > 0);  // its window was read over int8 pages

  TempFolder folder;
  SessionOptions exact = full;
  exact.full_precision = true;
  auto document = open_session(mini_model(), exact);
  read(document.get(), first(700));
  REQUIRE(document->save(folder.file("f.kv"), nullptr, {}).ok());
  CHECK(course(load_session(folder.file("f.kv"), exact, 600).get()) == fresh_course(600, exact));
}

TEST_CASE(
    "sessions over prefixes of one file go on, each for itself, and leave the file as it is") {
  const auto before = course(load_session(saved(false), choosing("full"), prefix_tokens).get());
  auto one = load_session(saved(false), choosing("full"), prefix_tokens),
       two = load_session(saved(false), choosing("full"), 1000);
  read(one.get(), first(700));  // seals pages where the file has others
  std::unique_ptr<Session> fork;
  REQUIRE(two->fork(&fork).ok());
  read(two.get(), first(300));
  CHECK(one->tokens().size() == prefix_tokens + 700);
  CHECK(course(load_session(saved(false), choosing("full"), prefix_tokens).get()) == before);
  auto again = load_session(saved(false), choosing("full"), 1000);
  CHECK(course(fork.get()) == course(again.get()));
  TempFolder folder;
  REQUIRE(one->save(folder.file("c.kv"), nullptr, {}).ok());
  CHECK(course(load_session(folder.file("c.kv"), choosing("quest"), prefix_tokens).get()) ==
        course(load_session(saved(false), choosing("quest"), prefix_tokens).get()));
}

TEST_CASE("a prefix ends in the turn that it ended in, and is stopped like any prefill") {
  TempFolder folder;
  auto session = open_session(mini_model(), choosing("full"));
  uint64_t done = 0, bytes = 0;
  std::string text;
  for (int i = 0; i < 60; ++i)
    text += i == 30 ? "The access code of the north gate is 4821907. "
                    : "The weather was fine, and nobody came to the house that day. ";
  REQUIRE(session->prefill(text, false, nullptr, {}, &done, &bytes).ok());
  const uint64_t document = session->tokens().size();
  GenerateOptions keep;
  keep.max_tokens = 8;
  const std::string expected =
      ask(session.get(), "What is the access code of the north gate?", keep);
  keep.keep = true;
  for (int i = 0; i < 12; ++i) ask(session.get(), "What is the access code of gate 3?", keep);
  REQUIRE(session->tokens().size() > document + 200);
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  CHECK(ask(load_session(folder.file("a.kv"), choosing("full"), document).get(),
            "What is the access code of the north gate?", keep) == expected);

  std::unique_ptr<Session> none;
  Cancel cancel;
  cancel.fire();
  CHECK(Session::load(mini_model(), folder.file("a.kv"), {}, false, &cancel, {}, &none, document)
            .code() == Code::cancelled);
  uint64_t reported = 0;
  const auto count = [&](uint64_t n, uint64_t total) {
    return reported = std::max(reported, std::max(n, total)), 0;
  };
  REQUIRE(Session::load(mini_model(), folder.file("a.kv"), {}, false, nullptr, {}, &none, document,
                        count)
              .ok());
  CHECK(reported >= 64);
  CHECK(reported < 96);
  SessionOptions small;
  small.context = document;
  CHECK(Session::load(mini_model(), folder.file("a.kv"), small, false, nullptr, {}, &none,
                      document + 1)
            .code() == Code::context_full);
  CHECK(Session::load(mini_model(), folder.file("a.kv"), small, false, nullptr, {}, &none, document)
            .ok());
  CHECK(Session::load(mini_model(), folder.file("a.kv"), {}, false, nullptr, {}, &none, 1 << 20)
            .code() == Code::bad_argument);
}
