#include "eval_run.h"

#include <algorithm>
#include <filesystem>

#include "argument_values.h"
#include "failure.h"
#include "files.h"
#include "number_text.h"
#include "sequence_text.h"
#include "strategies.h"

namespace tool {
namespace {

// tokens of the context for a conversation, or for the text after the document
constexpr uint64_t eval_question_room = 1024;
// the longest expected answers, two UUIDs and ten words, have 100 and 30
constexpr uint32_t answer_tokens = 160, quote_tokens = 48;
constexpr uint64_t usual_steps = 60;  // of a question and its answer

uint64_t steps_of(const Question& question) {
  return question.task == Task::perplexity ? following_tokens : usual_steps * question.turns.size();
}

}  // namespace

std::vector<Method> methods_of(const std::vector<std::string>& strategies,
                               const std::vector<NamedBudget>& budgets, const SessionFlags& flags) {
  const std::vector<kv_strategy_info> known = known_strategies();
  std::vector<Method> methods;
  const auto add_once = [&](Method method) {
    const auto same = [&](const Method& m) {
      return m.strategy == method.strategy && m.budget.name == method.budget.name;
    };
    if (std::none_of(methods.begin(), methods.end(), same)) methods.push_back(std::move(method));
  };
  for (const std::string& name : strategies) {
    bool found = false;
    for (const kv_strategy_info& info : known) {
      if (name != "all" && name != info.name) continue;
      found = true;
      const bool has_budget = info.budget_floor > 0;
      if (!has_budget) add_once({info.name, {}});
      for (const NamedBudget& budget : budgets)
        if (has_budget) add_once({info.name, budget});
    }
    if (!found)
      throw Failure(exit_usage, "--strategy: unknown strategy '" + name + "'; strategies are " +
                                    listed(strategy_choices("all")));
  }
  std::vector<std::string> names;
  names.reserve(methods.size());
  for (const Method& method : methods) names.push_back(method.strategy);
  expect_parameters_used(flags, names);
  return methods;
}

SessionFlags flags_for(const SessionFlags& flags, const Method& method) {
  return eval_flags(flags, method.strategy, method.budget.value);
}

Evaluation::Evaluation(Console& console, const EvalArguments& arguments)
    : AnyEvaluation(console, arguments),
      methods_(methods_of(arguments.strategies,
                          arguments.budgets.empty() ? budgets_of("1%,2%,5%") : arguments.budgets,
                          arguments.session)) {
  prepare(arguments.strategies);
  for (const uint64_t length : arguments.lengths)
    if (length > info_.context_tokens)
      throw Failure(exit_usage, "--length: " + grouped(length) +
                                    " tokens are more than the model's context of " +
                                    grouped(info_.context_tokens));
  console.terminal.draw("Generating documents");
  make_jobs(haystack());
  console.terminal.erase();
}

// A document does not depend on the requested tasks, so one prefill serves all of them.
void Evaluation::make_jobs(const Haystack& haystack) {
  const std::vector<Task>& tasks = arguments_.tasks;
  const std::string prefill = prefill_identity_of(flags_);
  for (const uint64_t length : arguments_.lengths) {
    for (const Kind kind : {Kind::story, Kind::table}) {
      if (std::none_of(tasks.begin(), tasks.end(),
                       [=](Task task) { return kind_for(task) == kind; }))
        continue;
      for (uint32_t number = 0; number < documents(); ++number) {
        DocumentPlan plan{length, number, arguments_.questions, depths(), arguments_.seed};
        plan.tokens = std::min(
            length, info_.context_tokens - std::min(eval_question_room, info_.context_tokens / 2));
        Job job{kind, length, plan.tokens, {}, {}};
        job.document =
            kind == Kind::story ? make_story(haystack, plan) : make_table(haystack, plan);
        std::erase_if(job.document.questions, [&](const Question& q) {
          return std::find(tasks.begin(), tasks.end(), q.task) == tasks.end();
        });
        job.name = hex(hash_of(model_identity_ + " " + prefill + " " + job.document.text));
        requested_ += job.document.questions.size() * methods_.size();
        jobs_.push_back(std::move(job));
      }
    }
  }
}

std::string Evaluation::key_of(const Job& job, const Method& method,
                               const Question& question) const {
  std::string parts = answer_identity(method.strategy) + " " + job.name + " " + method.budget.name +
                      " " + name_of(question.task);
  for (const Turn& turn : question.turns) {
    parts += "\n" + turn.question;
    for (const std::string& expected : turn.expected) parts += "\n" + expected;
  }
  return hex(hash_of(parts));
}

bool Evaluation::is_open(const Job& job, const Method& method) const {
  const auto& questions = job.document.questions;
  return std::any_of(questions.begin(), questions.end(),
                     [&](const Question& q) { return !stored_.find(key_of(job, method, q)); });
}

std::vector<const Result*> Evaluation::results() const {
  std::vector<const Result*> results;
  for (const Method& method : methods_)
    for (const Job& job : jobs_)
      for (const Question& question : job.document.questions)
        if (const Result* result = stored_.find(key_of(job, method, question)))
          results.push_back(result);
  return results;
}

void Evaluation::expect(const Job& job) {
  bool any = false;
  for (const Method& method : methods_) {
    for (const Question& question : job.document.questions) {
      if (stored_.find(key_of(job, method, question))) continue;
      estimate_.expect(Work::decode, decode_cost(steps_of(question), job.tokens));
      any = true;
    }
  }
  if (any) estimate_.expect(Work::prefill, prefill_cost(job.tokens));
}

void Evaluation::ask(kv_session* session, const Turn& turn, uint32_t max_tokens, bool keep,
                     Result* result) {
  kv_generate_options options = initialised<kv_generate_options>();
  options.max_tokens = max_tokens;
  options.flags = keep ? KV_KEEP_TURN : 0;
  std::string text;
  const kv_answer facts = generate(session, turn.question, options, &text, result);
  result->questions.push_back(turn.question);
  result->expected.push_back(turn.expected);
  result->answers.push_back(std::move(text));
  result->summary_bytes += stats_json(session).value("last_summary_bytes", uint64_t{0});
  result->seconds += static_cast<double>(facts.total_ns) * 1e-9;
}

// Leaves the session as it was.
void Evaluation::converse(kv_session* session, const Question& question, Result* result) {
  if (question.turns.size() == 1) {
    ask(session, question.turns.front(),
        question.task == Task::quote ? quote_tokens : answer_tokens, false, result);
  } else {
    const Session conversation = fork(session);
    for (const Turn& turn : question.turns)
      ask(conversation.get(), turn, answer_tokens, true, result);
  }
  result->score = score_of(question, result->answers);
}

void Evaluation::score_text(kv_session* session, const std::string& text, Result* result) {
  std::vector<int32_t> tokens = tokenize(model_.get(), text, 0);
  tokens.resize(std::min(tokens.size(), following_tokens));
  std::vector<float> logarithms(tokens.size());
  const kv_control control = control_of(console_);
  kv_error error{};
  const auto start = std::chrono::steady_clock::now();
  expect_done(
      kv_session_score(session, tokens.data(), tokens.size(), logarithms.data(), &control, &error),
      error);
  result->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const float logarithm : logarithms)
    result->score += static_cast<double>(logarithm) / static_cast<double>(tokens.size());
  result->steps = tokens.size();
  const kv_session_stats stats = stats_of(session);
  result->tokens_read = stats.last_tokens_read;
  result->tokens_present = stats.last_tokens_present;
  result->summary_bytes = stats_json(session).value("last_summary_bytes", uint64_t{0});
}

