// kvasir calibrate: measures on a text with questions which layers of a model should select for the
// layers after them.
#include <algorithm>

#include "answer.h"
#include "calibration.h"
#include "commands.h"
#include "comparison.h"
#include "eval_progress.h"
#include "eval_tasks.h"
#include "eval_values.h"
#include "failure.h"
#include "files.h"
#include "filter_choice.h"
#include "kvasir_experimental.h"
#include "number_text.h"
#include "output.h"
#include "strategies.h"

namespace tool {
namespace {

constexpr uint32_t calibration_tokens = 48;
constexpr size_t scored_tokens = 96;         // of the text that follows
constexpr uint64_t calibration_room = 1024;  // tokens after the document

// More than `tokens` tokens of generated sentences, in place of a given text.
std::string made_text(uint64_t tokens, uint64_t seed, const CountTokens& count) {
  Random random("calibration " + std::to_string(seed));
  std::string text;
  for (uint64_t n = 0; n < tokens * 5 / 4;) {
    std::string part;
    for (int i = 0; i < 20; ++i) {
      const std::string one = any_word(&random), other = any_word(&random),
                        entity = any_entity(&random);
      switch (random.below(4)) {
        case 0:
          part += "The " + one + " of the " + entity + " was left next to the " + other + ". ";
          break;
        case 1:
          part +=
              "Nobody at the " + entity + " had seen the " + one + " or the " + other + " before. ";
          break;
        case 2:
          part +=
              "On " + any_date(&random) + " they carried the " + one + " to the " + entity + ". ";
          break;
        default:
          part += "A " + one + " and a " + other + " stood in front of the " + entity +
                  ", and it rained. ";
      }
    }
    n += count(part);
    text += part;
  }
  return text;
}

class Calibration {
 public:
  Calibration(Console& console, const CalibrateArguments& arguments)
      : console_(console), arguments_(arguments), model_(open_model(console, arguments.model)),
        progress_(console.terminal, &estimate_) {
    info = info_of(model_.get());
    if (arguments.length + calibration_room > info.context_tokens)
      throw Failure(exit_usage, "--length: the model's context has " +
                                    grouped(info.context_tokens) +
                                    " tokens, of which questions need 1,024");
    const CountTokens count = [model = model_.get()](std::string_view text) {
      return count_tokens(model, text);
    };
    const Haystack haystack(
        arguments.texts.empty()
            ? made_text(std::max(arguments.length, calibration_room), arguments.seed, count)
            : joined_texts(arguments.texts),
        count);
    document_ = make_story(haystack, {arguments.length, 0, arguments.questions, 1, arguments.seed});
    std::erase_if(document_.questions, [](const Question& q) { return q.turns.size() != 1; });
  }

  void run() {
    SessionFlags flags = arguments_.session;
    flags.strategy = "full";
    const Session session = open_session(console_, model_.get(), flags);
    kv_error error{};
    check(kv_session_measure(session.get(), KV_MEASURE_LAYERS, &error), error);
    estimate_.expect(Work::prefill, prefill_cost(arguments_.length));
    estimate_.expect(Work::decode, decode_cost(1, arguments_.length) *
                                       static_cast<double>(document_.questions.size()));
    prefill(session.get());
    progress_.begin("answering");
    for (const Question& question : document_.questions) {
      question.task == Task::perplexity
          ? score(session.get(), question.turns.front().expected.front())
          : ask(session.get(), question.turns.front());
      sums.add(stats_json(session.get()));
      progress_.step(Work::decode, decode_cost(1, arguments_.length));
    }
    console_.terminal.erase();
    if (sums.covered_steps() == 0)
      throw Failure(exit_usage, "--length: so few tokens leave nothing to select");
  }

  // The number of filter layers, and the largest number of layers with full attention: those of the
  // strategy's default, or two more per further filter layer.
  std::pair<uint32_t, uint32_t> limits() {
    SessionFlags flags = arguments_.session;
    flags.strategy = filter_strategy;
    const Session session = open_session(console_, model_.get(), flags);
    const auto filters = stats_json(session.get()).at("filter_layers").get<std::vector<uint32_t>>();
    const uint32_t count =
        arguments_.filters > 0 ? arguments_.filters : static_cast<uint32_t>(filters.size());
    return {count, std::min(info.layers, filters.front() + 2 * count)};
  }

