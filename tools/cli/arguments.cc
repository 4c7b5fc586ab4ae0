// The command line's grammar and all of its help.
#include "commands.h"
#include "describe.h"
#include "failure.h"
#include "grammar.h"
#include "strategies.h"

namespace tool {
namespace {

void add_ask(Grammar& grammar) {
  const auto [command, arguments] = grammar.add("ask", "Question a document", run_ask);
  add_model(command, &arguments->model);
  add_source(command, &arguments->source);
  add_strategy(command, &arguments->session);
  add_reading(command, &arguments->session);
  add_sampling(command, &arguments->sampling);
  add_passages(command, &arguments->passages);
  command
      ->add_option("questions", arguments->questions,
                   "Questions; none: one a line from standard input")
      ->type_name("TEXT");
  command->footer(
      "Each question is answered on its own: an answer does not know the one before. For a "
      "conversation see `kvasir chat`.\n\n"
      "Examples:\n"
      "  kvasir ask -m model.gguf -f book.txt --save book.kv \"Who is Irene Adler?\"\n"
      "      reads the book and keeps it; the second time it is mapped and answers at once\n"
      "  kvasir ask -m model.gguf -c book.kv --passages 3 \"Who is Irene Adler?\"\n"
      "      quotes what the answer attended most, with its share of that and how far into the "
      "document it is\n"
      "  kvasir ask -m model.gguf -c book.kv --strategy quest --budget 2% \"Who came at nine?\" "
      "\"And who at ten?\"\n"
      "  pdftotext report.pdf - | kvasir ask -m model.gguf -f - --json \"What does it conclude?\"");
}

void add_prefill(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("prefill", "Read a document and save it as a cache", run_prefill);
  add_model(command, &arguments->model);
  add_document(command, &arguments->source, "-o,--output", "The cache file to write");
  command->get_option("--file")->required();
  command->get_option("--output")->required();
  add_reading(command, &arguments->session);
  choice(command, "--strategy", "NAME", "Also keep the index that this strategy searches: %s",
         strategy_choices("auto"),
         [held = arguments](const std::string& given) { held->session.strategy = given; });
  command->footer(
      "The first Ctrl-C stops and keeps what was read; the same command goes on where it stopped. "
      "A document that has grown\n"
      "at its end is read from there.\n\n"
      "Examples:\n"
      "  kvasir prefill -m model.gguf -f book.txt -o book.kv\n"
      "  kvasir ask -m model.gguf -c book.kv \"Who is Irene Adler?\"");
}

void add_chat(Grammar& grammar) {
  const auto [command, arguments] =
      grammar.add("chat", "Talk about a document, or just talk", run_chat);
  add_model(command, &arguments->model);
  add_source(command, &arguments->source);
  add_strategy(command, &arguments->session);
  add_reading(command, &arguments->session);
  add_sampling(command, &arguments->sampling);
  command->footer(
      "In the conversation: /reset /stats /save FILE /help; Ctrl-C stops an answer, Ctrl-D "
      "leaves.\n"
      "Questions may also come from a pipe, one a line.\n\n"
      "Examples:\n"
      "  kvasir chat -m model.gguf -f book.txt --save book.kv\n"
      "  kvasir chat -m model.gguf -c book.kv --temperature 0.7\n"
      "  printf 'Who is he?\\nWhy?\\n' | kvasir chat -m model.gguf -c book.kv");
}

void add_inspect_and_verify(Grammar& grammar) {
  const auto [inspect, inspected] =
      grammar.add("inspect", "Say what a model, a cache or a packed file is", run_inspect);
  text(inspect, "file", &inspected->path, "FILE", "A GGUF model, a cache, or a packed cache")
      ->required();
  inspect->footer("Examples:\n  kvasir inspect model.gguf\n  kvasir inspect --json book.kv");
  const auto [verify, verified] =
      grammar.add("verify", "Check a model or a cache file", run_verify);
  text(verify, "file", &verified->path, "FILE", "A GGUF model or a cache")->required();
  verify->footer(
      "Of a cache every byte is checked against its checksums. Of a model the metadata and the "
      "shapes of all tensors are\n"
      "checked; weights have no checksums.\n\n"
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
  const auto [pack, packed] =
      add("pack", "Make a smaller copy of a cache, for sending or keeping away", run_pack,
          "A cache", "The packed file to write");
  count<uint32_t>(pack, "--level", &packed->level, 1, 19,
                  "Of compression; higher is slower, and a little smaller [1]");
  pack->footer(
      "The packed file has about 85% of the cache's size. It is not mapped: `kvasir unpack` "
      "restores the cache, bit for bit.\n\n"
      "Examples:\n  kvasir pack book.kv -o book.kvz");
  const auto [unpack, unpacked] = add("unpack", "Restore a cache that was packed", run_unpack,
                                      "A packed cache", "The cache to write");
  unpack->footer(
      "Examples:\n  kvasir unpack book.kvz -o book.kv && kvasir ask -m model.gguf -c book.kv \"Who "
      "is Irene Adler?\"");
}

void add_tokenize_and_logits(Grammar& grammar) {
  const auto [tokens, tokenized] =
      grammar.add("tokenize", "Print a text's token ids as a JSON array", run_tokenize);
  add_model(tokens, &tokenized->model);
  text(tokens, "-f,--file", &tokenized->file, "FILE", "The text; - is standard input")->required();
  flag(tokens, "--special", &tokenized->special, "Text that spells a control token is that token");
  flag(tokens, "--bos", &tokenized->bos,
       "Begin with the begin-of-text token, if the model wants one");
  tokens->footer("Examples:\n  kvasir tokenize -m model.gguf --special -f prompt.txt > ids.json");

  const auto [logits, measured] =
      grammar.add("logits", "Write the logits at each token, to compare runtimes", run_logits);
  add_model(logits, &measured->model);
  text(logits, "--tokens", &measured->tokens, "FILE",
       "A JSON array of token ids; - is standard input")
      ->required();
  text(logits, "-o,--output", &measured->output, "FILE",
       "float32 [tokens][vocabulary], little endian")
      ->required();
  force(logits, &measured->force);
  choice(logits, "--kv", "f32|int8", "Precision of keys and values: %s [int8]", {"f32", "int8"},
         [held = measured](const std::string& given) {
           if (given != "f32" && given != "int8")
             throw CLI::ValidationError("'" + given + "' is neither f32 nor int8");
           held->session.full_precision = given == "f32";
         });
  add_reading(logits, &measured->session);
  logits->footer(
      "With --kv int8 what has left the window is read from int8 pages; a small --chunk lets "
      "tokens leave it early.\n\n"
      "Examples:\n  kvasir logits -m model.gguf --tokens ids.json --kv f32 -o reference.f32\n"
      "  kvasir logits -m model.gguf --tokens ids.json --kv int8 --chunk 32 -o int8.f32");
}

std::string version_text() {
  const uint32_t version = kv_version();
  return "kvasir " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100) + "\n" + json_text(Json::parse(kv_build_info()));
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

// For the build, not for people: help does not list it, and it does not list itself.
void add_describe(CLI::App& app, std::string* out) {
  CLI::App* command =
      app.add_subcommand("describe", "Print this grammar as another program wants it")->group("");
  value(command, "as", "bash|zsh|fish|man", "Completions for a shell, or the manual's page",
        [=, whole = &app](const std::string& given) {
          *out = described_as(given, grammar_of(*whole));
        })
      ->required();
}

}  // namespace

Invocation parse_arguments(int argument_count, const char* const* values) {
  Invocation invocation;
  CLI::App app("Read a long document once, keep it, question it any number of times.", "kvasir");
  describe(app);
  app.allow_windows_style_options(false);  // "/a/b" is a path there too
  add_global(&app, &invocation.global);
  app.set_version_flag("--version", version_text, "Version, and what it was built with");
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
    std::string which = "kvasir";
    for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
      at = at->get_subcommands().front();
      which += " " + at->get_name();
    }
    throw Failure(exit_usage,
                  std::string(error.what()) + "; `" + which + " --help` tells what can be said");
  }
  if (!invocation.text.empty()) return invocation;
  if (!chosen) throw Failure(exit_usage, "no command; `kvasir --help` lists them");
  invocation.command = chosen;
  return invocation;
}

}  // namespace tool
