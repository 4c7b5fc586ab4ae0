// Collections of documents: reproducible, with every answer where it is said to be; and passages
// that are found by their words.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "eval_collection.h"
#include "eval_retrieval.h"

using namespace tool;

namespace {

// A token a word.
size_t count_words(std::string_view text) {
  std::istringstream words{std::string(text)};
  size_t count = 0;
  for (std::string word; words >> word;) ++count;
  return count;
}

const Haystack& words_haystack() {
  static const Haystack all = [] {
    std::ifstream file(EXAMPLES "/sherlock-holmes.txt");
    std::stringstream text;
    text << file.rdbuf();
    return Haystack(text.str(), count_words);
  }();
  return all;
}

bool holds_text(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a collection has its answers in the documents that it names, and in no others") {
  const CollectionPlan plan{8, 1500, 6, 3};
  const Collection collection = make_collection(words_haystack(), plan);
  REQUIRE(collection.texts.size() == 8);
  std::map<Task, size_t> counts;
  std::set<std::string> asked;
  for (const CollectionQuestion& q : collection.questions) {
    ++counts[q.question.task];
    const Turn& turn = q.question.turns.front();
    CHECK(asked.insert(turn.question).second);
    CHECK(std::is_sorted(q.documents.begin(), q.documents.end()));
    const size_t places = q.question.task == Task::no_answer ? 0
                          : q.question.task == Task::pair    ? 2
                          : q.question.task == Task::values  ? turn.expected.size()
                                                             : 1;
    CHECK(q.documents.size() == places);
    CHECK((turn.expected.empty() == (q.question.task == Task::no_answer)));
    for (const std::string& value : turn.expected) {
      size_t holders = 0;
      for (size_t d = 0; d < 8; ++d) {
        if (!holds_text(collection.texts[d], value)) continue;
        ++holders;
        if (q.question.task != Task::lookup)
          CHECK(std::count(q.documents.begin(), q.documents.end(), d) == 1);
      }
      CHECK(holders >= 1);
    }
    for (const size_t d : q.documents)
      CHECK((q.question.task == Task::lookup) == (d % 4 == 3));  // tables
  }
  for (const Task task : collection_tasks) CHECK(counts[task] == 6);
  for (const std::string& text : collection.texts) {
    CHECK(count_words(text) > 1400);
    CHECK(count_words(text) < 1600);
  }
  const Collection again = make_collection(words_haystack(), plan);
  CHECK(again.texts == collection.texts);
  CHECK(again.questions[5].question.turns[0].question ==
        collection.questions[5].question.turns[0].question);
  CHECK(make_collection(words_haystack(), {8, 1500, 6, 4}).texts[0] != collection.texts[0]);
}

TEST_CASE("passages are whole sentences and lines, and together the text") {
  const std::string text =
      "One two three. Four five! Six seven eight nine ten? Eleven\ntwelve thirteen\n"
      "a b c d e f g h i j k l m n o p. The end";
  const std::vector<std::string> passages = split_passages(text, 6, count_words);
  std::string all;
  for (const std::string& passage : passages) {
    CHECK(count_words(passage) <= 6);
    all += passage;
  }
  CHECK(all == text);
  CHECK(passages[0] == "One two three. Four five! ");
  CHECK(passages[1] == "Six seven eight nine ten? Eleven\n");
  CHECK(split_passages("", 6, count_words).empty());
}

TEST_CASE("passages are found by rare words first, within the tokens that they may take") {
  PassageIndex index;
  index.add(0, {"The cat sat on the mat. ", "The code of the gate is 55. "}, count_words);
  index.add(1, {"The dog sat on the log. ", "The code of the tower is 66. "}, count_words);
  const auto texts = [&](const char* question, size_t tokens) {
    std::vector<std::string> found;
    for (const FoundPassage& p : index.find(question, tokens))
      found.push_back(p.text.substr(4, 13));
    return found;
  };
  using Texts = std::vector<std::string>;
  CHECK(texts("What is the code of the TOWER?", 7) == Texts{"code of the t"});
  CHECK(texts("What is the code of the gate?", 14) == Texts{"code of the g", "code of the t"});
  CHECK(index.find("What is the code of the gate?", 14)[1].document == 1);
  CHECK(texts("Zebras", 100).empty());
  CHECK(texts("cat", 3).empty());
  CHECK(index.find("dog", 100).size() == 1);
}

TEST_CASE("ways to ask are known by name") {
  CHECK(ways_of({"all"}).size() == 4);
  CHECK(ways_of({"alone", "composed"}) == std::vector<Way>{Way::alone, Way::composed});
  CHECK_THROWS(ways_of({"telepathy"}));
}
