// Sequences of models with windowed layers: what a window has dropped is missed by nothing, or
// prefilled again.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cachefile/cache_file.h"
#include "cachefile/pack.h"
#include "helpers.h"
#include "session/external_store.h"
#include "temp_folder.h"

using namespace kvasir;
using format::SectionKind;

namespace {

// Windows of 16 tokens; an extent has 1024.
std::shared_ptr<const Model> windowed_model() {
  static const auto model = test::open_model(FIXTURES "/models/gemma3-linear.gguf");
  return model;
}

// Without checkpoints but the end of the document (checkpoints_test.cc has the others).
std::unique_ptr<Session> fresh(std::size_t tokens, SessionOptions options = {}) {
  options.checkpoint_interval = 1 << 20;
  auto session = test::open_session(windowed_model(), options);
  test::read(session.get(), test::some_tokens(tokens));
  return session;
}

// A document of 1500 tokens and an answer, behind which only the ends of both are kept.
std::unique_ptr<Session> answered(const SessionOptions& options = {}) {
  auto session = fresh(1500, options);
  (void)test::continue_with(session.get(), 2400);
  return session;
}

uint64_t again(const Session& session) { return session.stats().prefilled_again; }

SessionOptions in_full_precision() {
  SessionOptions options;
  options.full_precision = true;
  return options;
}

std::unique_ptr<Session> loaded(const std::string& path, SessionOptions options = {},
                                uint64_t tokens = 0) {
  options.checkpoint_interval = 1 << 20;
  std::unique_ptr<Session> session;
  const Status s =
      Session::load(windowed_model(), path, options, true, nullptr, {}, &session, tokens);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

void save(Session* session, const std::string& path) {
  const Status s = session->save(path, nullptr, {});
  REQUIRE_MESSAGE(s.ok(), s.message());
}

// The same continuation and the same bits, from either.
void check_same(Session* a, Session* b) {
  CHECK(std::equal(a->tokens().begin(), a->tokens().end(), b->tokens().begin(), b->tokens().end()));
  CHECK(test::continue_with(a, 10) == test::continue_with(b, 10));
  CHECK(test::logits_after(a, 100) == test::logits_after(b, 100));
}

}  // namespace

TEST_CASE("a windowed sequence is the same saved, loaded and forked") {
  TempFolder folder;
  for (const SessionOptions& options : {SessionOptions(), in_full_precision()})
    for (const bool open_answer : {false, true}) {
      const auto session = open_answer ? answered(options) : fresh(2500, options);
      CHECK(again(*session) == 0);
      save(session.get(), folder.file("a.kv"));
      std::unique_ptr<Session> fork;
      REQUIRE(session->fork(&fork).ok());
      const auto other = loaded(folder.file("a.kv"), options);
      std::unique_ptr<Session> third;
      REQUIRE(session->fork(&third).ok());
      check_same(fork.get(), other.get());
      check_same(session.get(), third.get());
    }
}

TEST_CASE("an answer that is not kept leaves the windows as they were") {
  const auto session = fresh(2500), control = fresh(2500);
  GenerateOptions options;
  options.max_tokens = 300;
  const std::string text = test::ask(session.get(), "?", options);
  CHECK(test::ask(session.get(), "?", options) == text);
  check_same(session.get(), control.get());
}

TEST_CASE("a rewind to the end of the document needs no prefill, also of a loaded conversation") {
  TempFolder folder;
  for (const SessionOptions& options : {SessionOptions(), in_full_precision()}) {
    const auto session = answered(options), control = fresh(1500, options);
    save(session.get(), folder.file("a.kv"));
    const auto other = loaded(folder.file("a.kv"), options);
    const std::vector<float> expected = test::logits_after(control.get(), 100);
    for (Session* s : {session.get(), other.get()}) {
      REQUIRE(s->rewind(1500).ok());
      const std::vector<float> logits = test::logits_after(s, 100);
      CHECK(again(*s) == 0);
      CHECK(test::difference(logits, expected) < (options.full_precision ? 1e-5 : 0.03));
    }
  }
}

TEST_CASE("a rewind that a window cannot follow is prefilled again, bit for bit") {
  for (const SessionOptions& options : {SessionOptions(), in_full_precision()}) {
    const auto session = answered(options), control = fresh(900, options);
    REQUIRE(session->rewind(900).ok());
    CHECK(session->tokens().size() == 900);
    CHECK(again(*session) == 0);  // the next step does it
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    check_same(session.get(), control.get());
    CHECK(again(*session) == 900);
    TempFolder folder;
    save(fork.get(), folder.file("a.kv"));
    CHECK(again(*fork) == 900);
    const auto other = loaded(folder.file("a.kv"), options), second = fresh(900, options);
    check_same(other.get(), second.get());
  }
}

TEST_CASE("a rewind between document and answer goes on from the document") {
  const auto session = answered(), control = answered();
  REQUIRE(session->rewind(2500).ok());  // its window was dropped, the document's was not
  const std::vector<float> logits = test::logits_after(session.get(), 100);
  CHECK(again(*session) > 0);
  CHECK(again(*session) < 2500);
  const auto whole = test::open_session(windowed_model());
  test::read(whole.get(), {control->tokens().begin(), 2500});
  CHECK(test::difference(logits, test::logits_after(whole.get(), 100)) < 0.03);
}

TEST_CASE("prefilling again reports its progress and can be cancelled and taken up") {
  SessionOptions options;
  options.prefill_chunk = 128;
  const auto session = answered(options), control = fresh(900, options);
  REQUIRE(session->rewind(900).ok());
  uint64_t reported = 0, done = 0;
  const Token token = 100;
  const auto stop = [&](uint64_t at, uint64_t total) {
    CHECK(total == 900);
    reported = at;
    return 1;
  };
  const Status s = session->prefill_tokens({&token, 1}, nullptr, nullptr, stop, &done);
  CHECK(s.code() == Code::cancelled);
  CHECK(reported > 0);
  CHECK(reported < 900);
  CHECK(done == 0);
  CHECK(session->tokens().size() == 900);
  check_same(session.get(), control.get());
  CHECK(again(*session) == 900);
}

TEST_CASE("a prefix is bit for bit a fresh prefill, and one at the end is read again in part") {
  TempFolder folder;
  for (const SessionOptions& options : {SessionOptions(), in_full_precision()}) {
    const auto session = fresh(2500, options);
    save(session.get(), folder.file("a.kv"));
    const auto prefix = loaded(folder.file("a.kv"), options, 1100);
    CHECK(again(*prefix) == 1100);
    const auto control = fresh(1100, options);
    check_same(prefix.get(), control.get());
    CHECK(again(*loaded(folder.file("a.kv"), options, 2500)) == 0);
    const auto nearly = loaded(folder.file("a.kv"), options, 2495);
    CHECK(again(*nearly) < 200);
    const auto shorter = fresh(2495, options);
    CHECK(test::difference(test::logits_after(nearly.get(), 100),
                           test::logits_after(shorter.get(), 100)) < 0.02);
  }
}

TEST_CASE("one thread and two compute the same bits") {
  SessionOptions one, two;
  one.threads = 1, two.threads = 2;
  const auto a = fresh(1300, one), b = fresh(1300, two);
  check_same(a.get(), b.get());
}

TEST_CASE("windows of any length take bounded memory") {
  SessionOptions options;
  options.prefill_chunk = 256;
  const auto session = test::open_session(windowed_model(), options);
  const std::vector<Token> tokens = test::some_tokens(3840);
  const StoreShape shape = windowed_model()->windows_shape();
  for (std::size_t at = 0; at < tokens.size(); at += 256) {
    test::read(session.get(), {tokens.begin() + static_cast<std::ptrdiff_t>(at),
                               tokens.begin() + static_cast<std::ptrdiff_t>(at + 256)});
    const SessionStats stats = session->stats();
    CHECK(stats.windows_layers == 5);
    CHECK(stats.windows_bytes <= KvStore::max_bytes(shape, 64, at + 256, 256, 32));
  }
  CHECK(session->store().tokens() == 3840);
  // Small extents show that memory does not grow with the text.
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(1, &pool).ok());
  const StoreShape small = {2, 1, PageShape::of(256), 200};
  const std::vector<float> rows(500 * 256, 1.0f);
  for (const uint32_t window : {uint32_t{64}, KvStore::keep_all}) {
    KvStore store(small, window);
    uint64_t most = 0;
    for (int step = 0; step < 40; ++step) {
      REQUIRE(store.prepare(500).ok());
      for (uint32_t l = 0; l < small.layers; ++l) store.write(l, 500, rows.data(), rows.data());
      most = std::max(most, store.private_bytes());
      store.commit(500, cpu_kernels(), pool.get());
    }
    CHECK(store.tokens() == 20000);
    if (window == 64) CHECK(most <= KvStore::max_bytes(small, window, 20000, 500, 0));
    const uint64_t token = 2 * small.heads_total() * 256 * (window == 64 ? 1 : sizeof(float));
    CHECK(most < 20000 * token / (window == 64 ? 3 : 10));
    CHECK(store.resume_point(20000) == 20000);
    CHECK(store.resume_point(19900) == 19900);
    CHECK(store.resume_point(15000) == 0);
  }
}

