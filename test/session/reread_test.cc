// Passages that an answer over several documents reads again.
#include <algorithm>
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
  auto session = compose(mini_model(), numbered().paths, options_of("bounded"));
  GenerateOptions kept = listing();
  kept.keep = true;
  const std::string answer = ask(session.get(), numbers_question, kept),
                    text = text_of_tokens(session->tokens());
  CHECK(text.find(numbers_question) != std::string::npos);
  CHECK(text.find("One of the special") == std::string::npos);
  CHECK(text.find(answer) != std::string::npos);
  TempFolder folder;
  const std::string path = folder.file("kept.kv");
  REQUIRE(session->save(path, nullptr, {}).ok());
  auto loaded = load_session(path, options_of("bounded"));
  Array<Token> more;
  REQUIRE(mini_model()
              ->tokenizer()
              .encode(" One of the special magic numbers is", false, false, &more)
              .ok());
  CHECK(scores_of(session.get(), more) == scores_of(loaded.get(), more));
}

TEST_CASE("a question that is cancelled while passages are read leaves nothing of them") {
  auto session = compose(mini_model(), numbered().paths, options_of("bounded"));
  GenerateOptions failing = listing();
  Cancel cancel;
  failing.cancel = &cancel;
  failing.progress = [&](uint64_t, uint64_t) { return cancel.fire(), 0; };
  Answer answer;
  CHECK(session->generate(numbers_question, failing, {}, &answer).code() == Code::cancelled);
  CHECK(session->tokens().empty());
  auto fresh = compose(mini_model(), numbered().paths, options_of("bounded"));
  for (const char* question : {"What is the depth of the old well?", numbers_question})
    CHECK(ask(session.get(), question, keeping(24)) == ask(fresh.get(), question, keeping(24)));
}

TEST_CASE("without room for them passages are not read again") {
  SessionOptions options = options_of("bounded");
  options.context = 11000;  // three documents of 3,300 tokens and an answer
  auto session = compose(mini_model(), numbered().paths, options);
  Answer answer;
  const Status s = session->generate(numbers_question, listing(), {}, &answer);
  CHECK_MESSAGE(s.ok(), std::string(s.message()));
}
