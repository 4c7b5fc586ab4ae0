// An evaluation: documents are read once and kept as caches, and every strategy and budget answers
// their questions over the mapped file.
#pragma once

#include <string>
#include <vector>

#include "console.h"
#include "eval_progress.h"
#include "eval_results.h"
#include "eval_tasks.h"

namespace tool {

// A way to read: a strategy, and its budget where it takes one.
struct Method {
  std::string strategy;
  NamedBudget budget;
  uint32_t select_tokens = 0;  // where it takes it and it was asked for
};

// "all" stands for the library's strategies. Throws Failure(exit_usage) for a name that the library
// does not know, and for select_tokens when none of them takes it.
std::vector<Method> methods_of(const std::vector<std::string>& strategies,
                               const std::vector<NamedBudget>& budgets, uint32_t select_tokens);

class Evaluation {
 public:
  // Makes documents and questions; throws Failure.
  Evaluation(Console& console, const EvalArguments& arguments);

  // Answers what was not answered before. Throws Failure; what was answered by then is kept.
  void run();

  const kv_model_information& model() const { return info_; }
  const SessionFlags& flags() const { return flags_; }  // with calibrated filter layers
  // Of all documents, methods and tasks that were asked for, in their order.
  std::vector<const Result*> results() const;
  bool keeps(const std::string& key) const {
    return kept_.find(key) != nullptr;
  }  // a result, in the work folder

 private:
  struct Job {
    Kind kind = Kind::story;
    uint64_t length = 0;  // tokens asked for
    uint64_t tokens = 0;  // of the document
    Document document;    // with the questions that were asked for
    std::string name;     // of the cache, by everything it depends on
  };

  void make_jobs(const Haystack& haystack);
  std::string key_of(const Job& job, const Method& method, const Question& question) const;
  std::string path_of(const Job& job) const { return arguments_.work + "/" + job.name + ".kv"; }
  bool is_open(const Job& job, const Method& method) const;
  void expect(const Job& job);
  void read(const Job& job);
  Session resume(const Job& job, size_t* bytes, uint64_t* tokens);
  [[noreturn]] void stopped() const;
  Session load(const Job& job, const Method& method);
  void answer_all(const Job& job, const Method& method);
  void converse(kv_session* session, const Question& question, Result* result);
  void ask(kv_session* session, const Turn& turn, uint32_t max_tokens, bool keep, Result* result);
  void score_text(kv_session* session, const std::string& text, Result* result);

  Console& console_;
  const EvalArguments& arguments_;
  SessionFlags flags_;
  Model model_;
  kv_model_information info_{};
  std::string model_identity_, program_identity_;
  std::vector<Method> methods_;
  std::vector<Job> jobs_;
  ResultFile kept_;
  Estimate estimate_;
  EvalProgress progress_;
  size_t wanted_ = 0;  // results in all
};

}  // namespace tool
