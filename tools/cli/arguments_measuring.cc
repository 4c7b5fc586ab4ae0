// The grammar of the commands that measure.
#include "commands.h"
#include "grammar.h"
#include "strategies.h"

namespace tool {

void add_bench(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("bench", "Measure speed at several depths", run_bench);
  BenchArguments* const a = arguments.get();
  add_model(command, &a->model);
  value(command, "--depth", "N,N,...", "Tokens that are there before [0,4096]",
        [=](const std::string& given) { a->depths = numbers_of(given); });
  count<uint64_t>(command, "--prompt", &a->prompt, 0, max_tokens,
                  "Tokens to read at each depth; 0: none [512]");
  count<uint64_t>(command, "--generate", &a->generate, 0, 1u << 20,
                  "Tokens to decode at each depth; 0: none [32]");
  choice(
      command, "--strategy", "NAME,...", "Strategies to decode with: %s [full,quest]",
      strategy_choices("auto"), [=](const std::string& given) { a->strategies = parts_of(given); },
      true);
  add_budget(command, &a->session);
  count<uint32_t>(command, "--repetitions", &a->repetitions, 1, 1000,
                  "Measurements of which the median is told [3]");
  add_reading(command, &a->session);
  text(command, "--text", &a->text, "FILE",
       "Tokens of this text, over and over, instead of random ones");
  flag(command, "--synthetic", &a->synthetic,
       "Make up the keys and values of the tokens that are there before, instead of reading them: "
       "seconds or "
       "minutes, whatever the depth");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX,
                  "The same seed gives the same tokens, keys and values [1]");
  flag(command, "--mapped", &a->mapped,
       "Measure also loading and answering from a saved file, and its memory");
  a->folder = ".";
  text(command, "--folder", &a->folder, "FOLDER",
       "Where --mapped puts its file, removed afterwards [.]");
  command->footer(
      "Speeds are tokens a second. Ratios are of the same run: to full attention at the same "
      "depth, and to the\n"
      "smallest depth.\n\n"
      "Made-up keys lie in clusters about a mean of each head, a few of them further out, and are "
      "sealed, summed up and saved\n"
      "as those that are read are. They tell what an answer takes in time and memory, of models "
      "with random weights too; how\n"
      "much a strategy finds worth reading depends on the document. A depth is at most what the "
      "model's context leaves.\n\n"
      "Examples:\n"
      "  kvasir bench -m model.gguf --depth 0,8192,32768 --prompt 512 --generate 32 --strategy "
      "full,quest --budget 2%\n"
      "  kvasir bench -m model.gguf --depth 100000 --budget 2048 --dense-layers 0 --mapped --json\n"
      "  kvasir bench -m model.gguf --depth 8192,120000 --synthetic --prompt 0 --strategy "
      "full,bounded --device cuda");
}

void add_eval(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("eval", "Measure what strategies cost in right answers", run_eval);
  EvalArguments* const a = arguments.get();
  a->tasks = tasks_of("all");
  a->budgets = budgets_of("1%,2%,5%");
  add_model(command, &a->model);
  texts(command, "-f,--file", &a->texts, "FILE",
        "What documents are cut from, plain text; several are put together")
      ->required();
  choice(
      command, "--task", "NAME,...", "Any of: %s [all]", task_choices(),
      [=](const std::string& given) { a->tasks = tasks_of(given); }, true);
  value(command, "--length", "N,N,...", "Tokens of a document; 8K is 8192 [8K]",
        [=](const std::string& given) { a->lengths = lengths_of(given); });
  choice(
      command, "--strategy", "NAME,...", "What answers read, any of: %s [all]",
      strategy_choices("all"), [=](const std::string& given) { a->strategies = parts_of(given); },
      true);
  value(command, "--budget", "B,B,...",
        "Of each strategy that takes one: tokens, or shares of the document [1%,2%,5%]",
        [=](const std::string& given) { a->budgets = budgets_of(given); });
  add_choosing(command, &a->session);
  add_select_tokens(command, &a->select_tokens);
  count<uint32_t>(command, "--documents", &a->documents, 1, 1000,
                  "Documents of each length, and as many tables for key-value [2]");
  count<uint32_t>(command, "--questions", &a->questions, 1, 100,
                  "Questions of each task to a document; many-queries has a fourth, "
                  "pass-key and perplexity have one [10]");
  count<uint32_t>(command, "--depths", &a->depths, 1, 100,
                  "Stretches of a document over which answers are spread [5]");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX,
                  "The same seed gives the same documents and questions [1]");
  text(command, "--work", &a->work, "FOLDER", "Keeps what was read and answered [kvasir-eval]");
  text(command, "-o,--output", &a->output, "FILE",
       "Where all results go, as JSON [results.json in that folder]");
  flag(command, "--force", &a->force,
       "Replace that file also when it has other results than those in the folder");
  add_threads(command, &a->session);
  add_sparse_reading(command, &a->session);
  command->footer(
      "Each document is read once and kept in the folder; every strategy and budget maps it and "
      "answers all of its questions,\n"
      "each on its own. What was answered is not asked again: Ctrl-C stops, and the same command "
      "goes on. Another model, text,\n"
      "seed or build of Kvasir is asked anew; remove the folder when reading itself was changed. A "
      "document of 128K tokens needs\n"
      "a text of more than half a megabyte.\n\n"
      "Answers count when they contain what was expected, whatever the capitals and punctuation. "
      "tools/scripts/plot.py draws the results.\n\n"
      "Examples:\n"
      "  kvasir eval -m model.gguf -f book.txt --length 8K,32K --strategy full,quest --budget "
      "1%,5%\n"
      "  kvasir eval -m model.gguf -f book.txt -f another.txt --task single,key-value --length "
      "128K --depths 10");
}

