// A memory budget: pages that do not fit are in files, and nothing else changes.
#include <cerrno>
#include <cstring>
#include <thread>

#include "helpers.h"
#include "os/os.h"
#include "resident.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr std::size_t long_text = 6000;  // tokens: 17 MiB of keys and values

SessionOptions asked(const char* strategy, uint64_t memory, const TempFolder* folder = nullptr) {
  SessionOptions o;
  o.select.strategy = strategy;
  o.threads = 2;
  o.memory.bytes = memory;
  if (folder) o.memory.spill_folder = folder->path();
  return o;
}

const std::vector<Token>& long_document() {
  static const auto tokens = book_tokens(long_text + 400);
  return tokens;
}

// Read without a budget, once.
Session* unbounded() {
  static const auto session = [] {
    auto s = open_session(mini_model(), asked("full", 0));
    read(s.get(), {long_document().data(), long_text});
    return s;
  }();
  return session.get();
}

std::vector<Token> expected(const char* strategy, int n) {
  std::unique_ptr<Session> fork;
  REQUIRE(unbounded()->fork(&fork).ok());
  REQUIRE(fork->set_select(asked(strategy, 0).select).ok());
  return continue_with(fork.get(), n);
}

// Tokens as long_document()'s, but no end of them.
std::vector<Token> more_text(std::size_t n) {
  std::vector<Token> out;
  while (out.size() < n) out.insert(out.end(), long_document().begin(), long_document().end());
  out.resize(n);
  return out;
}

uint64_t tight_budget() { return unbounded()->store().min_bytes(long_text + 500) + (1 << 20); }

std::atomic<int> spills;
int count_spills(const char* operation, const char* path) {
  spills += std::strcmp(operation, "write") == 0 && std::strstr(path, "kvasir-spill");
  return 0;
}

int no_default_folder(const char* operation, const char* path) {
  return std::strcmp(operation, "open") == 0 && std::strstr(path, "kvasir-spill") ? ENOENT : 0;
}

std::atomic<int> writes_left;
int full_disk(const char* operation, const char* path) {
  if (std::strcmp(operation, "write") != 0 || !std::strstr(path, "kvasir-spill")) return 0;
  return writes_left.fetch_sub(1) > 0 ? 0 : ENOSPC;
}

}  // namespace

TEST_CASE(
    "a budget: a text that was spilled during prefill answers as one in memory, by every strategy" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("full", tight_budget(), &folder));
  read(session.get(), {long_document().data(), long_text});
  const PageStore& pages = session->store().pages();
  CHECK(pages.spilled_bytes() > 8 * (1 << 20));
  // the file has no name where there are files without one
  CHECK(folder.entries() == (on_windows ? 1 : 0));
  for (const char* strategy : {"full", "quest", "bounded", "flat"}) {
    CAPTURE(strategy);
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    REQUIRE(fork->set_select(asked(strategy, 0).select).ok());
    CHECK(continue_with(fork.get(), 15) == expected(strategy, 15));
    if (std::strcmp(strategy, "quest") == 0) CHECK(fork->store().pages().cache_counts().read > 0);
    CHECK(fork->store().private_bytes() <= tight_budget());
  }
  REQUIRE(session->set_select(asked("ood", 0).select).ok());
  CHECK(session->prepare(nullptr, {}).code() == Code::limit);  // its index has no room
  CHECK(session->store().indexes().private_bytes() == 0);
  REQUIRE(session->set_select(asked("quest", 0).select).ok());
  CHECK(continue_with(session.get(), 15) == expected("quest", 15));
}

TEST_CASE("a budget: representatives are found while the text is spilled" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  const auto empty = open_session(mini_model(), asked("infllm", 0));
  const uint64_t budget = empty->store().min_bytes(long_text + 500) + (1 << 20);
  auto session = open_session(mini_model(), asked("infllm", budget, &folder));
  read(session.get(), {long_document().data(), long_text});
  CHECK(session->store().pages().spilled_bytes() > 8 * (1 << 20));
  CHECK(continue_with(session.get(), 15) == expected("infllm", 15));
  CHECK(session->store().private_bytes() <= budget);
}

