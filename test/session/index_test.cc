// The life of an index in whole sessions: made, saved, mapped, shared, outgrown, cut.
#include <algorithm>
#include <fstream>
#include <set>

#include "cachefile/cache_file.h"
#include "helpers.h"
#include "select/graph/index_build.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

SessionOptions searching(const char* strategy, uint32_t threads = 2, uint64_t budget = 100) {
  SessionOptions o;
  o.threads = threads;
  o.select.strategy = strategy;
  o.select.budget_tokens = budget;
  return o;
}

double number(const Session& session, const std::string& key) {
  const std::string stats = session.stats_json();
  const std::size_t at = stats.find("\"" + key + "\":");
  REQUIRE(at != std::string::npos);
  return std::stod(stats.substr(at + key.size() + 3));
}

constexpr uint32_t long_enough = 2150;  // tokens: an index is made

constexpr IndexKind kinds[] = {IndexKind::hnsw, IndexKind::ood, IndexKind::ivf};

// A document with the index of a kind, read and made once.
std::string saved(IndexKind kind) {
  static TempFolder folder;
  static std::set<IndexKind> made;
  const std::string path = folder.file(std::string(name_of(kind)) + ".kv");
  if (made.insert(kind).second) {
    static std::unique_ptr<Session> document;
    if (!document) {
      document = open_session(mini_model(), searching("full"));
      read(document.get(), book_tokens(long_enough));
    }
    std::unique_ptr<Session> session;
    REQUIRE(document->fork(&session).ok());
    REQUIRE(session->set_select(searching(name_of(kind)).select).ok());
    CHECK(number(*session, "index_tokens") == 0);
    uint64_t last = 0, all = 0;
    bool forwards = true;
    const auto report = [&](uint64_t done, uint64_t total) {
      return forwards &= done >= last, last = done, all = total, 0;
    };
    REQUIRE(session->save(path, nullptr, {}, report).ok());
    CHECK(forwards);
    CHECK(all >= index_steps(session->store().shape()));
    CHECK(last == all);
    CHECK(number(*session, "index_tokens") == session->store().sealed_tokens());
  }
  return path;
}

}  // namespace

TEST_CASE(
    "an index: saved, mapped and shared by forks, every sequence goes on the same, on one thread "
    "and two" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  for (const char* strategy : {"hnsw", "ood", "dipr-graph", "ivf"}) {
    CAPTURE(strategy);
    const std::string path = saved(*strategy_info(strategy)->index);
    auto session = load_session(path, searching(strategy, 2)),
         one = load_session(path, searching(strategy, 1));
    std::unique_ptr<Session> fork;
    REQUIRE(session->fork(&fork).ok());
    const auto next = continue_with(session.get(), 40);
    CHECK(number(*session, "last_keys_scanned") > 0);
    CHECK(number(*session, "index_ns") == 0);  // the file's was used
    CHECK(continue_with(one.get(), 40) == next);
    CHECK(continue_with(fork.get(), 40) == next);
    REQUIRE(one->save(folder.file("b.kv"), nullptr, {}).ok());
    CHECK(continue_with(load_session(folder.file("b.kv"), searching(strategy)).get(), 20) ==
          continue_with(fork.get(), 20));
  }
}

TEST_CASE(
    "an index: the passages that are asked for it come evenly from the whole text, as questions "
    "with what follows them for an answer") {
  auto session = open_session(mini_model(), searching("ood"));
  const auto tokens = book_tokens(long_enough);
  read(session.get(), tokens);
  for (const uint32_t count : {1u, 600u, 1000u}) {
    CAPTURE(count);
    std::vector<Array<Token>> pieces;
    REQUIRE(session->question_passages(count, &pieces).ok());
    const std::size_t marks = pieces[0].size() - 32;
    CHECK(pieces.size() == std::max<std::size_t>(1, count / pieces[0].size()));
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Array<Token>& piece = pieces[i];
      const std::size_t at = (tokens.size() - 32) * i / pieces.size();
      REQUIRE(piece.size() == marks + 32);
      const auto question =
          std::search(piece.begin(), piece.end(), tokens.data() + at, tokens.data() + at + 16);
      CHECK(question - piece.begin() > 2);  // the document's end and the question's beginning
      CHECK(piece.end() - question > 32);   // the question's end
      CHECK(std::equal(piece.end() - 16, piece.end(), tokens.data() + at + 16));
    }
  }
}

