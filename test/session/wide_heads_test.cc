// Sequences of a model whose heads have 512 dimensions.
#include <cmath>

#include "cachefile/pack.h"
#include "helpers.h"
#include "wide_model.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t wide_tokens = 2200;  // enough for an index

std::shared_ptr<const Model> wide_model() {
  static const TempFolder folder;
  static const auto model = open_model(save_wide_model(folder));
  return model;
}

std::vector<Token> text() {
  std::vector<Token> tokens(wide_tokens);
  uint32_t state = 5;
  for (Token& t : tokens) t = static_cast<Token>((state = state * 1664525u + 1013904223u) >> 24);
  return tokens;
}

SessionOptions selecting(std::string_view strategy) {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = strategy;
  o.select.budget_tokens = strategy == "full" ? 0 : 100;
  return o;
}

}  // namespace

// The relative error of int8 pages in the logits behind a text.
static double page_error(uint32_t head_dim) {
  const TempFolder folder;
  const auto model = open_model(save_wide_model(folder, head_dim));
  SessionOptions exact = selecting("full");
  exact.full_precision = true;
  const auto sealed = open_session(model, selecting("full")), whole = open_session(model, exact);
  read(sealed.get(), text()), read(whole.get(), text());
  CHECK(sealed->store().shape().page.page_tokens == 2048 / head_dim);
  CHECK(sealed->store().sealed_tokens() > wide_tokens - 200);
  const std::vector<float> int8 = logits_after(sealed.get(), 65),
                           want = logits_after(whole.get(), 65);
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(int8[i] - want[i]), 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / size);
}

TEST_CASE("heads of 512 dimensions: int8 pages are as precise as those of smaller heads") {
  const double wide = page_error(512), usual = page_error(256);
  CAPTURE(wide);
  CAPTURE(usual);
  CHECK(wide < 2 * usual);
}

TEST_CASE("heads of 512 dimensions: every strategy goes on the same after a save, load and fork" *
          doctest::test_suite("slow")) {
  const TempFolder folder;
  const auto document = open_session(wide_model(), selecting("full"));
  read(document.get(), text());
  for (const StrategyInfo& strategy : all_strategies()) {
    CAPTURE(strategy.name);
    const SessionOptions options = selecting(strategy.name);
    std::unique_ptr<Session> session, loaded, fork;
    REQUIRE(document->fork(&session).ok());
    REQUIRE(session->set_select(options.select).ok());
    REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
    const Status s =
        Session::load(wide_model(), folder.file("a.kv"), options, true, nullptr, {}, &loaded);
    REQUIRE_MESSAGE(s.ok(), s.message());
    REQUIRE(session->fork(&fork).ok());
    const std::vector<Token> expected = continue_with(session.get(), 6);
    CHECK(continue_with(loaded.get(), 6) == expected);
    CHECK(continue_with(fork.get(), 6) == expected);
    CHECK(logits_after(loaded.get(), 7) == logits_after(session.get(), 7));
  }
}

TEST_CASE("heads of 512 dimensions: a document is packed and unpacked") {
  const TempFolder folder;
  const auto document = open_session(wide_model(), selecting("full"));
  read(document.get(), text());
  REQUIRE(document->save(folder.file("a.kv"), nullptr, {}).ok());
  REQUIRE(pack(folder.file("a.kv"), folder.file("a.kvz"), 1, nullptr, nullptr).ok());
  const Status s = unpack(folder.file("a.kvz"), folder.file("b.kv"), nullptr, nullptr);
  REQUIRE_MESSAGE(s.ok(), s.message());
  std::unique_ptr<Session> loaded;
  REQUIRE(Session::load(wide_model(), folder.file("b.kv"), selecting("full"), true, nullptr, {},
                        &loaded)
              .ok());
  CHECK(logits_after(loaded.get(), 7) == logits_after(document.get(), 7));
}
