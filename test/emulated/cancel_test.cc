// Transfers to a device before a step stop when the step is cancelled.
#include <chrono>
#include <future>
#include <random>
#include <vector>

#include "../session/device_helpers.h"
#include "emulated.h"
#include "session/external_store.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::shared_ptr<const Model> model_on_device() {
  std::shared_ptr<const Model> model;
  const Status s = open_on("cuda", 0, &model);
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return model;
}

uint64_t uploaded() {
  return emulated::machine().uploaded[0] + emulated::machine().uploaded_beside[0];
}

// Of a call that is cancelled by something that it asks of the device, the first one: how many
// bytes it took there all the same.
template <class Call>
uint64_t uploaded_when_cancelled(const Call& call, uint64_t asked = 1) {
  Cancel cancel;
  const emulated::Changed fires(emulated::machine().fires, &cancel);
  const emulated::Changed at(emulated::machine().fails_at, emulated::machine().calls + asked);
  const uint64_t before = uploaded();
  const Status s = call(&cancel);
  CHECK_MESSAGE(s.code() == Code::cancelled, std::string(s.message()));
  return uploaded() - before;
}

// Random keys and values of so many tokens.
std::unique_ptr<ExternalStore> made_up(uint32_t tokens) {
  BareOptions o;
  o.shape = mini_model()->config();
  o.max_tokens = tokens;
  o.threads = 2;
  std::unique_ptr<ExternalStore> cache;
  REQUIRE(ExternalStore::open(o, &cache).ok());
  std::mt19937 random(5);
  std::uniform_real_distribution<float> number(-1, 1);
  std::vector<float> rows(std::size_t{500} * o.shape.kv_width());
  for (uint32_t at = 0; at < tokens; at += 500)
    for (uint32_t l = 0; l < o.shape.layers; ++l) {
      for (float& x : rows) x = number(random);
      REQUIRE(cache->update(l, Numbers::f32, rows.data(), rows.data(), nullptr, 500).ok());
    }
  return cache;
}

}  // namespace

TEST_CASE(
    "a cancelled step transfers nothing more to the device, and the next step transfers the rest") {
  const auto model = model_on_device();
  const auto tokens = book_tokens(3400);
  const auto asked = std::span<const Token>(tokens).subspan(3000, 5);
  std::vector<float> scores(asked.size());
  SessionOptions quest = bounded_options(200);
  quest.select.strategy = "quest";
  for (const SessionOptions& options : {bounded_options(200), quest}) {
    CAPTURE(options.select.strategy);
    const auto expected = score(load(model, read_file(), options).get(), asked);
    const auto session = load(model, read_file(), options);
    const uint64_t kept = session->store().pages().extents() * model->store_shape().heads_total() *
                          model->store_shape().page.sketch_bytes();
    CHECK(uploaded_when_cancelled([&](const Cancel* cancel) {
            return session->score(asked, scores.data(), cancel, {});
          }) < kept / 2);
    CHECK(session->tokens().size() == 3000);
    CHECK(score(session.get(), asked) == expected);
  }
  const auto more = std::span<const Token>(tokens).subspan(3000);
  const auto expected = load(model, read_file(), bounded_options(200));
  read(expected.get(), more);
  const auto session = load(model, read_file(), bounded_options(200));
  const uint64_t pages = session->store().pages().extents() * model->store_shape().slab_bytes();
  std::size_t done = 0;
  CHECK(uploaded_when_cancelled([&](const Cancel* cancel) {
          return session->prefill_tokens(more, nullptr, cancel, {}, &done);
        }) < pages / 2);
  CHECK((done == 0 && session->tokens().size() == 3000));
  read(session.get(), more);
  CHECK(continue_with(session.get(), 8) == continue_with(expected.get(), 8));
}

TEST_CASE("what a decode step leaves goes to the store while the GPU computes the output") {
  const auto model = model_on_device();
  for (const char* strategy : {"full", "bounded"}) {
    CAPTURE(std::string(strategy));
    SessionOptions o = bounded_options(strategy == std::string("full") ? 0 : 200);
    o.select.strategy = strategy;
    const auto session = load(model, read_file(), o);
    Token token = 0;
    bool end = false;
    for (int i = 0; i < 2; ++i) REQUIRE(session->next({}, nullptr, &token, &end).ok());
    const uint64_t waits = emulated::machine().waits;
    for (int i = 0; i < 4; ++i) REQUIRE(session->next({}, nullptr, &token, &end).ok());
    CHECK(emulated::machine().waits - waits >= 8);  // after the store has it there is work left
    CHECK(attends(*session));
  }
}

