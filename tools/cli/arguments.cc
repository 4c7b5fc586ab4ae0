// The command line's grammar, with all of its help.
#include "arguments.h"

#include "commands.h"
#include "describe.h"
#include "failure.h"
#include "grammar.h"
#include "strategies.h"
#include "suggestion.h"

namespace tool {
namespace {

// Options of `ask` and `chat`.
template <class Arguments>
void add_answering(CLI::App* command, Arguments* arguments) {
  add_model(command, &arguments->model);
  add_source(command, &arguments->source);
  add_instructions(command, &arguments->session);
  add_strategy(command, &arguments->session);
  add_prefill_options(command, &arguments->session);
  add_sampling(command, &arguments->sampling);
}

// All documents of a library at once.
template <class Arguments>
void add_all_of_library(CLI::App* command, Arguments* arguments) {
  add_passages(command, &arguments->passages);
  text(
      command, "--library", &arguments->library, "DIR",
      "Ask all documents of a library at once, in place of -f and -c; answers quote their sources");
  value(command, "--only", "NAME,...",
        "With --library, only these of its documents; NAME* stands for all that begin so",
        [=](const std::string& given) { arguments->only = parts_of(given); });
  count<uint32_t>(command, "--documents", &arguments->max_documents, 1, 1024,
                  "With --library, documents that an answer attends at most [8, always chosen]");
}

void add_ask(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("ask", "Answer questions about a document", run_ask);
  add_answering(command, arguments.get());
  add_all_of_library(command, arguments.get());
  add_questions(command, &arguments->questions, "Questions [one per line of standard input]");
  footer(
      command,
      "Every question is answered on its own, without the questions before it. `kvasir chat` holds "
      "a conversation.\n\n"
      "Examples:\n"
      "  kvasir ask -m model.gguf -f book.txt --save book.kv \"Who is Irene Adler?\"\n"
      "      prefills the book and saves its KV cache; the next time maps the file\n"
      "  kvasir ask -m model.gguf -c book.kv --passages 3 \"Who is Irene Adler?\"\n"
      "      quotes the passages that the answer attended most, each with its share and place\n"
      "  kvasir ask -m model.gguf --library books \"Who is Irene Adler?\"\n"
      "      asks all documents of the library; nothing is prefilled but the question\n"
      "  kvasir ask -m model.gguf -c book.kv --strategy quest --budget 2% \"Who came at nine?\" "
      "\"And who at ten?\"\n"
      "  pdftotext report.pdf - | kvasir ask -m model.gguf -f - --json \"What does it conclude?\"");
}

void add_prefill(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("prefill", "Prefill a document and save its KV cache", run_prefill);
  add_model(command, &arguments->model);
  add_document(command, &arguments->source, "-o,--output", "Cache file to write");
  command->get_option("--file")->required();
  command->get_option("--output")->required();
  add_instructions(command, &arguments->session);
  add_prefill_options(command, &arguments->session);
  choice(command, "--strategy", "NAME", "Strategy whose index is saved too: %s",
         strategy_choices("auto"),
         [held = arguments](const std::string& given) { held->session.strategy = given; });
  footer(command,
         "The first Ctrl-C stops and saves the finished part. The same command continues there. It "
         "also continues with a document that has grown at its end.\n\n"
         "Examples:\n"
         "  kvasir prefill -m model.gguf -f book.txt -o book.kv\n"
         "  kvasir ask -m model.gguf -c book.kv \"Who is Irene Adler?\"");
}

void add_chat(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("chat", "Hold a conversation, with or without a document", run_chat);
  add_answering(command, arguments.get());
  add_all_of_library(command, arguments.get());
  footer(
      command,
      "Commands in the conversation: /reset /stats /save FILE /help. Ctrl-C stops an answer, "
      "Ctrl-D ends the conversation. Up and Down recall earlier questions.\n"
      "Questions may also come from a pipe, one per line. Over the documents of a library, each "
      "answer chooses its documents anew and quotes them; /save keeps the conversation in a file "
      "that refers to them.\n\n"
      "Examples:\n"
      "  kvasir chat -m model.gguf -f book.txt --save book.kv\n"
      "  kvasir chat -m model.gguf -c book.kv --temperature 0.7\n"
      "  kvasir chat -m model.gguf --library books\n"
      "  printf 'Who is he?\\nWhy?\\n' | kvasir chat -m model.gguf -c book.kv");
}

void add_inspect_and_verify(Grammar& grammar) {
  const auto [inspect, inspected] =
      grammar.add("inspect", "Describe a model, a cache file or a packed file", run_inspect);
  text(inspect, "file", &inspected->path, "FILE", "GGUF model, cache file or packed file")
      ->required();
  footer(inspect, "Examples:\n  kvasir inspect model.gguf\n  kvasir inspect --json book.kv");
  const auto [verify, verified] =
      grammar.add("verify", "Verify a model or a cache file", run_verify);
  text(verify, "file", &verified->path, "FILE", "GGUF model or cache file")->required();
  footer(verify,
         "Verifies every byte of a cache file against its checksums. A model has none for its "
         "weights: its metadata and the shapes of its tensors are verified, and the file is "
         "hashed.\n\n"
         "Examples:\n  kvasir verify book.kv && echo sound");
}

void add_pack_and_unpack(Grammar& grammar) {
  const auto add = [&](const char* name, const char* help, auto run, const char* file,
                       const char* output) {
    const auto [command, arguments] = grammar.add(name, help, run);
    text(command, "file", &arguments->path, "FILE", file)->required();
    text(command, "-o,--output", &arguments->output, "FILE", output)->required();
    force(command, &arguments->force);
    return std::pair(command, arguments);
  };
  const auto [pack, packed] = add("pack", "Compress a cache file, to send or archive it", run_pack,
                                  "Cache file", "Packed file to write");
  count<uint32_t>(pack, "--level", &packed->level, 1, 19,
                  "Level of compression; a higher one is slower and slightly smaller [1]");
  footer(
      pack,
      "A packed file has about 85% of the size. It cannot be mapped: `kvasir unpack` restores the "
      "cache file, bit for bit.\n\n"
      "Examples:\n  kvasir pack book.kv -o book.kvz");
  const auto [unpack, unpacked] = add("unpack", "Restore a cache file from a packed file",
                                      run_unpack, "Packed file", "Cache file to write");
  footer(
      unpack,
      "Examples:\n  kvasir unpack book.kvz -o book.kv && kvasir ask -m model.gguf -c book.kv \"Who "
      "is Irene Adler?\"");
}

void add_tokenize_and_logits(Grammar& grammar) {
  const auto [tokens, tokenized] =
      grammar.add("tokenize", "Print the token ids of a text as a JSON array", run_tokenize);
  add_vocabulary(tokens, &tokenized->model);
  text(tokens, "-f,--file", &tokenized->file, "FILE", "Text; - is standard input")->required();
  flag(tokens, "--special", &tokenized->special,
       "Text that spells a control token becomes that token");
  flag(tokens, "--bos", &tokenized->bos,
       "Begin with the begin-of-text token if the model wants one");
  footer(tokens, "Examples:\n  kvasir tokenize -m model.gguf --special -f prompt.txt > ids.json");

  const auto [logits, measured] =
      grammar.add("logits", "Write the logits at each token, to compare runtimes", run_logits);
  add_model(logits, &measured->model);
  text(logits, "--tokens", &measured->tokens, "FILE",
       "JSON array of token ids; - is standard input")
      ->required();
  text(logits, "-o,--output", &measured->output, "FILE",
       "float32 [tokens][vocabulary], little endian")
      ->required();
  force(logits, &measured->force);
  choice(logits, "--precision", "f32|int8", "Precision of the KV cache: %s [int8]", {"f32", "int8"},
         [held = measured](const std::string& given) {
           if (given != "f32" && given != "int8")
             throw CLI::ValidationError("'" + given + "' is neither f32 nor int8");
           held->session.full_precision = given == "f32";
         });
  add_prefill_options(logits, &measured->session);
  footer(
      logits,
      "With int8, tokens that have left the window are read from int8 pages. With a small --chunk "
      "they leave it early.\n\n"
      "Examples:\n  kvasir logits -m model.gguf --tokens ids.json --precision f32 -o "
      "reference.f32\n"
      "  kvasir logits -m model.gguf --tokens ids.json --chunk 32 -o int8.f32");
}

std::string version_text() {
  const uint32_t version = kv_version();
  return "kvasir " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100) + "\n" + json_text(Json::parse(kv_build_info()));
}

void describe(CLI::App& app) {
  app.get_formatter()->column_width(34);
  app.require_subcommand(0, 1);
  app.set_help_flag("-h,--help", "Print this help");
  footer(&app,
         "`kvasir COMMAND --help` lists the options of a command, with examples.\n\n"
         "Begin with:\n"
         "  kvasir ask -m model.gguf -f book.txt --save book.kv \"Who is Irene Adler?\"\n\n"
         "Exit codes:\n"
         "  0    done\n"
         "  1    another failure, such as a document longer than the model's context\n"
         "  2    the command line is wrong\n"
         "  3    a file is missing, not permitted, damaged, or of another kind\n"
         "  4    the cache file belongs to another model or version: prefill again\n"
         "  5    out of memory, disk space or another resource, such as a GPU\n"
         "  130  stopped by Ctrl-C\n"
         "  141  the reader of the output is gone");
}

// A command of the build. Help does not list it.
void add_describe(CLI::App& app, std::string* out) {
  CLI::App* command =
      app.add_subcommand("describe", "Print this grammar for a shell or as a manual page")
          ->group("");
  value(command, "as", "bash|zsh|fish|man", "Completions for a shell, or the manual page",
        [=, whole = &app](const std::string& given) {
          *out = described_as(given, grammar_of(*whole));
        })
      ->required();
}

// The innermost command that was parsed, and its name with those around it.
std::pair<CLI::App*, std::string> innermost(CLI::App* app) {
  std::string name = "kvasir";
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    name += " " + app->get_name();
  }
  return {app, name};
}

