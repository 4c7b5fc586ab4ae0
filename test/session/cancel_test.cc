// Cancels inside of a call: the places that check for one, and the state after it.
#include <atomic>
#include <fstream>
#include <random>

#include "base/memory.h"
#include "helpers.h"
#include "session/external_store.h"
#include "temp_folder.h"

using namespace kvasir;

namespace {

// Fires a token when an extent of a sketch is allocated, but for the first `skipped` ones: the
// first when finding a sketch begins.
class FireAtSketch {
 public:
  explicit FireAtSketch(const StoreShape& shape, uint32_t skipped = 0) {
    token.reset();
    size = shape.page.sketch_bytes() * shape.heads_total();
    left = skipped;
    allocated = 0;
    allocation_fault = [](std::size_t n) {
      if (n == size && allocated++ == left) token.fire();
      return false;
    };
  }
  ~FireAtSketch() { allocation_fault = nullptr; }
  FireAtSketch(const FireAtSketch&) = delete;
  FireAtSketch& operator=(const FireAtSketch&) = delete;

  inline static Cancel token;
  inline static std::atomic<uint32_t> allocated;

 private:
  inline static std::atomic<std::size_t> size;
  inline static std::atomic<uint32_t> left;
};

SessionOptions bounded() {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "bounded";
  o.select.budget_tokens = 128;
  return o;
}

std::vector<float> scores(Session* session, std::span<const Token> tokens) {
  std::vector<float> out(tokens.size());
  const Status s = session->score(tokens, out.data(), nullptr, {});
  REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
  return out;
}

std::vector<float> some_numbers(std::size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> number(-1, 1);
  std::vector<float> out(n);
  for (float& x : out) x = number(random);
  return out;
}

}  // namespace

TEST_CASE(
    "a cancel while the sketch of a text is found keeps all of the text, and the sketch that "
    "follows is the same" *
    doctest::test_suite("slow")) {
  const auto model = test::mini_model();
  const auto tokens = test::book_tokens(2100);
  const auto text = std::span<const Token>(tokens).first(2000),
             asked = std::span<const Token>(tokens).last(20);
  const auto whole = test::open_session(model, bounded());
  test::read(whole.get(), text);
  REQUIRE(whole->store().sketch().built());
  const auto expected = scores(whole.get(), asked);

  const auto cancelled = [&](std::span<const Token> first) {
    auto session = test::open_session(model, bounded());
    test::read(session.get(), first);
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    uint32_t before = 0;  // for the sketch of the first part, which follows the pages
    {
      const FireAtSketch counts(model->store_shape(), UINT32_MAX);
      test::read(fork.get(), text.subspan(first.size()));
      before = counts.allocated - fork->store().pages().extents();
    }
    const FireAtSketch fire(model->store_shape(), before);
    uint64_t done = 0;
    const Status s =
        session->prefill_tokens(text.subspan(first.size()), nullptr, &fire.token, {}, &done);
    CHECK_MESSAGE(s.ok(), std::string(s.message()));
    CHECK(fire.token.fired());
    CHECK(done == text.size() - first.size());
    CHECK(session->tokens().size() == text.size());
    CHECK_FALSE(session->store().sketch().built());
    return session;
  };
  CHECK(scores(cancelled({}).get(), asked) == expected);
  // Also where there was a sketch of a part of the text.
  const auto parts = test::open_session(model, bounded());
  test::read(parts.get(), text.first(1500));
  test::read(parts.get(), text.subspan(1500));
  CHECK(scores(cancelled(text.first(1500)).get(), asked) == scores(parts.get(), asked));

  // Saving finds it, and can be cancelled too.
  TempFolder folder;
  const auto session = cancelled({});
  {
    const FireAtSketch fire(model->store_shape());
    CHECK(session->save(folder.file("a.kv"), &fire.token, {}).code() == Code::cancelled);
    CHECK(folder.entries() == 0);
  }
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  std::unique_ptr<Session> loaded;
  REQUIRE(Session::load(model, folder.file("a.kv"), bounded(), false, nullptr, {}, &loaded).ok());
  CHECK(loaded->store().sketch().built());
  CHECK(scores(loaded.get(), asked) == expected);
}

TEST_CASE(
    "a question that is cancelled while the sketch is found leaves everything, and is answered by "
    "the next call") {
  const auto model = test::mini_model();
  const auto tokens = test::book_tokens(900);  // too few for a sketch at the end of the text
  const auto asked = std::span<const Token>(tokens).last(20);
  const auto session = test::open_session(model, bounded()),
             other = test::open_session(model, bounded());
  test::read(session.get(), tokens);
  test::read(other.get(), tokens);
  REQUIRE_FALSE(session->store().sketch().built());
  const auto stopped = [&](auto&& call) {
    const FireAtSketch fire(model->store_shape());
    const Status s = call(&fire.token);
    CHECK_MESSAGE(s.code() == Code::cancelled, std::string(s.message()));
    CHECK_FALSE(session->store().sketch().built());
    CHECK(session->tokens().size() == tokens.size());
  };
  std::vector<float> unused(asked.size());
  stopped([&](const Cancel* c) { return session->prepare(c, {}); });
  stopped([&](const Cancel* c) { return session->score(asked, unused.data(), c, {}); });
  stopped([&](const Cancel* c) {
    Token token;
    bool end;
    return session->next({}, c, &token, &end);
  });
  for (const bool keep : {false, true})
    stopped([&](const Cancel* c) {
      GenerateOptions o;
      o.cancel = c;
      o.keep = keep;
      Answer answer;
      Status s = session->generate("who?", o, {}, &answer);
      CHECK(answer.reason == StopReason::cancelled);
      return s;
    });
  CHECK(scores(session.get(), asked) == scores(other.get(), asked));
}

