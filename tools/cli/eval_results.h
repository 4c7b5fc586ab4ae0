// Results of an evaluation: appended to a file line by line, so that a stopped evaluation
// continues, and summed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "console.h"
#include "eval_tasks.h"

namespace tool {

// One question, answered with one strategy and budget.
struct Result {
  std::string key;       // a hash of everything that it depends on
  std::string document;  // name of its cache file
  uint64_t length = 0;   // requested tokens
  std::string strategy, budget;
  Task task = Task::single;
  std::optional<double> depth;
  std::vector<std::string> questions, answers;  // one per turn
  std::vector<std::vector<std::string>> expected;
  double score = 0;    // 0 to 1; perplexity: mean of ln(probability)
  uint64_t steps = 0;  // decoded tokens
  // summed over steps, layers and KV heads
  uint64_t tokens_read = 0, tokens_present = 0, summary_bytes = 0;
  double seconds = 0;
  // of a collection: the share of the documents with the answer that were attended
  std::optional<double> attended;
};

Json to_json(const Result& result);
Result result_of(const Json& json);

// One result per line, as JSON. Ignores an incomplete line of a killed run.
class ResultFile {
 public:
  explicit ResultFile(std::string path);  // throws Failure if it cannot be read

  const Result* find(const std::string& key) const;
  void add(Result result);  // writes at once; throws Failure
  size_t size() const { return results_.size(); }

 private:
  std::string path_;
  std::map<std::string, Result> results_;
  bool ends_with_newline_ = true;
};

// Sums over results.
struct Sum {
  uint64_t questions = 0;
  double score = 0;
  uint64_t steps = 0, tokens_read = 0, tokens_present = 0, summary_bytes = 0;
  double seconds = 0;
  uint64_t sought = 0;  // results with `attended`, and its sum
  double attended = 0;

  void add(const Result& result);
  double mean() const { return questions > 0 ? score / static_cast<double>(questions) : 0; }
  double read_share() const;  // of the keys and values
  double per_step(double sum) const { return steps > 0 ? sum / static_cast<double>(steps) : 0; }
};

struct Summary {
  uint64_t length = 0;
  std::string strategy, budget;
  std::map<Task, Sum> tasks;
  // [depths] equal stretches, for tasks whose answers are at one place
  std::map<Task, std::vector<Sum>> depths;
  Sum all;

  // Mean over tasks, each with the same weight.
  std::optional<double> score() const;
};

// In the order of the first result of each length, strategy and budget.
std::vector<Summary> summarise(const std::vector<const Result*>& results, size_t depths);

// A row per task and one for "all". kv_bytes: of one token in one layer and KV head.
Json rows_json(const std::vector<Summary>& summaries, double kv_bytes);

}  // namespace tool
