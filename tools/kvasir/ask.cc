// kvasir ask and kvasir prefill.
#include <unistd.h>

#include <sstream>

#include "answering.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "reading.h"
#include "words.h"

namespace tool {
namespace {

// From the command line, or one a line from standard input.
std::vector<std::string> questions_of(const AskArguments& arguments) {
  if (!arguments.questions.empty()) return arguments.questions;
  std::vector<std::string> questions;
  if (isatty(STDIN_FILENO) == 0 && arguments.source.document != "-") {
    std::istringstream lines(read_file("-"));
    for (std::string line; std::getline(lines, line);)
      if (line.find_first_not_of(" \t\r") != std::string::npos) questions.push_back(line);
  }
  if (questions.empty())
    throw Failure(exit_usage, "no question; put it at the end: kvasir ask -m MODEL -f DOCUMENT \"What ...?\"");
  return questions;
}

}  // namespace

void run_ask(Context& context, const AskArguments& arguments) {
  expect_one_source(arguments.source);
  if (arguments.source.document.empty() && arguments.source.cache.empty())
    throw Failure(exit_usage, "no document; name one with -f FILE, or its cache with -c FILE");
  const std::vector<std::string> questions = questions_of(arguments);
  const Model model = open_model(context, arguments.model);
  const SessionFlags flags = with_calibration(context, arguments.model, model.get(), arguments.session, {arguments.session.strategy});
  const Reading reading = open_reading(context, model.get(), arguments.source, flags);
  if (reading.save_failure) context.terminal.error(reading.save_failure->what());
  Json& answers = context.result["answers"] = Json::array();
  for (const std::string& question : questions) {
    if (context.terminal.chatty()) context.terminal.print_untrusted("\n> " + question + "\n");
    const Answer given = answer(context, reading.session.get(), question, arguments.sampling, Keep::no);
    context.terminal.note("  " + facts_line(given));
    Json entry = {{"question", question}, {"answer", given.text}};
    entry.update(facts_json(given));
    answers.push_back(std::move(entry));
    if (given.facts.stop_reason == KV_STOP_CANCELLED) throw Failure(exit_cancelled, "stopped");
  }
  if (reading.save_failure) throw *reading.save_failure;
}

void run_prefill(Context& context, const PrefillArguments& arguments) {
  const Model model = open_model(context, arguments.model);
  const Reading reading = open_reading(context, model.get(), arguments.source, arguments.session);
  if (reading.save_failure) throw *reading.save_failure;
}

}  // namespace tool