TEST_CASE("a budget: a spilled sequence is saved like any other, and loaded under a budget" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("bounded", tight_budget(), &folder));
  read(session.get(), {long_document().data(), long_text});
  REQUIRE(session->save(folder.file("spilled.kv"), nullptr, {}).ok());
  REQUIRE(unbounded()->save(folder.file("memory.kv"), nullptr, {}).ok());
  CHECK(read_file(folder.file("spilled.kv")) == read_file(folder.file("memory.kv")));
  for (const char* strategy : {"full", "quest", "bounded"}) {
    auto mapped = load_session(folder.file("spilled.kv"), asked(strategy, tight_budget()));
    CHECK(continue_with(mapped.get(), 15) == expected(strategy, 15));
    CHECK(mapped->store().private_bytes() <= tight_budget());
  }
  // It goes on, and what comes is spilled as well.
  auto mapped =
      load_session(folder.file("spilled.kv"), asked("quest", tight_budget() + (3 << 20), &folder));
  std::vector<Token> more(long_document());
  more.insert(more.end(), long_document().begin(), long_document().end());
  read(mapped.get(), {more.data(), 2600});
  CHECK(mapped->store().pages().spilled_bytes() > 0);
  std::unique_ptr<Session> fork;
  REQUIRE(unbounded()->fork(&fork).ok());
  read(fork.get(), {more.data(), 2600});
  REQUIRE(fork->set_select(asked("quest", 0).select).ok());
  CHECK(continue_with(mapped.get(), 15) == continue_with(fork.get(), 15));
}

TEST_CASE("a budget: forks of what was spilled go back and on with other texts, at the same time" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("quest", tight_budget(), &folder));
  read(session.get(), {long_document().data(), long_text});
  std::vector<std::unique_ptr<Session>> forks(2);
  for (auto& fork : forks) REQUIRE(session->fork(&fork).ok());
  session.reset();
  const auto go_on = [](Session* s, std::size_t back_to, const Token* text) {
    if (!s->rewind(back_to).ok()) return std::vector<Token>();
    uint64_t done = 0;
    if (!s->prefill_tokens({text, 1500}, nullptr, nullptr, {}, &done).ok())
      return std::vector<Token>();
    std::vector<Token> out;
    for (int i = 0; i < 10; ++i) {
      Token token = -1;
      bool end = false;
      if (!s->next({}, nullptr, &token, &end).ok()) return std::vector<Token>();
      out.push_back(token);
    }
    return out;
  };
  std::vector<std::vector<Token>> got(2);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      got[i] = go_on(forks[i].get(), 5000 - i * 1300, long_document().data() + 700 * i);
    });
  for (std::thread& t : threads) t.join();
  for (std::size_t i = 0; i < 2; ++i) {
    std::unique_ptr<Session> plain;
    REQUIRE(unbounded()->fork(&plain).ok());
    REQUIRE(plain->set_select(asked("quest", 0).select).ok());
    const auto want = go_on(plain.get(), 5000 - i * 1300, long_document().data() + 700 * i);
    REQUIRE(want.size() == 10);
    CHECK(got[i] == want);
    CHECK(forks[i]->store().pages().spilled_bytes() > 0);
  }
}

TEST_CASE("a budget that cannot be kept is refused before anything is read") {
  TempFolder folder;
  auto session =
      open_session(mini_model(), asked("full", unbounded()->store().min_bytes(1000), &folder));
  uint64_t done = 1;
  const Status s =
      session->prefill_tokens({long_document().data(), long_text}, nullptr, nullptr, {}, &done);
  CHECK(s.code() == Code::limit);
  CHECK(std::string(s.message()).find("memory_limit") != std::string::npos);
  CHECK(done == 0);
  CHECK(session->tokens().empty());
  std::unique_ptr<Session> none;
  CHECK(Session::open(mini_model(), asked("full", 1000, &folder), &none).code() == Code::limit);
  SessionOptions o = asked("full", 100 << 20);
  o.memory.spill_folder = folder.file("nowhere");
  CHECK(Session::open(mini_model(), o, &none).code() == Code::not_found);
  os::fault = no_default_folder;
  CHECK(Session::open(mini_model(), asked("full", 100 << 20), &none).code() == Code::not_found);
  os::fault = nullptr;
  o = asked("full", 100 << 20);
  o.full_precision = true;
  CHECK(Session::open(mini_model(), o, &none).code() == Code::bad_argument);
  o.memory.bytes = 0;
  auto exact = open_session(mini_model(), o);
  read(exact.get(), {long_document().data(), 200});
  REQUIRE(exact->save(folder.file("exact.kv"), nullptr, {}).ok());
  const Status refused = Session::load(mini_model(), folder.file("exact.kv"),
                                       asked("full", 100 << 20), false, nullptr, {}, &none);
  CHECK(refused.code() == Code::bad_argument);
  CHECK(std::string(refused.message()).find("exact.kv") != std::string::npos);
  REQUIRE(unbounded()->save(folder.file("a.kv"), nullptr, {}).ok());
  CHECK(Session::load(mini_model(), folder.file("a.kv"),
                      asked("full", unbounded()->store().min_bytes(1000)), false, nullptr, {},
                      &none)
            .code() == Code::limit);
  CHECK(!none);
}

