// The grammar of the measuring commands.
#include "commands.h"
#include "eval_collection.h"
#include "grammar.h"
#include "strategies.h"

namespace tool {

void add_bench(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("bench", "Measure speed at several depths", run_bench);
  BenchArguments* const a = arguments.get();
  add_model(command, &a->model);
  value(command, "--depth", "N,N,...", "Tokens before the measured ones; 8K is 8192 [0,4096]",
        [=](const std::string& given) { a->depths = depths_of(given); });
  count<uint64_t>(command, "--prompt", &a->prompt, 0, max_tokens,
                  "Tokens to prefill at each depth; 0: none [512]");
  count<uint64_t>(command, "--generate", &a->generate, 0, 1u << 20,
                  "Tokens to decode at each depth; 0: none [32]");
  choice(
      command, "--strategy", "NAME,...", "Strategies of decode: %s [full,quest]",
      strategy_choices("auto"), [=](const std::string& given) { a->strategies = parts_of(given); },
      true);
  add_budget(command, &a->session);
  add_select_tokens(command, &a->session);
  count<uint32_t>(command, "--repetitions", &a->repetitions, 1, 1000,
                  "Measurements; the result is their median [3]");
  add_prefill_options(command, &a->session);
  text(command, "--text", &a->text, "FILE", "Text whose tokens are used, repeated [random tokens]");
  flag(command, "--synthetic", &a->synthetic,
       "Synthetic keys and values for the tokens before, in place of a prefill: seconds or minutes "
       "for any depth");
  text(command, "-c,--cache", &a->cache, "CACHE",
       "Saved document before the measured tokens: its tokens are the depth");
  flag(command, "--reuse", &a->reuse,
       "Also measure load of that file, first token, rewind by 10 tokens, load of the first 90%, "
       "and 100 other tokens at the end");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX,
                  "The same seed gives the same tokens, keys and values [1]");
  flag(command, "--mapped", &a->mapped,
       "Also measure load and answer from a saved file, and its memory");
  a->folder = ".";
  text(command, "--folder", &a->folder, "DIR", "Folder of the temporary file of --mapped [.]");
  text(command, "--compare", &a->compare, "PROGRAM",
       "Also measure with this llama-bench of llama.cpp, in turns: same model, threads, depths");
  text(command, "--compare-options", &a->compare_options, "TEXT",
       "More options of that program, such as \"-ub 2048 -ctk q8_0 -ctv q8_0\"");
  footer(
      command,
      "Speeds are tokens per second. Ratios are of the same run: to full attention at the same "
      "depth, and to the smallest depth.\n\n"
      "Synthetic keys lie in clusters around a mean per head, a few of them further out. They are "
      "sealed, summarised and saved like real ones. They show the time and memory of an answer, "
      "also with random weights. What a strategy finds depends on the document.\n\n"
      "Examples:\n"
      "  kvasir bench -m model.gguf --depth 0,8192,32768 --prompt 512 --generate 32 --strategy "
      "full,quest --budget 2%\n"
      "  kvasir bench -m model.gguf --depth 100000 --budget 2048 --dense-layers 0 --mapped --json\n"
      "  kvasir bench -m model.gguf -c book.kv --reuse --threads 2 --strategy bounded\n"
      "  kvasir bench -m model.gguf --depth 8192,120000 --synthetic --prompt 0 --strategy "
      "full,bounded --device cuda\n"
      "  kvasir bench -m model.gguf --depth 0,8K --strategy bounded --compare "
      "llama.cpp/build/bin/llama-bench");
}