void add_recall(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("recall", "Compare what strategies read with exact attention", run_recall);
  RecallArguments* const a = arguments.get();
  a->budgets = budgets_of("0.5%,1%,2%,5%");
  add_model(command, &a->model);
  add_source(command, &a->source);
  choice(
      command, "--strategy", "NAME,...", "Any of: %s [all]", strategy_choices("all"),
      [=](const std::string& given) { a->strategies = parts_of(given); }, true);
  value(command, "--budget", "B,B,...",
        "Of each strategy that takes one: tokens, or shares of the document [0.5%,1%,2%,5%]",
        [=](const std::string& given) { a->budgets = budgets_of(given); });
  add_choosing(command, &a->session);
  add_select_tokens(command, &a->select_tokens);
  count<uint32_t>(
      command, "--steps", &a->steps, 0, 1u << 16,
      "Tokens at the document's end that are taken off and read again one at a time [128]");
  text(command, "-o,--output", &a->output, "FILE",
       "Where all of it goes, each layer and head, as JSON [recall.json]");
  add_reading(command, &a->session);
  command
      ->add_option("questions", a->questions, "Questions that are asked over the document besides")
      ->type_name("TEXT");
  command->footer(
      "Each token that is read or answered through a strategy is attended exactly as well, which "
      "takes its time. Told are, over all\n"
      "layers and heads: the share of the exact attention that was read (mass), how far the output "
      "is from the exact one (error),\n"
      "and the share of the 100 best tokens that were read (recall). tools/scripts/plot.py draws "
      "the file.\n\n"
      "Examples:\n"
      "  kvasir recall -m model.gguf -c book.kv --strategy quest,bounded --budget 1%,5%\n"
      "  kvasir recall -m model.gguf -f book.txt --save book.kv --steps 0 \"Who is Irene Adler?\"");
}

void add_calibrate(Grammar& grammar) {
  const auto [command, arguments] = grammar.add(
      "calibrate", "Find a model's filter layers and keep them beside it", run_calibrate);
  CalibrateArguments* const a = arguments.get();
  add_model(command, &a->model);
  texts(command, "-f,--file", &a->texts, "FILE",
        "Text to measure with, plain; without it sentences that mean little");
  value(command, "--length", "N", "Tokens of it that are read; 8K is 8192 [8K]",
        [=](const std::string& given) { a->length = length_of(given); });
  count<uint32_t>(command, "--questions", &a->questions, 1, 100, "Questions of each kind [2]");
  count<uint32_t>(command, "--filters", &a->filters, 1, 64,
                  "Layers that choose; without it as many as the strategy takes by itself");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX,
                  "The same seed gives the same questions [1]");
  text(command, "-o,--output", &a->output, "FILE", "Instead of MODEL.calibration.json");
  force(command, &a->force);
  add_threads(command, &a->session);
  command->footer(
      "The strategy filter-layers lets a few layers choose what the layers after them read. Which "
      "ones serves a model best is\n"
      "measured: how much of each layer's attention is on the tokens that another layer attends "
      "most. Commands with --strategy\n"
      "use the file when it is of the same model. tools/scripts/plot.py draws it.\n\n"
      "Examples:\n"
      "  kvasir calibrate -m model.gguf -f book.txt\n"
      "  kvasir calibrate -m model.gguf --filters 3 --length 16K");
}

}  // namespace tool