TEST_CASE(
    "a budget: a full disk stops prefill, keeps the finished tokens, and goes on when there is "
    "room" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  for (int writes : {0, 1, 4}) {
    CAPTURE(writes);
    auto session = open_session(mini_model(), asked("full", tight_budget(), &folder));
    writes_left = writes;
    os::fault = full_disk;
    uint64_t done = 0;
    const Status s =
        session->prefill_tokens({long_document().data(), long_text}, nullptr, nullptr, {}, &done);
    os::fault = nullptr;
    CHECK(s.code() == Code::no_space);
    CHECK(done > 0);
    CHECK(done < long_text);
    CHECK(session->tokens().size() == done);
    read(session.get(), {long_document().data() + done, long_text - done});
    CHECK(continue_with(session.get(), 10) == expected("full", 10));
  }
}

TEST_CASE(
    "a budget: what is spilled of a text that takes another one's place is read through the cache "
    "as well" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("quest", tight_budget(), &folder));
  read(session.get(), {long_document().data() + 300, long_text});
  CHECK(session->store().pages().spilled_bytes() > 0);
  REQUIRE(session->rewind(0).ok());
  CHECK(session->store().pages().spilled_bytes() == 0);
  read(session.get(), {long_document().data(), long_text});
  CHECK(session->store().pages().spilled_bytes() > 0);
  CHECK(continue_with(session.get(), 15) == expected("quest", 15));
  CHECK(session->store().pages().cache_counts().read > 0);
  CHECK(session->store().private_bytes() <= tight_budget());
}

TEST_CASE("the smallest allowed budget is kept, whatever pages are attended together" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  const auto text = more_text(7000);
  for (uint32_t chunk : {128u, 4096u}) {
    CAPTURE(chunk);
    SessionOptions o = asked("bounded", 1 << 30, &folder);
    o.prefill_chunk = chunk;
    o.memory.bytes = open_session(mini_model(), o)->store().min_bytes(text.size() + 10);
    auto session = open_session(mini_model(), o);
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t n = std::min<std::size_t>(chunk == 128 ? 1000 : chunk, text.size() - at);
      read(session.get(), {text.data() + at, n});
      at += n;
      CHECK(session->store().private_bytes() <= o.memory.bytes);
    }
    continue_with(session.get(), 5);
    CHECK(session->store().private_bytes() <= o.memory.bytes);
    o.memory.bytes -= 1;
    uint64_t done = 0;
    const auto again = open_session(mini_model(), o);
    CHECK(again->prefill_tokens(more_text(text.size() + 11), nullptr, nullptr, {}, &done).code() ==
          Code::limit);
  }
}

TEST_CASE("a budget is for the loaded tokens, not for all tokens of the file") {
  TempFolder folder;
  REQUIRE(unbounded()->save(folder.file("a.kv"), nullptr, {}).ok());
  constexpr uint64_t prefix = 1000;
  auto whole = load_session(folder.file("a.kv"), asked("quest", 0));
  const SessionOptions o =
      asked("quest", whole->store().min_bytes(prefix + 20) + (1 << 16), &folder);
  std::unique_ptr<Session> session;
  CHECK(Session::load(mini_model(), folder.file("a.kv"), o, false, nullptr, {}, &session).code() ==
        Code::limit);
  const Status s =
      Session::load(mini_model(), folder.file("a.kv"), o, false, nullptr, {}, &session, prefix);
  REQUIRE_MESSAGE(s.ok(), s.message());
  REQUIRE(whole->shorten(prefix, nullptr, {}).ok());
  CHECK(continue_with(session.get(), 10) == continue_with(whole.get(), 10));
  CHECK(session->store().private_bytes() <= o.memory.bytes);
}

