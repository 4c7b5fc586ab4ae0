// kvasir calibrate: which layers of a model should choose for the others, measured on a text with
// questions.
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
#include "number_text.h"
#include "output.h"

namespace tool {
namespace {

constexpr uint32_t answer_tokens = 48;
constexpr size_t scored_tokens = 96;      // of the text that follows
constexpr uint64_t question_room = 1024;  // tokens behind the document

// Sentences of known words, where no text is given: more than `tokens` tokens of them.
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
          part += "The " + one + " of the " + entity + " was left beside the " + other + ". ";
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
    kv_error error{};
    info.struct_size = sizeof info;
    check(kv_model_info(model_.get(), &info, &error), error);
    if (arguments.length + question_room > info.context)
      throw Failure(exit_usage, "--length: the model was trained for " + grouped(info.context) +
                                    " tokens, of which questions need 1,024");
    const CountTokens count = [model = model_.get()](std::string_view text) {
      return count_tokens(model, text);
    };
    const Haystack haystack(
        arguments.texts.empty()
            ? made_text(std::max(arguments.length, question_room), arguments.seed, count)
            : joined_texts(arguments.texts),
        count);
    document_ = make_story(haystack, {arguments.length, 0, arguments.questions, 1, arguments.seed});
    std::erase_if(document_.questions, [](const Question& q) { return q.turns.size() != 1; });
  }

  void run() {
    SessionFlags flags = arguments_.session;
    flags.strategy = "full";
    flags.compare = 2;
    const Session session = open_session(console_, model_.get(), flags);
    estimate_.expect(Work::reading, reading_cost(arguments_.length));
    estimate_.expect(Work::answering, answering_cost(1, arguments_.length) *
                                          static_cast<double>(document_.questions.size()));
    read(session.get());
    progress_.begin("answering");
    for (const Question& question : document_.questions) {
      question.task == Task::perplexity
          ? score(session.get(), question.turns.front().expected.front())
          : ask(session.get(), question.turns.front());
      sums.add(stats_of(session.get()));
      progress_.step(Work::answering, answering_cost(1, arguments_.length));
    }
    console_.terminal.erase();
    if (sums.covered_steps() == 0)
      throw Failure(exit_usage, "--length: so few tokens leave nothing to choose");
  }

  // How many layers filter, and how many may attend everything: as with the layers that the
  // strategy takes by itself, or as many more as there are more filters.
  std::pair<uint32_t, uint32_t> wanted() {
    SessionFlags flags = arguments_.session;
    flags.strategy = filter_strategy;
    const Session session = open_session(console_, model_.get(), flags);
    const auto filters = stats_of(session.get()).at("filter_layers").get<std::vector<uint32_t>>();
    const uint32_t count =
        arguments_.filters > 0 ? arguments_.filters : static_cast<uint32_t>(filters.size());
    return {count, std::min(info.layers, filters.front() + 2 * count)};
  }

  Json identity() const { return model_identity(arguments_.model.path, model_.get()); }
  size_t questions() const { return document_.questions.size(); }

  kv_model_information info{};
  ComparisonSums sums;

 private:
  [[noreturn]] static void stopped() {
    throw Failure(exit_cancelled, "stopped; nothing was written");
  }

  void read(kv_session* session) {
    progress_.begin("reading " + grouped(arguments_.length) + " tokens");
    kv_call_options options = call_options(console_, nullptr);
    options.progress_user = this;
    options.progress = [](int32_t, uint64_t done, uint64_t, void* user) {
      auto& self = *static_cast<Calibration*>(user);
      self.progress_.step(Work::reading, reading_cost(done) - self.told_);
      self.told_ = reading_cost(done);
      return int32_t{0};
    };
    kv_error error{};
    const kv_status status = kv_prefill(session, document_.text.data(), document_.text.size(),
                                        &options, nullptr, nullptr, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
  }

  void ask(kv_session* session, const Turn& turn) {
    kv_generate_options options;
    kv_generate_options_init(&options, sizeof options);
    options.max_tokens = answer_tokens;
    options.cancel = console_.interrupt.token();
    kv_error error{};
    std::string text;
    const kv_status status = kv_generate(session, turn.question.data(), turn.question.size(),
                                         &options, append_text, &text, nullptr, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
  }

  void score(kv_session* session, const std::string& text) {
    std::vector<int32_t> tokens = tokenize(model_.get(), text, 0);
    tokens.resize(std::min(tokens.size(), scored_tokens));
    std::vector<float> logarithms(tokens.size());
    const kv_call_options options = call_options(console_, nullptr);
    kv_error error{};
    const kv_status status =
        kv_score(session, tokens.data(), tokens.size(), logarithms.data(), &options, &error);
    if (status == KV_CANCELLED) stopped();
    check(status, error);
  }

  Console& console_;
  const CalibrateArguments& arguments_;
  Model model_;
  Document document_;
  Estimate estimate_;
  EvalProgress progress_;
  double told_ = 0;
};

void print_choice(Terminal& terminal, const Json& result) {
  const Json& covered = result.at("covered");
  terminal.print(
      "\nOf a layer's attention (across), how much is on the 5% of the tokens that another layer "
      "(down) attends most, sinks and window:\n\n      ");
  for (size_t j = 0; j < covered.size(); ++j) terminal.print(printed("%4zu", j));
  for (size_t i = 0; i < covered.size(); ++i) {
    terminal.print(printed("\n%4zu  ", i));
    for (const Json& share : covered[i])
      terminal.print(printed("%4.0f", 100 * share.get<double>()));
  }
  terminal.print("\n\nfilter layers " +
                 list_text(result.at("filter_layers").get<std::vector<uint32_t>>()) + "; " +
                 printed("%u of %zu layers attend everything, the others find %.1f%% of their "
                         "attention in what is chosen for them\n",
                         result.at("dense_layers").get<uint32_t>(), covered.size(),
                         100 * result.at("mass_found").get<double>()));
}

}  // namespace

void run_calibrate(Console& console, const CalibrateArguments& arguments) {
  const std::string path =
      arguments.output.empty() ? calibration_path(arguments.model.path) : arguments.output;
  expect_unused(path, arguments.force);
  Calibration calibration(console, arguments);
  const auto [count, max_dense] = calibration.wanted();
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
  console.terminal.note("Kept in " + path);
}

}  // namespace tool
