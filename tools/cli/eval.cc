// kvasir eval: the tables and the JSON of an evaluation.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "commands.h"
#include "eval_collection_run.h"
#include "eval_run.h"
#include "failure.h"
#include "files.h"
#include "number_text.h"
#include "output.h"
#include "system.h"

namespace tool {
namespace {

// below this score of full attention, a task compares little
constexpr double min_full_score = 0.5;

void make_folder(const std::string& path) {
  std::error_code failed;
  std::filesystem::create_directories(system::path(path), failed);
  if (failed)
    throw Failure(exit_file, "cannot create the folder " + path + ": " + failed.message());
}

// All summaries of a length have the same tasks.
std::vector<Task> tasks_of(const Summary& summary) {
  std::vector<Task> tasks;
  for (const auto& [task, sum] : summary.tasks) tasks.push_back(task);
  return tasks;
}

std::string cell(const Summary& summary, Task task) {
  const double mean = summary.tasks.at(task).mean();
  return task == Task::perplexity ? string_printf("%.2f", std::exp(-mean))
                                  : string_printf("%.1f%%", 100 * mean);
}

void print_length(Terminal& terminal, const std::vector<Summary>& rows) {
  const std::vector<Task> tasks = tasks_of(rows.front());
  const auto width = [](Task task) {
    return static_cast<int>(std::max<size_t>(std::string(name_of(task)).size(), 6));
  };
  std::string line =
      string_printf("\n%-17s  %6s", (grouped(rows.front().length) + " tokens").c_str(), "budget");
  for (const Task task : tasks) line += string_printf("  %*s", width(task), name_of(task));
  terminal.print(line + string_printf("  %6s  %7s  %9s\n", "all", "KV read", "summaries"));
  for (const Summary& row : rows) {
    line = string_printf("%-17s  %6s", row.strategy.c_str(), row.budget.c_str());
    for (const Task task : tasks)
      line += string_printf("  %*s", width(task), cell(row, task).c_str());
    const std::optional<double> score = row.score();
    line += string_printf("  %6s", score ? string_printf("%.1f%%", 100 * *score).c_str() : "-");
    line += string_printf("  %6.2f%%", 100 * row.all.read_share());
    line += string_printf("  %9s\n", byte_count(static_cast<uint64_t>(row.all.per_step(
                                                    static_cast<double>(row.all.summary_bytes))))
                                         .c_str());
    terminal.print(line);
  }
  for (const Summary& row : rows)
    for (const Task task : tasks)
      if (row.strategy == "full" && task != Task::perplexity &&
          row.tasks.at(task).mean() < min_full_score)
        terminal.print(string_printf("%s: full attention itself scores %s: hard for this model\n",
                                     name_of(task), cell(row, task).c_str()));
}

void print_tables(Terminal& terminal, const std::vector<Summary>& summaries) {
  std::vector<uint64_t> lengths;
  for (const Summary& summary : summaries)
    if (std::find(lengths.begin(), lengths.end(), summary.length) == lengths.end())
      lengths.push_back(summary.length);
  for (const uint64_t length : lengths) {
    std::vector<Summary> rows;
    std::copy_if(summaries.begin(), summaries.end(), std::back_inserter(rows),
                 [=](const Summary& s) { return s.length == length; });
    print_length(terminal, rows);
  }
  terminal.print(
      "\nKV read: share of keys and values read per token; summaries: bytes of page summaries and "
      "sketches read per token to select them\n");
}

Json header_json(const kv_model_info& model, const EvalArguments& arguments) {
  Json tasks = Json::array();
  for (const Task task : arguments.tasks) tasks.push_back(name_of(task));
  return {{"build", Json::parse(kv_build_info())},
          {"model",
           {{"path", arguments.model.path},
            {"name", model.name},
            {"weights", model.weights},
            {"parameters", model.parameters}}},
          {"texts", arguments.texts},
          {"tasks", tasks},
          {"lengths", arguments.lengths},
          {"questions", arguments.questions},
          {"seed", arguments.seed},
          {"dense_layers",
           arguments.session.dense_layers ? Json(*arguments.session.dense_layers) : Json(nullptr)},
          {"separate_heads", arguments.session.separate_heads}};
}

// Ways in rows, tasks in columns.
void print_collection(Terminal& terminal, const std::vector<Summary>& rows, uint32_t documents) {
  for (const Summary& row : rows) {
    const std::vector<Task> tasks = tasks_of(row);
    const auto width = [](Task task) {
      return static_cast<int>(std::max<size_t>(std::string(name_of(task)).size(), 6));
    };
    if (&row == &rows.front() || row.length != (&row - 1)->length) {
      std::string head = string_printf(
          "\n%-17s  %-8s",
          (std::to_string(documents) + " x " + grouped(row.length) + " tokens").c_str(),
          "strategy");
      for (const Task task : tasks) head += string_printf("  %*s", width(task), name_of(task));
      terminal.print(head + string_printf("  %6s  %8s  %10s\n", "all", "attended", "s/question"));
    }
    std::string line = string_printf("%-17s  %-8s", row.strategy.c_str(), row.budget.c_str());
    for (const Task task : tasks)
      line += string_printf("  %*s", width(task), cell(row, task).c_str());
    const Sum& all = row.all;
    line += string_printf("  %6s", string_printf("%.1f%%", 100 * row.score().value_or(0)).c_str());
    line += string_printf(
        "  %8s",
        all.sought > 0
            ? string_printf("%.1f%%", 100 * all.attended / static_cast<double>(all.sought)).c_str()
            : "-");
    terminal.print(line +
                   string_printf("  %10.2f\n", all.seconds / static_cast<double>(all.questions)));
  }
  terminal.print(
      "\nattended: share of the documents with the answer that an answer attended, in whole or in "
      "part; s/question: without the prefill of documents\n");
}

// Rows, and all results to the file.
void report(Console& console, const std::vector<Summary>& summaries,
            const std::vector<const Result*>& results, const std::string& output, double kv_bytes) {
  console.result["rows"] = rows_json(summaries, kv_bytes);
  Json whole = console.result;
  for (const Result* result : results) whole["results"].push_back(to_json(*result));
  write_file(output, json_text(whole));
}

// The loss of replacing this file: none where the folder has all of its results.
std::string lost_with(const AnyEvaluation& evaluation, const std::string& path,
                      const std::string& work) {
  try {
    const Json file = Json::parse(read_file(path));
    for (const Json& result : file.at("results"))
      if (!evaluation.has(result.at("key").get<std::string>()))
        return "has results that are not in " + work;
    return "";
  } catch (const Json::exception&) {
    return "is not a file of results";
  }
}

}  // namespace

void run_eval(Console& console, const EvalArguments& arguments) {
  make_folder(arguments.work);
  expect_writable_folder(arguments.work);
  const std::string output =
      arguments.output.empty() ? arguments.work + "/results.json" : arguments.output;
  expect_writable(output);
  if (std::any_of(arguments.tasks.begin(), arguments.tasks.end(), is_of_collection))
    return run_collection(console, arguments, output);
  if (!arguments.ways.empty() || arguments.attend > 0 || arguments.retrieve > 0)
    throw Failure(exit_usage, "--way, --attend and --retrieve need the tasks of a collection");
  Evaluation evaluation(console, arguments);
  if (exists(output))
    if (const std::string lost = lost_with(evaluation, output, arguments.work); !lost.empty())
      expect_force(output, lost, arguments.force);
  evaluation.run();
  const std::vector<const Result*> results = evaluation.results();
  const std::vector<Summary> summaries = summarise(results, evaluation.depths());
  const kv_model_info& model = evaluation.model();
  const double kv_bytes =
      static_cast<double>(model.kv_bytes_per_token) / (model.layers * model.kv_heads);

  console.result = header_json(model, arguments);
  console.result["documents"] = evaluation.documents();
  console.result["depths"] = evaluation.depths();
  console.result["filter_layers"] = evaluation.flags().filter_layers;
  report(console, summaries, results, output, kv_bytes);
  if (!console.json) print_tables(console.terminal, summaries);
  console.terminal.note("All results are in " + output);
}

void run_collection(Console& console, const EvalArguments& arguments, const std::string& output) {
  CollectionEvaluation evaluation(console, arguments);
  if (exists(output))
    if (const std::string lost = lost_with(evaluation, output, arguments.work); !lost.empty())
      expect_force(output, lost, arguments.force);
  evaluation.run();
  const std::vector<const Result*> results = evaluation.results();
  const std::vector<Summary> summaries = summarise(results, 1);
  const kv_model_info& model = evaluation.model();
  console.result = header_json(model, arguments);
  console.result["documents"] = evaluation.documents();
  console.result["attend"] = arguments.attend;
  console.result["retrieve"] = evaluation.retrieve();
  const double kv_bytes =
      static_cast<double>(model.kv_bytes_per_token) / (model.layers * model.kv_heads);
  report(console, summaries, results, output, kv_bytes);
  if (!console.json) print_collection(console.terminal, summaries, evaluation.documents());
  console.terminal.note("All results are in " + output);
}

}  // namespace tool
