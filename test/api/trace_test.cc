// kv_session_passages: the passages of the document that an answer attended.
#include <cstring>

#include "helpers.h"
#include "temp_folder.h"

using namespace api_test;

namespace {

const char traced_fact[] = " The access code of the north gate is 4821907. ";
const char traced_question[] = "What is the access code of the north gate?";

const kv_strategy* decode_with(const char* strategy) {
  return strategies::make(strategy, {{KV_PARAM_BUDGET_TOKENS, 192}}, strategies::Fit::some);
}

kv_session_options options_with(const char* strategy, uint32_t threads = 2) {
  kv_session_options o;
  kv_init(&o, sizeof o);
  o.threads = threads;
  o.decode = decode_with(strategy);
  return o;
}

struct Asked {
  std::string text;
  kv_status status = KV_OK;
};

Asked ask_traced(kv_session* session, const char* text = traced_question,
                 uint32_t flags = KV_TRACE_PASSAGES, uint32_t max_tokens = 32) {
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.flags = flags;
  o.max_tokens = max_tokens;
  Asked asked;
  const auto on_text = [](const char* t, size_t n, void* user) {
    return static_cast<std::string*>(user)->append(t, n), 0;
  };
  asked.status = kv_generate(session, text, std::strlen(text), &o, nullptr, on_text, &asked.text,
                             nullptr, nullptr);
  return asked;
}

std::vector<kv_passage> trace(kv_session* session) {
  std::size_t count = 0;
  (void)kv_session_passages(session, nullptr, 0, &count, nullptr);
  std::vector<kv_passage> spans(count);
  REQUIRE_OK(kv_session_passages(session, spans.data(), spans.size(), &count, error));
  REQUIRE(count == spans.size());
  return spans;
}

kv_status trace_status(kv_session* session) {
  std::size_t count = 77;
  kv_passage spans[64];
  const kv_status status = kv_session_passages(session, spans, 64, &count, nullptr);
  CHECK((status == KV_OK || count == 77));
  return status;
}

std::string text_of(kv_session* session, const kv_passage& span) {
  const std::vector<int32_t> tokens = sequence(session);
  REQUIRE(span.first_token + span.tokens <= tokens.size());
  std::string text(4096, '\0');
  std::size_t size = 0;
  REQUIRE_OK(kv_detokenize(mini_model(), tokens.data() + span.first_token, span.tokens, 0,
                           text.data(), text.size(), &size, error));
  return text.substr(0, size);
}

// Of the mini model, that has read a page of a book with the fact in it, about 1100 tokens.
kv_session* reader() {
  static const Session session = [] {
    Session s = open_session(mini_model(), options_with("full"));
    read_text(s.get(), book(2400) + traced_fact + book(4200).substr(2400));
    return s;
  }();
  return session.get();
}

Session reader_with(const char* strategy) {
  Session session = fork(reader());
  REQUIRE_OK(kv_session_set_strategy(session.get(), decode_with(strategy), error));
  return session;
}

void check_in_order(const std::vector<kv_passage>& spans, uint64_t document) {
  double all = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    CHECK(spans[i].tokens > 0);
    CHECK(spans[i].first_token + spans[i].tokens <= document);
    CHECK(spans[i].share > 0);
    CHECK(spans[i].document == 0);
    if (i > 0) CHECK(spans[i].share <= spans[i - 1].share);
    for (std::size_t j = 0; j < i; ++j)  // neither overlap nor touch
      CHECK((spans[i].first_token > spans[j].first_token + spans[j].tokens ||
             spans[j].first_token > spans[i].first_token + spans[i].tokens));
    all += static_cast<double>(spans[i].share);
  }
  CHECK(all <= 1.0001);
}

bool same(const std::vector<kv_passage>& a, const std::vector<kv_passage>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(kv_passage)) == 0);
}

}  // namespace

