#include "eval_base.h"

#include "answer.h"
#include "calibration.h"
#include "failure.h"
#include "files.h"
#include "number_text.h"
#include "strategies.h"
#include "system.h"

namespace tool {

AnyEvaluation::AnyEvaluation(Console& console, const EvalArguments& arguments)
    : console_(console), arguments_(arguments), flags_(arguments.session),
      stored_(arguments.work + "/results.jsonl"), progress_(console.terminal, &estimate_) {}

void AnyEvaluation::prepare(const std::vector<std::string>& strategies) {
  model_ = open_model(console_, arguments_.model);
  info_ = info_of(model_.get());
  flags_ = with_calibration(console_, arguments_.model, model_.get(), flags_, strategies);
  model_identity_ = model_identity_of(console_, arguments_.model, model_.get());
  program_identity_ = hex(sampled_hash(system::program_path()));
  files_.emplace(EvalDocuments::Parts{console_, model_.get(), arguments_.work,
                                      eval_flags(flags_, "auto"), estimate_, progress_,
                                      [this] { stopped(); }});
}

Haystack AnyEvaluation::haystack() {
  return Haystack(joined_texts(arguments_.texts), [model = model_.get()](std::string_view text) {
    return count_tokens(model, text);
  });
}

std::string AnyEvaluation::answer_identity(const std::string& strategy) const {
  std::string parts = program_identity_ + " " + strategy + " " +
                      (flags_.dense_layers ? std::to_string(*flags_.dense_layers) : "default") +
                      (flags_.separate_heads ? " separate " : " shared ") +
                      (flags_.coverage > 0 ? std::to_string(flags_.coverage) : "") +
                      (flags_.head_graphs ? " graphs " : "") +
                      (flags_.select_tokens ? " by " + std::to_string(flags_.select_tokens) : "");
  if (strategy == filter_strategy)
    parts += " " + flags_.filter_layers + " " + std::to_string(flags_.filter_window);
  return parts;
}

void AnyEvaluation::stopped() const {
  throw Failure(exit_cancelled, "stopped; " + grouped(results().size()) + " of " +
                                    grouped(requested()) + " answers are in " + arguments_.work +
                                    "; run the same command again to continue");
}

void AnyEvaluation::expect_done(kv_status status, const kv_error& error) const {
  if (status == KV_CANCELLED) stopped();
  check(status, error);
}

kv_answer AnyEvaluation::generate(kv_session* session, const std::string& question,
                                  const kv_generate_options& options, std::string* text,
                                  Result* result) {
  const kv_control control = control_of(console_);
  kv_answer facts = initialised<kv_answer>();
  kv_error error{};
  expect_done(kv_generate(session, question.data(), question.size(), &options, &control,
                          append_text, text, &facts, &error),
              error);
  result->steps += facts.question_tokens + facts.answer_tokens;
  result->tokens_read += facts.tokens_read;
  result->tokens_present += facts.tokens_present;
  return facts;
}

}  // namespace tool
