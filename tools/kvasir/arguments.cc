// The command line's grammar and all of its help.
#include "arguments.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <utility>

#include "argument_values.h"
#include "commands.h"
#include "failure.h"
#include "strategies.h"

namespace tool {
namespace {

// Help beside the options' names, in lines that fit a terminal of 100 columns.
std::string wrapped(const std::string& help) {
  constexpr size_t columns = 64;
  std::string lines;
  size_t column = 0;
  for (const std::string& word : CLI::detail::split(help, ' ')) {
    if (column > 0 && column + 1 + word.size() > columns) {
      lines += '\n';
      column = 0;
    } else if (column > 0) {
      lines += ' ';
      ++column;
    }
    lines += word;
    column += word.size();
  }
  return lines;
}

void flag(CLI::App* app, const std::string& names, bool* target, const std::string& help) {
  app->add_flag(names, *target, wrapped(help));
}

// One option with a value that `take` reads; one name for the value in the help.
template <typename Take>
CLI::Option* value(CLI::App* app, const std::string& names, const char* kind, const std::string& help, Take take) {
  const auto named = [=](const std::string& given) {
    try {
      take(given);
    } catch (const CLI::ValidationError& error) {
      throw CLI::ValidationError(names.substr(names.find("--")) + ": " + error.what());
    }
  };
  return app->add_option_function<std::string>(names, named, wrapped(help))->type_name(kind);
}

template <typename Number>
CLI::Option* count(CLI::App* app, const std::string& names, Number* target, Number least, Number most,
                   const std::string& help) {
  return value(app, names, "N", help,
               [=](const std::string& text) { *target = number<Number>(text, least, most); });
}

CLI::Option* text(CLI::App* app, const std::string& names, std::string* target, const char* kind, const std::string& help) {
  return value(app, names, kind, help, [=](const std::string& given) { *target = given; });
}

void add_global(CLI::App* app, GlobalFlags* flags) {
  flag(app, "--json", &flags->json, "One JSON document on standard output, errors included");
  flag(app, "-q,--quiet", &flags->quiet, "Only results and errors");
}

void add_model(CLI::App* app, ModelFlags* flags) {
  text(app, "-m,--model", &flags->path, "FILE", "The model's weights, a GGUF file")->required();
  text(app, "--chat-format", &flags->chat_format, "NAME",
       "Instead of the one recognised in the model: raw, chatml, llama3, llama2, mistral, gemma, phi, deepseek");
}

void add_threads(CLI::App* app, SessionFlags* flags) {
  count<uint32_t>(app, "-t,--threads", &flags->threads, 1, 1024, "Threads; without it all processors");
}

void add_choosing(CLI::App* app, SessionFlags* flags) {
  value(app, "--dense-layers", "N", "Layers that read everything, those that a choice serves worst; without it the strategy decides",
        [=](const std::string& given) { flags->dense_layers = number<uint32_t>(given, 0, 1024); });
  value(app, "--coverage", "P%", "bounded reads what it takes for this share of attention, from a quarter of the budget to four times it",
        [=](const std::string& given) {
          const Budget share = budget_of(given);
          if (share.tokens != 0) throw Failure(exit_usage, "'" + given + "' is a number of tokens: write a share, as 95%");
          flags->coverage = share.fraction;
        });
  flag(app, "--separate-heads", &flags->separate_heads, "Query heads of a group choose each for itself");
}

void add_select_tokens(CLI::App* app, uint32_t* target) {
  count<uint32_t>(app, "--select-tokens", target, 1, 1024, "Of quest: neighbouring tokens that are chosen together, such as 16, 32, 64 [16]");
}

void add_budget(CLI::App* app, SessionFlags* flags) {
  value(app, "--budget", "N|P%", "What a strategy may read in each layer and head: tokens, or a share of the document",
        [=](const std::string& given) { flags->budget = budget_of(given); });
  add_choosing(app, flags);
}

void add_sparse_reading(CLI::App* app, SessionFlags* flags) {
  text(app, "--prefill", &flags->prefill, "NAME",
       "Read a long document sparsely, which is several times faster: quest, or to compare flat, filter-layers, window; without it exactly");
  value(app, "--prefill-budget", "P%", "What sparse reading chooses of the text before [5%]", [=](const std::string& given) {
    const Budget budget = budget_of(given);
    if (budget.tokens != 0) throw Failure(exit_usage, "'" + given + "' is a number of tokens: write a share, as 5%");
    flags->prefill_budget = budget.fraction;
  });
  count<uint64_t>(app, "--prefill-exact", &flags->prefill_exact, 0, most_tokens, "Tokens at the document's end that are read exactly all the same [0]");
}

void add_reading(CLI::App* app, SessionFlags* flags) {
  add_threads(app, flags);
  add_sparse_reading(app, flags);
  count<uint64_t>(app, "--context", &flags->context, 1, most_tokens,
                  "Tokens the document and the conversation may have; without it what the model was trained for");
  count<uint32_t>(app, "--chunk", &flags->chunk, 1, 4096, "Tokens read together");
  count<uint32_t>(app, "--window", &flags->window, 1, 65536, "Newest tokens kept in full precision and always read");
}

void add_strategy(CLI::App* app, SessionFlags* flags) {
  text(app, "--strategy", &flags->strategy, "NAME", "What an answer reads of the document: auto, " + strategy_names());
  add_budget(app, flags);
  add_select_tokens(app, &flags->select_tokens);
}

void add_sampling(CLI::App* app, SamplingFlags* flags) {
  const std::string group = "Sampling";
  const auto real = [=](const char* name, float* target, float least, float most, const char* help) {
    value(app, name, "X", help, [=](const std::string& given) { *target = number<float>(given, least, most); })->group(group);
  };
  count<uint32_t>(app, "-n,--max-tokens", &flags->max_tokens, 1, 1u << 20, "Longest answer, tokens [512]")->group(group);
  real("--temperature", &flags->temperature, 0, 100, "0 takes the likeliest token each time [0]");
  count<uint32_t>(app, "--top-k", &flags->top_k, 0, 1u << 30, "Only the N likeliest tokens; 0: all [0]")->group(group);
  real("--top-p", &flags->top_p, 0, 1, "Only the likeliest tokens of this probability together [1]");
  real("--min-p", &flags->min_p, 0, 1, "Only tokens at least this likely, relative to the likeliest [0]");
  real("--repetition-penalty", &flags->repetition_penalty, 0.01f, 100, "Above 1: avoid what was said lately [1]");
  count<uint64_t>(app, "--seed", &flags->seed, 0, UINT64_MAX, "The same seed gives the same answer [0]")->group(group);
  app->add_option("--stop", flags->stop, "Ends an answer where it comes up; may be given several times")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->group(group);
}

void add_document(CLI::App* app, SourceFlags* flags, const char* save_names, const char* save_help) {
  text(app, "-f,--file", &flags->document, "FILE", "The document, plain text; - is standard input");
  text(app, save_names, &flags->save, "CACHE", save_help);
  flag(app, "--force", &flags->force, "Replace that file also when it is no cache, or holds a conversation");
}

void add_source(CLI::App* app, SourceFlags* flags) {
  add_document(app, flags, "-s,--save",
               "Keep what was read in this file, and use it the next time: if it holds this document, nothing is read");
  text(app, "-c,--cache", &flags->cache, "CACHE", "A saved document instead of -f");
}

using Command = std::function<void(Context&)>;

struct Grammar {
  CLI::App& app;
  GlobalFlags* global;
  Command* chosen;  // set by the subcommand that was given