TEST_CASE(
    "the passage that holds the fact comes first, whatever the strategy, and the answer is the one "
    "without a trace") {
  for (const char* strategy : {"full", "bounded", "quest", "flat", "dipr", "ood", "ivf"}) {
    CAPTURE(strategy);
    const Session session = reader_with(strategy);
    const Asked plain = ask_traced(session.get(), traced_question, 0);
    CHECK(trace_status(session.get()) == KV_BAD_STATE);
    const Asked traced = ask_traced(session.get());
    CHECK(traced.text == plain.text);
    REQUIRE(traced.text.find("4821907") != std::string::npos);
    const std::vector<kv_passage> spans = trace(session.get());
    REQUIRE(!spans.empty());
    check_in_order(spans, sequence(session.get()).size());
    CHECK(text_of(session.get(), spans[0]).find("4821907") != std::string::npos);
    CHECK(spans[0].share > 0.2f);
  }
}

TEST_CASE("tokens that a strategy did not read are in no passage") {
  const Session session = reader_with("window");
  REQUIRE(ask_traced(session.get()).status == KV_OK);
  const uint64_t tokens = sequence(session.get()).size();
  for (const kv_passage& span : trace(session.get())) {
    CAPTURE(span.first_token);
    // sinks; window and what is not sealed yet
    CHECK((span.first_token + span.tokens <= 64 || span.first_token + 192 >= tokens));
  }
}

TEST_CASE("every strategy traces, by heads that choose each for itself too") {
  for (uint32_t i = 0;; ++i) {
    kv_strategy_info info{};
    info.struct_size = sizeof info;
    if (kv_strategy_list(i, &info, nullptr) == KV_NOT_FOUND) break;
    CAPTURE(info.name);
    kv_session_options o = small_options();
    for (const uint32_t share : {1u, 0u}) {
      o.decode = budgeted(info.name, 64, {{KV_PARAM_SHARE_HEADS, share}});
      const Session session = tiny_session(400, o);
      REQUIRE(ask_traced(session.get(), "a", KV_TRACE_PASSAGES, 4).status == KV_OK);
      check_in_order(trace(session.get()), 400);
    }
  }
}

TEST_CASE("passages are the same bits on any number of threads, from a file, and from a fork") {
  const TempFolder folder;
  const std::string path = folder.file("book.kv");
  save(reader(), path);
  for (const char* strategy : {"full", "bounded", "quest"}) {
    CAPTURE(strategy);
    const Session held = reader_with(strategy);
    REQUIRE(ask_traced(held.get()).status == KV_OK);
    const std::vector<kv_passage> expected = trace(held.get());
    for (const uint32_t threads : {1u, 2u, 5u}) {
      CAPTURE(threads);
      const kv_session_options o = options_with(strategy, threads);
      kv_session* loaded = nullptr;
      REQUIRE_OK(kv_load(mini_model(), path.c_str(), &o, nullptr, &loaded, error));
      const Session owner(loaded);
      REQUIRE(ask_traced(loaded).status == KV_OK);
      CHECK(same(trace(loaded), expected));
    }
    const Session copy = fork(held.get());
    CHECK(trace_status(copy.get()) == KV_BAD_STATE);
    REQUIRE(ask_traced(copy.get()).status == KV_OK);
    CHECK(same(trace(copy.get()), expected));
    CHECK(same(trace(held.get()), expected));
  }
}

TEST_CASE(
    "the first words of a document, its last ones, and one that nothing was sealed of are traced") {
  const std::string page = book(1500);
  for (const uint32_t kv_type : {KV_PRECISION_INT8, KV_PRECISION_F32})
    for (const std::string& text : {std::string(traced_fact).substr(1) + page, page + traced_fact,
                                    std::string(traced_fact).substr(1) + book(100)}) {
      CAPTURE(kv_type);
      CAPTURE(text.size());
      kv_session_options o = options_with("full");
      o.precision = kv_type;
      const Session session = open_session(mini_model(), o);
      read_text(session.get(), text);
      REQUIRE(ask_traced(session.get()).text.find("4821907") != std::string::npos);
      const std::vector<kv_passage> spans = trace(session.get());
      REQUIRE(!spans.empty());
      CHECK(text_of(session.get(), spans[0]).find("4821907") != std::string::npos);
    }
}

