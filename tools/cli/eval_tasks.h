// Documents with hidden answers, their questions, and the scores of answers.
//
// Everything depends on the text, the plan and the seed alone; nothing here uses the library. The
// forms of sentences and questions are those of the bundled model's training. Models that follow
// instructions answer them too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eval_random.h"
#include "eval_text.h"

namespace tool {

enum class Task {
  single,         // a fact that stands alone
  many_keys,      // a fact among others of its kind, about other things
  many_values,    // all values of one key, spread over the document
  many_queries,   // four facts in one conversation
  key_value,      // the value of a key in a long table
  pass_key,       // RULER's and InfiniteBench's pass key
  number_string,  // twenty digits
  quote,          // the next words of a passage of the text
  perplexity,     // probability of the text after the document
  // Of a collection of documents (eval_collection.h):
  fact,       // a fact of one document, among facts of its kind in others
  lookup,     // the value of a key in the table of one document
  values,     // all values of one key, each in another document
  source,     // the document that has the fact
  pair,       // two facts of a kind, in two documents
  no_answer,  // a fact that no document has
};
constexpr Task all_tasks[] = {Task::single,        Task::many_keys, Task::many_values,
                              Task::many_queries,  Task::key_value, Task::pass_key,
                              Task::number_string, Task::quote,     Task::perplexity};

constexpr Task collection_tasks[] = {Task::fact,   Task::lookup, Task::values,
                                     Task::source, Task::pair,   Task::no_answer};
bool is_of_collection(Task task);

const char* name_of(Task task);  // "many-keys"
std::optional<Task> task_named(std::string_view name);
std::vector<std::string> task_choices();  // "all", "collection" and all names

struct Turn {
  std::string question;
  std::vector<std::string> expected;
};

struct Question {
  Task task = Task::single;
  // of one conversation. Perplexity has one turn without a question: the text after the document
  std::vector<Turn> turns;
  // place of the answer in the document, 0 to 1; none if it is spread over it
  std::optional<double> depth;
};

struct Fact {
  std::string attribute, entity, value;
  std::string subject() const { return attribute + " of the " + entity; }
};
std::string sentence_of(const Fact& fact, Random* random);
Turn turn_for(const Fact& fact, Random* random);  // a question for it

enum class Kind { story, table };  // of documents
const char* name_of(Kind kind);
Kind kind_for(Task task);

struct Document {
  std::string text;
  std::vector<Question> questions;  // in random order
};

struct DocumentPlan {
  size_t tokens = 0;     // of the document
  size_t number = 0;     // among the documents of its kind and length
  size_t questions = 0;  // of each task that can have several in a document
  // equal stretches of the document over which each task's questions are spread
  size_t depths = 1;
  uint64_t seed = 0;
};

// A part of the text with hidden facts, numbers and a pass key, and the questions of all tasks but
// key_value. The document does not depend on the requested tasks. Throws Failure where text or
// length are too short.
Document make_story(const Haystack& haystack, const DocumentPlan& plan);

// A part of the text, then a table of keys and values with three quarters of the tokens. The
// bundled model was not trained on a small table in a long text.
Document make_table(const Haystack& haystack, const DocumentPlan& plan);

// Tokens after a story whose perplexity is measured.
constexpr size_t following_tokens = 512;

// 0 to 1: the share of the expected texts that the answers contain, whatever their capitals, spaces
// and punctuation. For a quote, the share of its words before the first wrong one. One answer per
// turn. Perplexity has no score.
double score_of(const Question& question, const std::vector<std::string>& answers);

}  // namespace tool