TEST_CASE(
    "an index: a sequence that made it goes on as one that mapped it, and one thread makes the "
    "same as two" *
    doctest::test_suite("slow")) {
  auto session = open_session(mini_model(), searching("ood", 1));
  read(session.get(), book_tokens(long_enough));
  REQUIRE(session->prepare(nullptr, {}).ok());
  auto mapped = load_session(saved(IndexKind::ood), searching("ood", 2));
  CHECK(continue_with(session.get(), 30) == continue_with(mapped.get(), 30));
  CHECK(number(*session, "index_ns") > 0);
}

TEST_CASE(
    "an index: a sequence that is rewound below it and goes on with another text attends the new "
    "text" *
    doctest::test_suite("slow")) {
  const auto tokens = book_tokens(long_enough + 200);
  auto full = load_session(saved(IndexKind::ivf), searching("full"));
  REQUIRE(full->rewind(1500).ok());
  read(full.get(), {tokens.data() + long_enough, 200});
  const auto want = continue_with(full.get(), 20);
  for (IndexKind kind : kinds) {
    CAPTURE(std::string(name_of(kind)));
    // With a budget of everything and a search that ends nowhere the choice is everything: full
    // attention.
    SessionOptions o = searching(name_of(kind), 2, 1 << 20);
    o.select.search_breadth = 1 << 20;
    auto session = load_session(saved(kind), o);
    REQUIRE(session->rewind(1500).ok());
    CHECK(number(*session, "index_tokens") == session->store().sealed_tokens());
    read(session.get(), {tokens.data() + long_enough, 200});
    CHECK(number(*session, "index_tokens") < session->store().sealed_tokens());
    const auto next = continue_with(session.get(), 20);
    // its graph of inner products has keys that no search reaches
    if (kind != IndexKind::hnsw) CHECK(next == want);
    CHECK(number(*session, "last_keys_scanned") >= 0.97 * number(*session, "last_tokens_present"));
    REQUIRE(session->rewind(0).ok());
    CHECK(number(*session, "index_tokens") == 0);
  }
}

TEST_CASE(
    "an index: it is built again when a quarter more tokens are sealed than it has, and not "
    "before" *
    doctest::test_suite("slow")) {
  const auto tokens = book_tokens(long_enough * 2);
  auto session = load_session(saved(IndexKind::ivf), searching("ivf"));
  const double first = number(*session, "index_tokens");
  CHECK(first > 2000);
  read(session.get(), {tokens.data() + long_enough, 300});
  ask(session.get(), "Who came?");
  CHECK(number(*session, "index_tokens") == first);
  read(session.get(), {tokens.data() + long_enough + 300, 500});
  ask(session.get(), "Who came?");
  CHECK(number(*session, "index_tokens") > first + 500);
}

TEST_CASE("an index: none is built for one token; every token is scored instead") {
  for (const char* strategy : {"ood", "hnsw", "ivf"}) {
    auto session = load_session(saved(IndexKind::ivf), searching(strategy));
    auto flat = load_session(saved(IndexKind::ivf), searching("flat"));
    if (std::string(strategy) == "ivf") REQUIRE((session->rewind(0).ok() && flat->rewind(0).ok()));
    if (std::string(strategy) == "ivf")
      read(session.get(), book_tokens(long_enough)), read(flat.get(), book_tokens(long_enough));
    CHECK(continue_with(session.get(), 20) == continue_with(flat.get(), 20));
    CHECK(number(*session, "index_tokens") == 0);
    CHECK(number(*session, "last_keys_scanned") > 0.9 * number(*session, "last_tokens_present"));
  }
}

TEST_CASE(
    "an index: what was sealed since is inserted into ood's graph on request, which is saved so" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  const auto tokens = book_tokens(long_enough + 400);
  auto session = load_session(saved(IndexKind::ood), searching("ood"));
  const double first = number(*session, "index_tokens");
  read(session.get(), {tokens.data() + long_enough, 400});
  CHECK(number(*session, "index_tokens") == first);
  REQUIRE(session->prepare(nullptr, {}).ok());
  const double sealed = static_cast<double>(session->store().sealed_tokens());
  CHECK(number(*session, "index_tokens") == sealed);
  CHECK(number(*session, "index_inserted") == sealed - first);
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  auto mapped = load_session(folder.file("a.kv"), searching("ood", 1));
  CHECK(number(*mapped, "index_inserted") == sealed - first);
  CHECK(continue_with(mapped.get(), 30) == continue_with(session.get(), 30));
  // three searches of 128 tokens in a short text
  CHECK(number(*session, "last_keys_scanned") < number(*session, "last_tokens_present") * 2 / 3);
}

