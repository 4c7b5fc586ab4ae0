#include "argument_values.h"

#include <algorithm>

#include "kvasir.h"
#include "number_text.h"

namespace tool {

Budget budget_of(const std::string& text) {
  Budget budget;
  if (text.ends_with('%')) {
    budget.fraction = number<double>(text.substr(0, text.size() - 1), 0.001, 100) / 100;
  } else {
    budget.tokens = number<uint64_t>(text, 1, max_tokens);
  }
  return budget;
}

uint32_t filter_window_of(const std::string& name) {
  if (name == "last") return KV_FILTER_LAST;
  if (name == "exponential") return KV_FILTER_EXPONENTIAL;
  if (name == "uniform") return KV_FILTER_UNIFORM;
  throw CLI::ValidationError("'" + name + "' is not last, exponential or uniform");
}

std::vector<std::string> parts_of(const std::string& list) {
  if (list.empty()) throw CLI::ValidationError("it is empty");
  std::vector<std::string> parts = CLI::detail::split(list, ',');
  for (const std::string& part : parts)
    if (part.empty()) throw CLI::ValidationError("'" + list + "' has an empty part");
  return parts;
}

kv_budget_schedule schedule_of(const std::string& name) {
  if (name == "uniform") return KV_BUDGET_UNIFORM;
  if (name == "linear") return KV_BUDGET_LINEAR;
  if (name == "pyramid") return KV_BUDGET_PYRAMID;
  throw CLI::ValidationError("'" + name + "' is not uniform, linear or pyramid");
}

std::vector<NamedBudget> budgets_of(const std::string& list) {
  std::vector<NamedBudget> budgets;
  for (const std::string& part : parts_of(list)) budgets.push_back({part, budget_of(part)});
  return budgets;
}

uint64_t size_of(const std::string& text) {
  std::string bytes = text;
  if (const std::string wrong = CLI::AsSizeValue(false)(bytes); !wrong.empty())
    throw CLI::ValidationError("'" + text + "' is not a size: write 300M or 2G");
  return number<uint64_t>(bytes, 1, uint64_t{1} << 50);
}

static uint64_t length_from(const std::string& text, uint64_t min) {
  const bool thousands = text.ends_with('K') || text.ends_with('k');
  return number<uint64_t>(thousands ? text.substr(0, text.size() - 1) : text, min, max_tokens) *
         (thousands ? 1024 : 1);
}

static std::vector<uint64_t> lengths_from(const std::string& list, uint64_t min) {
  std::vector<uint64_t> lengths;
  for (const std::string& part : parts_of(list)) {
    const uint64_t length = length_from(part, min);
    if (std::find(lengths.begin(), lengths.end(), length) == lengths.end())
      lengths.push_back(length);
  }
  return lengths;
}

uint64_t length_of(const std::string& text) { return length_from(text, 1); }
std::vector<uint64_t> lengths_of(const std::string& list) { return lengths_from(list, 1); }
std::vector<uint64_t> depths_of(const std::string& list) { return lengths_from(list, 0); }

std::vector<Task> tasks_of(const std::string& list) {
  std::vector<Task> tasks;
  for (const std::string& part : parts_of(list)) {
    const std::optional<Task> task = task_named(part);
    if (part == "collection") {
      tasks.insert(tasks.end(), std::begin(collection_tasks), std::end(collection_tasks));
      continue;
    }
    if (!task && part != "all")
      throw CLI::ValidationError("unknown task '" + part + "'; tasks are " +
                                 listed(task_choices()));
    if (task) tasks.push_back(*task);
    if (!task) tasks.assign(std::begin(all_tasks), std::end(all_tasks));
  }
  return tasks;
}

}  // namespace tool
