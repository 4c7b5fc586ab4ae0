// Sessions made of a cache that another engine filled. Here the other engine is a session in full
// precision, whose window has every row.
#include <cmath>
#include <cstring>
#include <random>

#include "helpers.h"
#include "session/external_store.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

const char adopted_fact[] = " The access code of the north gate is 4821907. ",
           adopted_question[] = "What is the access code of the north gate?";

std::string adopted_text() {
  const std::string text = book_text(24'000);
  return text.substr(0, 9'000) + adopted_fact + text.substr(9'000);
}

std::vector<Token> document_tokens() {
  Array<Token> tokens;
  REQUIRE(Session::encode_first(*mini_model(), mini_model()->chat(), adopted_text(), false, nullptr,
                                &tokens, nullptr)
              .ok());
  return {tokens.begin(), tokens.end()};
}

SessionOptions options(bool full_precision = false) {
  SessionOptions o;
  o.threads = 2;
  o.full_precision = full_precision;
  return o;
}

// What another engine has of the tokens: k, v [layers][tokens][kv_heads][head_dim].
struct Rows {
  explicit Rows(std::span<const Token> tokens) : count(tokens.size()) {
    auto session = open_session(mini_model(), options(true));
    read(session.get(), tokens);
    const HeadShape& s = mini_model()->config();
    const std::size_t dim = mini_model()->store_shape().page.dim,
                      width = std::size_t{s.kv_heads} * s.head_dim;
    k.resize(s.layers * count * width);
    v.resize(k.size());
    for (uint32_t l = 0; l < s.layers; ++l)
      for (uint32_t h = 0; h < s.kv_heads; ++h) {
        const KvStore::Rows rows = session->store().window(l, h);
        for (std::size_t t = 0; t < count; ++t)
          for (uint32_t d = 0; d < s.head_dim; ++d) {
            const std::size_t to = (l * count + t) * width + std::size_t{h} * s.head_dim + d;
            k[to] = rows.k[t * dim + d], v[to] = rows.v[t * dim + d];
          }
      }
  }
  std::size_t count;
  std::vector<float> k, v;
};

std::unique_ptr<ExternalStore> fill(const Rows& rows, bool full_precision = false,
                                    uint32_t layers_of_last = UINT32_MAX) {
  BareOptions o;
  o.shape = mini_model()->config();
  o.max_tokens = 1 << 17;
  o.threads = 2;
  o.full_precision = full_precision;
  std::unique_ptr<ExternalStore> cache;
  REQUIRE(ExternalStore::open(o, &cache).ok());
  const std::size_t width = o.shape.kv_width();
  for (std::size_t at = 0; at < rows.count; at += 500) {
    const std::size_t n = std::min<std::size_t>(500, rows.count - at);
    for (uint32_t l = 0; l < o.shape.layers && (at + n < rows.count || l < layers_of_last); ++l) {
      const std::size_t from = (l * rows.count + at) * width;
      REQUIRE(cache
                  ->update(l, Numbers::f32, rows.k.data() + from, rows.v.data() + from, nullptr,
                           static_cast<uint32_t>(n))
                  .ok());
    }
  }
  return cache;
}

Status adopt(ExternalStore& cache, std::span<const Token> tokens, std::unique_ptr<Session>* out,
             SessionOptions o = options()) {
  return Session::adopt(mini_model(), cache, tokens, o, {.document = true}, nullptr, {}, out);
}

}  // namespace

TEST_CASE(
    "a sequence from another engine is asked, saved, loaded and continued like one of the model" *
    doctest::test_suite("slow")) {
  const std::vector<Token> tokens = document_tokens();
  const Rows rows(tokens);
  auto plain = open_session(mini_model(), options());
  uint64_t done = 0, bytes = 0;
  REQUIRE(plain->prefill(adopted_text(), false, nullptr, {}, &done, &bytes).ok());
  REQUIRE(std::equal(tokens.begin(), tokens.end(), plain->tokens().begin(), plain->tokens().end()));
  TempFolder folder;
  for (const bool full_precision : {false, true}) {
    CAPTURE(full_precision);
    const auto cache = fill(rows, full_precision);
    std::unique_ptr<Session> session;
    const Status s = adopt(*cache, tokens, &session);
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(session->tokens().size() == tokens.size());
    CHECK(session->in_document());
    CHECK(session->store().sealed_tokens() ==
          (full_precision ? 0 : plain->store().sealed_tokens()));
    if (!full_precision) {
      CHECK(session->store().sketch().built_pages() == session->store().pages().pages());
      CHECK(session->stats_json().find("\"decode_strategy\":\"bounded\"") != std::string::npos);
    }
    CHECK(ask(session.get(), adopted_question).find("4821907") != std::string::npos);
    CHECK(session->tokens().size() == tokens.size());
    const std::string path = folder.file(full_precision ? "a.kv" : "b.kv");
    REQUIRE(session->save(path, nullptr, {}).ok());
    std::unique_ptr<Session> loaded;
    REQUIRE(Session::load(mini_model(), path, options(), true, nullptr, {}, &loaded).ok());
    CHECK(ask(loaded.get(), adopted_question) == ask(session.get(), adopted_question));
    REQUIRE(loaded->prefill(" The pass key is 71432. ", false, nullptr, {}, &done, &bytes).ok());
    CHECK(ask(loaded.get(), "What is the pass key?").find("71432") != std::string::npos);
    std::unique_ptr<Session> again;  // the cache stayed as it was
    REQUIRE(adopt(*cache, tokens, &again).ok());
    CHECK(ask(again.get(), adopted_question) == ask(session.get(), adopted_question));
  }
}

