// Passages that an answer over several documents reads again.
#include <algorithm>
#include <cmath>
#include <string>

#include "compose_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

GenerateOptions listing() {
  GenerateOptions o;
  o.max_tokens = 60;
  return o;
}
// Options that write the session's log to `log`.
SessionOptions logged(std::string* log) {
  SessionOptions o = options_of("bounded");
  o.log = [log](int, const char* message) { *log += message; };
  return o;
}
bool says(const std::string& log, const char* what) { return log.find(what) != std::string::npos; }
std::string text_of_tokens(std::span<const Token> tokens) {
  std::string out;
  for (Token token : tokens) out += mini_model()->tokenizer().piece(token, true);
  return out;
}

}  // namespace

TEST_CASE("an answer about several documents reads the passage of each again, and quotes it") {
  for (const char* strategy : {"full", "bounded"}) {
    auto session = compose(mini_model(), numbered().paths, options_of(strategy));
    GenerateOptions traced = listing();
    traced.trace = true;
    const std::string answer = ask(session.get(), numbers_question, traced);
    for (const char* number : numbers) CHECK(answer.find(number) != std::string::npos);
    CHECK(session->tokens().empty());
    std::vector<Passage> passages;
    REQUIRE(session->passages(&passages).ok());
    for (std::size_t i = 0; i < 3; ++i) {
      const auto at = std::find_if(passages.begin(), passages.end(),
                                   [&](const Passage& p) { return p.document == 2 + 2 * i; });
      REQUIRE(at != passages.end());
      CHECK(numbered().texts[at->document].substr(at->first_byte, at->bytes).find(numbers[i]) !=
            std::string::npos);
    }
    // the same again, and from a session that has answered nothing
    CHECK(ask(session.get(), numbers_question, listing()) == answer);
    auto fresh = compose(mini_model(), numbered().paths, options_of(strategy));
    CHECK(ask(fresh.get(), numbers_question, listing()) == answer);
  }
}

TEST_CASE("a kept turn has no passage, and what follows it attends the saved text") {
  std::string log;
  auto session = compose(mini_model(), numbered().paths, logged(&log));
  GenerateOptions kept = listing();
  kept.keep = true;
  const std::string answer = ask(session.get(), numbers_question, kept),
                    text = text_of_tokens(session->tokens());
  CHECK(says(log, "prefills 384 tokens of 3 documents again"));
  log.clear();
  CHECK(text.find(numbers_question) != std::string::npos);
  CHECK(text.find("One of the special") == std::string::npos);
  CHECK(text.find(answer) != std::string::npos);
  std::unique_ptr<Session> fork;
  REQUIRE(session->fork(&fork).ok());
  TempFolder folder;
  const std::string path = folder.file("kept.kv");
  REQUIRE(session->save(path, nullptr, {}).ok());
  auto loaded = load_session(path, options_of("bounded"));
  Array<Token> more;
  REQUIRE(mini_model()
              ->tokenizer()
              .encode(" One of the special magic numbers is", false, false, &more)
              .ok());
  const std::vector<float> scores = scores_of(session.get(), more);
  CHECK(scores_of(loaded.get(), more) == scores);
  CHECK(scores_of(fork.get(), more) == scores);
  // the next turn has the conversation, and no passages
  ask(session.get(), numbers_question, kept);
  CHECK_FALSE(says(log, "passages"));
  CHECK_FALSE(says(log, "again"));
  // into the kept turn, before anything has prefilled it
  auto again = compose(mini_model(), numbered().paths, options_of("bounded"));
  ask(again.get(), numbers_question, kept);
  for (Session* s : {session.get(), again.get()}) REQUIRE(s->rewind(10).ok());
  CHECK(again->tokens().size() == 10);
  CHECK(std::equal(again->tokens().begin(), again->tokens().end(), session->tokens().begin()));
  for (float x : scores_of(again.get(), more)) CHECK(std::isfinite(x));
}

TEST_CASE("a kept turn that is stopped keeps what was decoded, without passages") {
  auto session = compose(mini_model(), numbered().paths, options_of("bounded"));
  Cancel cancel;
  GenerateOptions kept = listing();
  kept.keep = true, kept.cancel = &cancel;
  int pieces = 0;
  std::string heard;
  Answer answer;
  const Status s = session->generate(
      numbers_question, kept,
      [&](std::string_view t) {
        heard += t;
        if (++pieces == 6) cancel.fire();
        return 0;
      },
      &answer);
  CHECK(s.code() == Code::cancelled);
  const std::string text = text_of_tokens(session->tokens());
  CHECK(text.find(heard.substr(0, heard.size() / 2)) != std::string::npos);
  CHECK(text.find("One of the special") == std::string::npos);
  cancel.reset();
  CHECK(!ask(session.get(), question_of(0), keeping(8)).empty());
}

TEST_CASE("a question that fails before or in its passages leaves all as it was") {
  auto session = compose(mini_model(), numbered().paths, options_of("bounded"));
  GenerateOptions traced = listing();
  traced.trace = true;
  ask(session.get(), question_of(0), traced);
  std::vector<Passage> before, after;
  REQUIRE(session->passages(&before).ok());
  // 400 tokens in chunks: stopped after the first
  SessionOptions small = options_of("bounded");
  small.prefill_chunk = 64;
  auto chunked = compose(mini_model(), numbered().paths, small);
  ask(chunked.get(), question_of(0), traced);
  GenerateOptions failing = listing();
  Cancel cancel;
  failing.cancel = &cancel;
  failing.progress = [&](uint64_t, uint64_t all) {
    CHECK(all > 384);
    return cancel.fire(), 0;
  };
  Answer answer;
  CHECK(chunked->generate(numbers_question, failing, {}, &answer).code() == Code::cancelled);
  CHECK(chunked->tokens().empty());
  // a question too long for the context fails before
  std::string endless = numbers_question;
  for (int i = 0; i < 20000; ++i) endless += " harbor";
  SessionOptions tight = options_of("bounded");
  tight.context = 16000;
  auto limited = compose(mini_model(), numbered().paths, tight);
  CHECK(!limited->generate(endless, listing(), {}, &answer).ok());
  for (Session* s : {chunked.get(), limited.get()}) {
    auto fresh = compose(mini_model(), numbered().paths, s == limited.get() ? tight : small);
    for (const char* question : {"What is the depth of the old well?", numbers_question})
      CHECK(ask(s, question, keeping(24)) == ask(fresh.get(), question, keeping(24)));
  }
}

TEST_CASE("passages take no room of the context that an answer needs") {
  std::string log;
  SessionOptions options = logged(&log);
  Answer answer;
  uint64_t tokens = 0;
  for (const bool tight : {false, true}) {
    options.context = tight ? tokens + 300 : 11000;
    auto session = compose(mini_model(), numbered().paths, options);
    log.clear();
    GenerateOptions o = listing();
    o.max_tokens = 100;
    const Status s = session->generate(numbers_question, o, {}, &answer);
    CHECK_MESSAGE(s.ok(), std::string(s.message()));
    CHECK(says(log, "prefills 384 tokens") == !tight);
    CHECK(says(log, "no room to prefill passages") == tight);
    for (const DocumentReport& d : session->documents()) tokens += d.is_chosen ? d.tokens : 0;
  }
}