std::vector<std::string> commands_of(const CLI::App* app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app->get_subcommands(nullptr))
    if (!command->get_group().empty()) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> options_of(const CLI::App* app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app->get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

// CLI11 reports a missing argument before an unknown one, which often is the missing one mistyped.
std::string usage_error(CLI::App* app, const CLI::ParseError& error) {
  const auto [command, name] = innermost(app);
  const std::string advice = "`" + name + " --help` lists the ";
  std::vector<std::string> unknown = command->remaining();
  std::erase(unknown, "--");
  if (unknown.empty()) return error.what() + ("; " + advice) + "options";
  const std::string& first = unknown.front();
  if (first.starts_with('-') && first.size() > 1)
    return "unknown option '" + first + "'" +
           suggestion(first.substr(0, first.find('=')), options_of(command)) + "; " + advice +
           "options";
  if (const std::vector<std::string> commands = commands_of(command); !commands.empty())
    return "unknown command '" + first + "'" + suggestion(first, commands) + "; " + advice +
           "commands";
  return "unexpected argument '" + first + "'; " + advice + "arguments";
}

}  // namespace

Invocation parse_arguments(int argument_count, const char* const* values) {
  Invocation invocation;
  CLI::App app("Prefill a long document once, save its KV cache, query it any number of times.",
               "kvasir");
  describe(app);
  app.allow_windows_style_options(false);  // "/a/b" is a path there too
  add_global(&app, &invocation.global);
  app.set_version_flag("--version", version_text, "Print the version and the build");
  Command chosen;
  Grammar grammar{app, &invocation.global, &chosen};
  add_ask(grammar);
  add_prefill(grammar);
  add_chat(grammar);
  add_library(grammar);
  add_inspect_and_verify(grammar);
  add_pack_and_unpack(grammar);
  add_bench(grammar);
  add_eval(grammar);
  add_recall(grammar);
  add_calibrate(grammar);
  add_tokenize_and_logits(grammar);
  add_describe(app, &invocation.text);
  try {
    app.parse(argument_count, values);
  } catch (const CLI::CallForHelp&) {
    invocation.text = app.help();
    return invocation;
  } catch (const CLI::CallForVersion& version) {
    invocation.text = version.what();
    return invocation;
  } catch (const CLI::ParseError& error) {
    throw Failure(exit_usage, usage_error(&app, error));
  }
  if (!invocation.text.empty()) return invocation;
  if (!chosen) throw Failure(exit_usage, "no command; `kvasir --help` lists them");
  invocation.command = chosen;
  return invocation;
}

}  // namespace tool