TEST_CASE("a conversation's passages are the document's") {
  const Session session = reader_with("full");
  const uint64_t document = sequence(session.get()).size();
  for (int turn = 0; turn < 3; ++turn) {
    REQUIRE(ask_traced(session.get(), traced_question, KV_TRACE_PASSAGES | KV_KEEP_TURN).status ==
            KV_OK);
    REQUIRE(sequence(session.get()).size() > document);
    check_in_order(trace(session.get()), document);
  }
}

TEST_CASE("a trace is of the last answer, until something else changes the sequence") {
  const Session session = tiny_session(300);
  kv_session* const s = session.get();
  CHECK(trace_status(s) == KV_BAD_STATE);
  const auto traced = [s] {
    REQUIRE(ask_traced(s, "a", KV_TRACE_PASSAGES, 4).status == KV_OK);
    REQUIRE(trace_status(s) == KV_OK);
  };
  const TempFolder folder;
  traced();
  save(s, folder.file("a.kv"));
  char json[16384];
  std::size_t size = 0;
  REQUIRE_OK(kv_session_stats_json(s, json, sizeof json, &size, error));
  CHECK(trace_status(s) == KV_OK);
  REQUIRE(ask_traced(s, "a", 0, 4).status == KV_OK);
  CHECK(trace_status(s) == KV_BAD_STATE);
  traced();
  int32_t token = 0;
  REQUIRE_OK(kv_session_next(s, nullptr, nullptr, &token, nullptr, error));
  CHECK(trace_status(s) == KV_BAD_STATE);
  traced();
  float logarithm = 0;
  REQUIRE_OK(kv_session_score(s, &token, 1, &logarithm, nullptr, error));
  CHECK(trace_status(s) == KV_BAD_STATE);
  traced();
  REQUIRE_OK(kv_session_rewind(s, 250, error));
  CHECK(trace_status(s) == KV_BAD_STATE);
  traced();
  read_tokens(s, some_tokens(3));
  CHECK(trace_status(s) == KV_BAD_STATE);
}

TEST_CASE("a stopped answer has the passages of its finished tokens") {
  const Session session = reader_with("full");
  kv_generate_options o;
  kv_init(&o, sizeof o);
  o.flags = KV_TRACE_PASSAGES;
  int left = 3;
  const auto stop = [](const char*, size_t, void* user) -> int32_t {
    return --*static_cast<int*>(user) <= 0;
  };
  CHECK(kv_generate(session.get(), traced_question, std::strlen(traced_question), &o, nullptr, stop,
                    &left, nullptr, nullptr) == KV_CANCELLED);
  CHECK(!trace(session.get()).empty());
}

TEST_CASE("a small capacity returns the passages that fit, and their full number") {
  const Session session = tiny_session(300);
  REQUIRE(ask_traced(session.get(), "a", KV_TRACE_PASSAGES, 2).status == KV_OK);
  const std::vector<kv_passage> all = trace(session.get());
  REQUIRE(all.size() >= 2);
  kv_passage spans[2];
  std::memset(spans, 0x5A, sizeof spans);
  std::size_t count = 0;
  kv_error error{};
  CHECK(kv_session_passages(session.get(), spans, 1, &count, &error) == KV_LIMIT);
  CHECK(count == all.size());
  CHECK(std::memcmp(spans, all.data(), sizeof *spans) == 0);
  CHECK(spans[1].first_token == 0x5A5A5A5A5A5A5A5A);
}

TEST_CASE("an answer that does not ask for passages has none") {
  const Session session = tiny_session(200);
  REQUIRE(ask_traced(session.get(), "a", 0, 2).status == KV_OK);
  CHECK(trace_status(session.get()) == KV_BAD_STATE);
}