void add_eval(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("eval", "Measure the right answers of strategies and budgets", run_eval);
  EvalArguments* const a = arguments.get();
  a->tasks = tasks_of("all");
  add_model(command, &a->model);
  texts(command, "-f,--file", &a->texts, "FILE",
        "Plain text that documents are cut from; may be given several times")
      ->required();
  choice(
      command, "--task", "NAME,...", "Tasks, any of: %s [all]", task_choices(),
      [=](const std::string& given) { a->tasks = tasks_of(given); }, true);
  value(command, "--length", "N,N,...", "Tokens of a document; 8K is 8192 [8K]",
        [=](const std::string& given) { a->lengths = lengths_of(given); });
  choice(
      command, "--strategy", "NAME,...", "Strategies, any of: %s [all]", strategy_choices("all"),
      [=](const std::string& given) { a->strategies = parts_of(given); }, true);
  value(command, "--budget", "B,B,...",
        "Budgets: tokens, or percentages of the document [1%,2%,5%]",
        [=](const std::string& given) { a->budgets = budgets_of(given); });
  add_selection(command, &a->session);
  add_select_tokens(command, &a->session);
  count<uint32_t>(
      command, "--documents", &a->documents, 1, 1000,
      "Documents of each length, and as many tables for key-value [2]; of a collection, "
      "a quarter of them with tables [8]");
  count<uint32_t>(command, "--questions", &a->questions, 1, 100,
                  "Questions of each task per document; many-queries has a quarter, pass-key and "
                  "perplexity have one [10]");
  count<uint32_t>(command, "--depths", &a->depths, 1, 100,
                  "Equal stretches of a document over which answers are spread [5]");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX,
                  "The same seed gives the same documents and questions [1]");
  choice(
      command, "--way", "NAME,...", "Ways to ask a collection, any of: %s [all]", way_choices(),
      [=](const std::string& given) { a->ways = parts_of(given); }, true);
  count<uint32_t>(command, "--attend", &a->attend, 1, 1000,
                  "Documents of a collection that an answer attends at most [8, always chosen]");
  value(command, "--retrieve", "N", "Tokens of the passages that --way retrieved prefills [1K]",
        [=](const std::string& given) { a->retrieve = length_of(given); });
  text(command, "--work", &a->work, "DIR", "Folder of cache files and answers [kvasir-eval]");
  text(command, "-o,--output", &a->output, "FILE",
       "All results, as JSON [results.json in that folder]");
  flag(command, "--force", &a->force,
       "Replace that file even if it has results that are not in the folder");
  add_threads(command, &a->session);
  add_sparse_prefill(command, &a->session);
  footer(
      command,
      "Every document is prefilled once and kept in the folder. Every strategy and budget maps it "
      "and answers each question on its own. Ctrl-C stops, and the same command continues. A "
      "finished answer is not computed again unless model, text, seed or build change. Remove the "
      "folder after a change of prefill. A document of 128K tokens needs more than half a megabyte "
      "of text.\n\n"
      "The tasks of a collection ask several documents at once, in several ways. composed asks a "
      "session over the saved documents, joined one prefill of all. alone asks each document; the "
      "most likely answer counts. retrieved asks passages found by words (BM25). fact asks for a "
      "fact of one document, lookup for an entry of a table, values for the values of a key in "
      "several documents, pair for a fact of each of two documents. source asks for a fact; right "
      "is an answer that attended the fact's document most. no-answer asks for what no document "
      "has; right is an answer without any hidden value.\n\n"
      "An answer is right if it contains the expected words, whatever its capitals and "
      "punctuation. tools/scripts/plot.py draws the results.\n\n"
      "Examples:\n"
      "  kvasir eval -m model.gguf -f book.txt --length 8K,32K --strategy full,quest --budget "
      "1%,5%\n"
      "  kvasir eval -m model.gguf -f book.txt -f another.txt --task single,key-value --length "
      "128K --depths 10\n"
      "  kvasir eval -m model.gguf -f book.txt --task collection --length 4K --documents 8 "
      "--strategy full");
}

void add_recall(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("recall", "Compare the attention of strategies with exact attention", run_recall);
  RecallArguments* const a = arguments.get();
  a->budgets = budgets_of("0.5%,1%,2%,5%");
  add_model(command, &a->model);
  add_source(command, &a->source);
  choice(
      command, "--strategy", "NAME,...", "Strategies, any of: %s [all]", strategy_choices("all"),
      [=](const std::string& given) { a->strategies = parts_of(given); }, true);
  value(command, "--budget", "B,B,...",
        "Budgets: tokens, or percentages of the document [0.5%,1%,2%,5%]",
        [=](const std::string& given) { a->budgets = budgets_of(given); });
  add_selection(command, &a->session);
  add_select_tokens(command, &a->session);
  count<uint32_t>(command, "--steps", &a->steps, 0, 1u << 16,
                  "Tokens at the document's end to remove and decode again one by one [128]");
  text(command, "-o,--output", &a->output, "FILE",
       "All results, of each layer and head, as JSON [recall.json]");
  add_prefill_options(command, &a->session);
  add_questions(command, &a->questions, "Questions about the document, measured too");
  footer(
      command,
      "Every decoded token is also attended exactly, which takes its time. The results are over "
      "all "
      "layers and heads: the share of the exact attention that was read (mass), the relative error "
      "of the output (error), and the share of the 100 largest scores that was read (recall). "
      "tools/scripts/plot.py draws the file.\n\n"
      "Examples:\n"
      "  kvasir recall -m model.gguf -c book.kv --strategy quest,bounded --budget 1%,5%\n"
      "  kvasir recall -m model.gguf -f book.txt --save book.kv --steps 0 \"Who is Irene Adler?\"");
}

void add_calibrate(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("calibrate", "Find the filter layers of a model", run_calibrate);
  CalibrateArguments* const a = arguments.get();
  add_model(command, &a->model);
  texts(command, "-f,--file", &a->texts, "FILE",
        "Plain text to measure with; may be given several times [generated sentences]");
  value(command, "--length", "N", "Tokens of the text to prefill; 8K is 8192 [8K]",
        [=](const std::string& given) { a->length = length_of(given); });
  count<uint32_t>(command, "--questions", &a->questions, 1, 100, "Questions of each task [2]");
  count<uint32_t>(command, "--filters", &a->filters, 1, 64,
                  "Number of filter layers [the strategy's own]");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX,
                  "The same seed gives the same questions [1]");
  text(command, "-o,--output", &a->output, "FILE", "Result [MODEL.calibration.json]");
  force(command, &a->force);
  add_threads(command, &a->session);
  footer(
      command,
      "With the strategy filter-layers, a few layers select the tokens that the layers after them "
      "read. This command measures which layers serve a model best: the share of each layer's "
      "attention on the tokens that another layer attends most. Commands with --strategy use the "
      "file if it belongs to the model. tools/scripts/plot.py draws it.\n\n"
      "Examples:\n"
      "  kvasir calibrate -m model.gguf -f book.txt\n"
      "  kvasir calibrate -m model.gguf --filters 3 --length 16K");
}

}  // namespace tool
