#include "eval_tasks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "eval_values.h"
#include "failure.h"
#include "number_text.h"

namespace tool {
namespace {

// facts of one kind, one of which a many-keys question asks for
constexpr size_t keys_alike = 6;
constexpr size_t queries_together = 4;  // facts of a many-queries conversation
constexpr size_t head_words = 12, quoted_words = 10;
// sentences counted one by one have slightly more tokens than together
constexpr size_t enough_following = following_tokens * 9 / 8;
constexpr double text_before_table = 0.25;  // of the tokens
constexpr const char* leads[] = {"The", "Note that the", "Remember: the",
                                 "According to the records, the"};
constexpr const char* prepositions[] = {"of", "for"};
constexpr const char* no_words = "";

std::string seed_text(const DocumentPlan& plan, Kind kind) {
  return std::to_string(plan.seed) + " " + std::to_string(plan.tokens) + " " + name_of(kind) + " " +
         std::to_string(plan.number);
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  constexpr std::string_view spaces = " \n\r\t";
  for (size_t at = text.find_first_not_of(spaces); at != std::string_view::npos;) {
    const size_t end = std::min(text.find_first_of(spaces, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = text.find_first_not_of(spaces, end);
  }
  return parts;
}

std::string joined(const std::vector<std::string_view>& parts, size_t first, size_t end) {
  std::string text;
  for (size_t i = first; i < end; ++i) text.append(i > first ? " " : no_words).append(parts[i]);
  return text;
}

class Story {
 public:
  Story(const Haystack& haystack, const DocumentPlan& plan)
      : haystack_(haystack), plan_(plan), random_(seed_text(plan, Kind::story)),
        fresh_(haystack.text()) {}
  Document make();

 private:
  void add_singles();
  void add_many_keys();
  void add_many_values();
  void add_many_queries();
  void add_pass_key();
  void add_number_strings();
  void add_quotes(const Passage& passage);
  bool add_quote(const Passage& passage, size_t sentence);
  void add_perplexity(const Passage& passage);

  Fact new_fact(const std::string& attribute, const std::string& value) {
    return {attribute, fresh_([&] {
                         return attribute + " of the " + any_entity(&random_);
                       }).substr(attribute.size() + 8),
            value};
  }
  // A random place in the question's stretch of the document.
  double depth_for(size_t question) {
    const auto depths = static_cast<double>(plan_.depths),
               stretch = static_cast<double>(question % plan_.depths);
    return (stretch + 0.1 + 0.8 * random_.real()) / depths;
  }
  void hide_answer(std::string sentence, double depth, Question question) {
    asked_.emplace_back(needles_.size(), questions_.size());
    needles_.push_back({std::move(sentence), depth});
    questions_.push_back(std::move(question));
  }
  void hide_fact(const Fact& fact, double depth, Task task) {
    std::string sentence = sentence_of(fact, &random_);
    hide_answer(std::move(sentence), depth, {task, {turn_for(fact, &random_)}, {}});
  }

  const Haystack& haystack_;
  const DocumentPlan& plan_;
  Random random_;
  Fresh fresh_;
  std::vector<Needle> needles_;
  std::vector<Question> questions_;
  // needle and the question that it answers
  std::vector<std::pair<size_t, size_t>> asked_;
  std::vector<Fact> facts_;  // that stand alone
};

void Story::add_singles() {
  for (size_t i = 0; i < plan_.questions; ++i) {
    const std::string attribute = fresh_([&] { return any_attribute(&random_); });
    const Fact fact = new_fact(attribute, fresh_([&] { return value_for(attribute, &random_); }));
    facts_.push_back(fact);
    hide_fact(fact, depth_for(i), Task::single);
  }
}

// Facts without a question complete the last group.
void Story::add_many_keys() {
  std::string attribute;
  for (size_t i = 0; i < plan_.questions || i % keys_alike != 0; ++i) {
    if (i % keys_alike == 0) attribute = fresh_([&] { return any_attribute(&random_); });
    const Fact fact = new_fact(attribute, fresh_([&] { return value_for(attribute, &random_); }));
    const double depth = i < plan_.questions ? depth_for(i) : random_.real();
    if (i < plan_.questions) hide_fact(fact, depth, Task::many_keys);
    else needles_.push_back({sentence_of(fact, &random_), depth});
  }
}

void Story::add_many_values() {
  for (size_t i = 0; i < plan_.questions; ++i) {
    const std::string key = fresh_([&] { return "magic numbers for " + any_word(&random_); });
    Turn turn{"What are all the special " + key + " mentioned in the document?", {}};
    for (size_t values = random_.between(2, 4); values > 0; --values) {
      turn.expected.push_back(fresh_([&] { return any_number(&random_); }));
      needles_.push_back(
          {"One of the special " + key + " is: " + turn.expected.back() + ".", random_.real()});
    }
    questions_.push_back({Task::many_values, {turn}, {}});
  }
}

void Story::add_many_queries() {
  for (size_t done = 0; done < plan_.questions; done += queries_together) {
    Question question{Task::many_queries, {}, {}};
    for (const size_t i : random_.sample(facts_.size(), queries_together))
      question.turns.push_back(turn_for(facts_[i], &random_));
    questions_.push_back(std::move(question));
  }
}

// A document has one pass key. Its depth varies from document to document by the golden section.
void Story::add_pass_key() {
  const std::string key = fresh_([&] { return std::to_string(random_.between(10'000, 99'999)); });
  const double place = std::fmod(0.5 + 0.618034 * static_cast<double>(plan_.number), 1.0);
  hide_answer("The pass key is " + key + ". Remember it. " + key + " is the pass key.", place,
              {Task::pass_key, {{"What is the pass key?", {key}}}, {}});
}

void Story::add_number_strings() {
  for (size_t i = 0; i < plan_.questions; ++i) {
    std::string digits;
    while (digits.size() < 20) digits += static_cast<char>('0' + random_.below(10));
    const Fact fact = new_fact("number string", digits);
    hide_answer("The " + fact.subject() + " is " + digits + ".", depth_for(i),
                {Task::number_string, {{"What is the " + fact.subject() + "?", {digits}}}, {}});
  }
}

// False where the sentence is too short, or its beginning occurs again.
bool Story::add_quote(const Passage& passage, size_t sentence) {
  const std::string_view text = haystack_.sentence(sentence);
  const std::vector<std::string_view> words = split(text);
  if (words.size() < head_words + quoted_words) return false;
  const auto head = text.substr(0, static_cast<size_t>(words[head_words - 1].data() - text.data()) +
                                       words[head_words - 1].size());
  const size_t at = passage.text.find(head);
  if (at == std::string::npos || passage.text.find(head, at + 1) != std::string::npos) return false;
  const Turn turn{"Continue: " + joined(words, 0, head_words),
                  {joined(words, head_words, head_words + quoted_words)}};
  for (const Question& other : questions_)
    if (other.turns.front().question == turn.question) return false;
  questions_.push_back(
      {Task::quote, {turn}, static_cast<double>(at) / static_cast<double>(passage.text.size())});
  return true;
}

void Story::add_quotes(const Passage& passage) {
  const size_t count = passage.end - passage.first;
  for (size_t i = 0; i < plan_.questions; ++i) {
    const auto place = static_cast<size_t>(depth_for(i) * static_cast<double>(count));
    bool found = false;
    for (size_t away = 0; away < count && !found; ++away) {
      if (place + away < count) found = add_quote(passage, passage.first + place + away);
      if (!found && away > 0 && away <= place)
        found = add_quote(passage, passage.first + place - away);
    }
  }
}

void Story::add_perplexity(const Passage& passage) {
  const size_t end = haystack_.end_after(passage.end, enough_following);
  const std::string_view last = haystack_.sentence(passage.end - 1);
  const size_t words_end = last.find_last_not_of(" \n\r\t") + 1;  // the document ends there
  std::string following(last.substr(words_end));
  following += haystack_.between(passage.end, end);
  if (end > passage.end) questions_.push_back({Task::perplexity, {{"", {following}}}, {}});
}

Document Story::make() {
  add_singles();
  add_many_keys();
  add_many_values();
  add_many_queries();
  add_pass_key();
  add_number_strings();
  const size_t slack = plan_.tokens / 100;
  const size_t first = haystack_.random_start(plan_.tokens + slack + enough_following, &random_);
  Passage passage = hide(haystack_, first, plan_.tokens, needles_);
  for (const auto& [needle, question] : asked_) questions_[question].depth = passage.depths[needle];
  add_quotes(passage);
  add_perplexity(passage);
  random_.shuffle(&questions_);
  return {std::move(passage.text), std::move(questions_)};
}

using MakeText = std::string (*)(Random*);

// Keys are of one kind and values of one kind. UUIDs for UUIDs are left out: the bundled model does
// not end its answer after many of them. The same happens over longer tables where either are
// UUIDs, also with full attention in full precision: 9 of 16 right over 112K tokens of UUIDs and
// numbers.
std::pair<MakeText, MakeText> kinds_of_table(size_t tokens, Random* random) {
  constexpr size_t min_pair_tokens = 12, longest_with_uuids = 65'536;
  // two words have too few combinations
  const bool many = tokens / min_pair_tokens > two_word_pairs / 2;
  for (;;) {
    constexpr MakeText kinds[] = {any_number, any_two_words, any_uuid};
    const MakeText key = random->pick(kinds), value = random->pick(kinds);
    const int uuids = (key == any_uuid) + (value == any_uuid);
    if (uuids <= (tokens > longest_with_uuids ? 0 : 1) && (key != any_two_words || !many))
      return {key, value};
  }
}

using Pair = std::pair<std::string, std::string>;

std::string line_of(const Pair& pair) { return "\"" + pair.first + "\": \"" + pair.second + "\""; }

std::string table_text(const std::string& before, const std::vector<Pair>& pairs) {
  std::string text = before + "\nJSON data:\n{";
  for (const Pair& pair : pairs)
    text.append(&pair == pairs.data() ? no_words : ",\n").append(line_of(pair));
  return text + "}\n";
}

// Counts pairs one by one, then the whole, and adds or removes pairs accordingly.
std::vector<Pair> fill_table(const Haystack& haystack, const std::string& before, size_t tokens,
                             Random* random) {
  const auto [make_key, make_value] = kinds_of_table(tokens, random);
  Fresh fresh(no_words);
  std::vector<Pair> pairs;
  size_t pair_tokens = 0;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const size_t size = haystack.count(table_text(before, pairs));
    if (size > tokens) {
      const size_t each = std::max<size_t>(pair_tokens / pairs.size(), 1);
      pairs.resize(pairs.size() - std::min((size - tokens + each - 1) / each, pairs.size() - 1));
      continue;
    }
    for (size_t missing = tokens - size; missing > 0;) {
      std::string key = fresh([&, make = make_key] { return make(random); });
      pairs.emplace_back(std::move(key), make_value(random));
      const size_t more = haystack.count(line_of(pairs.back()) + ",\n");
      pair_tokens += more;
      if (more >= missing) break;
      missing -= more;
    }
  }
  return pairs;
}

}  // namespace

std::string sentence_of(const Fact& fact, Random* random) {
  const char* lead = random->pick(leads);
  const char* preposition = random->pick(prepositions);
  return std::string(lead) + " " + fact.attribute + " " + preposition + " the " + fact.entity +
         " is " + fact.value + ".";
}

Turn turn_for(const Fact& fact, Random* random) {
  const bool polite = random->below(2) == 0;
  return {polite ? "Tell me the " + fact.subject() + "." : "What is the " + fact.subject() + "?",
          {fact.value}};
}

const char* name_of(Task task) {
  switch (task) {
    case Task::single:
      return "single";
    case Task::many_keys:
      return "many-keys";
    case Task::many_values:
      return "many-values";
    case Task::many_queries:
      return "many-queries";
    case Task::key_value:
      return "key-value";
    case Task::pass_key:
      return "pass-key";
    case Task::number_string:
      return "number-string";
    case Task::quote:
      return "quote";
    case Task::perplexity:
      return "perplexity";
    case Task::fact:
      return "fact";
    case Task::lookup:
      return "lookup";
    case Task::values:
      return "values";
    case Task::source:
      return "source";
    case Task::pair:
      return "pair";
    case Task::no_answer:
      return "no-answer";
  }
  return "";
}

bool is_of_collection(Task task) {
  return std::find(std::begin(collection_tasks), std::end(collection_tasks), task) !=
         std::end(collection_tasks);
}

std::optional<Task> task_named(std::string_view name) {
  for (const Task task : all_tasks)
    if (name == name_of(task)) return task;
  for (const Task task : collection_tasks)
    if (name == name_of(task)) return task;
  return {};
}

std::vector<std::string> task_choices() {
  std::vector<std::string> names = {"all"};
  for (const Task task : all_tasks) names.emplace_back(name_of(task));
  names.emplace_back("collection");
  for (const Task task : collection_tasks) names.emplace_back(name_of(task));
  return names;
}

const char* name_of(Kind kind) { return kind == Kind::story ? "story" : "table"; }

Kind kind_for(Task task) { return task == Task::key_value ? Kind::table : Kind::story; }

Document make_story(const Haystack& haystack, const DocumentPlan& plan) {
  return Story(haystack, plan).make();
}

Document make_table(const Haystack& haystack, const DocumentPlan& plan) {
  Random random(seed_text(plan, Kind::table));
  const auto before_tokens =
      static_cast<size_t>(static_cast<double>(plan.tokens) * text_before_table);
  const size_t first = haystack.random_start(before_tokens, &random);
  std::string before(haystack.between(first, haystack.end_after(first, before_tokens)));
  before.resize(before.find_last_not_of(" \n\r\t") + 1);
  const std::vector<Pair> pairs = fill_table(haystack, before, plan.tokens, &random);
  if (pairs.size() < plan.questions * 2)
    throw Failure(exit_usage, grouped(plan.tokens) + " tokens are too few for a table with " +
                                  std::to_string(plan.questions) +
                                  " questions; ask for a longer --length or fewer --questions");
  Document document{table_text(before, pairs), {}};
  std::vector<bool> used(pairs.size());
  for (size_t i = 0; i < plan.questions; ++i) {
    const double place =
        (static_cast<double>(i % plan.depths) + random.real()) / static_cast<double>(plan.depths);
    auto at = static_cast<size_t>(place * static_cast<double>(pairs.size()));
    while (used[at]) at = (at + 1) % pairs.size();
    used[at] = true;
    const auto& [key, value] = pairs[at];
    const size_t byte = document.text.find("\"" + key + "\": ");
    document.questions.push_back(
        {Task::key_value,
         {{"What is the value for the key \"" + key + "\"?", {value}}},
         static_cast<double>(byte) / static_cast<double>(document.text.size())});
  }
  random.shuffle(&document.questions);
  return document;
}

}  // namespace tool
