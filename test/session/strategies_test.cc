// Promises of every strategy, future ones included.
#include <cstring>
#include <functional>

#include "helpers.h"
#include "replacing.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions choosing(std::string_view strategy, uint32_t threads) {
  SessionOptions o;
  o.threads = threads;
  o.select.strategy = strategy;
  o.select.budget_tokens = strategy == "full" || strategy == "window" ? 0 : 150;
  return o;
}

// A session that has read 1500 tokens, with this strategy from now on.
std::unique_ptr<Session> reader(std::string_view strategy, uint32_t threads) {
  static std::unique_ptr<Session> read_by[9];
  if (!read_by[threads]) {
    read_by[threads] = open_session(mini_model(), choosing("full", threads));
    read(read_by[threads].get(), book_tokens(1500));
  }
  std::unique_ptr<Session> session;
  REQUIRE(read_by[threads]->fork(&session).ok());
  REQUIRE(session->set_select(choosing(strategy, threads).select).ok());
  return session;
}

GenerateOptions keeping(bool keep) {
  GenerateOptions o;
  o.max_tokens = 6;
  o.keep = keep;
  return o;
}

// The file at `from` once more at `to`, a section changed by change(&version, &bytes).
void copy_changed(const std::string& from, const std::string& to, format::SectionKind kind,
                  const std::function<void(uint32_t*, std::vector<std::byte>*)>& change) {
  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(from, &file).ok());
  std::unique_ptr<CacheWriter> writer;
  REQUIRE(CacheWriter::create(to, file->identity(), &writer).ok());
  std::vector<std::vector<std::byte>> contents;
  for (const CacheFile::Section& s : file->sections()) {
    const auto bytes = file->bytes(s.kind);
    REQUIRE(file->check_section(s).ok());  // summaries are there when they have been checked
    contents.emplace_back(bytes.begin(), bytes.end());
    uint32_t version = s.version;
    if (s.kind == kind) change(&version, &contents.back());
    REQUIRE(writer->add_section(s.kind, version, contents.back().size()).ok());
  }
  REQUIRE(writer->begin().ok());
  for (const auto& bytes : contents) REQUIRE(writer->write(bytes.data(), bytes.size()).ok());
  REQUIRE(writer->finish().ok());
}

constexpr char question[] = "What is said of the door, and who was the man that came at night?";

}  // namespace

TEST_CASE("every strategy: one thread, two and eight give the same bits" *
          doctest::test_suite("slow")) {
  for (const StrategyInfo& strategy : all_strategies()) {
    CAPTURE(strategy.name);
    const auto one = reader(strategy.name, 1), two = reader(strategy.name, 2),
               eight = reader(strategy.name, 8);
    const auto alike = [&](const auto& of) {
      const auto expected = of(one.get());
      CHECK(of(two.get()) == expected);
      CHECK(of(eight.get()) == expected);
    };
    alike([](Session* s) { return continue_with(s, 3); });
    alike([](Session* s) { return ask(s, question, keeping(true)); });
    alike([](Session* s) { return continue_with(s, 3); });
    alike([](Session* s) { return ask(s, "Why?", keeping(true)); });  // a short one
    alike([](Session* s) { return logits_after(s, 100); });
  }
}

