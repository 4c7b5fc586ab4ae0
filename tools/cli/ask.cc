// kvasir ask and kvasir prefill.
#include "answering.h"
#include "calibration.h"
#include "commands.h"
#include "failure.h"
#include "prefill.h"

namespace tool {

void run_ask(Context& context, const AskArguments& arguments) {
  expect_one_source(arguments.source);
  if (arguments.source.document.empty() && arguments.source.cache.empty())
    throw Failure(exit_usage, "no document; name one with -f FILE, or its cache with -c FILE");
  const std::vector<std::string> questions =
      questions_of(arguments.questions, arguments.source.document);
  const Model model = open_model(context, arguments.model, true);
  const SessionFlags flags =
      with_calibration(context, arguments.model, model.get(), arguments.session,
                       {arguments.session.strategy, arguments.session.prefill});
  const Reading reading = open_reading(context, model.get(), arguments.source, flags);
  if (reading.save_failure) context.terminal.error(reading.save_failure->what());
  answer_each(context, model.get(), reading.session.get(), questions, arguments.sampling,
              arguments.passages);
  if (reading.save_failure) throw *reading.save_failure;
}

void run_prefill(Context& context, const PrefillArguments& arguments) {
  const Model model = open_model(context, arguments.model, true);
  const Reading reading = open_reading(context, model.get(), arguments.source, arguments.session);
  if (reading.save_failure) throw *reading.save_failure;
}

}  // namespace tool