TEST_CASE(
    "an index: a graph for each query head is saved, mapped and kept apart from a shared one" *
    doctest::test_suite("slow")) {
  TempFolder folder;
  SessionOptions o = searching("ood");
  o.select.head_graphs = true;
  int warnings = 0;
  o.log = [&](int level, const char*) { warnings += level == 1; };
  auto session = load_session(saved(IndexKind::ood), o);
  const double group = mini_model()->config().heads / mini_model()->config().kv_heads;
  REQUIRE(group > 1);
  CHECK(number(*session, "index_graphs") == 1);  // the file's, until one is needed
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  continue_with(fork.get(), 3);
  CHECK(warnings == 1);
  REQUIRE(session->prepare(nullptr, {}).ok());
  CHECK(number(*session, "index_graphs") == group);
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  auto mapped = load_session(folder.file("a.kv"), o);
  CHECK(number(*mapped, "index_graphs") == group);
  CHECK(continue_with(mapped.get(), 30) == continue_with(session.get(), 30));
  CHECK(number(*mapped, "index_ns") == 0);
  auto shared = load_session(folder.file("a.kv"), searching("ood"));
  REQUIRE(shared->prepare(nullptr, {}).ok());
  continue_with(shared.get(), 2);
  CHECK(number(*shared, "index_graphs") == 1);
}

TEST_CASE("an index: a build can be cancelled, and then there is no index") {
  auto session = load_session(saved(IndexKind::ivf), searching("hnsw"));
  CHECK(session->prepare(nullptr, [](uint64_t done, uint64_t) { return done > 2; }).code() ==
        Code::cancelled);
  REQUIRE(session->set_select(searching("ood").select).ok());
  // progress is reported from the beginning, which computes queries again
  uint64_t steps = 0, reported = 0;
  const auto stop_at_once = [&](uint64_t done, uint64_t total) {
    return steps = total, ++reported, done == 0;
  };
  CHECK(session->prepare(nullptr, stop_at_once).code() == Code::cancelled);
  CHECK(reported == 1);
  CHECK(steps > index_steps(session->store().shape()));
  Cancel cancel;
  cancel.fire();
  for (const char* strategy : {"hnsw", "ood"}) {
    REQUIRE(session->set_select(searching(strategy).select).ok());
    CHECK(session->prepare(&cancel, {}).code() == Code::cancelled);
    CHECK(number(*session, "index_tokens") == 0);
  }
  CHECK(session->tokens().size() == long_enough);
}

TEST_CASE("an index: a damaged one is an error that names it when it is used, and only then") {
  TempFolder folder;
  REQUIRE(load_session(saved(IndexKind::ivf), searching("ivf"))
              ->save(folder.file("a.kv"), nullptr, {})
              .ok());
  uint64_t at = 0;
  {
    std::shared_ptr<const CacheFile> file;
    REQUIRE(CacheFile::open(folder.file("a.kv"), &file).ok());
    const CacheFile::Section* section = file->find(format::SectionKind::ivf);
    REQUIRE(section);
    at = section->offset + section->bytes / 2;
  }
  std::fstream file(folder.file("a.kv"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const auto old = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(old ^ 1));
  file.close();
  std::unique_ptr<Session> loaded;
  REQUIRE(Session::load(mini_model(), folder.file("a.kv"), searching("ivf"), false, nullptr, {},
                        &loaded)
              .ok());
  Token token = 0;
  bool end = false;
  const Status s = loaded->next({}, nullptr, &token, &end);
  CHECK(s.code() == Code::corrupt);
  CHECK(std::string(s.message()).find("ivf") != std::string::npos);
  REQUIRE(Session::load(mini_model(), folder.file("a.kv"), searching("flat"), false, nullptr, {},
                        &loaded)
              .ok());
  CHECK(loaded->next({}, nullptr, &token, &end).ok());
}