TEST_CASE(
    "every strategy: saving and loading, in the middle of an answer too, is continuing, and so is "
    "a fork" *
    doctest::skip(!replaces_files_in_use()) * doctest::test_suite("slow")) {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  for (const StrategyInfo& strategy : all_strategies())
    for (const bool answering : {false, true}) {
      CAPTURE(strategy.name);
      CAPTURE(answering);
      const auto session = reader(strategy.name, 2);
      if (answering) ask(session.get(), question, keeping(true));
      // more than the queries that a sequence keeps
      if (answering) continue_with(session.get(), 35);
      std::unique_ptr<Session> loaded, fork, again;
      REQUIRE(session->save(path, nullptr, {}).ok());
      REQUIRE(
          Session::load(mini_model(), path, choosing(strategy.name, 2), true, nullptr, {}, &loaded)
              .ok());
      REQUIRE(session->fork(&fork).ok());
      const auto next = continue_with(session.get(), 34);  // seals a page
      CHECK(continue_with(fork.get(), 34) == next);
      CHECK(continue_with(loaded.get(), 2) == std::vector<Token>(next.begin(), next.begin() + 2));
      REQUIRE(loaded->save(path, nullptr, {}).ok());  // from a mapped sequence
      REQUIRE(
          Session::load(mini_model(), path, choosing(strategy.name, 1), true, nullptr, {}, &again)
              .ok());
      CHECK(continue_with(again.get(), 32) == std::vector<Token>(next.begin() + 2, next.end()));
      CHECK(continue_with(loaded.get(), 32) == std::vector<Token>(next.begin() + 2, next.end()));
      const std::string answer = ask(session.get(), question, keeping(true));
      CHECK(ask(fork.get(), question, keeping(true)) == answer);
      CHECK(ask(loaded.get(), question, keeping(true)) == answer);
      const auto logits = logits_after(session.get(), 7);
      CHECK(logits_after(fork.get(), 7) == logits);
      CHECK(logits_after(loaded.get(), 7) == logits);
    }
}

TEST_CASE(
    "every strategy: a sequence that is short, or kept in full precision, is attended in full") {
  for (const bool full_precision : {false, true}) {
    std::vector<Token> expected;
    for (const StrategyInfo& strategy : all_strategies()) {
      CAPTURE(strategy.name);
      SessionOptions o = choosing(strategy.name, 2);
      o.full_precision = full_precision;
      const auto session = open_session(mini_model(), o);
      read(session.get(), book_tokens(full_precision ? 300 : 90));
      const auto next = continue_with(session.get(), 8);
      if (expected.empty()) expected = next;
      CHECK(next == expected);
    }
  }
}

TEST_CASE(
    "every strategy: a question that is not kept leaves no trace, in the middle of an answer too" *
    doctest::test_suite("slow")) {
  for (const StrategyInfo& strategy : all_strategies())
    for (const bool answering : {false, true}) {
      CAPTURE(strategy.name);
      CAPTURE(answering);
      const auto asked = reader(strategy.name, 2), straight = reader(strategy.name, 2);
      for (Session* s : {asked.get(), straight.get()})
        if (answering) ask(s, question, keeping(true));
      const std::string answer = ask(asked.get(), "Why?", keeping(false));
      CHECK(ask(asked.get(), "Why?", keeping(false)) == answer);
      CHECK(continue_with(asked.get(), 8) == continue_with(straight.get(), 8));
      CHECK(logits_after(asked.get(), 7) == logits_after(straight.get(), 7));
    }
}

TEST_CASE(
    "snapkv chooses by the question, which it reads exactly, and keeps its choice for the answer") {
  const auto session = reader("snapkv", 2), full = reader("full", 2);
  SessionOptions o = choosing("snapkv", 2);
  GenerateOptions one = keeping(true);
  one.max_tokens = 2;
  Answer answer;
  REQUIRE(session->generate(question, one, {}, &answer).ok());
  REQUIRE(full->generate(question, one, {}, &answer).ok());
  // What the question left is what full attention leaves, so the answer begins alike.
  const std::size_t n = 1500 + answer.question_tokens + 1;
  CHECK(std::equal(session->tokens().begin(),
                   session->tokens().begin() + static_cast<std::ptrdiff_t>(n),
                   full->tokens().begin()));
  // A larger budget is another choice by the same queries: the same as if it had been asked for at
  // first.
  const auto larger = reader("snapkv", 2);
  o.select.budget_tokens = 400;
  REQUIRE(larger->set_select(o.select).ok());
  REQUIRE(larger->generate(question, one, {}, &answer).ok());
  REQUIRE(session->rewind(n).ok());
  REQUIRE(larger->rewind(n).ok());
  REQUIRE(session->set_select(o.select).ok());
  CHECK(continue_with(session.get(), 20) == continue_with(larger.get(), 20));
}