void Evaluation::answer_all(const Job& job, const Method& method) {
  const Session session = files_->load(job.name, flags_for(flags_, method));
  progress_.begin(method.strategy + " " + method.budget.name +
                  (method.budget.name.empty() ? "" : " ") + "over " + name_of(job.kind) + " of " +
                  grouped(job.tokens) + " tokens");
  for (const Question& question : job.document.questions) {
    Result result;
    result.key = key_of(job, method, question);
    if (stored_.find(result.key)) continue;
    result.document = job.name;
    result.length = job.length;
    result.strategy = method.strategy;
    result.budget = method.budget.name;
    result.task = question.task;
    result.depth = question.depth;
    if (question.task == Task::perplexity)
      score_text(session.get(), question.turns.front().expected.front(), &result);
    else converse(session.get(), question, &result);
    stored_.add(std::move(result));
    progress_.step(Work::decode, decode_cost(steps_of(question), job.tokens));
  }
}

void Evaluation::run() {
  for (const Job& job : jobs_) expect(job);
  for (const Job& job : jobs_) {
    std::vector<Method> open;
    std::copy_if(methods_.begin(), methods_.end(), std::back_inserter(open),
                 [&](const Method& m) { return is_open(job, m); });
    if (open.empty()) continue;
    files_->prefill({job.name,
                     std::string(name_of(job.kind)) + " of " + grouped(job.tokens) + " tokens",
                     job.tokens, job.document.text});
    for (const Method& method : open) answer_all(job, method);
  }
  console_.terminal.erase();
}

}  // namespace tool
