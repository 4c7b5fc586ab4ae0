// kvasir ask and kvasir prefill.
#include "answer.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "passages.h"
#include "prefill.h"

namespace tool {

void run_ask(Console& console, const AskArguments& arguments) {
  if (!arguments.library.empty()) return ask_library(console, arguments);
  if (arguments.max_documents > 0 || !arguments.only.empty())
    throw Failure(exit_usage, "--documents and --only need a library, --library DIR");
  expect_one_source(arguments.source);
  if (arguments.source.document.empty() && arguments.source.cache.empty())
    throw Failure(exit_usage, "no document; name one with -f FILE, or a cache file with -c FILE");
  const std::vector<std::string> questions =
      questions_of(arguments.questions, arguments.source.document);
  const Model model = open_model(console, arguments.model, arguments.session);
  const SessionFlags flags =
      with_calibration(console, arguments.model, model.get(), arguments.session,
                       {arguments.session.strategy, arguments.session.prefill});
  const OpenDocument opened = open_document(console, model.get(), arguments.source, flags);
  if (opened.save_failure) console.terminal.error(opened.save_failure->what());
  const bool several = !session_documents(opened.session.get()).empty();
  answer_each(console, model.get(), opened.session.get(), questions, arguments.sampling,
              arguments.passages == 0 && several ? default_sources : arguments.passages);
  if (opened.save_failure) throw *opened.save_failure;
}

void run_prefill(Console& console, const PrefillArguments& arguments) {
  const Model model = open_model(console, arguments.model, arguments.session);
  const SessionFlags flags =
      with_calibration(console, arguments.model, model.get(), arguments.session,
                       {arguments.session.strategy, arguments.session.prefill});
  const OpenDocument opened = open_document(console, model.get(), arguments.source, flags);
  if (opened.save_failure) throw *opened.save_failure;
}

}  // namespace tool
