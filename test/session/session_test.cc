// Promises of a session: the same bits with any threads, from memory or a file, and after rewinds;
// no token is lost by a cancel.
#include <cmath>
#include <fstream>

#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using test::ask;
using test::book_tokens;
using test::continue_with;
using test::mini_model;
using test::open_session;
using test::read;

namespace {

SessionOptions with(const char* strategy, uint64_t budget = 0, uint32_t dense = UINT32_MAX,
                    uint32_t threads = 2) {
  SessionOptions o;
  o.threads = threads;
  o.select.strategy = strategy;
  o.select.budget_tokens = budget;
  o.select.dense_layers = dense;
  return o;
}

std::unique_ptr<Session> save_and_load(Session* session, const SessionOptions& options,
                                       bool verify = false) {
  TempFolder folder;
  REQUIRE(session->save(folder.file("a.kv"), nullptr, {}).ok());
  std::unique_ptr<Session> loaded;
  const Status s =
      Session::load(mini_model(), folder.file("a.kv"), options, verify, nullptr, {}, &loaded);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return loaded;  // the mapping outlives the file's name
}

bool same_sequence(const Session& a, const Session& b) {
  return std::equal(a.tokens().begin(), a.tokens().end(), b.tokens().begin(), b.tokens().end());
}

const std::string fact = " The access code of the north gate is 4821907. ";
const std::string question = "What is the access code of the north gate?";
const std::string fact_answer = "The access code of the north gate is 4821907.";

// A document of the book with the fact in its middle.
std::string document(std::size_t bytes) {
  std::ifstream in(EXAMPLES "/demo.txt", std::ios::binary);
  std::string text(bytes, '\0');
  in.read(text.data(), static_cast<std::streamsize>(bytes));
  REQUIRE(in.good());
  const std::size_t middle = text.find(". ", bytes / 2) + 1;
  return text.substr(0, middle) + fact + text.substr(middle);
}

std::unique_ptr<Session> with_document(std::size_t bytes, const SessionOptions& options) {
  auto session = open_session(mini_model(), options);
  uint64_t tokens = 0, done = 0;
  const Status s = session->prefill(document(bytes), false, nullptr, {}, &tokens, &done);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

}  // namespace

TEST_CASE("one thread and several give the same bits" * doctest::test_suite("slow")) {
  const auto tokens = book_tokens(1500);
  for (const SessionOptions& base : {with("full"), with("quest", 256), with("quest", 256, 0),
                                     with("bounded", 128), with("flat", 64), with("dipr")}) {
    SessionOptions one = base, three = base;
    one.threads = 1;
    three.threads = 3;
    auto a = open_session(mini_model(), one), b = open_session(mini_model(), three);
    read(a.get(), tokens);
    read(b.get(), tokens);
    CHECK(continue_with(a.get(), 40) == continue_with(b.get(), 40));
    CHECK(test::logits_after(a.get(), 100) == test::logits_after(b.get(), 100));
  }
}

TEST_CASE("how tokens are cut into chunks changes no bit in full precision") {
  const auto tokens = book_tokens(1300);
  std::vector<float> expected;
  for (uint32_t chunk : {100u, 511u, 1100u, 1300u}) {
    CAPTURE(chunk);
    SessionOptions o = with("full");
    o.full_precision = true;
    o.prefill_chunk = chunk;
    auto session = open_session(mini_model(), o);
    read(session.get(), tokens);
    const auto logits = test::logits_after(session.get(), 100);
    if (expected.empty()) expected = logits;
    CHECK(logits == expected);
  }
}

TEST_CASE("saving and loading at any moment is continuing" * doctest::test_suite("slow")) {
  const auto tokens = book_tokens(1200);
  for (const SessionOptions& o : {with("full"), with("quest", 128, 0), with("window"),
                                  with("bounded", 128), with("flat", 64), with("dipr")}) {
    for (std::size_t n : {1u, 63u, 96u, 97u, 700u, 1200u}) {
      CAPTURE(n);
      auto session = open_session(mini_model(), o);
      read(session.get(), {tokens.data(), n});
      continue_with(session.get(), 5);
      auto loaded = save_and_load(session.get(), o, n == 700);
      // seals a page on the way
      CHECK(continue_with(session.get(), 40) == continue_with(loaded.get(), 40));
      CHECK(test::logits_after(session.get(), 7) == test::logits_after(loaded.get(), 7));
      CHECK(same_sequence(*session, *loaded));
    }
  }
}

TEST_CASE("a loaded session saved again and loaded again goes on the same") {
  auto session = with_document(12000, with("quest", 256));
  auto once = save_and_load(session.get(), with("quest", 256));
  continue_with(once.get(), 70);
  auto twice = save_and_load(once.get(), with("quest", 256));
  CHECK(continue_with(once.get(), 20) == continue_with(twice.get(), 20));
}

TEST_CASE("a question leaves the sequence exactly as it was") {
  auto session = with_document(12000, with("quest", 256));
  auto untouched = with_document(12000, with("quest", 256));
  const std::string first = ask(session.get(), question);
  CHECK(first == fact_answer);
  CHECK(ask(session.get(), question) == first);
  CHECK(same_sequence(*session, *untouched));
  CHECK(continue_with(session.get(), 40) == continue_with(untouched.get(), 40));
}

TEST_CASE("every strategy that should find the fact finds it" * doctest::test_suite("slow")) {
  auto session = with_document(40000, with("full"));
  for (const char* strategy : {"auto", "full", "quest", "flat", "dipr", "bounded"}) {
    CAPTURE(strategy);
    REQUIRE(session->set_select(with(strategy).select).ok());
    CHECK(ask(session.get(), question) == fact_answer);
  }
  REQUIRE(session->set_select(with("window").select).ok());
  // the fact is out of the window: nothing else may be read
  CHECK(ask(session.get(), question) != fact_answer);
}

TEST_CASE(
    "layers that pages serve badly are measured in prefill, attend everything, and a cache "
    "remembers them" *
    doctest::test_suite("slow")) {
  auto session = with_document(20000, with("quest", 256));
  const std::string stats = session->stats_json();
  const auto list_of = [](const std::string& json) {
    const std::size_t at = json.find("\"dense_layers\":[");
    return json.substr(at, json.find(']', at) - at);
  };
  CHECK(list_of(stats) == "\"dense_layers\":[7,8");  // the mini model's retrieving layers
  CHECK(list_of(save_and_load(session.get(), with("quest", 256))->stats_json()) == list_of(stats));
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  CHECK(list_of(fork->stats_json()) == list_of(stats));
  auto unmeasured = with_document(4000, with("quest", 256));
  CHECK(list_of(unmeasured->stats_json()) == "\"dense_layers\":[0,1");
}

TEST_CASE("a kept answer stays and the next question follows it") {
  auto session = with_document(8000, with("full"));
  const std::size_t before = session->tokens().size();
  GenerateOptions keep;
  keep.keep = true;
  CHECK(ask(session.get(), question, keep) == fact_answer);
  CHECK(session->tokens().size() > before + 20);
  CHECK(ask(session.get(), question, keep) == fact_answer);
  uint64_t tokens = 0, bytes = 0;
  CHECK(session->prefill("more", false, nullptr, {}, &tokens, &bytes).code() == Code::bad_state);
  session = save_and_load(session.get(), with("full"));
  REQUIRE(session->rewind(before).ok());  // the document's turn is open again
  CHECK(session->prefill(" The end.", false, nullptr, {}, &tokens, &bytes).ok());
  CHECK(ask(session.get(), question) == fact_answer);
}

TEST_CASE("a budget of everything is full attention" * doctest::test_suite("slow")) {
  const auto tokens = book_tokens(1500);
  for (const char* strategy : {"quest", "flat", "bounded", "infllm", "snapkv"}) {
    auto full = open_session(mini_model(), with("full")),
         all = open_session(mini_model(), with(strategy, 1u << 20, 0));
    read(full.get(), tokens);
    read(all.get(), tokens);
    CHECK(continue_with(full.get(), 20) == continue_with(all.get(), 20));
  }
}

TEST_CASE(
    "bounded answers from a twentieth of a document where nothing is dense, and reports how "
    "much attention that covers" *
    doctest::test_suite("slow")) {
  auto session = with_document(20000, with("bounded", 256));
  CHECK(ask(session.get(), question) == fact_answer);
  const std::string stats = session->stats_json();
  CHECK(stats.find("\"dense_layers\":[]") != std::string::npos);
  const auto number = [&](const std::string& key) {
    return std::stod(stats.substr(stats.find("\"" + key + "\":") + key.size() + 3));
  };
  CHECK(number("last_tokens_read") < 0.05 * number("last_tokens_present"));
  CHECK(number("last_keys_scanned") == 0);
  CHECK(number("last_mass_read") > 0.5);
  CHECK(number("last_mass_read") < 1);
}

TEST_CASE(
    "bounded follows a sequence that begins with nothing, through its first pages and past its "
    "doubling") {
  auto session = open_session(mini_model(), with("bounded", 64));
  const auto tokens = book_tokens(3);
  read(session.get(), tokens);
  const auto reply = continue_with(session.get(), 400);
  CHECK(session->stats_json().find("\"sketch_pages\":0,") == std::string::npos);
  auto again = open_session(mini_model(), with("bounded", 64));
  read(again.get(), tokens);
  auto some = continue_with(again.get(), 150);
  // the sketch is found again when it would have been
  auto loaded = save_and_load(again.get(), with("bounded", 64));
  for (Token t : continue_with(loaded.get(), 250)) some.push_back(t);
  CHECK(some == reply);
}

TEST_CASE("query heads that choose alone and together both find the fact, and read what they may" *
          doctest::test_suite("slow")) {
  for (bool share : {true, false}) {
    SessionOptions o = with("quest", 512, 0);
    o.select.share_heads = share;
    auto session = with_document(40000, o);
    Answer answer;
    std::string text;
    REQUIRE(session
                ->generate(
                    question, {}, [&](std::string_view t) { return text += t, 0; }, &answer)
                .ok());
    CHECK(text == fact_answer);
    const ModelConfig& c = mini_model()->config();
    const uint64_t queries =
        (answer.question_tokens + answer.answer_tokens) * c.layers * c.kv_heads;
    CHECK(answer.read.tokens_read <= queries * 512 * (share ? 1 : c.group()));
    CHECK(answer.read.tokens_read > queries * 256);
    CHECK(answer.read.tokens_present > answer.read.tokens_read);
  }
}

TEST_CASE("going back within the window is exact, and further back works on") {
  const auto tokens = book_tokens(1000);
  auto session = open_session(mini_model(), with("full")),
       straight = open_session(mini_model(), with("full"));
  read(straight.get(), tokens);
  const auto fresh = continue_with(straight.get(), 12);
  REQUIRE(straight->rewind(999).ok());
  read(straight.get(), {&tokens[999], 1});
  const auto expected = continue_with(straight.get(), 12);

  read(session.get(), tokens);
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  continue_with(session.get(), 8);
  for (Session* s : {session.get(), fork.get()}) {  // by a detour and without
    REQUIRE(s->rewind(999).ok());
    read(s, {&tokens[999], 1});
    CHECK(continue_with(s, 12) == expected);
  }
  for (uint64_t at : {999u, 640u, 500u, 96u, 40u, 1u}) {
    REQUIRE(session->rewind(at).ok());
    CHECK(session->tokens().size() == at);
    continue_with(session.get(), 3);
  }
  REQUIRE(session->rewind(0).ok());
  read(session.get(), tokens);
  CHECK(continue_with(session.get(), 12) == fresh);
  CHECK(session->rewind(5000).code() == Code::bad_argument);
}

TEST_CASE("a fork and its origin do not see each other's tail") {
  const auto tokens = book_tokens(900);
  auto a = open_session(mini_model(), with("quest", 128, 0));
  read(a.get(), tokens);
  std::unique_ptr<Session> b;
  REQUIRE(a->fork(&b).ok());
  auto alone = open_session(mini_model(), with("quest", 128, 0));
  read(alone.get(), tokens);
  read(b.get(), std::span(tokens).first(300));  // seals pages into what was the shared slab
  CHECK(continue_with(a.get(), 60) == continue_with(alone.get(), 60));
  a.reset();
  continue_with(b.get(), 10);
}

TEST_CASE("a cancelled document keeps whole chunks and can go on" * doctest::test_suite("slow")) {
  const std::string text = document(16000);
  SessionOptions o = with("full");
  o.prefill_chunk = 128;
  auto whole = open_session(mini_model(), o);
  uint64_t tokens = 0, bytes = 0;
  REQUIRE(whole->prefill(text, false, nullptr, {}, &tokens, &bytes).ok());
  CHECK(bytes == text.size());
  for (uint64_t stop_at : {1u, 500u, 2000u}) {
    auto session = open_session(mini_model(), o);
    const auto stop = [&](uint64_t done, uint64_t) { return done >= stop_at ? 1 : 0; };
    CHECK(session->prefill(text, false, nullptr, stop, &tokens, &bytes).code() == Code::cancelled);
    CHECK(tokens % 128 == 0);
    CHECK(tokens == session->tokens().size());
    CHECK(bytes > 0);
    CHECK(bytes < text.size());
    const auto rest = whole->tokens().subspan(tokens);
    read(session.get(), rest);
    CHECK(same_sequence(*session, *whole));
    CHECK(ask(session.get(), question) == fact_answer);
  }
  {
    SessionOptions tiny = o;
    tiny.prefill_chunk = 2;  // stopped within the marks that open the document's turn
    auto stopped = open_session(mini_model(), tiny);
    CHECK(stopped
              ->prefill(
                  text, false, nullptr, [](uint64_t, uint64_t) { return 1; }, &tokens, &bytes)
              .code() == Code::cancelled);
    CHECK(stopped->tokens().empty());
    CHECK(tokens == 0);
    CHECK(bytes == 0);
  }
  Cancel cancel;
  cancel.fire();
  auto session = open_session(mini_model(), o);
  CHECK(session->prefill(text, false, &cancel, {}, &tokens, &bytes).code() == Code::cancelled);
  CHECK(session->tokens().empty());
  GenerateOptions cancelled;
  cancelled.cancel = &cancel;
  Answer answer;
  CHECK(whole->generate(question, cancelled, {}, &answer).code() == Code::cancelled);
  CHECK(answer.reason == StopReason::cancelled);
  CHECK(ask(whole.get(), question) == fact_answer);
}

TEST_CASE("an answer ends at stop strings, limits and the callback's wish") {
  auto session = with_document(8000, with("full"));
  GenerateOptions o;
  o.stop = {"north", "zebra"};
  CHECK(ask(session.get(), question, o) == "The access code of the ");
  o.stop = {"gate is 4821907.", "907.!"};
  CHECK(ask(session.get(), question, o) == "The access code of the north ");
  o.stop.clear();
  o.max_tokens = 3;
  Answer answer;
  REQUIRE(session->generate(question, o, {}, &answer).ok());
  CHECK(answer.answer_tokens == 3);
  CHECK(answer.reason == StopReason::max_tokens);
  int calls = 0;
  o.max_tokens = 100;
  CHECK(session
            ->generate(
                question, o, [&](std::string_view) { return ++calls == 2; }, &answer)
            .code() == Code::cancelled);
  CHECK(calls == 2);
}

TEST_CASE("the context's end is an error before anything is read") {
  SessionOptions o = with("full");
  o.context = 300;
  auto session = open_session(mini_model(), o);
  const auto tokens = book_tokens(301);
  uint64_t done = 0;
  CHECK(session->prefill_tokens(tokens, nullptr, nullptr, {}, &done).code() == Code::context_full);
  CHECK(session->tokens().empty());
  read(session.get(), std::span(tokens).first(299));
  continue_with(session.get(), 1);
  Token token = 0;
  bool end = false;
  CHECK(session->next({}, nullptr, &token, &end).code() == Code::context_full);
  o.context = 1 << 30;
  std::unique_ptr<Session> refused;
  CHECK(Session::open(mini_model(), o, &refused).code() == Code::bad_argument);
}

TEST_CASE(
    "a cache of another model is refused as stale and a damaged page is found when it is read") {
  TempFolder folder;
  const std::string path = folder.file("a.kv");
  auto session = with_document(12000, with("full"));
  REQUIRE(session->save(path, nullptr, {}).ok());
  std::unique_ptr<Session> loaded;
  const auto other = test::open_model(FIXTURES "/models/llama-f32.gguf");
  CHECK(Session::load(other, path, {}, false, nullptr, {}, &loaded).code() == Code::model_mismatch);

  std::shared_ptr<const CacheFile> file;
  REQUIRE(CacheFile::open(path, &file).ok());
  const uint64_t in_pages = file->find(format::SectionKind::pages)->offset + 5 * page_bytes + 99;
  {
    std::fstream damage(path, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(static_cast<std::streamoff>(in_pages));
    damage.put('\x55');
  }
  for (const char* strategy : {"full", "flat", "dipr"}) {  // all of them look at every page
    CAPTURE(strategy);
    REQUIRE(Session::load(mini_model(), path, with(strategy), false, nullptr, {}, &loaded).ok());
    Answer answer;
    const Status s = loaded->generate(question, {}, {}, &answer);
    CHECK(s.code() == Code::corrupt);
    CHECK(std::string(s.message()).find("pages") != std::string::npos);
    CHECK(same_sequence(*loaded, *session));
  }
  std::unique_ptr<Session> verified;
  CHECK(Session::load(mini_model(), path, with("full"), true, nullptr, {}, &verified).code() ==
        Code::corrupt);
  CHECK(!verified);
}

TEST_CASE("the store costs at most 15 percent more than int8 keys and values") {
  // at 256 a page is 8 tokens and its summaries cost 26 percent, at 512 it is 4 and they cost 51
  for (uint32_t head_dim : {32u, 64u, 128u}) {
    const StoreShape shape{1, 1, PageShape::of(head_dim)};
    const double bytes = static_cast<double>(shape.slab_bytes()) / shape.page.extent_tokens();
    CAPTURE(head_dim);
    CHECK(bytes <= 2.0 * head_dim * 1.15);
  }
}
