// What evaluations of single documents and of collections share: the model, the answers in the work
// folder, the progress and the cache files.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval_documents.h"
#include "eval_progress.h"
#include "eval_results.h"
#include "eval_text.h"
#include "sessions.h"

namespace tool {

class AnyEvaluation {
 public:
  virtual ~AnyEvaluation() = default;
  AnyEvaluation(const AnyEvaluation&) = delete;
  AnyEvaluation& operator=(const AnyEvaluation&) = delete;

  // Computes the missing answers. Throws Failure; finished answers stay in the work folder.
  virtual void run() = 0;
  // All requested results that the work folder has, in their order.
  virtual std::vector<const Result*> results() const = 0;

  const kv_model_info& model() const { return info_; }
  const SessionFlags& flags() const { return flags_; }  // with calibrated filter layers
  // Whether the work folder has the result.
  bool has(const std::string& key) const { return stored_.find(key) != nullptr; }

 protected:
  AnyEvaluation(Console& console, const EvalArguments& arguments);
  // Opens the model, and what depends on it. Throws Failure.
  void prepare(const std::vector<std::string>& strategies);
  Haystack haystack();
  // All options of an answer that are neither of a method nor of a way. They include the program:
  // another build may give other answers.
  std::string answer_identity(const std::string& strategy) const;

  virtual size_t requested() const = 0;  // results
  [[noreturn]] void stopped() const;
  // Throws after an interrupt or an error.
  void expect_done(kv_status status, const kv_error& error) const;
  // Appends the answer to *text, and adds its figures to *result.
  kv_answer generate(kv_session* session, const std::string& question,
                     const kv_generate_options& options, std::string* text, Result* result);

  Console& console_;
  const EvalArguments& arguments_;
  SessionFlags flags_;
  Model model_;
  kv_model_info info_{};
  std::string model_identity_;
  ResultFile stored_;
  Estimate estimate_;
  EvalProgress progress_;
  std::optional<EvalDocuments> files_;

 private:
  std::string program_identity_;
};

}  // namespace tool