  // A subcommand and its own arguments, which live as long as the command can be called.
  template <typename Arguments>
  std::pair<CLI::App*, std::shared_ptr<Arguments>> add(const char* name, const char* help,
                                                       void (*run)(Context&, const Arguments&)) {
    const auto arguments = std::make_shared<Arguments>();
    CLI::App* command = app.add_subcommand(name, help);
    command->callback([to = chosen, run, arguments] { *to = [run, arguments](Context& c) { run(c, *arguments); }; });
    add_global(command, global);
    return {command, arguments};
  }
};

void add_ask(Grammar& grammar) {
  const auto [command, arguments] = grammar.add("ask", "Question a document", run_ask);
  add_model(command, &arguments->model);
  add_source(command, &arguments->source);
  add_strategy(command, &arguments->session);
  add_reading(command, &arguments->session);
  add_sampling(command, &arguments->sampling);
  command->add_option("questions", arguments->questions, "Questions; none: one a line from standard input")
      ->type_name("TEXT");
  command->footer(
      "Each question is answered on its own: an answer does not know the one before. For a conversation see `kvasir chat`.\n\n"
      "Examples:\n"
      "  kvasir ask -m model.gguf -f book.txt --save book.kv \"Who is Irene Adler?\"\n"
      "      reads the book and keeps it; the second time it is mapped and answers at once\n"
      "  kvasir ask -m model.gguf -c book.kv --strategy quest --budget 2% \"Who came at nine?\" \"And who at ten?\"\n"
      "  pdftotext report.pdf - | kvasir ask -m model.gguf -f - --json \"What does it conclude?\"");
}

void add_prefill(Grammar& grammar) {
  const auto [command, arguments] = grammar.add("prefill", "Read a document and save it as a cache", run_prefill);
  add_model(command, &arguments->model);
  add_document(command, &arguments->source, "-o,--output", "The cache file to write");
  command->get_option("--file")->required();
  command->get_option("--output")->required();
  add_reading(command, &arguments->session);
  command->footer(
      "The first Ctrl-C stops and keeps what was read; the same command goes on where it stopped. A document that has grown\n"
      "at its end is read from there.\n\n"
      "Examples:\n"
      "  kvasir prefill -m model.gguf -f book.txt -o book.kv\n"
      "  kvasir ask -m model.gguf -c book.kv \"Who is Irene Adler?\"");
}

void add_chat(Grammar& grammar) {
  const auto [command, arguments] = grammar.add("chat", "Talk about a document, or just talk", run_chat);
  add_model(command, &arguments->model);
  add_source(command, &arguments->source);
  add_strategy(command, &arguments->session);
  add_reading(command, &arguments->session);
  add_sampling(command, &arguments->sampling);
  command->footer(
      "In the conversation: /reset /stats /save FILE /help; Ctrl-C stops an answer, Ctrl-D leaves.\n"
      "Questions may also come from a pipe, one a line.\n\n"
      "Examples:\n"
      "  kvasir chat -m model.gguf -f book.txt --save book.kv\n"
      "  kvasir chat -m model.gguf -c book.kv --temperature 0.7\n"
      "  printf 'Who is he?\\nWhy?\\n' | kvasir chat -m model.gguf -c book.kv");
}

void add_inspect_and_verify(Grammar& grammar) {
  const auto [inspect, inspected] = grammar.add("inspect", "Say what a model or a cache file is", run_inspect);
  text(inspect, "file", &inspected->path, "FILE", "A GGUF model or a cache")->required();
  inspect->footer("Examples:\n  kvasir inspect model.gguf\n  kvasir inspect --json book.kv");
  const auto [verify, verified] = grammar.add("verify", "Check a model or a cache file", run_verify);
  text(verify, "file", &verified->path, "FILE", "A GGUF model or a cache")->required();
  verify->footer(
      "Of a cache every byte is checked against its checksums. Of a model the metadata and the shapes of all tensors are\n"
      "checked; weights have no checksums.\n\n"
      "Examples:\n  kvasir verify book.kv && echo sound");
}

void add_bench(Grammar& grammar) {
  const auto [command, arguments] = grammar.add("bench", "Measure speed at several depths", run_bench);
  BenchArguments* const a = arguments.get();
  add_model(command, &a->model);
  value(command, "--depth", "N,N,...", "Tokens that are there before [0,4096]",
        [=](const std::string& given) { a->depths = numbers_of(given); });
  count<uint64_t>(command, "--prompt", &a->prompt, 0, most_tokens, "Tokens to read at each depth; 0: none [512]");
  count<uint64_t>(command, "--generate", &a->generate, 0, 1u << 20, "Tokens to decode at each depth; 0: none [32]");
  value(command, "--strategy", "NAME,...", "Strategies to decode with [full,quest]",
        [=](const std::string& given) { a->strategies = parts_of(given); });
  add_budget(command, &a->session);
  count<uint32_t>(command, "--repetitions", &a->repetitions, 1, 1000, "Measurements of which the median is told [3]");
  add_reading(command, &a->session);
  text(command, "--text", &a->text, "FILE", "Tokens of this text, over and over, instead of random ones");
  flag(command, "--mapped", &a->mapped, "Measure also loading and answering from a saved file, and its memory");
  a->folder = ".";
  text(command, "--folder", &a->folder, "FOLDER", "Where --mapped puts its file, removed afterwards [.]");
  command->footer(
      "Speeds are tokens a second. Ratios are of the same run: to full attention at the same depth, and to the\n"
      "smallest depth.\n\n"
      "Examples:\n"
      "  kvasir bench -m model.gguf --depth 0,8192,32768 --prompt 512 --generate 32 --strategy full,quest --budget 2%\n"
      "  kvasir bench -m model.gguf --depth 131072 --budget 2048 --dense-layers 0 --mapped --json");
}

void add_eval(Grammar& grammar) {
  const auto [command, arguments] = grammar.add("eval", "Measure what strategies cost in right answers", run_eval);
  EvalArguments* const a = arguments.get();
  a->tasks = tasks_of("all");
  a->budgets = budgets_of("1%,2%,5%");
  add_model(command, &a->model);
  command->add_option("-f,--file", a->texts, wrapped("What documents are cut from, plain text; several are put together"))
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->required();
  value(command, "--task", "NAME,...", "all, " + task_names() + " [all]", [=](const std::string& given) { a->tasks = tasks_of(given); });
  value(command, "--length", "N,N,...", "Tokens of a document; 8K is 8192 [8K]",
        [=](const std::string& given) { a->lengths = lengths_of(given); });
  value(command, "--strategy", "NAME,...", "What answers read: all, or some of " + strategy_names() + " [all]",
        [=](const std::string& given) { a->strategies = parts_of(given); });
  value(command, "--budget", "B,B,...", "Of each strategy that takes one: tokens, or shares of the document [1%,2%,5%]",
        [=](const std::string& given) { a->budgets = budgets_of(given); });
  add_choosing(command, &a->session);
  add_select_tokens(command, &a->select_tokens);
  count<uint32_t>(command, "--documents", &a->documents, 1, 1000, "Documents of each length, and as many tables for key-value [2]");
  count<uint32_t>(command, "--questions", &a->questions, 1, 100, "Questions of each task to a document; many-queries has a fourth, "
                  "pass-key and perplexity have one [10]");
  count<uint32_t>(command, "--depths", &a->depths, 1, 100, "Stretches of a document over which answers are spread [5]");
  count<uint64_t>(command, "--seed", &a->seed, 0, UINT64_MAX, "The same seed gives the same documents and questions [1]");
  text(command, "--work", &a->work, "FOLDER", "Keeps what was read and answered [kvasir-eval]");
  text(command, "-o,--output", &a->output, "FILE", "Where all results go, as JSON [results.json in that folder]");
  add_threads(command, &a->session);
  add_sparse_reading(command, &a->session);
  command->footer(
      "Each document is read once and kept in the folder; every strategy and budget maps it and answers all of its questions,\n"
      "each on its own. What was answered is not asked again: Ctrl-C stops, and the same command goes on. Another model, text,\n"
      "seed or build of Kvasir is asked anew; remove the folder when reading itself was changed. A document of 128K tokens needs\n"
      "a text of more than half a megabyte.\n\n"
      "Answers count when they contain what was expected, whatever the capitals and punctuation. tools/plot.py draws the results.\n\n"
      "Examples:\n"
      "  kvasir eval -m model.gguf -f book.txt --length 8K,32K --strategy full,quest --budget 1%,5%\n"
      "  kvasir eval -m model.gguf -f book.txt -f another.txt --task single,key-value --length 128K --depths 10");
}

void add_tokenize_and_logits(Grammar& grammar) {
  const auto [tokens, tokenized] = grammar.add("tokenize", "Print a text's token ids as a JSON array", run_tokenize);
  add_model(tokens, &tokenized->model);
  text(tokens, "-f,--file", &tokenized->file, "FILE", "The text; - is standard input")->required();
  flag(tokens, "--special", &tokenized->special, "Text that spells a control token is that token");
  flag(tokens, "--bos", &tokenized->bos, "Begin with the begin-of-text token, if the model wants one");
  tokens->footer("Examples:\n  kvasir tokenize -m model.gguf --special -f prompt.txt > ids.json");

  const auto [logits, measured] = grammar.add("logits", "Write the logits at each token, to compare runtimes", run_logits);
  add_model(logits, &measured->model);
  text(logits, "--tokens", &measured->tokens, "FILE", "A JSON array of token ids; - is standard input")->required();
  text(logits, "-o,--output", &measured->output, "FILE", "float32 [tokens][vocabulary], little endian")->required();
  value(logits, "--kv", "f32|int8", "Precision of keys and values [int8]", [held = measured](const std::string& given) {
    if (given != "f32" && given != "int8") throw CLI::ValidationError("'" + given + "' is neither f32 nor int8");
    held->session.full_precision = given == "f32";
  });
  add_reading(logits, &measured->session);
  logits->footer(
      "With --kv int8 what has left the window is read from int8 pages; a small --chunk lets tokens leave it early.\n\n"
      "Examples:\n  kvasir logits -m model.gguf --tokens ids.json --kv f32 -o reference.f32\n"
      "  kvasir logits -m model.gguf --tokens ids.json --kv int8 --chunk 32 -o int8.f32");
}

std::string version_text() {
  const uint32_t version = kv_version();
  return "kvasir " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100) + "\n" + json_text(Json::parse(kv_build_info()));
}

void describe(CLI::App& app) {
  app.get_formatter()->column_width(34);
  app.require_subcommand(0, 1);
  app.set_help_flag("-h,--help", "What you are reading");
  app.footer(
      "`kvasir COMMAND --help` tells each command's options, with examples.\n\n"
      "Begin with:\n"
      "  kvasir ask -m model.gguf -f book.txt --save book.kv \"Who is Irene Adler?\"\n\n"
      "Exit codes:\n"
      "  0    done\n"
      "  1    another failure, such as a document longer than the model's context\n"
      "  2    the command line makes no sense\n"
      "  3    a file is not there, not permitted, damaged, or of another kind\n"
      "  4    the cache is of another model or version: read the document again\n"
      "  5    out of memory, disk space or another resource\n"
      "  130  stopped by Ctrl-C\n"
      "  141  nobody reads the output any more");
}

}  // namespace

