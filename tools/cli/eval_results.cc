#include "eval_results.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "failure.h"
#include "files.h"
#include "system.h"

namespace tool {

Json to_json(const Result& r) {
  return {{"key", r.key},
          {"document", r.document},
          {"length", r.length},
          {"strategy", r.strategy},
          {"budget", r.budget},
          {"task", name_of(r.task)},
          {"depth", r.depth ? Json(*r.depth) : Json(nullptr)},
          {"score", r.score},
          {"questions", r.questions},
          {"expected", r.expected},
          {"answers", r.answers},
          {"steps", r.steps},
          {"tokens_read", r.tokens_read},
          {"tokens_present", r.tokens_present},
          {"summary_bytes", r.summary_bytes},
          {"seconds", r.seconds},
          {"attended", r.attended ? Json(*r.attended) : Json(nullptr)}};
}

Result result_of(const Json& json) {
  Result r;
  json.at("key").get_to(r.key);
  json.at("document").get_to(r.document);
  json.at("length").get_to(r.length);
  json.at("strategy").get_to(r.strategy);
  json.at("budget").get_to(r.budget);
  r.task = task_named(json.at("task").get<std::string>()).value();
  if (!json.at("depth").is_null()) r.depth = json.at("depth").get<double>();
  json.at("score").get_to(r.score);
  json.at("questions").get_to(r.questions);
  json.at("expected").get_to(r.expected);
  json.at("answers").get_to(r.answers);
  json.at("steps").get_to(r.steps);
  json.at("tokens_read").get_to(r.tokens_read);
  json.at("tokens_present").get_to(r.tokens_present);
  json.at("summary_bytes").get_to(r.summary_bytes);
  json.at("seconds").get_to(r.seconds);
  if (const Json attended = json.value("attended", Json()); !attended.is_null())
    r.attended = attended.get<double>();
  return r;
}

ResultFile::ResultFile(std::string path) : path_(std::move(path)) {
  if (!std::filesystem::exists(system::path(path_))) return;
  const std::string text = read_file(path_);
  ends_with_newline_ = text.empty() || text.back() == '\n';
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    try {
      Result result = result_of(Json::parse(text.begin() + static_cast<ptrdiff_t>(at),
                                            text.begin() + static_cast<ptrdiff_t>(end)));
      results_[result.key] = std::move(result);
    } catch (const Json::exception&) {
    } catch (const std::bad_optional_access&) {  // a task of another version
    }
    at = end + 1;
  }
}

const Result* ResultFile::find(const std::string& key) const {
  const auto found = results_.find(key);
  return found == results_.end() ? nullptr : &found->second;
}

// One write per line: runs that share a folder do not mix their lines.
void ResultFile::add(Result result) {
  const std::string line = (ends_with_newline_ ? "" : "\n") +
                           to_json(result).dump(-1, ' ', false, Json::error_handler_t::replace) +
                           "\n";
  const ptrdiff_t written = system::append(path_, line);
  const int code = errno;
  if (written != static_cast<ptrdiff_t>(line.size()))
    throw Failure(
        written >= 0 || system::is_disk_full(code) ? exit_resources : exit_file,
        "cannot write " + path_ + ": " + (written >= 0 ? "no space left" : std::strerror(code)));
  ends_with_newline_ = true;
  std::string key = result.key;
  results_[std::move(key)] = std::move(result);
}

void Sum::add(const Result& result) {
  ++questions;
  score += result.score;
  steps += result.steps;
  tokens_read += result.tokens_read;
  tokens_present += result.tokens_present;
  summary_bytes += result.summary_bytes;
  seconds += result.seconds;
  if (result.attended) ++sought, attended += *result.attended;
}

double Sum::read_share() const {
  return tokens_present > 0 ? static_cast<double>(tokens_read) / static_cast<double>(tokens_present)
                            : 0;
}

std::optional<double> Summary::score() const {
  double sum = 0;
  size_t count = 0;
  for (const auto& [task, of_task] : tasks)
    if (task != Task::perplexity) sum += of_task.mean(), ++count;
  if (count == 0) return {};
  return sum / static_cast<double>(count);
}

std::vector<Summary> summarise(const std::vector<const Result*>& results, size_t depths) {
  std::vector<Summary> summaries;
  for (const Result* result : results) {
    auto at = std::find_if(summaries.begin(), summaries.end(), [&](const Summary& s) {
      return s.length == result->length && s.strategy == result->strategy &&
             s.budget == result->budget;
    });
    if (at == summaries.end())
      at = summaries.insert(at, {result->length, result->strategy, result->budget, {}, {}, {}});
    at->all.add(*result);
    at->tasks[result->task].add(*result);
    if (!result->depth) continue;
    std::vector<Sum>& stretches = at->depths[result->task];
    stretches.resize(depths);
    stretches[std::min(static_cast<size_t>(*result->depth * static_cast<double>(depths)),
                       depths - 1)]
        .add(*result);
  }
  return summaries;
}

static Json depths_json(const std::vector<Sum>& stretches) {
  Json json = Json::array();
  for (size_t i = 0; i < stretches.size(); ++i) {
    const double middle = (static_cast<double>(i) + 0.5) / static_cast<double>(stretches.size());
    if (stretches[i].questions > 0)
      json.push_back({{"depth", middle},
                      {"questions", stretches[i].questions},
                      {"score", stretches[i].mean()}});
  }
  return json;
}

Json rows_json(const std::vector<Summary>& summaries, double kv_bytes) {
  Json rows = Json::array();
  for (const Summary& summary : summaries) {
    const auto row = [&](const char* task, const Sum& sum) -> Json& {
      rows.push_back({{"length", summary.length},
                      {"strategy", summary.strategy},
                      {"budget", summary.budget},
                      {"task", task}});
      Json& json = rows.back();
      json["questions"] = sum.questions;
      json["kv_read"] = sum.read_share();
      json["kv_bytes_per_token"] = sum.per_step(static_cast<double>(sum.tokens_read) * kv_bytes);
      json["summary_bytes_per_token"] = sum.per_step(static_cast<double>(sum.summary_bytes));
      json["seconds"] = sum.seconds;
      if (sum.sought > 0) json["attended"] = sum.attended / static_cast<double>(sum.sought);
      return json;
    };
    for (const auto& [task, sum] : summary.tasks) {
      Json& json = row(name_of(task), sum);
      if (task == Task::perplexity) {
        json["log_probability"] = sum.mean();
        json["perplexity"] = std::exp(-sum.mean());
        continue;
      }
      json["score"] = sum.mean();
      const auto stretches = summary.depths.find(task);
      if (stretches != summary.depths.end()) json["depths"] = depths_json(stretches->second);
    }
    Json& all = row("all", summary.all);
    if (const std::optional<double> score = summary.score()) all["score"] = *score;
  }
  return rows;
}

}  // namespace tool
