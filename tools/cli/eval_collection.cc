#include "eval_collection.h"

#include <algorithm>

#include "eval_values.h"
#include "failure.h"
#include "number_text.h"
#include "output.h"

namespace tool {
namespace {

constexpr size_t table_every = 4;  // documents
constexpr size_t facts_alike = 4;  // of one kind, about other things, each in another document
constexpr size_t least_stories = 3;

class Writer {
 public:
  Writer(const Haystack& haystack, const CollectionPlan& plan)
      : haystack_(haystack), plan_(plan),
        random_("collection " + std::to_string(plan.seed) + " " + std::to_string(plan.tokens) +
                " " + std::to_string(plan.documents)),
        fresh_(haystack.text()) {}
  Collection make();

 private:
  bool is_table(size_t document) const { return document % table_every == table_every - 1; }
  Fact new_fact(const std::string& attribute) {
    const std::string subject =
        fresh_([&] { return attribute + " of the " + any_entity(&random_); });
    const std::string value = fresh_([&] { return value_for(attribute, &random_); });
    return {attribute, subject.substr(attribute.size() + 8), value};
  }
  std::string new_attribute() {
    return fresh_([&] { return any_attribute(&random_); });
  }
  // `count` different stories, in random order.
  std::vector<size_t> stories(size_t count) {
    std::vector<size_t> found;
    for (const size_t i : random_.sample(stories_.size(), count)) found.push_back(stories_[i]);
    return found;
  }
  void hide_fact(size_t document, const Fact& fact) {
    needles_[document].push_back({sentence_of(fact, &random_), random_.real()});
    collection_.values.push_back(fact.value);
  }
  void ask(Task task, Turn turn, std::vector<size_t> documents) {
    std::sort(documents.begin(), documents.end());
    collection_.questions.push_back({{task, {std::move(turn)}, {}}, std::move(documents)});
  }
  void add_facts(Task task);
  void add_pairs();
  void add_values();
  void add_unanswered();
  void add_tables();

  const Haystack& haystack_;
  const CollectionPlan& plan_;
  Random random_;
  Fresh fresh_;
  std::vector<size_t> stories_;
  std::vector<std::string> attributes_;       // of hidden facts
  std::vector<std::vector<Needle>> needles_;  // [documents]
  Collection collection_;
};

// Facts of one attribute, each in another document.
void Writer::add_facts(Task task) {
  std::vector<size_t> places;
  for (size_t i = 0; i < plan_.questions; ++i) {
    if (places.empty()) {
      attributes_.push_back(new_attribute());
      places = stories(facts_alike);
    }
    const size_t document = places.back();
    places.pop_back();
    const Fact fact = new_fact(attributes_.back());
    hide_fact(document, fact);
    ask(task, turn_for(fact, &random_), {document});
  }
  for (const size_t document : places) hide_fact(document, new_fact(attributes_.back()));
}

void Writer::add_pairs() {
  for (size_t i = 0; i < plan_.questions; ++i) {
    attributes_.push_back(new_attribute());
    const std::vector<size_t> places = stories(2);
    const Fact a = new_fact(attributes_.back()), b = new_fact(attributes_.back());
    hide_fact(places[0], a), hide_fact(places[1], b);
    ask(Task::pair,
        {"What is the " + a.subject() + ", and what is the " + b.subject() + "?",
         {a.value, b.value}},
        places);
  }
}

void Writer::add_values() {
  for (size_t i = 0; i < plan_.questions; ++i) {
    const std::string key = fresh_([&] { return "magic numbers for " + any_word(&random_); });
    Turn turn{"What are all the special " + key + " mentioned in the document?", {}};
    const std::vector<size_t> places = stories(random_.between(2, 3));
    for (const size_t document : places) {
      turn.expected.push_back(fresh_([&] { return any_number(&random_); }));
      collection_.values.push_back(turn.expected.back());
      needles_[document].push_back(
          {"One of the special " + key + " is: " + turn.expected.back() + ".", random_.real()});
    }
    ask(Task::values, std::move(turn), places);
  }
}

// About other things than the hidden facts, of their kinds.
void Writer::add_unanswered() {
  for (size_t i = 0; i < plan_.questions; ++i) {
    Turn turn = turn_for(new_fact(random_.pick(attributes_)), &random_);
    turn.expected.clear();
    ask(Task::no_answer, std::move(turn), {});
  }
}

void Writer::add_tables() {
  std::vector<std::pair<size_t, std::vector<Question>>> asked;
  const size_t tables = plan_.documents - stories_.size();
  // more than are needed: a key may be in two tables
  const size_t each = tables ? 2 * (plan_.questions / tables + 1) : 0;
  for (size_t d = 0; d < plan_.documents; ++d) {
    if (!is_table(d)) continue;
    Document document =
        make_table(haystack_, {plan_.tokens, d, each, 1, plan_.seed ^ hash_of("collection")});
    collection_.texts[d] = std::move(document.text);
    asked.emplace_back(d, std::move(document.questions));
  }
  for (size_t done = 0, i = 0; done < plan_.questions && i < each * tables; ++i) {
    const auto& [place, questions] = asked[i % tables];
    Turn turn = questions[i / tables].turns.front();
    const std::string key = turn.question.substr(turn.question.find('"'));
    const auto has_key = [&](const std::string& text) {
      return text.find(key.substr(0, key.rfind('"') + 1) + ":") != std::string::npos;
    };
    if (std::count_if(collection_.texts.begin(), collection_.texts.end(), has_key) != 1) continue;
    ask(Task::lookup, std::move(turn), {place});
    ++done;
  }
}

Collection Writer::make() {
  for (size_t d = 0; d < plan_.documents; ++d)
    if (!is_table(d)) stories_.push_back(d);
  if (stories_.size() < least_stories)
    throw Failure(exit_usage, "a collection has at least " + std::to_string(least_stories) +
                                  " documents; ask for more with --documents");
  needles_.resize(plan_.documents);
  collection_.texts.resize(plan_.documents);
  add_facts(Task::fact);
  add_facts(Task::source);
  add_pairs();
  add_values();
  add_unanswered();
  for (const size_t d : stories_) {
    const size_t first = haystack_.random_start(plan_.tokens + plan_.tokens / 100, &random_);
    collection_.texts[d] = hide(haystack_, first, plan_.tokens, needles_[d]).text;
  }
  add_tables();
  random_.shuffle(&collection_.questions);
  return std::move(collection_);
}

}  // namespace

Collection make_collection(const Haystack& haystack, const CollectionPlan& plan) {
  return Writer(haystack, plan).make();
}

const char* name_of(Way way) {
  switch (way) {
    case Way::composed:
      return "composed";
    case Way::joined:
      return "joined";
    case Way::alone:
      return "alone";
    case Way::retrieved:
      return "retrieved";
  }
  return "";
}

std::vector<std::string> way_choices() {
  std::vector<std::string> names = {"all"};
  for (const Way way : all_ways) names.emplace_back(name_of(way));
  return names;
}

std::vector<Way> ways_of(const std::vector<std::string>& names) {
  std::vector<Way> ways;
  for (const std::string& name : names) {
    bool found = name == "all";
    if (found) ways.assign(std::begin(all_ways), std::end(all_ways));
    for (const Way way : all_ways)
      if (name == name_of(way)) ways.push_back(way), found = true;
    if (!found)
      throw Failure(exit_usage,
                    "--way: unknown way '" + name + "'; ways are " + listed(way_choices()));
  }
  return ways;
}

}  // namespace tool
