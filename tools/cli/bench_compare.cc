#include "bench_compare.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "failure.h"
#include "number_text.h"
#include "run_program.h"

namespace tool {
namespace {

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

// Layers of llama.cpp on GPUs: as many as Kvasir has there.
uint32_t gpu_layers_of(Console& console, const BenchModel& model, const BenchArguments& arguments) {
  if (arguments.model.device.empty()) return 0;
  const Session session =
      open_session(console, model.model.get(), flags_for(arguments.session, "auto"));
  const uint32_t layers = stats_of(session.get()).gpu_layers;
  return layers >= model.info.layers ? 999 : layers;  // the output as well
}

std::vector<std::string> command_of(const BenchModel& model, const BenchArguments& arguments,
                                    uint32_t gpu_layers) {
  std::string depths;
  for (const uint64_t depth : arguments.depths)
    depths += (depths.empty() ? "" : ",") + std::to_string(depth);
  const std::vector<std::string> more = words_of(arguments.compare_options);
  std::vector<std::string> command = {arguments.compare, "-m", arguments.model.path};
  // llama-bench measures each value of an option that is there twice.
  const auto add = [&](const char* option, const std::string& value) {
    if (std::find(more.begin(), more.end(), option) == more.end())
      command.insert(command.end(), {option, value});
  };
  add("-t", std::to_string(model.threads));
  add("-ngl", std::to_string(gpu_layers));
  add("-fa", "1");
  add("-p", std::to_string(arguments.prompt));
  add("-n", std::to_string(arguments.generate));
  add("-d", depths);
  command.insert(command.end(), {"-r", "1", "-o", "json"});
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

// The last line with letters, which says what went wrong.
std::string last_line(const std::string& text) {
  std::istringstream in(text);
  std::string last;
  for (std::string line; std::getline(in, line);)
    if (line.find_first_not_of(" \t\r") != std::string::npos) last = line;
  constexpr size_t most = 200;
  return last.size() > most ? last.substr(0, most) + "..." : last;
}

[[noreturn]] void fail_of_program(const OtherProgram& other, const ProgramResult& result,
                                  const std::string& model) {
  const std::string& name = other.command.front();
  if (result.signal != 0)
    throw Failure(exit_failure, name + " was ended by signal " + std::to_string(result.signal) +
                                    (result.errors.empty() ? "" : ": " + last_line(result.errors)));
  const auto says = [&](const char* text) {
    return result.errors.find(text) != std::string::npos ||
           result.output.find(text) != std::string::npos;
  };
  const std::string unknown = "invalid parameter for argument: ";
  if (const size_t at = result.errors.find(unknown); at != std::string::npos)
    throw Failure(
        exit_failure,
        name + " does not know the option " +
            last_line(result.errors.substr(at + unknown.size(),
                                           result.errors.find('\n', at) - at - unknown.size())) +
            ", or not this value: use a newer llama.cpp, or another value with "
            "--compare-options");
  if (says("failed to load model") || says("failed to create context"))
    throw Failure(exit_failure, name + " cannot use " + model + ": " + last_line(result.errors));
  throw Failure(exit_failure, name + " ended with code " + std::to_string(result.code) +
                                  (result.errors.empty() ? "" : ": " + last_line(result.errors)));
}

double speed_in(const Json& test, const std::string& name) {
  const auto found = test.find("avg_ts");
  if (found == test.end() || !found->is_number() || !(found->get<double>() > 0))
    throw Failure(exit_failure, name + " printed a test without avg_ts, its tokens per second");
  return found->get<double>();
}

uint64_t number_in(const Json& test, const char* key) {
  const auto found = test.find(key);
  return found != test.end() && found->is_number_unsigned() ? found->get<uint64_t>() : 0;
}

// Adds the tests of one run.
void add_run(const std::string& output, OtherProgram* other) {
  const std::string& name = other->command.front();
  const Json run = Json::parse(output, nullptr, false);
  if (!run.is_array() || run.empty() || !run.front().is_object())
    throw Failure(exit_failure, name + " printed no JSON list of tests" +
                                    (output.empty() ? "" : ", but: " + last_line(output)) +
                                    ": is it llama-bench?");
  for (const Json& test : run) {
    if (!test.is_object()) continue;
    const uint64_t prompt = number_in(test, "n_prompt"), generate = number_in(test, "n_gen"),
                   depth = number_in(test, "n_depth");
    for (OtherSpeeds& at : other->depths)
      if (at.depth == depth && (prompt > 0) != (generate > 0))
        (prompt > 0 ? at.prefill : at.decode).values.push_back(speed_in(test, name));
  }
  const Json& first = run.front();
  const auto commit = first.find("build_commit");
  other->version = commit != first.end() && commit->is_string() ? commit->get<std::string>() : "";
  if (const uint64_t number = number_in(first, "build_number"))
    other->version += " (" + std::to_string(number) + ")";
  other->runs.push_back(run);
}

void run_other(Console& console, const BenchArguments& arguments, OtherProgram* other) {
  console.terminal.draw("Measuring with " + arguments.compare);
  ProgramResult result;
  if (!run_program(
          other->command, [&] { return console.interrupt.fired(); }, &result))
    throw Failure(exit_file,
                  "--compare: cannot run " + arguments.compare + ": " + std::strerror(errno));
  console.terminal.erase();
  if (console.interrupt.fired()) throw Failure(exit_cancelled, "stopped");
  if (result.is_too_long)
    throw Failure(exit_failure, arguments.compare + " printed more than " +
                                    std::to_string(max_program_megabytes) +
                                    " MB: is it llama-bench?");
  if (result.code != 0 || result.signal != 0) fail_of_program(*other, result, arguments.model.path);
  add_run(result.output, other);
  for (const OtherSpeeds& at : other->depths)
    if ((arguments.prompt > 0 && at.prefill.values.size() != other->runs.size()) ||
        (arguments.generate > 0 && at.decode.values.size() != other->runs.size()))
      throw Failure(exit_failure, arguments.compare + " printed no result, or several, at depth " +
                                      grouped(at.depth) +
                                      ": one value for each of --compare-options");
}

void append(const Samples& from, Samples* to) {
  to->values.insert(to->values.end(), from.values.begin(), from.values.end());
}

// Adds the samples of one repetition.
void add_results(std::vector<DepthResult> more, std::vector<DepthResult>* all) {
  if (all->empty()) {
    *all = std::move(more);
    return;
  }
  for (size_t i = 0; i < all->size(); ++i) {
    append(more[i].prefill_tokens_per_second, &(*all)[i].prefill_tokens_per_second);
    for (size_t k = 0; k < more[i].decode.size(); ++k) {
      append(more[i].decode[k].tokens_per_second, &(*all)[i].decode[k].tokens_per_second);
      (*all)[i].decode[k].stats = std::move(more[i].decode[k].stats);
    }
  }
}

}  // namespace

std::vector<DepthResult> measure_compared(Console& console, BenchModel* model,
                                          const BenchArguments& arguments, OtherProgram* other) {
  other->command = command_of(*model, arguments, gpu_layers_of(console, *model, arguments));
  for (const uint64_t depth : arguments.depths) other->depths.push_back({depth, {}, {}});
  BenchArguments once = arguments;
  once.repetitions = 1;
  std::vector<DepthResult> results;
  for (uint32_t i = 0; i < arguments.repetitions; ++i) {
    model->model.reset();
    run_other(console, arguments, other);  // first: its failures are reported at once
    model->model = open_model(console, arguments.model);
    add_results(measure(console, *model, once), &results);
  }
  return results;
}

std::vector<ComparedStep> compared_steps(const std::vector<DepthResult>& results,
                                         const OtherProgram& other,
                                         const BenchArguments& arguments) {
  std::vector<ComparedStep> steps;
  for (size_t i = 0; i < results.size(); ++i)
    if (arguments.prompt > 0)
      steps.push_back({"prefill " + grouped(arguments.prompt) + " at " + grouped(results[i].depth),
                       other.depths[i].prefill.median(),
                       results[i].prefill_tokens_per_second.median()});
  for (size_t i = 0; i < results.size(); ++i)
    for (const DecodeSpeed& speed : results[i].decode)
      if (arguments.generate > 0)
        steps.push_back({"decode at " + grouped(results[i].depth) + ", " + speed.strategy,
                         other.depths[i].decode.median(), speed.tokens_per_second.median()});
  return steps;
}

Json compared_json(const OtherProgram& other, const std::vector<ComparedStep>& steps) {
  Json json = {{"program", "llama.cpp"},
               {"version", other.version},
               {"command", other.command},
               {"steps", Json::array()},
               {"runs", other.runs}};
  for (const ComparedStep& step : steps)
    json["steps"].push_back({{"step", step.step},
                             {"other_tokens_per_second", step.other},
                             {"kvasir_tokens_per_second", step.kvasir},
                             {"ratio", step.kvasir / step.other}});
  return json;
}

}  // namespace tool
