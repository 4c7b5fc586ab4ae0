// Questions whose answers are known, hidden in long texts, and what an answer is worth.
//
// Everything follows from the text, the wishes and the seed; nothing here knows the library. The
// forms of sentences and questions are those that the bundled model was trained on; models that
// follow instructions answer them too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eval_text.h"

namespace tool {

enum class Task {
  single,         // a fact that stands alone
  many_keys,      // a fact among others of its kind, about other things
  many_values,    // all the values that one key has, all over the document
  many_queries,   // four facts, asked one after the other in one conversation
  key_value,      // the value of a key in a long table
  pass_key,       // RULER's and InfiniteBench's pass key
  number_string,  // twenty digits
  quote,          // the words that follow in a passage of the text
  perplexity,     // how likely the text after the document is
};
constexpr Task all_tasks[] = {Task::single,        Task::many_keys, Task::many_values,
                              Task::many_queries,  Task::key_value, Task::pass_key,
                              Task::number_string, Task::quote,     Task::perplexity};

const char* name_of(Task task);  // "many-keys"
std::optional<Task> task_named(std::string_view name);
std::vector<std::string> task_choices();  // "all", and the names of all

struct Turn {
  std::string question;
  std::vector<std::string> expected;  // all of them
};

struct Question {
  Task task = Task::single;
  // one after the other in one conversation. Perplexity has no question, and one text that follows
  std::vector<Turn> turns;
  // where in the document the answer stands, 0 to 1; none where it is all over it
  std::optional<double> depth;
};

enum class Kind { story, table };  // of documents
const char* name_of(Kind kind);
Kind kind_for(Task task);

struct Document {
  std::string text;
  std::vector<Question> questions;  // in random order
};

struct Wishes {
  size_t tokens = 0;     // of the document
  size_t number = 0;     // of this document among those of its kind and length
  size_t questions = 0;  // of each task that can have several in a document
  // equal stretches of the document, over which each task's questions are spread
  size_t depths = 1;
  uint64_t seed = 0;
};

// A part of the text with facts, numbers and a pass key hidden in it, and the questions of all
// tasks but key_value: a document is the same whichever of its tasks are asked. Throws Failure when
// text or length are too short.
Document make_story(const Haystack& haystack, const Wishes& wishes);

// A part of the text, then a table of keys and values, which has three quarters of the tokens: a
// small table in a long text is not what the bundled model was trained on.
Document make_table(const Haystack& haystack, const Wishes& wishes);

// Tokens of the text that follows a story, of which perplexity is measured.
constexpr size_t following_tokens = 512;

// 0 to 1: the share of what was expected that the answers contain, whatever their capitals, spaces
// and punctuation; of a quote, the share of its words before the first wrong one. answers: one a
// turn. Perplexity has no score.
double score_of(const Question& question, const std::vector<std::string>& answers);

}  // namespace tool
