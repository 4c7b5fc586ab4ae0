// kvasir recall: the attention of strategies over one document, compared with exact attention.
#include <algorithm>
#include <cmath>

#include "answer.h"
#include "calibration.h"
#include "commands.h"
#include "comparison.h"
#include "eval_progress.h"
#include "eval_run.h"
#include "failure.h"
#include "files.h"
#include "kvasir_experimental.h"
#include "number_text.h"
#include "output.h"
#include "prefill.h"
#include "strategies.h"

namespace tool {
namespace {

constexpr uint32_t recall_tokens = 64;
constexpr uint64_t recall_steps = 60;  // of a question and its answer

struct Measured {
  Method method;
  ComparisonSums sums;
  double log_probability = 0;  // of the document's end, mean
  Json stats;                  // of the last answer
};

class Recall {
 public:
  Recall(Console& console, const RecallArguments& arguments)
      : console_(console), arguments_(arguments),
        methods_(methods_of(arguments.strategies, arguments.budgets, arguments.session)),
        model_(open_model(console, arguments.model)), progress_(console.terminal, &estimate_) {
    info = info_of(model_.get());
    flags_ = with_calibration(console, arguments.model, model_.get(), arguments.session,
                              arguments.strategies);
    OpenDocument opened =
        open_document(console, model_.get(), arguments.source, flags_for(flags_, "auto"));
    if (opened.save_failure) console.terminal.error(opened.save_failure->what());
    document_ = std::move(opened.session);
    kv_error error{};
    check(kv_session_measure(document_.get(), KV_MEASURE_COMPARE | KV_MEASURE_CERTIFY, &error),
          error);
    remove_end();
  }

  std::vector<Measured> run() {
    const double cost =
        decode_cost(arguments_.steps, tokens) +
        static_cast<double>(arguments_.questions.size()) * decode_cost(recall_steps, tokens);
    estimate_.expect(Work::decode, cost * static_cast<double>(methods_.size()));
    std::vector<Measured> all;
    for (const Method& method : methods_) all.push_back(measure(method));
    console_.terminal.erase();
    return all;
  }

  kv_model_info info{};
  uint64_t tokens = 0;  // of the document, with its end

 private:
  void remove_end() {
    std::vector<int32_t> ids = tokens_of(document_.get());
    tokens = ids.size();
    if (arguments_.steps == 0) return;
    if (tokens <= 2 * uint64_t{arguments_.steps})
      throw Failure(exit_usage, "--steps: the document has " + grouped(tokens) +
                                    " tokens, too few to remove " + grouped(arguments_.steps));
    end_.assign(ids.end() - arguments_.steps, ids.end());
    shortened_ = fork(document_.get());
    kv_error error{};
    check(kv_session_rewind(shortened_.get(), tokens - arguments_.steps, &error), error);
  }

  Session fork_with(kv_session* session, const Method& method) {
    Session forked = fork(session);
    set_strategy(forked.get(), flags_for(flags_, method));
    return forked;
  }

  [[noreturn]] static void stopped() {
    throw Failure(exit_cancelled, "stopped; nothing was written");
  }

  Measured measure(const Method& method) {
    Measured measured{method, {}, 0, {}};
    label_ = method.strategy + (method.budget.name.empty() ? "" : " ") + method.budget.name;
    if (arguments_.steps > 0) score_end(&measured);
    if (!arguments_.questions.empty()) {
      const Session session = fork_with(document_.get(), method);
      for (const std::string& question : arguments_.questions)
        ask(session.get(), question, &measured);
    }
    return measured;
  }