TEST_CASE("Gemma 3 4B at 128K takes at most a fifth of what all layers would take") {
  constexpr uint32_t tokens = 131072;
  const PageShape page = PageShape::of(256);
  const StoreShape full = {5, 4, page}, windows = {29, 4, page, 1024}, all = {34, 4, page};
  const uint64_t extents = tokens / page.extent_tokens();
  const auto checkpoints = static_cast<uint32_t>(checkpoint_room(extents * full.slab_bytes()) /
                                                 KvStore::checkpoint_bytes(windows, 64));
  const auto most = static_cast<double>(extents * full.slab_bytes() +
                                        KvStore::max_bytes(windows, 64, tokens, 512, checkpoints));
  CHECK(most / static_cast<double>(extents * all.slab_bytes()) < 0.2);
}

TEST_CASE("a memory limit counts the windows") {
  TempFolder folder;
  SessionOptions options;
  options.prefill_chunk = 128;
  options.memory.spill_folder = folder.path();
  const auto unlimited = test::open_session(windowed_model(), options);
  test::read(unlimited.get(), test::some_tokens(3900));
  const StoreShape shape = windowed_model()->windows_shape();
  const uint64_t windows = KvStore::max_bytes(shape, 64, 3900, 128, 1);
  options.memory.bytes = windows / 2;
  std::unique_ptr<Session> session;
  Status s = Session::open(windowed_model(), options, &session);
  uint64_t done = 0;
  if (s.ok()) s = session->prefill_tokens(test::some_tokens(3900), nullptr, nullptr, {}, &done);
  CHECK(s.code() == Code::limit);
  KvStore whole(windowed_model()->store_shape(), 64);
  MemoryBudget budget;
  budget.step_tokens = 128;
  budget.windows = shape;
  budget.checkpoints = 1;
  REQUIRE(whole.set_budget(budget, 0).ok());
  options.memory.bytes = whole.min_bytes(4096) + (1 << 16);
  const auto limited = test::open_session(windowed_model(), options);
  test::read(limited.get(), test::some_tokens(3900));
  CHECK(limited->stats().private_bytes <= options.memory.bytes);
  CHECK(limited->stats().windows_bytes <= windows);
  check_same(limited.get(), unlimited.get());
}

