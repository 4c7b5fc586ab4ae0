// What was answered: kept line by line as it comes, so that an evaluation that was stopped goes on,
// and summed up.
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

// One question, asked through one strategy and budget.
struct Result {
  std::string key;       // names everything that it depends on
  std::string document;  // the name of its file
  uint64_t length = 0;   // tokens, as it was asked for
  std::string strategy, budget;
  Task task = Task::single;
  std::optional<double> depth;
  std::vector<std::string> questions, answers;  // one a turn
  std::vector<std::vector<std::string>> expected;
  double score = 0;    // 0 to 1; of perplexity the mean of ln(probability)
  uint64_t steps = 0;  // tokens that went through the strategy
  // summed over steps, layers and KV heads
  uint64_t tokens_read = 0, tokens_present = 0, summary_bytes = 0;
  double seconds = 0;
};

Json to_json(const Result& result);
Result result_of(const Json& json);

// JSON, a line a result. What another, killed run wrote half is not a result.
class ResultFile {
 public:
  explicit ResultFile(std::string path);  // throws Failure when it cannot be read

  const Result* find(const std::string& key) const;
  void add(Result result);  // written before it returns; throws Failure
  size_t size() const { return results_.size(); }

 private:
  std::string path_;
  std::map<std::string, Result> results_;
  bool ends_with_newline_ = true;
};

// Sums over results: of one task, or of all that have a score.
struct Sum {
  uint64_t questions = 0;
  double score = 0;
  uint64_t steps = 0, tokens_read = 0, tokens_present = 0, summary_bytes = 0;
  double seconds = 0;

  void add(const Result& result);
  double mean() const { return questions > 0 ? score / static_cast<double>(questions) : 0; }
  double read_share() const;  // of the keys and values present
  double per_step(double sum) const { return steps > 0 ? sum / static_cast<double>(steps) : 0; }
};

struct Summary {
  uint64_t length = 0;
  std::string strategy, budget;
  std::map<Task, Sum> tasks;
  // [depths] equal stretches, for tasks whose answers stand at one place
  std::map<Task, std::vector<Sum>> depths;
  Sum all;  // of what was read, over everything

  // Of the tasks' scores, so that a task counts the same however many questions it has.
  std::optional<double> score() const;
};

// In the order in which lengths, strategies and budgets come first.
std::vector<Summary> summarise(const std::vector<const Result*>& results, size_t depths);

// A row for each task and one for "all". kv_bytes: of one token in one layer and KV head.
Json rows_json(const std::vector<Summary>& summaries, double kv_bytes);

}  // namespace tool