TEST_CASE("a decode step that is cancelled at any call leaves nothing that the next one meets") {
  const auto model = model_on_device();
  for (const char* strategy : {"full", "bounded"}) {
    CAPTURE(std::string(strategy));
    SessionOptions o = bounded_options(strategy == std::string("full") ? 0 : 200);
    o.select.strategy = strategy;
    const auto expected = load(model, read_file(), o), session = load(model, read_file(), o);
    Token token = 0, other = 0;
    bool end = false;
    uint32_t cancelled = 0;
    const auto follows = [&] {
      REQUIRE(expected->next({}, nullptr, &other, &end).ok());
      CHECK(token == other);
    };
    for (int i = 0; i < 2; ++i) {  // later ones replay graphs
      REQUIRE(session->next({}, nullptr, &token, &end).ok());
      follows();
    }
    for (uint64_t at = 1;; ++at) {
      CAPTURE(at);
      Cancel cancel;
      const emulated::Changed fires(emulated::machine().fires, &cancel);
      const uint64_t begin = emulated::machine().calls, length = session->tokens().size();
      const emulated::Changed when(emulated::machine().fails_at, begin + at);
      const Status s = session->next({}, &cancel, &token, &end);
      const bool had_call = emulated::machine().calls >= begin + at;
      if (!s.ok()) {
        ++cancelled;
        CHECK(s.code() == Code::cancelled);
        CHECK(session->tokens().size() == length);
        REQUIRE(session->next({}, nullptr, &token, &end).ok());
      }
      follows();
      if (!had_call) break;
    }
    CHECK(cancelled > 5);
    CHECK(attends(*session));
    const auto tokens = book_tokens(40);
    CHECK(score(session.get(), tokens) == score(expected.get(), tokens));
    read(session.get(), tokens), read(expected.get(), tokens);
    CHECK(continue_with(session.get(), 4) == continue_with(expected.get(), 4));
  }
}

TEST_CASE("a sketch whose transfer was cancelled keeps the part that is on the device") {
  constexpr uint32_t count = 32000;
  const auto model = model_on_device();
  const auto cache = made_up(count);
  const auto tokens = book_tokens(3000);
  std::vector<Token> text;
  while (text.size() < count)
    text.insert(text.end(), tokens.begin(),
                tokens.begin() + std::min<std::ptrdiff_t>(3000, count - std::ssize(text)));
  const auto asked = std::span<const Token>(tokens).first(5);
  std::vector<float> scores(asked.size());
  const auto open = [&] {
    std::unique_ptr<Session> session;
    const Status s = Session::adopt(model, *cache, text, bounded_options(200), {.compared = false},
                                    nullptr, {}, &session);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    return session;
  };
  const auto first = open();
  const uint64_t before = uploaded();
  const auto expected = score(first.get(), asked);
  const uint64_t all = uploaded() - before;
  uint32_t halfway = 0;
  for (uint64_t at = 12; at <= 24; at += 2) {
    CAPTURE(at);
    const auto session = open();
    const uint64_t came = uploaded_when_cancelled(
        [&](const Cancel* cancel) { return session->score(asked, scores.data(), cancel, {}); }, at);
    const uint64_t again = uploaded();
    CHECK(score(session.get(), asked) == expected);
    halfway += came > all / 4 && uploaded() - again < all - all / 5;
  }
  CHECK(halfway > 0);
}

TEST_CASE("a session that waits for another session's transfer can be cancelled") {
  const auto model = model_on_device();
  const auto session = load(model, read_file(), bounded_options(200));
  Device::Staging others;
  REQUIRE(model->device_weights()[0].device()->stage(1, CancelLatch(nullptr), &others).ok());
  Cancel cancel;
  auto waits = std::async(std::launch::async, [&] {
    Token token = -1;
    bool end = false;
    return session->next({}, &cancel, &token, &end);
  });
  CHECK(waits.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
  cancel.fire();
  CHECK(waits.get().code() == Code::cancelled);
  others = {};
  const auto alone = load(model, read_file(), bounded_options(200));
  CHECK(continue_with(session.get(), 8) == continue_with(alone.get(), 8));
}

TEST_CASE("a model whose transfer of weights is cancelled is not opened") {
  const uint64_t held = emulated::machine().held, begin = emulated::machine().calls;
  (void)model_on_device();
  const uint64_t calls = emulated::machine().calls - begin;
  uint32_t stopped = 0;
  for (uint64_t at = 2; at < calls; at += 5) {
    CAPTURE(at);
    Cancel cancel;
    std::shared_ptr<const Model> model;
    const emulated::Changed fires(emulated::machine().fires, &cancel);
    const emulated::Changed when(emulated::machine().fails_at, emulated::machine().calls + at);
    const uint64_t from = emulated::machine().calls;
    // which goes on without a device for other reasons
    const char* const device = at % 2 ? "cuda" : "auto";
    const Status s =
        Model::open(EXAMPLES "/mini-reader-q8_0.gguf", "", &model, {device, 0}, "", &cancel);
    if (s.ok()) continue;  // fired behind the last weights
    CHECK(s.code() == Code::cancelled);
    CHECK(model == nullptr);
    CHECK(emulated::machine().calls - from < at + 30);
    CHECK(emulated::machine().held == held);
    ++stopped;
  }
  CHECK(stopped > 3);
}
