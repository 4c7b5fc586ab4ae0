// Trained models that read: attention that means something, in models with sliding windows and with
// recurrent layers. tools/scripts/train makes them.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "helpers.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

struct Fact {
  const char *subject, *value;
};
constexpr Fact facts[] = {
    {"access code of the north gate", "4821907"}, {"phone number of Doctor Marlow", "5550173"},
    {"serial number of the old press", "90417"},  {"locker combination of Tom", "31764"},
    {"budget for the harbor", "725000"},          {"birth year of Madam Rosier", "1853"}};

// About 6,000 tokens of a book. Each fact follows a sentence, far from the others.
std::string text_with_facts() {
  std::string text = book_text(24000);
  std::size_t at = 1500;
  for (const Fact& fact : facts) {
    at = text.find(". ", at);
    REQUIRE(at != std::string::npos);
    const std::string sentence = std::string(" The ") + fact.subject + " is " + fact.value + ".";
    text.insert(at + 1, sentence);
    at += 3500;
  }
  return text;
}

std::shared_ptr<const Model> reader(const char* name) {
  return open_model(FIXTURES "/readers/" + std::string(name) + ".gguf");
}

SessionOptions options_of(const char* strategy, uint64_t budget) {
  SessionOptions options;
  options.threads = 2;
  options.select.strategy = strategy;
  options.select.budget_tokens = budget;
  return options;
}

std::unique_ptr<Session> read_document(const std::shared_ptr<const Model>& model,
                                       const SessionOptions& options) {
  auto session = open_session(model, options);
  uint64_t tokens = 0, bytes = 0;
  const Status s = session->prefill(text_with_facts(), false, nullptr, {}, &tokens, &bytes);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return session;
}

int right_answers(Session* session) {
  int right = 0;
  GenerateOptions options;
  options.max_tokens = 40;
  for (const Fact& fact : facts) {
    const std::string question = std::string("What is the ") + fact.subject + "?";
    right += ask(session, question, options).find(fact.value) != std::string::npos;
  }
  return right;
}

}  // namespace

TEST_CASE("trained models with windows and with states answer by a twelfth of their tokens") {
  for (const char* name : {"windows", "states"}) {
    CAPTURE(name);
    const auto model = reader(name);
    TempFolder folder;
    const std::string path = folder.file("read.kv");
    const auto full = read_document(model, options_of("full", 0));
    CHECK(right_answers(full.get()) == std::size(facts));
    REQUIRE(full->save(path, nullptr, {}).ok());

    std::unique_ptr<Session> bounded;
    REQUIRE(
        Session::load(model, path, options_of("bounded", 512), false, nullptr, {}, &bounded).ok());
    CHECK(right_answers(bounded.get()) == std::size(facts));
    CHECK(bounded->stats().prefilled_again == 0);
    // Back to the middle and on: the facts before are still there, those after are not.
    REQUIRE(bounded->rewind(bounded->tokens().size() / 2).ok());
    const int half = right_answers(bounded.get());
    CHECK(half >= 2);
    CHECK(half < static_cast<int>(std::size(facts)));
  }
}

// Windows and states see the questions and answers alone; the other layers see the documents.
TEST_CASE("trained models with windows and with states answer over several documents") {
  for (const char* name : {"windows", "states"}) {
    CAPTURE(name);
    const auto model = reader(name);
    const SessionOptions options = options_of("auto", 0);
    const std::string text = text_with_facts();
    TempFolder folder;
    std::vector<std::string> paths;
    for (std::size_t i = 0; i < 3; ++i) {
      const auto at = [&](std::size_t part) { return std::min(text.size(), 500 + part * 8000); };
      auto document = open_session(model, options);
      uint64_t tokens = 0, bytes = 0;
      REQUIRE(
          document
              ->prefill(text.substr(at(i), at(i + 1) - at(i)), false, nullptr, {}, &tokens, &bytes)
              .ok());
      paths.push_back(folder.file(std::to_string(i) + ".kv"));
      REQUIRE(document->save(paths.back(), nullptr, {}).ok());
    }
    std::unique_ptr<Session> session;
    REQUIRE(Session::compose(model, {.paths = paths}, options, &session).ok());
    CHECK(right_answers(session.get()) >= 5);
    CHECK(session->tokens().empty());
    // kept, it goes on as its fork, as what was saved of it, and after a rewind
    GenerateOptions kept;
    kept.keep = true, kept.max_tokens = 30;
    const std::string question = "What is the birth year of Madam Rosier?",
                      answer = ask(session.get(), question, kept);
    CHECK(answer.find("1853") != std::string::npos);
    const std::string path = folder.file("kept.kv");
    REQUIRE(session->save(path, nullptr, {}).ok());
    std::unique_ptr<Session> fork, loaded;
    REQUIRE(session->fork(&fork).ok());
    Status s = Session::load(model, path, options, false, nullptr, {}, &loaded);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    const std::string again = ask(session.get(), "What is the budget for the harbor?", kept);
    CHECK(ask(fork.get(), "What is the budget for the harbor?", kept) == again);
    CHECK(ask(loaded.get(), "What is the budget for the harbor?", kept) == again);
    REQUIRE(session->rewind(0).ok());
    CHECK(ask(session.get(), question, kept) == answer);
  }
}

TEST_CASE("drafts of a trained MTP layer are accepted, and the answer is the same") {
  const auto model = reader("states");
  SessionOptions options = options_of("full", 0);
  const auto alone = read_document(model, options);
  options.draft_tokens = 1, options.lookup_tokens = 0, options.drafts_always = true;
  const auto drafting = read_document(model, options);
  GenerateOptions answer;
  answer.max_tokens = 40;
  uint64_t drafted = 0, accepted = 0;
  for (const Fact& fact : facts) {
    const std::string question = std::string("What is the ") + fact.subject + "?";
    CHECK(ask(drafting.get(), question, answer) == ask(alone.get(), question, answer));
    drafted += drafting->stats().drafts.drafted;
    accepted += drafting->stats().drafts.accepted;
  }
  CHECK(drafted > 20);
  CHECK(accepted * 10 > drafted * 8);
}