TEST_CASE("snapkv reads the chosen tokens of each head, and the tokens sealed since") {
  const auto session = reader("snapkv", 2);
  continue_with(session.get(), 3);
  const auto read_by_a_step = [&] {
    const std::string stats = session->stats_json();
    return std::stoul(stats.substr(stats.find("\"last_tokens_read\":") + 19));
  };
  const uint64_t heads = mini_model()->store_shape().heads_total(),
                 page = mini_model()->store_shape().page.page_tokens;
  CHECK(read_by_a_step() == heads * 150);
  const uint32_t pages = session->store().pages().pages();
  while (session->store().pages().pages() == pages) continue_with(session.get(), 1);
  continue_with(session.get(), 1);
  CHECK(read_by_a_step() == heads * (150 + page));
}

TEST_CASE(
    "infllm prefills a text again that has no representatives, and chooses as if it had had them") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), without = folder.file("b.kv");
  const auto session = reader("infllm", 2);
  REQUIRE(session->save(path, nullptr, {}).ok());
  copy_changed(path, without, format::SectionKind::representatives,
               [](uint32_t*, auto* bytes) { bytes->clear(); });
  std::unique_ptr<Session> loaded;
  SessionOptions o = choosing("infllm", 2);
  std::string log;
  o.log = [&](int level, const char* message) { log += level == 1 ? message : ""; };
  REQUIRE(Session::load(mini_model(), without, o, true, nullptr, {}, &loaded).ok());
  CHECK_FALSE(loaded->store().representatives().known());
  CHECK(continue_with(loaded.get(), 40) == continue_with(session.get(), 40));
  CHECK(loaded->store().representatives().known());
  CHECK(log.find("prefilling it again") != std::string::npos);

  REQUIRE(Session::load(mini_model(), without, o, true, nullptr, {}, &loaded).ok());
  uint64_t last = 0, all = 1, reports = 0;
  const auto report = [&](uint64_t done, uint64_t total) {
    return last = done, all = total, ++reports, 0;
  };
  REQUIRE(loaded->prepare(nullptr, report).ok());
  CHECK(last == all);
  // A budget is for both sequences, while it is read again.
  const uint64_t least = loaded->store().min_bytes(1540);
  o.memory.spill_folder = folder.path();
  o.memory.bytes = least;
  REQUIRE(Session::load(mini_model(), without, o, true, nullptr, {}, &loaded).ok());
  reports = 0;
  CHECK(loaded->prepare(nullptr, report).code() == Code::limit);
  CHECK(reports == 0);
  CHECK_FALSE(loaded->store().representatives().known());
  o.memory.bytes = least * 5 / 2;
  REQUIRE(Session::load(mini_model(), without, o, true, nullptr, {}, &loaded).ok());
  REQUIRE(loaded->prepare(nullptr, report).ok());
  CHECK(loaded->store().private_bytes() <= o.memory.bytes);
  const auto again = reader("infllm", 2);
  CHECK(continue_with(loaded.get(), 20) == continue_with(again.get(), 20));
}

TEST_CASE("bounded chooses by a file's sketch, and makes one of another version again" *
          doctest::skip(!replaces_files_in_use()) * doctest::test_suite("slow")) {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  const auto session = reader("bounded", 2);
  REQUIRE(session->store().sketch().built());
  REQUIRE(session->save(path, nullptr, {}).ok());
  std::string log;
  SessionOptions o = choosing("bounded", 2);
  o.log = [&](int, const char* message) { log += message; };
  const auto load_with =
      [&](const std::function<void(uint32_t*, std::vector<std::byte>*)>& change) {
        copy_changed(path, other, format::SectionKind::sketch, change);
        std::unique_ptr<Session> loaded;
        REQUIRE(Session::load(mini_model(), other, o, true, nullptr, {}, &loaded).ok());
        log.clear();
        return loaded;
      };
  const auto same = load_with([](uint32_t*, auto*) {});
  CHECK(same->store().sketch().pages() == session->store().pages().pages());
  ask(same.get(), question);
  CHECK(log.find("sketch") == std::string::npos);
  for (const uint32_t other_version :
       {KeySketch::section_version - 1, KeySketch::section_version + 1}) {
    const auto made_again = load_with([&](uint32_t* version, auto*) { *version = other_version; });
    CHECK_FALSE(made_again->store().sketch().built());
    CHECK(ask(made_again.get(), question) == ask(session.get(), question));
    CHECK(log.find("sketch") != std::string::npos);
  }
}

