// kvasir recall: how strategies read one document, beside exact attention.
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
#include "number_text.h"
#include "output.h"
#include "prefill.h"
#include "strategies.h"

namespace tool {
namespace {

constexpr uint32_t answer_tokens = 64;
constexpr double usual_steps = 60;  // of a question and its answer

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
        methods_(methods_of(arguments.strategies, arguments.budgets, arguments.select_tokens)),
        model_(open_model(console, arguments.model)), progress_(console.terminal, &estimate_) {
    kv_error error{};
    info.struct_size = sizeof info;
    check(kv_model_info(model_.get(), &info, &error), error);
    flags_ = with_calibration(console, arguments.model, model_.get(), arguments.session,
                              arguments.strategies);
    flags_.compare = 1;
    flags_.certify = true;
    // a session has it from its opening, with a strategy that takes it
    for (const Method& method : methods_)
      if (method.select_tokens != 0)
        flags_.strategy = method.strategy, flags_.select_tokens = method.select_tokens;
    for (const Method& method : methods_)
      if (flags_.head_graphs && takes_head_graphs(method.strategy))
        flags_.strategy = method.strategy;
    OpenDocument opened = open_document(console, model_.get(), arguments.source, flags_);
    if (opened.save_failure) console.terminal.error(opened.save_failure->what());
    document_ = std::move(opened.session);
    take_off_end();
  }

  std::vector<Measured> run() {
    const double cost =
        answering_cost(arguments_.steps, tokens) +
        static_cast<double>(arguments_.questions.size()) * answering_cost(60, tokens);
    estimate_.expect(Work::answering, cost * static_cast<double>(methods_.size()));
    std::vector<Measured> all;
    for (const Method& method : methods_) all.push_back(measure(method));
    console_.terminal.erase();
    return all;
  }

  kv_model_information info{};
  uint64_t tokens = 0;  // of the document, with its end

 private:
  void take_off_end() {
    std::vector<int32_t> ids = tokens_of(document_.get());
    tokens = ids.size();
    if (arguments_.steps == 0) return;
    if (tokens <= 2 * uint64_t{arguments_.steps})
      throw Failure(exit_usage, "--steps: the document has " + grouped(tokens) +
                                    " tokens, too few to take " + grouped(arguments_.steps) +
                                    " off");
    end_.assign(ids.end() - arguments_.steps, ids.end());
    shortened_ = fork();
    kv_error error{};
    check(kv_rewind(shortened_.get(), tokens - arguments_.steps, &error), error);
  }

  Session fork(kv_session* session = nullptr) {
    kv_error error{};
    kv_session* forked = nullptr;
    check(kv_fork(session != nullptr ? session : document_.get(), &forked, &error), error);
    return Session(forked);
  }

  Session fork_with(kv_session* session, const Method& method) {
    Session forked = fork(session);
    kv_error error{};
    check(kv_session_set_strategy(forked.get(), method.strategy.c_str(), method.budget.value.tokens,
                                  method.budget.value.fraction, &error),
          error);
    return forked;
  }

  [[noreturn]] static void stopped() {
    throw Failure(exit_cancelled, "stopped; nothing was written");
  }

  Measured measure(const Method& method) {
    Measured measured{method, {}, 0, {}};
    label_ = method.strategy + (method.budget.name.empty() ? "" : " ") + method.budget.name;
    if (arguments_.steps > 0) read_end(&measured);
    if (!arguments_.questions.empty()) {
      const Session session = fork_with(document_.get(), method);
      for (const std::string& question : arguments_.questions)
        ask(session.get(), question, &measured);
    }
    return measured;
  }