// Windows does not say which pages of a mapping are in memory as /proc does.
TEST_CASE(
    "a budget: pages of a mapped file stay in memory where there is room for all of them, and only "
    "there" *
    doctest::skip(on_windows)) {
  TempFolder folder;
  REQUIRE(unbounded()->save(folder.file("a.kv"), nullptr, {}).ok());
  const uint64_t pages = unbounded()->store().pages().full_private_bytes();
  for (uint64_t room : {uint64_t{1} << 20, pages * 2}) {
    CAPTURE(room);
    auto session = load_session(folder.file("a.kv"), asked("full", 0));
    const uint64_t least = session->store().min_bytes(long_text + 500);
    session = load_session(folder.file("a.kv"), asked("full", least + room));
    continue_with(session.get(), 3);
    if (room > pages) CHECK(resident_of(folder.file("a.kv")) > pages / 2);
    else CHECK(resident_of(folder.file("a.kv")) < pages / 4);
  }
}

TEST_CASE(
    "a budget without room for an index: a document is saved without it, and what is not in one "
    "stays out" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  std::vector<std::string> warnings;
  SessionOptions o = asked("ood", tight_budget(), &folder);
  o.log = [&](int level, const char* message) {
    if (level == 1) warnings.push_back(message);
  };
  auto session = open_session(mini_model(), o);
  read(session.get(), {long_document().data(), long_text});
  uint64_t steps = 0;
  const auto count = [&](uint64_t, uint64_t) { return ++steps, 0; };
  CHECK(session->prepare(nullptr, count).code() == Code::limit);
  CHECK(steps == 0);  // known before the work
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("memory_limit") != std::string::npos);
  REQUIRE(unbounded()->save(folder.file("b.kv"), nullptr, {}).ok());
  CHECK(read_file(folder.file("a.kv")) == read_file(folder.file("b.kv")));

  constexpr uint64_t first = 2300, all = 2500;
  std::unique_ptr<Session> plain;
  REQUIRE(unbounded()->fork(&plain).ok());
  REQUIRE(plain->rewind(0).ok());
  read(plain.get(), {long_document().data(), first});
  REQUIRE(plain->set_select(o.select).ok());
  REQUIRE(plain->prepare(nullptr, {}).ok());
  const uint64_t index = plain->store().indexes().private_bytes();
  // a twelfth more tokens are to come
  o.memory.bytes = unbounded()->store().min_bytes(all + 500) + index + index / 20;
  session = open_session(mini_model(), o);
  read(session.get(), {long_document().data(), first});
  REQUIRE(session->prepare(nullptr, {}).ok());
  CHECK(session->store().private_bytes() <= o.memory.bytes);
  read(session.get(), {long_document().data() + first, all - first});
  warnings.clear();
  CHECK(session->prepare(nullptr, {}).ok());
  CHECK(warnings.size() == 1);
  CHECK(session->store().indexes().private_bytes() == index);
  CHECK(session->store().indexes().of(IndexKind::ood).valid < first);
  o.memory.bytes += index / 5;  // the old one's room is the new one's
  session = open_session(mini_model(), o);
  read(session.get(), {long_document().data(), first});
  REQUIRE(session->prepare(nullptr, {}).ok());
  read(session.get(), {long_document().data() + first, all - first});
  CHECK(session->prepare(nullptr, {}).ok());
  CHECK(session->store().indexes().of(IndexKind::ood).valid == session->store().sealed_tokens());
}

TEST_CASE("a budget: what an answer takes the room of is spilled once, before it" *
          doctest::test_suite("slow")) {
  TempFolder folder;
  constexpr std::size_t length = 350;  // an extent gets full
  std::unique_ptr<Session> plain;
  REQUIRE(unbounded()->fork(&plain).ok());
  REQUIRE(plain->set_select(asked("quest", 0).select).ok());
  std::vector<float> wanted(length), got(length);
  REQUIRE(plain->score({long_document().data(), length}, wanted.data(), nullptr, {}).ok());
  const PageStore& pages = unbounded()->store().pages();
  const uint64_t budget = unbounded()->store().min_bytes(long_text + length) +
                          pages.full_private_bytes() + pages.shape().slab_bytes() / 2;
  auto session = open_session(mini_model(), asked("quest", budget, &folder));
  read(session.get(), {long_document().data(), long_text});
  CHECK(session->store().pages().spilled_bytes() == 0);
  for (bool again : {false, true}) {
    CAPTURE(again);
    spills = 0;
    os::fault = count_spills;
    const Status s = session->score({long_document().data(), length}, got.data(), nullptr, {});
    os::fault = nullptr;
    CHECK(s.ok());
    CHECK(got == wanted);
    CHECK((spills == 0) == again);
    CHECK(session->store().pages().spilled_bytes() > 0);
    CHECK(session->store().private_bytes() <= budget);
  }
}
