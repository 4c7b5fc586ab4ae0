// A memory budget: what does not fit is in files, and nothing else changes.
#include <cerrno>
#include <cstring>
#include <thread>

#include "helpers.h"
#include "os/os.h"
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

const std::vector<Token>& document() {
  static const auto tokens = book_tokens(long_text + 400);
  return tokens;
}

// Read without a budget, once.
Session* unbounded() {
  static const auto session = [] {
    auto s = open_session(mini_model(), asked("full", 0));
    read(s.get(), {document().data(), long_text});
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

uint64_t tight_budget() { return unbounded()->store().least_bytes(long_text + 500) + (1 << 20); }

std::unique_ptr<Session> load(const std::string& path, const SessionOptions& options) {
  std::unique_ptr<Session> session;
  const Status s = Session::load(mini_model(), path, options, false, nullptr, {}, &session);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

std::atomic<int> writes_left;
int full_disk(const char* operation, const char* path) {
  if (std::strcmp(operation, "write") != 0 || !std::strstr(path, "kvasir-spill")) return 0;
  return writes_left.fetch_sub(1) > 0 ? 0 : ENOSPC;
}

}  // namespace

TEST_CASE("a budget: a text that was spilled while it was read answers as one in memory, by every way of reading it") {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("full", tight_budget(), &folder));
  read(session.get(), {document().data(), long_text});
  const PageStore& pages = session->store().pages();
  CHECK(pages.spilled_bytes() > 8 * (1 << 20));
  CHECK(folder.entries() == 0);  // the file has no name
  for (const char* strategy : {"full", "quest", "bounded", "flat", "infllm"}) {
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

TEST_CASE("a budget: what was spilled is saved as what was not, and loaded under a budget") {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("bounded", tight_budget(), &folder));
  read(session.get(), {document().data(), long_text});
  REQUIRE(session->save(folder.file("spilled.kv"), nullptr, {}).ok());
  REQUIRE(unbounded()->save(folder.file("memory.kv"), nullptr, {}).ok());
  CHECK(read_file(folder.file("spilled.kv")) == read_file(folder.file("memory.kv")));
  for (const char* strategy : {"full", "quest", "bounded"}) {
    auto mapped = load(folder.file("spilled.kv"), asked(strategy, tight_budget()));
    CHECK(continue_with(mapped.get(), 15) == expected(strategy, 15));
    CHECK(mapped->store().private_bytes() <= tight_budget());
  }
  // It goes on, and what comes is spilled as well.
  auto mapped = load(folder.file("spilled.kv"), asked("quest", tight_budget() + (3 << 20), &folder));
  std::vector<Token> more(document());
  more.insert(more.end(), document().begin(), document().end());
  read(mapped.get(), {more.data(), 2600});
  CHECK(mapped->store().pages().spilled_bytes() > 0);
  std::unique_ptr<Session> fork;
  REQUIRE(unbounded()->fork(&fork).ok());
  read(fork.get(), {more.data(), 2600});
  REQUIRE(fork->set_select(asked("quest", 0).select).ok());
  CHECK(continue_with(mapped.get(), 15) == continue_with(fork.get(), 15));
}

TEST_CASE("a budget: forks of what was spilled go back and on with other texts, beside each other") {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("quest", tight_budget(), &folder));
  read(session.get(), {document().data(), long_text});
  std::vector<std::unique_ptr<Session>> forks(2);
  for (auto& fork : forks) REQUIRE(session->fork(&fork).ok());
  session.reset();
  const auto go_on = [](Session* s, std::size_t back_to, const Token* text) {
    if (!s->rewind(back_to).ok()) return std::vector<Token>();
    uint64_t done = 0;
    if (!s->prefill_tokens({text, 1500}, nullptr, nullptr, {}, &done).ok()) return std::vector<Token>();
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
    threads.emplace_back([&, i] { got[i] = go_on(forks[i].get(), 5000 - i * 1300, document().data() + 700 * i); });
  for (std::thread& t : threads) t.join();
  for (std::size_t i = 0; i < 2; ++i) {
    std::unique_ptr<Session> plain;
    REQUIRE(unbounded()->fork(&plain).ok());
    REQUIRE(plain->set_select(asked("quest", 0).select).ok());
    const auto want = go_on(plain.get(), 5000 - i * 1300, document().data() + 700 * i);
    REQUIRE(want.size() == 10);
    CHECK(got[i] == want);
    CHECK(forks[i]->store().pages().spilled_bytes() > 0);
  }
}

TEST_CASE("a budget that cannot be kept is refused before anything is read") {
  TempFolder folder;
  auto session = open_session(mini_model(), asked("full", unbounded()->store().least_bytes(1000), &folder));
  uint64_t done = 1;
  const Status s = session->prefill_tokens({document().data(), long_text}, nullptr, nullptr, {}, &done);
  CHECK(s.code() == Code::limit);
  CHECK(std::string(s.message()).find("memory_budget") != std::string::npos);
  CHECK(done == 0);
  CHECK(session->tokens().empty());
  std::unique_ptr<Session> none;
  CHECK(Session::open(mini_model(), asked("full", 1000, &folder), &none).code() == Code::limit);
  SessionOptions o = asked("full", 100 << 20);
  o.memory.spill_folder = folder.file("nowhere");
  CHECK(Session::open(mini_model(), o, &none).code() == Code::not_found);
  o = asked("full", 100 << 20);
  o.full_precision = true;
  CHECK(Session::open(mini_model(), o, &none).code() == Code::bad_argument);
  REQUIRE(unbounded()->save(folder.file("a.kv"), nullptr, {}).ok());
  CHECK(Session::load(mini_model(), folder.file("a.kv"), asked("full", unbounded()->store().least_bytes(1000)), false, nullptr, {}, &none).code() == Code::limit);
  CHECK(!none);
}

TEST_CASE("a budget: a full disk stops the reading, keeps what was read, and goes on when there is room") {
  TempFolder folder;
  for (int writes : {0, 1, 4}) {
    CAPTURE(writes);
    auto session = open_session(mini_model(), asked("full", tight_budget(), &folder));
    writes_left = writes;
    os::fault = full_disk;
    uint64_t done = 0;
    const Status s = session->prefill_tokens({document().data(), long_text}, nullptr, nullptr, {}, &done);
    os::fault = nullptr;
    CHECK(s.code() == Code::no_space);
    CHECK(done > 0);
    CHECK(done < long_text);
    CHECK(session->tokens().size() == done);
    read(session.get(), {document().data() + done, long_text - done});
    CHECK(continue_with(session.get(), 10) == expected("full", 10));
  }
}