  void read_end(Measured* measured) {
    const Session session = fork_with(shortened_.get(), measured->method);
    progress_.begin(label_ + ": the document's end");
    done_ = 0;
    kv_call_options options = call_options(console_, nullptr);
    options.progress_user = this;
    options.progress = [](int32_t, uint64_t done, uint64_t, void* user) {
      auto& self = *static_cast<Recall*>(user);
      self.progress_.step(Work::answering, answering_cost(done - self.done_, self.tokens));
      self.done_ = done;
      return int32_t{0};
    };
    std::vector<float> logarithms(end_.size());
    kv_error error{};
    const kv_status status =
        kv_score(session.get(), end_.data(), end_.size(), logarithms.data(), &options, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
    for (const float logarithm : logarithms)
      measured->log_probability +=
          static_cast<double>(logarithm) / static_cast<double>(end_.size());
    measured->stats = stats_of(session.get());
    measured->sums.add(measured->stats);
  }

  void ask(kv_session* session, const std::string& question, Measured* measured) {
    progress_.begin(label_ + ": questions");
    kv_generate_options options;
    kv_generate_options_init(&options, sizeof options);
    options.max_tokens = answer_tokens;
    options.cancel = console_.interrupt.token();
    kv_error error{};
    std::string text;
    const kv_status status = kv_generate(session, question.data(), question.size(), &options,
                                         append_text, &text, nullptr, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
    measured->stats = stats_of(session);
    measured->sums.add(measured->stats);
    progress_.step(Work::answering, answering_cost(static_cast<uint64_t>(usual_steps), tokens));
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

// Tokens that were attended, and keys scanned to choose for one of them in one layer and KV head.
uint64_t steps_of(const Measured& measured, const kv_model_information& info) {
  const auto& layers = measured.sums.layers();
  return layers.empty() || layers.front().empty()
             ? 0
             : layers.front().front().queries / (info.heads / info.kv_heads);
}

double per(uint64_t sum, uint64_t count) {
  return count > 0 ? static_cast<double>(sum) / static_cast<double>(count) : 0;
}

Json row_json(const Measured& measured, const kv_model_information& info) {
  const uint64_t steps = steps_of(measured, info);
  Json row = {{"strategy", measured.method.strategy},
              {"budget", measured.method.budget.name},
              {"steps", steps}};
  row.update(measured.sums.all().json());
  row["keys_scanned"] = per(measured.sums.keys_scanned(), steps * info.layers * info.kv_heads);
  row["summary_bytes_per_token"] = per(measured.sums.summary_bytes(), steps);
  if (measured.log_probability < 0) row["perplexity"] = std::exp(-measured.log_probability);
  for (const char* name : {"dense_layers", "filter_layers", "layer_budgets", "planned_because"})
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
      printed("\n%-14s  %6s  %9s  %9s  %9s  %9s  %7s  %7s  %7s  %7s  %7s  %7s  %7s  %7s\n",
              "strategy", "budget", "tokens", "summaries", "keys", "a head's", "finds", "mass",
              "certain", "least", "error", "largest", "recall", "claimed"));
  for (const Json& row : result.at("compared")) {
    const auto share = [&](const char* name) {
      return row.contains(name) ? printed("%.2f%%", 100 * row[name].get<double>())
                                : std::string("-");
    };
    const auto keys = [&](const char* name) {
      return row.contains(name) ? grouped(static_cast<uint64_t>(row[name].get<double>()))
                                : std::string("-");
    };
    terminal.print(printed(
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
      "\ntokens, keys: read, and scanned to choose, by each layer and key/value head for each "
      "token; a head's: scanned by the search of one query head,\n"
      "were it alone, finds: the share of the 100 best tokens among these; summaries: bytes read "
      "to choose, for each token;\n"
      "mass: of the exact attention that was read, certain: at least, by its certificate, claimed: "
      "besides samples, as the strategy estimates it;\n"
      "error: of the output, relative; recall: of the 100 best tokens. Layers that read everything "
      "are in the means.\n");
}

}  // namespace

void run_recall(Console& console, const RecallArguments& arguments) {
  expect_one_source(arguments.source);
  if (arguments.source.document.empty() && arguments.source.cache.empty())
    throw Failure(exit_usage, "no document; name one with -f FILE, or its cache with -c FILE");
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
  console.terminal.note("All of it is in " + arguments.output);
}

}  // namespace tool
