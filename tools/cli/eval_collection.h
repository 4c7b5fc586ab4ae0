// Collections: several documents with hidden answers, and questions over all of them. Everything
// depends on the text, the plan and the seed alone.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "eval_tasks.h"

namespace tool {

struct CollectionQuestion {
  Question question;
  std::vector<size_t> documents;  // that have the answer; none: no document has it
};

struct Collection {
  std::vector<std::string> texts;  // [documents]
  std::vector<CollectionQuestion> questions;
  std::vector<std::string> values;  // all that are hidden in stories
};

struct CollectionPlan {
  size_t documents = 0;  // every fourth one is a table, as make_table()
  size_t tokens = 0;     // of each
  size_t questions = 0;  // of each task
  uint64_t seed = 0;
};

// Throws Failure where there are too few documents or tokens.
Collection make_collection(const Haystack& haystack, const CollectionPlan& plan);

// Ways to ask a collection.
enum class Way {
  composed,   // one session over the saved documents
  joined,     // one prefill of all
  alone,      // each document, and of their answers the one with the largest probability a token
  retrieved,  // a prefill of passages that share words with the question
};
constexpr Way all_ways[] = {Way::composed, Way::joined, Way::alone, Way::retrieved};
const char* name_of(Way way);
std::vector<std::string> way_choices();                           // "all", and the names of all
std::vector<Way> ways_of(const std::vector<std::string>& names);  // throws Failure

void run_collection(Console& console, const EvalArguments& arguments, const std::string& output);

}  // namespace tool