  void score_end(Measured* measured) {
    const Session session = fork_with(shortened_.get(), measured->method);
    progress_.begin(label_ + ": the document's end");
    done_ = 0;
    kv_control control = control_of(console_);
    control.user = this;
    control.progress = [](int32_t, uint64_t done, uint64_t, void* user) {
      auto& self = *static_cast<Recall*>(user);
      self.progress_.step(Work::decode, decode_cost(done - self.done_, self.tokens));
      self.done_ = done;
      return int32_t{0};
    };
    std::vector<float> logarithms(end_.size());
    kv_error error{};
    const kv_status status = kv_session_score(session.get(), end_.data(), end_.size(),
                                              logarithms.data(), &control, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
    for (const float logarithm : logarithms)
      measured->log_probability +=
          static_cast<double>(logarithm) / static_cast<double>(end_.size());
    measured->stats = stats_json(session.get());
    measured->sums.add(measured->stats);
  }

  void ask(kv_session* session, const std::string& question, Measured* measured) {
    progress_.begin(label_ + ": questions");
    kv_generate_options options = initialised<kv_generate_options>();
    options.max_tokens = recall_tokens;
    const kv_control control = control_of(console_);
    kv_error error{};
    std::string text;
    const kv_status status = kv_generate(session, question.data(), question.size(), &options,
                                         &control, append_text, &text, nullptr, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
    measured->stats = stats_json(session);
    measured->sums.add(measured->stats);
    progress_.step(Work::decode, decode_cost(recall_steps, tokens));
  }

  Console& console_;
  const RecallArguments& arguments_;
  std::vector<Method> methods_;
  Model model_;
  SessionFlags flags_;
  Session document_, shortened_;
  std::vector<int32_t> end_;
  Estimate estimate_;
  EvalProgress progress_;
  std::string label_;
  uint64_t done_ = 0;
};

// Decoded tokens.
uint64_t steps_of(const Measured& measured, const kv_model_info& info) {
  const auto& layers = measured.sums.layers();
  return layers.empty() || layers.front().empty()
             ? 0
             : layers.front().front().queries / (info.heads / info.kv_heads);
}

double per(uint64_t sum, uint64_t count) {
  return count > 0 ? static_cast<double>(sum) / static_cast<double>(count) : 0;
}

Json row_json(const Measured& measured, const kv_model_info& info) {
  const uint64_t steps = steps_of(measured, info);
  Json row = {{"strategy", measured.method.strategy},
              {"budget", measured.method.budget.name},
              {"steps", steps}};
  row.update(measured.sums.all().json());
  row["keys_scanned"] = per(measured.sums.keys_scanned(), steps * info.layers * info.kv_heads);
  row["summary_bytes_per_token"] = per(measured.sums.summary_bytes(), steps);
  if (measured.log_probability < 0) row["perplexity"] = std::exp(-measured.log_probability);
  for (const char* name :
       {"dense_layers", "filter_layers", "layer_budgets", "decode_strategy_because"})
    if (measured.stats.contains(name)) row[name] = measured.stats[name];
  for (const auto& layer : measured.sums.layers()) {
    Json heads = Json::array();
    for (const ComparisonSum& head : layer) heads.push_back(head.json());
    row["layers"].push_back(std::move(heads));
  }
  return row;
}

void print_table(Terminal& terminal, const Json& result) {
  terminal.print(
      string_printf("\n%-14s  %6s  %9s  %9s  %9s  %9s  %7s  %7s  %7s  %7s  %7s  %7s  %7s  %7s\n",
                    "strategy", "budget", "tokens", "summaries", "keys", "a head's", "finds",
                    "mass", "certain", "least", "error", "largest", "recall", "claimed"));
  for (const Json& row : result.at("compared")) {
    const auto share = [&](const char* name) {
      return row.contains(name) ? string_printf("%.2f%%", 100 * row[name].get<double>())
                                : std::string("-");
    };
    const auto keys = [&](const char* name) {
      return row.contains(name) ? grouped(static_cast<uint64_t>(row[name].get<double>()))
                                : std::string("-");
    };
    terminal.print(string_printf(
        "%-14s  %6s  %9.1f  %9s  %9s  %9s  %7s  %7s  %7s  %7s  %7s  %7s  %7s  %7s\n",
        row["strategy"].get<std::string>().c_str(), row["budget"].get<std::string>().c_str(),
        row["tokens"].get<double>(),
        byte_count(static_cast<uint64_t>(row["summary_bytes_per_token"].get<double>())).c_str(),
        keys("keys_scanned").c_str(), keys("search_keys").c_str(), share("search_recall").c_str(),
        share("mass").c_str(), share("certificate").c_str(), share("min_mass").c_str(),
        share("error").c_str(), share("largest_error").c_str(), share("recall").c_str(),
        share("mass_estimated").c_str()));
  }
  terminal.print(
      "\nPer layer and KV head, means over query heads and tokens, layers with full attention "
      "included:\n"
      "tokens: read; keys: scanned to select them; a head's: keys that the search of one query "
      "head "
      "alone scans;\n"
      "finds: share of the 100 largest scores that this search finds; summaries: bytes read to "
      "select, per token;\n"
      "mass: share of the exact attention that was read; least: the smallest one; certain: a lower "
      "bound of it;\n"
      "claimed: the strategy's own estimate, without samples; error: of the output, relative;\n"
      "recall: share of the 100 largest scores that was read.\n");
}

}  // namespace

void run_recall(Console& console, const RecallArguments& arguments) {
  expect_one_source(arguments.source);
  if (arguments.source.document.empty() && arguments.source.cache.empty())
    throw Failure(exit_usage, "no document; name one with -f FILE, or a cache file with -c FILE");
  if (arguments.steps == 0 && arguments.questions.empty())
    throw Failure(exit_usage, "--steps is 0 and there is no question: nothing to compare");
  expect_unused(arguments.output, arguments.source.force);
  Recall recall(console, arguments);
  const std::vector<Measured> measured = recall.run();
  Json& result = console.result;
  result["build"] = Json::parse(kv_build_info());
  result["model"] = {{"path", arguments.model.path},
                     {"name", recall.info.name},
                     {"layers", recall.info.layers},
                     {"heads", recall.info.heads},
                     {"kv_heads", recall.info.kv_heads}};
  result["tokens"] = recall.tokens;
  result["questions"] = arguments.questions;
  for (const Measured& one : measured) result["compared"].push_back(row_json(one, recall.info));
  write_file(arguments.output, json_text(result));
  if (!console.json) print_table(console.terminal, result);
  console.terminal.note("All results are in " + arguments.output);
}

}  // namespace tool