TEST_CASE("a document shorter than a window, and one of one token, are adopted too") {
  const std::vector<Token> tokens = document_tokens();
  for (const std::size_t n : {1u, 40u, 64u, 96u, 130u}) {
    CAPTURE(n);
    const std::span<const Token> some = std::span<const Token>(tokens).first(n);
    auto plain = open_session(mini_model(), options());
    read(plain.get(), some);
    std::unique_ptr<Session> session;
    const Status s = adopt(*fill(Rows(some)), some, &session);
    REQUIRE_MESSAGE(s.ok(), s.message());
    const std::vector<float> a = logits_after(session.get(), tokens[n]),
                             b = logits_after(plain.get(), tokens[n]);
    double apart = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      apart += std::pow(a[i] - b[i], 2), size += std::pow(b[i], 2);
    CHECK(std::sqrt(apart / size) < 0.03);
  }
}

TEST_CASE(
    "synthetic keys and values are adopted if declared as such, and are answered from and saved "
    "like others" *
    doctest::test_suite("slow")) {
  const std::vector<Token> tokens = document_tokens();
  const std::span<const Token> some = std::span<const Token>(tokens).first(5000);
  Rows rows(some);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& x : rows.k) x = normal(random);
  for (float& x : rows.v) x = normal(random);
  const auto cache = fill(rows);
  std::unique_ptr<Session> session, loaded;
  REQUIRE(adopt(*cache, some, &session).code() == Code::model_mismatch);
  REQUIRE(Session::adopt(mini_model(), *cache, some, options(), {.compared = false}, nullptr, {},
                         &session)
              .ok());
  CHECK(session->store().sketch().built_pages() == session->store().pages().pages());
  const KvStore* given = nullptr;
  REQUIRE(cache->finish(&given).ok());
  CHECK(std::memcmp(session->store().pages().page(3, 1, 9).data, given->pages().page(3, 1, 9).data,
                    page_bytes) == 0);
  TempFolder folder;
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  REQUIRE(
      Session::load(mini_model(), folder.file("a.kv"), options(), true, nullptr, {}, &loaded).ok());
  CHECK(logits_after(loaded.get(), tokens[7]) == logits_after(session.get(), tokens[7]));
}

TEST_CASE(
    "keys of another model, of other tokens or positions, or with their channels in another order, "
    "are refused") {
  const std::vector<Token> tokens = document_tokens();
  const std::span<const Token> some = std::span<const Token>(tokens).first(700);
  const Rows good(some);
  std::unique_ptr<Session> session;
  REQUIRE(adopt(*fill(good), some, &session).ok());
  session.reset();
  const HeadShape& s = mini_model()->config();
  SUBCASE("halves that are rotated instead of pairs") {
    Rows rows = good;
    for (std::size_t row = 0; row < rows.k.size(); row += s.head_dim)
      for (uint32_t i = 0; i < s.head_dim / 2; ++i) {
        rows.k[row + i] = good.k[row + 2 * i];
        rows.k[row + s.head_dim / 2 + i] = good.k[row + 2 * i + 1];
      }
    CHECK(adopt(*fill(rows), some, &session).code() == Code::model_mismatch);
  }
  SUBCASE("positions") {
    const Rows later(std::span<const Token>(tokens).first(701));  // rows 1 to 700 of it
    Rows rows = good;
    const std::size_t width = s.kv_width();
    for (uint32_t l = 0; l < s.layers; ++l)
      std::copy_n(later.k.begin() + static_cast<std::ptrdiff_t>((l * later.count + 1) * width),
                  rows.count * width,
                  rows.k.begin() + static_cast<std::ptrdiff_t>(l * rows.count * width));
    CHECK(adopt(*fill(rows), some, &session).code() == Code::model_mismatch);
  }
  SUBCASE("values") {
    Rows rows = good;
    for (float& x : rows.v) x = -x;
    CHECK(adopt(*fill(rows), some, &session).code() == Code::model_mismatch);
  }
  SUBCASE("other tokens") {
    std::vector<Token> others(some.begin(), some.end());
    std::reverse(others.end() - 40, others.end());
    const Status e = adopt(*fill(good), others, &session);
    CHECK(e.code() == Code::model_mismatch);
  }
  SUBCASE("another number of tokens, and invalid tokens") {
    const auto cache = fill(good);
    CHECK(adopt(*cache, some.first(699), &session).code() == Code::bad_argument);
    CHECK(adopt(*cache, {}, &session).code() == Code::bad_argument);
    std::vector<Token> none(some.begin(), some.end());
    none[5] = -1;
    CHECK(adopt(*cache, none, &session).code() == Code::bad_argument);
    SessionOptions o = options();
    o.context = 699;
    CHECK(adopt(*cache, some, &session, o).code() == Code::context_full);
    Cancel cancel;
    cancel.fire();
    CHECK(Session::adopt(mini_model(), *cache, some, options(), {.document = true}, &cancel, {},
                         &session)
              .code() == Code::cancelled);
    CHECK(adopt(*cache, some, &session).ok());
    session.reset();
  }
  SUBCASE("a step that is not complete") {
    CHECK(adopt(*fill(good, false, 3), some, &session).code() == Code::bad_state);
  }
  CHECK(!session);
}