Invocation parse_arguments(int argument_count, const char* const* values) {
  Invocation invocation;
  CLI::App app("Read a long document once, keep it, question it for ever after.", "kvasir");
  describe(app);
  add_global(&app, &invocation.global);
  app.set_version_flag("--version", version_text, "Version, and what it was built with");
  Command chosen;
  Grammar grammar{app, &invocation.global, &chosen};
  add_ask(grammar);
  add_prefill(grammar);
  add_chat(grammar);
  add_inspect_and_verify(grammar);
  add_bench(grammar);
  add_eval(grammar);
  add_tokenize_and_logits(grammar);
  try {
    app.parse(argument_count, values);
  } catch (const CLI::CallForHelp&) {
    invocation.text = app.help();
    return invocation;
  } catch (const CLI::CallForVersion& version) {
    invocation.text = version.what();
    return invocation;
  } catch (const CLI::ParseError& error) {
    std::string which = "kvasir";
    for (const CLI::App* command : app.get_subcommands()) which += " " + command->get_name();
    throw Failure(exit_usage, std::string(error.what()) + "; `" + which + " --help` tells what can be said");
  }
  if (!chosen) throw Failure(exit_usage, "no command; `kvasir --help` lists them");
  invocation.command = chosen;
  return invocation;
}

}  // namespace tool
