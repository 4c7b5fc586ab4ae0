// An evaluation: each document is prefilled once, and every strategy and budget answers its
// questions over the mapped cache file.
#pragma once

#include <string>
#include <vector>

#include "eval_base.h"
#include "eval_tasks.h"

namespace tool {

// A strategy, with its budget if it has one.
struct Method {
  std::string strategy;
  NamedBudget budget;
};

// "all" stands for all strategies of the library. Throws Failure(exit_usage) for an unknown name,
// and for a parameter of the flags that none of the strategies has.
std::vector<Method> methods_of(const std::vector<std::string>& strategies,
                               const std::vector<NamedBudget>& budgets, const SessionFlags& flags);
// The flags for one method.
SessionFlags flags_for(const SessionFlags& flags, const Method& method);

class Evaluation : public AnyEvaluation {
 public:
  // Makes documents and questions; throws Failure.
  Evaluation(Console& console, const EvalArguments& arguments);

  void run() override;
  std::vector<const Result*> results() const override;
  uint32_t documents() const { return arguments_.documents > 0 ? arguments_.documents : 2; }
  uint32_t depths() const { return arguments_.depths > 0 ? arguments_.depths : 5; }

 private:
  struct Job {
    Kind kind = Kind::story;
    uint64_t length = 0;  // requested tokens
    uint64_t tokens = 0;  // of the document
    Document document;    // with the requested questions
    std::string name;     // of the cache file, a hash of everything that it depends on
  };

  void make_jobs(const Haystack& haystack);
  std::string key_of(const Job& job, const Method& method, const Question& question) const;
  bool is_open(const Job& job, const Method& method) const;
  void expect(const Job& job);
  size_t requested() const override { return requested_; }
  void answer_all(const Job& job, const Method& method);
  void converse(kv_session* session, const Question& question, Result* result);
  void ask(kv_session* session, const Turn& turn, uint32_t max_tokens, bool keep, Result* result);
  void score_text(kv_session* session, const std::string& text, Result* result);

  std::vector<Method> methods_;
  std::vector<Job> jobs_;
  size_t requested_ = 0;  // results
};

}  // namespace tool