TEST_CASE("strategies that scan all keys say so") {
  for (const char* strategy : {"flat", "dipr"}) {
    auto session = reader(strategy, 2);
    Token token = 0;
    bool end = false;
    REQUIRE(session->next({}, nullptr, &token, &end).ok());
    const std::string json = session->stats_json();
    const auto number = [&](const char* key) {
      return std::stoull(json.substr(json.find(key) + std::strlen(key)));
    };
    CHECK(number("\"last_keys_scanned\":") == number("\"last_tokens_present\":"));
  }
}

TEST_CASE(
    "a page that holds what was chosen for certain, samples or several of them is fetched once for "
    "a token") {
  TempFolder folder;
  REQUIRE(reader("bounded", 2)->save(folder.file("a.kv"), nullptr, {}).ok());
  SessionOptions o = choosing("bounded", 2);
  o.select.budget_tokens = 400;  // several of most pages
  std::unique_ptr<Session> session;
  REQUIRE(Session::load(mini_model(), folder.file("a.kv"), o, true, nullptr, {}, &session).ok());
  const auto fetched = [&] {
    const PageCache::Counts counts = session->store().pages().cache_counts();
    return counts.found + counts.read;
  };
  Token token = 0;
  bool end = false;
  REQUIRE(session->next({}, nullptr, &token, &end).ok());
  const uint64_t before = fetched();
  REQUIRE(session->next({}, nullptr, &token, &end).ok());
  const std::string json = session->stats_json(), key = "\"last_pages_touched\":";
  const uint64_t touched = std::stoull(json.substr(json.find(key) + key.size()));
  CHECK(touched > 100);
  CHECK(fetched() - before == touched);
}

TEST_CASE("a damaged choice or damaged representatives are refused") {
  TempFolder folder;
  const std::string path = folder.file("a.kv"), other = folder.file("b.kv");
  const auto load_with = [&](format::SectionKind kind, auto change) {
    copy_changed(path, other, kind, [&](uint32_t*, auto* bytes) { change(bytes); });
    std::unique_ptr<Session> loaded;
    return Session::load(mini_model(), other, {}, false, nullptr, {}, &loaded).code();
  };
  for (const format::SectionKind kind :
       {format::SectionKind::observed, format::SectionKind::representatives}) {
    CAPTURE(format::name_of(kind));
    const auto session = reader(kind == format::SectionKind::observed ? "snapkv" : "infllm", 2);
    continue_with(session.get(), 3);
    REQUIRE(session->save(path, nullptr, {}).ok());
    CHECK(load_with(kind, [](auto*) {}) == Code::ok);
    CHECK(load_with(kind, [](auto* b) { b->clear(); }) == Code::ok);
    CHECK(load_with(kind, [](auto* b) { b->resize(9); }) == Code::corrupt);
    CHECK(load_with(kind, [](auto* b) { b->resize(b->size() - 4); }) == Code::corrupt);
    CHECK(load_with(kind, [](auto* b) { b->insert(b->end(), 4, std::byte{0}); }) == Code::corrupt);
    CHECK(load_with(kind, [](auto* b) { std::fill_n(b->begin(), 4, std::byte{0xff}); }) ==
          Code::corrupt);
    CHECK(load_with(kind, [](auto* b) { std::fill_n(b->end() - 4, 4, std::byte{0xff}); }) ==
          Code::corrupt);
  }
}
