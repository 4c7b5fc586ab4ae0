// Sparse prefill in whole sessions.
#include <cmath>
#include <cstdlib>
#include <span>

#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr std::size_t text_tokens = 5400;
// of them, prefilled once for all cases: the shortest text after which prefill may be sparse
constexpr std::size_t exact_tokens = 4300;

SessionOptions reading(const char* strategy, double fraction = 0, uint32_t threads = 2) {
  SessionOptions o;
  o.threads = threads;
  o.read.strategy = strategy;
  o.read.budget_fraction = fraction;
  return o;
}

std::unique_ptr<Session> read_by(const SessionOptions& options) {
  static const TempFolder folder;
  static const std::string beginning = [] {
    auto session = open_session(mini_model());
    read(session.get(), book_tokens(exact_tokens));
    const std::string path = folder.file("beginning.kv");
    REQUIRE(session->save(path, nullptr, {}).ok());
    return path;
  }();
  std::unique_ptr<Session> session;
  REQUIRE(Session::load(mini_model(), beginning, options, false, nullptr, {}, &session).ok());
  const auto tokens = book_tokens(text_tokens);
  read(session.get(), std::span(tokens).subspan(exact_tokens));
  return session;
}

uint64_t sparse_tokens(const Session& session) {
  const std::string stats = session.stats_json();
  const auto at = stats.find("\"sparse_tokens\":");
  REQUIRE(at != std::string::npos);
  return std::strtoull(stats.c_str() + at + 16, nullptr, 10);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(a[i]), 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE(
    "sparse prefill: a budget of everything is exact prefill, bit for bit; a small one is close, "
    "and closer than none" *
    doctest::test_suite("slow")) {
  auto exact = read_by(reading("full"));
  CHECK(sparse_tokens(*exact) == 0);
  const auto expected = logits_after(exact.get(), 1);
  for (const char* strategy : {"quest", "flat", "bounded"}) {
    CAPTURE(strategy);
    auto all = read_by(reading(strategy, 1));
    CHECK(sparse_tokens(*all) > exact_tokens);
    CHECK(logits_after(all.get(), 1) == expected);
  }
  auto window = read_by(reading("window")), quest = read_by(reading("quest", 0.25)),
       flat = read_by(reading("flat", 0.25)), bounded = read_by(reading("bounded", 0.25));
  const double without = distance(expected, logits_after(window.get(), 1));
  CHECK(distance(expected, logits_after(quest.get(), 1)) < without);
  CHECK(distance(expected, logits_after(flat.get(), 1)) < without);
  CHECK(distance(expected, logits_after(bounded.get(), 1)) < without / 2);
  auto filtered = read_by(reading("filter-layers", 0.25));
  CHECK(sparse_tokens(*filtered) > exact_tokens);
  CHECK(distance(expected, logits_after(filtered.get(), 1)) < without);
}

TEST_CASE(
    "sparse prefill: one thread and several give the same bits, and saving says what was read "
    "sparsely" *
    doctest::test_suite("slow")) {
  for (const char* strategy : {"quest", "filter-layers", "bounded"}) {
    auto one = read_by(reading(strategy, 0.1, 1)), three = read_by(reading(strategy, 0.1, 3));
    TempFolder folder;
    REQUIRE(one->save(folder.file("a.kv"), nullptr, {}).ok());
    std::unique_ptr<Session> loaded, fork;
    REQUIRE(Session::load(mini_model(), folder.file("a.kv"), {}, true, nullptr, {}, &loaded).ok());
    REQUIRE(loaded->fork(&fork).ok());
    CHECK(sparse_tokens(*one) > exact_tokens);
    CHECK(sparse_tokens(*fork) == sparse_tokens(*one));
    REQUIRE(loaded->rewind(4400).ok());
    CHECK(sparse_tokens(*loaded) == 4400);
    CHECK(logits_after(one.get(), 1) == logits_after(three.get(), 1));
  }
}

TEST_CASE(
    "sparse prefill: the end of a text is read exactly on request, and what cannot read is refused "
    "by name") {
  SessionOptions o = reading("quest", 0.1);
  o.read.exact_tokens = 400;
  const uint64_t sparse = sparse_tokens(*read_by(o));
  CHECK(sparse > exact_tokens);
  CHECK(sparse <= text_tokens - 400);
  for (const char* strategy : {"infllm", "dipr", "nothing"}) {
    std::unique_ptr<Session> none;
    const Status s = Session::open(mini_model(), reading(strategy), &none);
    CHECK(s.code() == Code::bad_argument);
    CHECK(std::string(s.message()).find("use one of full, window, quest") != std::string::npos);
  }
  std::unique_ptr<Session> none;
  CHECK(Session::open(mini_model(), reading("quest", 1.5), &none).code() == Code::bad_argument);
}

TEST_CASE("sparse prefill: from a text's first token on, by every strategy that reads so" *
          doctest::test_suite("slow")) {
  const auto tokens = book_tokens(4900);
  for (const char* strategy : {"window", "quest", "bounded"}) {
    CAPTURE(strategy);
    std::unique_ptr<Session> session;
    REQUIRE(Session::open(mini_model(), reading(strategy), &session).ok());
    read(session.get(), tokens);
    CHECK(sparse_tokens(*session) > 4096);
  }
}
