// kvasir bench: the tables and the JSON of the measurements.
#include <algorithm>

#include "bench_compare.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "number_text.h"
#include "output.h"
#include "strategies.h"

namespace tool {
namespace {

// Median tokens per second of a strategy at a depth; 0: not measured.
double speed_of(const DepthResult& result, const std::string& strategy) {
  for (const DecodeSpeed& speed : result.decode)
    if (speed.strategy == strategy) return speed.tokens_per_second.median();
  return 0;
}

std::string ratio(double value, double base) {
  return value > 0 && base > 0 ? string_printf("%.2f", value / base) : "-";
}

std::string budget_text(const Budget& budget) {
  if (budget.tokens > 0) return grouped(budget.tokens) + " tokens";
  return budget.fraction > 0 ? string_printf("%g%%", budget.fraction * 100) : "the strategy's own";
}

void print_speeds(Terminal& terminal, const std::vector<DepthResult>& results,
                  const BenchArguments& arguments) {
  const std::string shallow = "vs " + grouped(results.front().depth);
  terminal.print(string_printf("\n%9s  %12s  %9s  %-9s %12s  %8s  %9s\n", "depth", "prefill t/s",
                               shallow.c_str(), "strategy", "decode t/s", "vs full",
                               shallow.c_str()));
  for (const DepthResult& result : results) {
    const double prefill = result.prefill_tokens_per_second.median();
    const std::string head = string_printf(
        "%9s  %12s  %9s", grouped(result.depth).c_str(), prefill > 0 ? rate(prefill).c_str() : "-",
        ratio(prefill, results.front().prefill_tokens_per_second.median()).c_str());
    for (const DecodeSpeed& speed : result.decode) {
      const double decode = speed.tokens_per_second.median();
      terminal.print(
          (&speed == &result.decode.front() ? head : std::string(head.size(), ' ')) +
          string_printf("  %-9s %12s  %8s  %9s\n", speed.strategy.c_str(),
                        decode > 0 ? rate(decode).c_str() : "-",
                        ratio(decode, speed_of(result, "full")).c_str(),
                        ratio(decode, speed_of(results.front(), speed.strategy)).c_str()));
    }
  }
  terminal.print(string_printf("medians of %u; prefill of %s tokens, decode of %s; budget: %s\n",
                               arguments.repetitions, grouped(arguments.prompt).c_str(),
                               grouped(arguments.generate).c_str(),
                               budget_text(arguments.session.budget).c_str()));
  for (const DepthResult& result : results)
    for (const DecodeSpeed& speed : result.decode)
      if (const std::string part =
              speed.stats.is_object() ? speed.stats.value("gpu_coexecution_share", "") : "";
          !part.empty())
        terminal.print(string_printf("at %s tokens, %s: the GPU reads %s\n",
                                     grouped(result.depth).c_str(), speed.strategy.c_str(),
                                     part.c_str()));
  if (arguments.synthetic)
    terminal.print(string_printf("synthetic documents, seed %llu\n",
                                 static_cast<unsigned long long>(arguments.seed)));
}

void print_mapped(Terminal& terminal, const std::vector<DepthResult>& results) {
  terminal.print(string_printf("\n%9s  %-9s %9s  %12s  %12s  %10s  %10s  %8s  %10s\n", "depth",
                               "strategy", "load", "first token", "decode t/s", "KV", "resident",
                               "of KV", "private"));
  for (const DepthResult& result : results)
    for (const MappedCost& cost : result.mapped)
      terminal.print(string_printf(
          "%9s  %-9s %9s  %12s  %12s  %10s  %10s  %8s  %10s\n", grouped(result.depth).c_str(),
          cost.strategy.c_str(), duration(cost.load_ms.median() / 1e3).c_str(),
          duration(cost.first_token_ms.median() / 1e3).c_str(),
          cost.tokens_per_second.values.empty() ? "-"
                                                : rate(cost.tokens_per_second.median()).c_str(),
          byte_count(cost.kv_bytes).c_str(), byte_count(cost.resident_bytes).c_str(),
          percent(static_cast<double>(cost.resident_bytes), static_cast<double>(cost.kv_bytes))
              .c_str(),
          byte_count(cost.private_bytes).c_str()));
  terminal.print(
      "mapped cache files; KV: keys and values in the file; resident: of the file in memory after "
      "an "
      "answer; private: KV cache outside the file\n");
}

void print_reuse(Terminal& terminal, const ReuseCost& cost) {
  const std::pair<const char*, const Samples*> rows[] = {
      {"load", &cost.load_ms},
      {"first token after it", &cost.first_token_ms},
      {"rewind by 10 tokens, first token", &cost.rewind_ms},
      {"load of the first 90%, first token", &cost.prefix_ms},
      {"100 other tokens at the end", &cost.edit_ms}};
  terminal.print("\nfile of " + byte_count(cost.file_bytes) + ", " + cost.strategy +
                 ": median, first\n");
  for (const auto& [name, samples] : rows)
    terminal.print(string_printf("%36s  %10s  %10s\n", name,
                                 duration(samples->median() / 1e3).c_str(),
                                 duration(samples->values.front() / 1e3).c_str()));
}

void print_compared(Terminal& terminal, const OtherProgram& other,
                    const std::vector<ComparedStep>& steps) {
  terminal.print(
      string_printf("\n%-30s  %14s  %12s  %6s\n", "step", "llama.cpp t/s", "Kvasir t/s", "ratio"));
  for (const ComparedStep& step : steps)
    terminal.print(string_printf("%-30s  %14s  %12s  %6s\n", step.step.c_str(),
                                 rate(step.other).c_str(), rate(step.kvasir).c_str(),
                                 ratio(step.kvasir, step.other).c_str()));
  std::string command;
  for (const std::string& each : other.command) command += " " + each;
  terminal.print("llama.cpp " + other.version + ":" + command + "\n");
}

Json samples_json(const Samples& samples) {
  return {{"median", samples.median()}, {"samples", samples.values}};
}

Json ratio_json(double value, double base) {
  return value > 0 && base > 0 ? Json(value / base) : Json(nullptr);
}

Json depth_json(const DepthResult& result, const DepthResult& shallowest) {
  Json json = {{"depth", result.depth},
               {"prefill_tokens_per_second", samples_json(result.prefill_tokens_per_second)}};
  json["prefill_to_shallowest"] = ratio_json(result.prefill_tokens_per_second.median(),
                                             shallowest.prefill_tokens_per_second.median());
  for (const DecodeSpeed& speed : result.decode) {
    const double median = speed.tokens_per_second.median();
    json["decode"].push_back(
        {{"strategy", speed.strategy},
         {"tokens_per_second", samples_json(speed.tokens_per_second)},
         {"to_full", ratio_json(median, speed_of(result, "full"))},
         {"to_shallowest", ratio_json(median, speed_of(shallowest, speed.strategy))},
         {"stats", speed.stats}});
  }
  for (const MappedCost& cost : result.mapped)
    json["mapped"].push_back({{"strategy", cost.strategy},
                              {"load_ms", samples_json(cost.load_ms)},
                              {"first_token_ms", samples_json(cost.first_token_ms)},
                              {"tokens_per_second", samples_json(cost.tokens_per_second)},
                              {"kv_bytes", cost.kv_bytes},
                              {"resident_bytes", cost.resident_bytes},
                              {"stats", cost.stats}});
  return json;
}

Json reuse_json(const ReuseCost& cost) {
  return {{"strategy", cost.strategy},
          {"file_bytes", cost.file_bytes},
          {"load_ms", samples_json(cost.load_ms)},
          {"first_token_ms", samples_json(cost.first_token_ms)},
          {"rewind_ms", samples_json(cost.rewind_ms)},
          {"prefix_ms", samples_json(cost.prefix_ms)},
          {"edit_ms", samples_json(cost.edit_ms)}};
}

const char* document_of(const BenchArguments& arguments) {
  if (!arguments.cache.empty()) return "saved";
  return arguments.synthetic ? "synthetic" : "prefilled";
}

Json header_json(const Console& console, const BenchModel& model, const BenchArguments& arguments) {
  const SessionFlags& session = arguments.session;
  return {{"build", Json::parse(kv_build_info())},
          {"command", console.command},
          {"model",
           {{"path", arguments.model.path},
            {"name", model.info.name},
            {"weights", model.info.weights},
            {"parameters", model.info.parameters}}},
          {"threads", model.threads},
          {"prompt", arguments.prompt},
          {"generate", arguments.generate},
          {"repetitions", arguments.repetitions},
          {"budget_tokens", session.budget.tokens},
          {"budget_fraction", session.budget.fraction},
          {"dense_layers", session.dense_layers ? Json(*session.dense_layers) : Json(nullptr)},
          {"filter_layers", session.filter_layers},
          {"document", document_of(arguments)},
          {"seed", arguments.seed},
          {"tokens", arguments.text.empty() ? "random" : arguments.text}};
}

constexpr uint64_t mapped_question_tokens = 64;  // tokens of the question about a mapped file

// Refuses impossible measurements before minutes are spent.
void expect_possible(const BenchModel& model, const BenchArguments& arguments) {
  const uint64_t max_context = arguments.session.context_tokens ? arguments.session.context_tokens
                                                                : model.info.context_tokens;
  // a question, its answer, and the decode after it
  const uint64_t after_file =
      arguments.mapped ? mapped_question_tokens + 2 * arguments.generate + 1 : 0;
  const uint64_t deepest = arguments.depths.back(),
                 more = std::max({arguments.prompt, arguments.generate + 1, after_file});
  if (deepest > max_context || more > max_context - deepest)
    throw Failure(exit_usage, "--depth: " + grouped(deepest) + " tokens and up to " +
                                  grouped(more) + " after them are more than the context of " +
                                  grouped(max_context));
  if (arguments.prompt == 0 && arguments.generate == 0 && !arguments.reuse &&
      !(arguments.mapped && deepest > 0))
    throw Failure(exit_usage,
                  "--prompt and --generate are 0, and no file is mapped: nothing to measure");
  if (arguments.mapped) expect_writable_folder(arguments.folder);
  if (!arguments.compare.empty() && (arguments.mapped || arguments.reuse))
    throw Failure(exit_usage,
                  "--compare measures prefill and decode: --mapped and --reuse measure files");
  if (arguments.compare.empty() && !arguments.compare_options.empty())
    throw Failure(exit_usage, "--compare-options are those of a program: add --compare");
  if (arguments.synthetic && !arguments.text.empty())
    throw Failure(exit_usage, "--synthetic generates keys and values: --text would be prefilled");
  if (arguments.synthetic &&
      std::count(arguments.strategies.begin(), arguments.strategies.end(), "infllm"))
    throw Failure(exit_usage, "infllm selects by the queries of the prefill: --synthetic has none");
}

// The depth is that of the saved document.
void expect_saved_document(BenchArguments* arguments) {
  if (arguments->synthetic || arguments->mapped)
    throw Failure(exit_usage, "--cache is a saved document: --synthetic and --mapped make another");
  kv_file_info info = initialised<kv_file_info>();
  kv_error error{};
  check_cache(kv_file_inspect(arguments->cache.c_str(), &info, &error), error, arguments->cache);
  if (info.tokens == 0) throw Failure(exit_usage, arguments->cache + " has no tokens");
  arguments->depths = {info.tokens};
}

}  // namespace

void run_bench(Console& console, const BenchArguments& given) {
  BenchArguments arguments = given;
  if (!arguments.cache.empty()) expect_saved_document(&arguments);
  else if (arguments.reuse) throw Failure(exit_usage, "--reuse measures a --cache file");
  std::sort(arguments.depths.begin(), arguments.depths.end());
  arguments.depths.erase(std::unique(arguments.depths.begin(), arguments.depths.end()),
                         arguments.depths.end());
  BenchModel model;
  model.model = open_model(console, arguments.model);
  model.info = info_of(model.model.get());
  expect_possible(model, arguments);
  expect_parameters_used(arguments.session, arguments.strategies);
  arguments.session = with_calibration(console, arguments.model, model.model.get(),
                                       arguments.session, arguments.strategies);
  model.threads =
      stats_of(open_session(console, model.model.get(), flags_for(arguments.session, "auto")).get())
          .threads;
  console.result = header_json(console, model, arguments);

  // first: what a new process meets
  std::optional<ReuseCost> reuse;
  if (arguments.reuse) reuse = measure_reuse(console, model, arguments);
  if (reuse) console.result["reuse"] = reuse_json(*reuse);
  OtherProgram other;
  const std::vector<DepthResult> results =
      arguments.compare.empty() ? measure(console, model, arguments)
                                : measure_compared(console, &model, arguments, &other);
  const std::vector<ComparedStep> steps = arguments.compare.empty()
                                              ? std::vector<ComparedStep>()
                                              : compared_steps(results, other, arguments);
  if (!steps.empty()) console.result["compared"] = compared_json(other, steps);
  for (const DepthResult& result : results)
    console.result["depths"].push_back(depth_json(result, results.front()));
  if (console.json) return;
  console.terminal.print(std::string(model.info.name) + ", " + model.info.architecture + " " +
                         model.info.weights + ", " + grouped(model.info.parameters) +
                         " parameters, " + std::to_string(model.threads) +
                         (model.threads == 1 ? " thread\n" : " threads\n"));
  print_speeds(console.terminal, results, arguments);
  if (arguments.mapped) print_mapped(console.terminal, results);
  if (reuse) print_reuse(console.terminal, *reuse);
  if (!steps.empty()) print_compared(console.terminal, other, steps);
}

}  // namespace tool