TEST_CASE("damage in the sections of windows is found") {
  TempFolder folder;
  const auto session = answered();
  const std::string path = folder.file("a.kv"), damaged = folder.file("b.kv");
  save(session.get(), path);
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  CHECK(file->version() == format::windows_version);
  std::ifstream in(path, std::ios::binary);
  const std::string sound((std::istreambuf_iterator<char>(in)), {});
  for (const SectionKind kind :
       {SectionKind::windows, SectionKind::windows_centre, SectionKind::windows_rows,
        SectionKind::windows_pages, SectionKind::windows_scales}) {
    CAPTURE(format::name_of(kind));
    const CacheFile::Section* section = file->find(kind);
    REQUIRE(section);
    REQUIRE(section->bytes > 0);
    std::string bytes = sound;
    const uint64_t page_of_the_end = 7 * page_bytes;  // the 24th, in the extent of the 17th
    bytes[section->offset + (kind == SectionKind::windows_pages ? page_of_the_end : 9)] ^= 1;
    std::ofstream(damaged, std::ios::binary | std::ios::trunc) << bytes;
    std::unique_ptr<Session> other;
    Status s = Session::load(windowed_model(), damaged, {}, false, nullptr, {}, &other);
    if (s.ok()) s = other->rewind(1490);  // reads pages at the document's end again
    if (s.ok()) {
      Token token = 0;
      bool end = false;
      s = other->next({}, nullptr, &token, &end);
    }
    CHECK_MESSAGE(s.code() == Code::corrupt, s.message());
  }
}

TEST_CASE("a file with windows packs and unpacks to the same bytes") {
  TempFolder folder;
  const auto session = answered();
  const std::string path = folder.file("a.kv"), again = folder.file("b.kv");
  save(session.get(), path);
  REQUIRE(pack(path, folder.file("a.kvz"), default_level, nullptr, nullptr).ok());
  REQUIRE(unpack(folder.file("a.kvz"), again, nullptr, nullptr).ok());
  const auto bytes_of = [](const std::string& name) {
    std::ifstream in(name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  CHECK(bytes_of(path) == bytes_of(again));
}

TEST_CASE("a cache of another engine, whose layers are all alike, is refused") {
  BareOptions options;
  options.shape = windowed_model()->config();
  options.max_tokens = 100;
  std::unique_ptr<ExternalStore> cache;
  REQUIRE(ExternalStore::open(options, &cache).ok());
  const std::vector<Token> tokens = test::some_tokens(10);
  std::unique_ptr<Session> session;
  const Status s = Session::adopt(windowed_model(), *cache, tokens, {}, {}, nullptr, {}, &session);
  CHECK(s.code() == Code::unsupported);
  CHECK(std::string(s.message()).find("window") != std::string::npos);
}