  Json identity() const { return model_identity(arguments_.model.path, model_.get()); }
  size_t questions() const { return document_.questions.size(); }

  kv_model_info info{};
  ComparisonSums sums;

 private:
  [[noreturn]] static void stopped() {
    throw Failure(exit_cancelled, "stopped; nothing was written");
  }

  void prefill(kv_session* session) {
    progress_.begin("prefilling " + grouped(arguments_.length) + " tokens");
    kv_control control = control_of(console_);
    control.user = this;
    control.progress = [](int32_t, uint64_t done, uint64_t, void* user) {
      auto& self = *static_cast<Calibration*>(user);
      self.progress_.step(Work::prefill, prefill_cost(done) - self.reported_);
      self.reported_ = prefill_cost(done);
      return int32_t{0};
    };
    kv_error error{};
    const kv_status status = kv_prefill(session, document_.text.data(), document_.text.size(),
                                        &control, nullptr, nullptr, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
  }

  void ask(kv_session* session, const Turn& turn) {
    kv_generate_options options = initialised<kv_generate_options>();
    options.max_tokens = calibration_tokens;
    const kv_control control = control_of(console_);
    kv_error error{};
    std::string text;
    const kv_status status = kv_generate(session, turn.question.data(), turn.question.size(),
                                         &options, &control, append_text, &text, nullptr, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
  }

  void score(kv_session* session, const std::string& text) {
    std::vector<int32_t> tokens = tokenize(model_.get(), text, 0);
    tokens.resize(std::min(tokens.size(), scored_tokens));
    std::vector<float> logarithms(tokens.size());
    const kv_control control = control_of(console_);
    kv_error error{};
    const kv_status status = kv_session_score(session, tokens.data(), tokens.size(),
                                              logarithms.data(), &control, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
  }

  Console& console_;
  const CalibrateArguments& arguments_;
  Model model_;
  Document document_;
  Estimate estimate_;
  EvalProgress progress_;
  double reported_ = 0;  // cost
};

void print_choice(Terminal& terminal, const Json& result) {
  const Json& covered = result.at("covered");
  terminal.print(
      "\nPercent of a layer's attention (column) in sinks, window and the 5% of tokens that "
      "another "
      "layer (row) attends most:\n\n      ");
  for (size_t j = 0; j < covered.size(); ++j) terminal.print(string_printf("%4zu", j));
  for (size_t i = 0; i < covered.size(); ++i) {
    terminal.print(string_printf("\n%4zu  ", i));
    for (const Json& share : covered[i])
      terminal.print(string_printf("%4.0f", 100 * share.get<double>()));
  }
  terminal.print(
      "\n\nfilter layers " + list_text(result.at("filter_layers").get<std::vector<uint32_t>>()) +
      "; " +
      string_printf("%u of %zu layers use full attention; the others find %.1f%% of their "
                    "attention in the selected tokens\n",
                    result.at("dense_layers").get<uint32_t>(), covered.size(),
                    100 * result.at("mass_found").get<double>()));
}

}  // namespace

void run_calibrate(Console& console, const CalibrateArguments& arguments) {
  const std::string path =
      arguments.output.empty() ? calibration_path(arguments.model.path) : arguments.output;
  expect_unused(path, arguments.force);
  Calibration calibration(console, arguments);
  const auto [count, max_dense] = calibration.limits();
  if (count > calibration.info.layers)
    throw Failure(exit_usage,
                  "--filters: the model has " + grouped(calibration.info.layers) + " layers");
  calibration.run();
  const std::vector<std::vector<double>> covered = calibration.sums.covered();
  const FilterChoice choice = choose_filters(covered, count, max_dense);
  const uint32_t sparse = calibration.info.layers - choice.dense;
  console.result = {{"model", calibration.identity()},
                    {"filter_layers", choice.filters},
                    {"dense_layers", choice.dense},
                    {"mass_found", sparse > 0 ? 1 - choice.lost / sparse : 1.0},
                    {"texts", arguments.texts},
                    {"tokens", arguments.length},
                    {"questions", calibration.questions()},
                    {"steps", calibration.sums.covered_steps()},
                    {"covered", covered}};
  write_file(path, json_text(console.result));
  if (!console.json) print_choice(console.terminal, console.result);
  console.terminal.note("Saved in " + path);
}

}  // namespace tool
