// The documents and questions of an evaluation: reproducible, of the length asked for, with each
// answer where it is said to be.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "eval_tasks.h"
#include "eval_values.h"
#include "failure.h"
#include "kvasir.h"

using namespace tool;

namespace {

const std::string& book() {
  static const std::string text = [] {
    std::ifstream in(EXAMPLES "/sherlock-holmes.txt", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  return text;
}

size_t count_tokens(std::string_view text) {
  static kv_model* const model = [] {
    kv_model* opened = nullptr;
    REQUIRE(kv_open(EXAMPLES "/mini-reader-q8_0.gguf", nullptr, nullptr, &opened, nullptr) ==
            KV_OK);
    return opened;
  }();
  size_t count = 0;
  kv_tokenize(model, text.data(), text.size(), 0, nullptr, nullptr, 0, &count, nullptr);
  return count;
}

const Haystack& haystack() {
  static const Haystack made(book(), count_tokens);
  return made;
}

DocumentPlan plan(size_t tokens, uint64_t seed = 1, size_t number = 0) {
  return {tokens, number, 10, 5, seed};
}

size_t occurrences(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::vector<Question> of_task(const Document& document, Task task) {
  std::vector<Question> found;
  for (const Question& question : document.questions)
    if (question.task == task) found.push_back(question);
  return found;
}

double off(size_t tokens, size_t wanted) {
  return std::abs(static_cast<double>(tokens) - static_cast<double>(wanted)) /
         static_cast<double>(wanted);
}

std::vector<std::string> flat(const Document& document) {
  std::vector<std::string> all = {document.text};
  for (const Question& question : document.questions)
    for (const Turn& turn : question.turns) {
      all.push_back(turn.question);
      all.insert(all.end(), turn.expected.begin(), turn.expected.end());
    }
  return all;
}

}  // namespace

TEST_CASE("the same seed gives the same document, and another seed, number or length another") {
  const std::vector<std::string> first = flat(make_story(haystack(), plan(4096)));
  CHECK(flat(make_story(haystack(), plan(4096))) == first);
  CHECK(flat(make_story(haystack(), plan(4096, 2))) != first);
  CHECK(flat(make_story(haystack(), plan(4096, 1, 1))) != first);
  CHECK(flat(make_story(haystack(), plan(4100))) != first);
  const std::vector<std::string> table = flat(make_table(haystack(), plan(4096)));
  CHECK(flat(make_table(haystack(), plan(4096))) == table);
  CHECK(flat(make_table(haystack(), plan(4096, 2))) != table);
}

TEST_CASE("documents have the length asked for within one percent") {
  for (const size_t tokens : {4096u, 8192u, 32768u, 130048u}) {
    CAPTURE(tokens);
    CHECK(off(count_tokens(make_story(haystack(), plan(tokens)).text), tokens) < 0.01);
    CHECK(off(count_tokens(make_table(haystack(), plan(tokens)).text), tokens) < 0.01);
  }
}

TEST_CASE("every task has its questions") {
  const Document story = make_story(haystack(), plan(8192));
  std::map<Task, size_t> counts;
  for (const Question& question : story.questions) ++counts[question.task];
  const std::map<Task, size_t> expected = {{Task::single, 10},      {Task::many_keys, 10},
                                           {Task::many_values, 10}, {Task::many_queries, 3},
                                           {Task::pass_key, 1},     {Task::number_string, 10},
                                           {Task::quote, 10},       {Task::perplexity, 1}};
  CHECK(counts == expected);
  CHECK(of_task(make_table(haystack(), plan(8192)), Task::key_value).size() == 10);
}

TEST_CASE("an answer is in the document exactly once, near the depth that is reported") {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    const Document story = make_story(haystack(), plan(8192, seed));
    for (const Task task : {Task::single, Task::many_keys, Task::number_string}) {
      for (const Question& question : of_task(story, task)) {
        const std::string& value = question.turns.at(0).expected.at(0);
        CAPTURE(value);
        CHECK(occurrences(story.text, value) == 1);
        const double at =
            static_cast<double>(story.text.find(value)) / static_cast<double>(story.text.size());
        CHECK(std::abs(at - question.depth.value()) < 0.01);
      }
    }
    for (const Question& question : of_task(story, Task::many_values)) {
      CHECK(question.turns.at(0).expected.size() >= 2);
      CHECK(question.turns.at(0).expected.size() <= 4);
      for (const std::string& value : question.turns.at(0).expected)
        CHECK(occurrences(story.text, value) == 1);
    }
    CHECK(occurrences(story.text,
                      "The pass key is " +
                          of_task(story, Task::pass_key).at(0).turns.at(0).expected.at(0)) == 1);
    const Document table = make_table(haystack(), plan(8192, seed));
    for (const Question& question : of_task(table, Task::key_value)) {
      const std::string asked = question.turns.at(0).question;
      const std::string key = asked.substr(asked.find('"'), asked.rfind('"') - asked.find('"') + 1);
      const std::string line = key + ": \"" + question.turns.at(0).expected.at(0) + "\"";
      CHECK(occurrences(table.text, line) == 1);
      CHECK(occurrences(table.text, key + ": ") == 1);
      const double at =
          static_cast<double>(table.text.find(line)) / static_cast<double>(table.text.size());
      CHECK(std::abs(at - question.depth.value()) < 1e-9);
    }
  }
}

TEST_CASE("tables that are longer than the bundled model can copy UUIDs from have none") {
  const auto has_uuids = [](const Document& table) {
    const Question question = of_task(table, Task::key_value).at(0);
    return (question.turns.at(0).question + question.turns.at(0).expected.at(0)).find('-') !=
           std::string::npos;
  };
  bool short_has = false;
  for (uint64_t seed = 1; seed <= 6; ++seed)
    short_has = short_has || has_uuids(make_table(haystack(), plan(4096, seed)));
  CHECK(short_has);
  for (uint64_t seed = 1; seed <= 6; ++seed)
    CHECK_FALSE(has_uuids(make_table(haystack(), plan(70'000, seed))));
}

TEST_CASE("each stretch of the document has its share of the answers") {
  const Document story = make_story(haystack(), plan(16384));
  for (const Task task : {Task::single, Task::many_keys, Task::number_string, Task::quote}) {
    std::map<int, size_t> stretches;
    for (const Question& question : of_task(story, task))
      ++stretches[static_cast<int>(question.depth.value() * 5)];
    CAPTURE(name_of(task));
    CHECK(stretches == std::map<int, size_t>{{0, 2}, {1, 2}, {2, 2}, {3, 2}, {4, 2}});
  }
  std::set<int> pass_keys;
  for (size_t number = 0; number < 5; ++number)
    pass_keys.insert(static_cast<int>(
        of_task(make_story(haystack(), plan(4096, 1, number)), Task::pass_key).at(0).depth.value() *
        5));
  CHECK(pass_keys.size() == 5);
}

TEST_CASE("facts that many-keys asks for stand among others of their kind") {
  const Document story = make_story(haystack(), {8192, 0, 4, 2, 1});
  for (const Question& question : of_task(story, Task::many_keys)) {
    const std::string asked = question.turns.at(0).question;
    const size_t end = asked.find(" of the "), begin = asked.find("the ") + 4;
    const std::string attribute = asked.substr(begin, end - begin);
    CAPTURE(attribute);
    CHECK(occurrences(story.text, attribute + " of the ") +
              occurrences(story.text, attribute + " for the ") ==
          6);
  }
}

TEST_CASE("a quote's beginning and end stand in the document one after the other") {
  const Document story = make_story(haystack(), plan(8192));
  std::string plain;  // with one space where the document has some
  for (const char c : story.text)
    if (c != '\n' && c != '\r') plain += c;
    else if (plain.back() != ' ') plain += ' ';
  for (const Question& question : of_task(story, Task::quote)) {
    const Turn& turn = question.turns.at(0);
    CHECK(occurrences(plain, turn.question.substr(10) + " " + turn.expected.at(0)) == 1);
  }
}

TEST_CASE("the text that follows is what the book goes on with") {
  const Document story = make_story(haystack(), plan(4096));
  const std::string following = of_task(story, Task::perplexity).at(0).turns.at(0).expected.at(0);
  CHECK(count_tokens(following) >= following_tokens);
  const size_t at = book().find(following);
  REQUIRE(at != std::string::npos);
  CHECK(story.text.ends_with(book().substr(at - 100, 100)));
}

TEST_CASE("a text or a length that is too short is refused, and says what to do") {
  CHECK_THROWS_WITH_AS(make_story(haystack(), plan(200'000)), doctest::Contains("name more texts"),
                       Failure);
  CHECK_THROWS_WITH_AS(make_story(haystack(), plan(1024)), doctest::Contains("fewer --questions"),
                       Failure);
  CHECK_THROWS_WITH_AS(make_table(haystack(), plan(256)), doctest::Contains("fewer --questions"),
                       Failure);
  CHECK_THROWS_WITH_AS(make_story(Haystack("", count_tokens), plan(4096)),
                       doctest::Contains("name more texts"), Failure);
}

TEST_CASE("a text without a full stop is cut all the same") {
  std::string endless;
  for (int i = 0; i < 20'000; ++i) endless += i % 7 == 0 ? "\xC3\xA4hnlich " : "weiter ";
  const Haystack words(endless, count_tokens);
  CHECK(words.sentences() > 100);
  CHECK(off(count_tokens(make_story(words, {8192, 0, 2, 2, 1}).text), 8192) < 0.05);
  const Haystack block(std::string(50'000, 'x'), [](std::string_view text) { return text.size(); });
  CHECK(block.sentences() > 20);
}

TEST_CASE("generated values are of their form") {
  Random random("form");
  for (int i = 0; i < 200; ++i) {
    const std::string id = any_uuid(&random);
    CHECK(id.size() == 36);
    CHECK((id[8] == '-' && id[13] == '-' && id[18] == '-' && id[23] == '-' && id[14] == '4'));
    CHECK(any_number(&random).size() == 7);
    CHECK(any_code(&random).size() == 7);
  }
}

TEST_CASE("answers count when they contain what was expected as whole words") {
  const auto score = [](std::vector<std::string> expected, const char* answer) {
    return score_of({Task::single, {{"?", std::move(expected)}}, {}}, {answer});
  };
  CHECK(score({"4821907"}, "The access code is 4821907.") == 1);
  CHECK(score({"4821907"}, "The access code is 48219071.") == 0);
  CHECK(score({"amber walnut"}, "It is Amber  Walnut!") == 1);
  CHECK(score({"amber walnut"}, "amber, then walnuts") == 0);
  CHECK(score({"XK-2210"}, "\"xk-2210\"") == 1);
  CHECK(score({"1", "2", "3", "4"}, "2, 4 and 5") == doctest::Approx(0.5));
  CHECK(score({"4821907"}, "") == 0);
}

TEST_CASE("a conversation counts by its turns, a quote by its words before the first wrong one") {
  const Question conversation{
      Task::many_queries, {{"a?", {"1"}}, {"b?", {"2"}}, {"c?", {"3"}}, {"d?", {"4"}}}, {}};
  CHECK(score_of(conversation, {"1", "2", "7", "4"}) == doctest::Approx(0.75));
  CHECK(score_of(conversation, {"2", "1"}) == 0);
  const Question quote{Task::quote, {{"Continue: It was a", {"dark and stormy night"}}}, {}};
  CHECK(score_of(quote, {"dark and stormy night; the rain fell"}) == 1);
  CHECK(score_of(quote, {"It was a dark and stormy night"}) == 1);
  CHECK(score_of(quote, {"Dark and stormier"}) == doctest::Approx(0.5));
  CHECK(score_of(quote, {"dark and"}) == doctest::Approx(0.5));
  CHECK(score_of(quote, {"and stormy night"}) == 0);
  CHECK(score_of(quote, {""}) == 0);
}