TEST_CASE("an answer that stays can be cancelled within a token") {
  const auto session = test::open_session(test::mini_model(), bounded());
  test::read(session.get(), test::book_tokens(300));
  Cancel cancel;
  GenerateOptions o;
  o.keep = true;
  o.cancel = &cancel;
  int texts = 0;
  Answer answer;
  const auto fires = [&](std::string_view) { return ++texts == 3 ? cancel.fire(), 0 : 0; };
  CHECK(session->generate("who?", o, fires, &answer).code() == Code::cancelled);
  // without the last one reported
  CHECK(session->tokens().size() == 300 + answer.question_tokens + answer.answer_tokens - 1);
  cancel.reset();
  CHECK(session->generate("and then?", o, {}, &answer).ok());
}

TEST_CASE(
    "a cache's attention that is cancelled while it finds the sketch finds it when it is asked "
    "again") {
  BareOptions o;
  o.shape = test::mini_model()->config();
  o.max_tokens = 4000;
  o.threads = 2;
  o.select.strategy = "bounded";
  o.select.budget_tokens = 64;
  constexpr uint32_t step = 700;
  const auto numbers = some_numbers(std::size_t{step} * o.shape.q_width() + 64, 5);
  const auto open = [&] {
    std::unique_ptr<ExternalStore> cache;
    REQUIRE(ExternalStore::open(o, &cache).ok());
    for (uint32_t l = 0; l < o.shape.layers; ++l)
      REQUIRE(
          cache->update(l, Numbers::f32, numbers.data() + l, numbers.data() + l + 7, nullptr, step)
              .ok());
    return cache;
  };
  std::vector<float> out(o.shape.q_width());
  const auto token = [&](ExternalStore* cache, const Cancel* cancel) -> Status {
    for (uint32_t l = 0; l < o.shape.layers; ++l) {
      REQUIRE(
          cache->update(l, Numbers::f32, numbers.data() + 9 * l, numbers.data() + 5 * l, nullptr, 1)
              .ok());
      BareQuery query{l, 1, Numbers::f32, numbers.data() + 3 * l, out.data()};
      query.cancel = cancel;
      if (Status s = cache->attention(query); s.code() == Code::cancelled) {
        query.cancel = nullptr;
        REQUIRE(cache->attention(query).ok());
        cancel = nullptr;
      } else if (!s.ok()) {
        return s;
      }
    }
    return {};
  };
  const auto cache = open(), plain = open();
  REQUIRE(token(plain.get(), nullptr).ok());
  const auto expected = out;
  {
    const FireAtSketch fire(test::mini_model()->store_shape());
    REQUIRE(token(cache.get(), &fire.token).ok());
    CHECK(fire.token.fired());
  }
  CHECK(out == expected);
  for (uint32_t t = 0; t < 150; ++t) {  // pages are sealed behind what the sketch was found of
    REQUIRE(token(plain.get(), nullptr).ok());
    const auto wanted = out;
    REQUIRE(token(cache.get(), nullptr).ok());
    REQUIRE(out == wanted);
  }
  const auto again = open();
  const FireAtSketch fire(test::mini_model()->store_shape());
  std::unique_ptr<ExternalStore> copy;
  CHECK(again->fork(&fire.token, &copy).code() == Code::cancelled);
  CHECK(copy == nullptr);
  CHECK(again->fork(nullptr, &copy).ok());
}

TEST_CASE("a cancelled step does not check the pages that it would have read") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  const auto model = test::mini_model();
  {
    auto session = test::open_session(model);
    test::read(session.get(), test::book_tokens(1000));
    REQUIRE(session->save(path, nullptr, {}).ok());
  }
  uint64_t at = 0;
  SavedSequence saved;
  {
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(path, &file).ok());
    CachePeek peek;
    REQUIRE(CachePeek::open(path, &peek).ok());
    REQUIRE(read_saved(peek, &saved).ok());
    // in page 1 of the first layer and head
    at = file->find(format::SectionKind::pages)->offset + page_bytes + 99;
  }
  {
    std::fstream damage(path, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(static_cast<std::streamoff>(at));
    damage.put('\x55');
  }
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  PageStore pages(model->store_shape());
  REQUIRE(PageStore::map(model->store_shape(), file, saved.pages, &pages).ok());
  const StoreShape shape = model->store_shape();
  Representatives none(shape, 64);
  none.forget();
  KvStore store = KvStore::restore(std::move(pages), KeySketch(shape), std::move(none), 64,
                                   {saved.window_count, true, true}, {});
  const KvStore::Restored to = store.restored();
  std::fill_n(to.centre, store.centre_size(), 0.0f);
  std::fill_n(to.sinks, store.sinks_size(), 0.0f);
  for (uint32_t plane = 0; plane < 2 * shape.heads_total(); ++plane)
    std::fill_n(to.window(plane), saved.window_count * shape.page.dim, 0.0f);
  REQUIRE(store.prepare(1).ok());

  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(2, &pool).ok());
  Attention attention(model->config(), model->store_shape().page, cpu_kernels(), pool.get());
  std::vector<float> q(model->config().q_width()), out(q.size());
  Cancel cancel;
  cancel.fire();
  const Plan plan;
  const auto attend = [&] {
    const CancelLatch latch(&cancel);
    return attention.run(
        {.tokens = 1, .q = q.data(), .store = store, .plan = plan, .cancel = latch}, out.data(),
        nullptr);
  };
  CHECK(attend().ok());
  cancel.reset();
  CHECK(attend().code() == Code::corrupt);
}
