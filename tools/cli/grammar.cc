#include "grammar.h"

#include "failure.h"
#include "number_text.h"
#include "strategies.h"

namespace tool {

std::string wrapped(const std::string& help, size_t columns) {
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

void footer(CLI::App* app, const std::string& text) {
  std::string lines;
  for (const std::string& line : CLI::detail::split(text, '\n'))
    lines += (lines.empty() ? "" : "\n") + (line.starts_with("  ") ? line : wrapped(line, 100));
  app->footer(lines);
}

void flag(CLI::App* app, const std::string& names, bool* target, const std::string& help) {
  app->add_flag(names, *target, wrapped(help));
}

CLI::Option* text(CLI::App* app, const std::string& names, std::string* target, const char* kind,
                  const std::string& help) {
  return value(app, names, kind, help, [=](const std::string& given) {
    if (given.empty()) throw CLI::ValidationError("it is empty");
    *target = given;
  });
}

CLI::Option* texts(CLI::App* app, const std::string& names, std::vector<std::string>* target,
                   const char* kind, const std::string& help) {
  return app->add_option(names, *target, wrapped(help))
      ->type_name(kind)
      ->allow_extra_args(false)
      ->check(not_empty());
}

CLI::Validator not_blank() {
  return {[](const std::string& given) {
            const bool blank = given.find_first_not_of(" \t\r\n") == std::string::npos;
            return std::string(blank ? "a question is empty" : "");
          },
          ""};
}

void add_questions(CLI::App* app, std::vector<std::string>* target, const std::string& help) {
  app->add_option("questions", *target, wrapped(help))->type_name("TEXT")->check(not_blank());
}

CLI::Validator not_empty() {
  return {[](const std::string& given) { return std::string(given.empty() ? "it is empty" : ""); },
          ""};
}

void force(CLI::App* app, bool* target) {
  flag(app, "--force", target, "Replace an existing file");
}

CLI::Option* described_choice(CLI::Option* option, const char* kind, const Choices& choices,
                              bool several) {
  std::string names;
  for (const std::string& choice : choices)
    names.append(names.empty() ? "" : "|").append(choice.substr(0, choice.find(' ')));
  if (several) names += ",...";
  return option->type_name(names)->option_text(kind);
}

std::string with_choices(const std::string& help, const Choices& choices) {
  std::string filled = help;
  return filled.replace(help.find("%s"), 2, listed(choices));
}

void add_global(CLI::App* app, GlobalFlags* flags) {
  flag(app, "--json", &flags->json, "Print one JSON document on standard output, errors included");
  flag(app, "-q,--quiet", &flags->quiet, "Print results and errors only");
}

void add_vocabulary(CLI::App* app, ModelFlags* flags) {
  text(app, "-m,--model", &flags->path, "FILE", "Model weights, a GGUF file")->required();
  choice(app, "--chat-format", "NAME", "Chat format, if not the one recognised in the model: %s",
         {"raw",          "chatml",         "llama3",     "llama2",
          "llama4",       "mistral",        "mistral-v3", "mistral-tekken",
          "mistral-v7",   "mistral-v7-spm", "gemma",      "gemma4",
          "phi",          "phi4",           "phi4-mini",  "deepseek",
          "deepseek-v2",  "zephyr",         "gpt-oss",    "gpt-oss-low",
          "gpt-oss-high", "granite",        "command-r",  "command-r7b",
          "glm4",         "exaone4",        "seed-oss",   "hunyuan-dense",
          "bailing2",     "dots1",          "falcon3",    "minicpm"},
         [=](const std::string& given) { flags->chat_format = given; });
  text(
      app, "--chat-format-file", &flags->chat_format_file, "FILE",
      "Custom chat format: the text of one conversation, with {document}, {question} and {answer}");
}

void add_model(CLI::App* app, ModelFlags* flags) {
  add_vocabulary(app, flags);
  choice(app, "--device", "NAME",
         "Device that multiplies weights: %s; cuda:1 is one GPU, cuda:0,cuda:1 and cuda:all are "
         "several; auto uses GPUs if there are any [cpu]",
         {"cpu", "auto", "cuda"}, [=](const std::string& given) { flags->device = given; });
  value(app, "--device-memory", "SIZE",
        "Limit of each GPU's memory for the model, such as 4G; layers beyond it stay on the CPU "
        "[all free memory]",
        [=](const std::string& given) { flags->device_memory = size_of(given); });
}

void add_threads(CLI::App* app, SessionFlags* flags) {
  count<uint32_t>(app, "-t,--threads", &flags->threads, 1, 1024, "Threads [one per CPU]");
}

static Budget percentage_of(const std::string& given, const char* example) {
  const Budget budget = budget_of(given);
  if (budget.tokens != 0)
    throw Failure(exit_usage,
                  "'" + given + "' is a number of tokens: write a percentage, such as " + example);
  return budget;
}

void add_selection(CLI::App* app, SessionFlags* flags) {
  value(app, "--dense-layers", "N",
        "Layers with full attention, those that the strategy serves worst [the strategy's own]",
        [=](const std::string& given) { flags->dense_layers = number<uint32_t>(given, 0, 1024); });
  value(app, "--coverage", "P%",
        "bounded: 100% less the expected error of its sample; each step reads a quarter of the "
        "budget to four times the budget",
        [=](const std::string& given) { flags->coverage = percentage_of(given, "95%").fraction; });
  value(app, "--filter-layers", "N,N,...",
        "filter-layers: layers that select for the layers after them [found by `kvasir calibrate`]",
        [=](const std::string& given) {
          for (const std::string& part : parts_of(given)) number<uint32_t>(part, 0, 1023);
          flags->filter_layers = given;
        });
  choice(app, "--filter-window", "NAME",
         "filter-layers: queries whose attention filter layers select by: %s [last]",
         {"last", "exponential", "uniform (of 16)"},
         [=](const std::string& given) { flags->filter_window = filter_window_of(given); });
  flag(app, "--separate-heads", &flags->separate_heads,
       "Select for each query head, not for a group of query heads");
  flag(app, "--head-graphs", &flags->head_graphs,
       "ood, dipr-graph: build a graph for each query head from its own queries, not one for the "
       "group");
}

void add_select_tokens(CLI::App* app, SessionFlags* flags) {
  count<uint32_t>(app, "--select-tokens", &flags->select_tokens, 1, 1024,
                  "quest: neighbouring tokens that are selected together, such as 16, 32, 64 [16]");
}

static void add_spreading(CLI::App* app, SessionFlags* flags) {
  choice(app, "--budget-schedule", "NAME", "Spread of the budget over layers: %s [uniform]",
         {"uniform", "linear (fewer tokens from layer to layer)", "pyramid (far fewer)"},
         [=](const std::string& given) { flags->schedule = schedule_of(given); });
  count<uint32_t>(app, "--search-breadth", &flags->search_breadth, 1, 1u << 30,
                  "Breadth of an index search: tokens that it keeps, or clusters that it reads [as "
                  "the budget needs]");
}

void add_budget(CLI::App* app, SessionFlags* flags) {
  value(app, "--budget", "N|P%",
        "Tokens that a strategy may read per layer and head, or a percentage of the document",
        [=](const std::string& given) { flags->budget = budget_of(given); });
  add_selection(app, flags);
  add_spreading(app, flags);
}

void add_instructions(CLI::App* app, SessionFlags* flags) {
  text(app, "--instructions", &flags->instructions, "TEXT",
       "System text before the document, such as \"Answer in one sentence.\"");
  text(app, "--instructions-file", &flags->instructions_file, "FILE", "The same, from a file");
}

void add_sparse_prefill(CLI::App* app, SessionFlags* flags) {
  choice(app, "--prefill", "NAME",
         "Strategy of a sparse prefill, several times faster for long documents: %s [exact]",
         {"bounded", "quest (faster, worse)", "flat (to compare, like the following)",
          "filter-layers", "window"},
         [=](const std::string& given) { flags->prefill = given; });
  value(app, "--prefill-budget", "P%", "Budget of a sparse prefill, of the text so far [10%]",
        [=](const std::string& given) {
          flags->prefill_budget = percentage_of(given, "5%").fraction;
        });
  count<uint64_t>(app, "--prefill-exact", &flags->prefill_exact, 0, max_tokens,
                  "Exact tokens at the document's end in a sparse prefill [0]");
}

void add_prefill_options(CLI::App* app, SessionFlags* flags) {
  add_threads(app, flags);
  add_sparse_prefill(app, flags);
  count<uint64_t>(app, "--context", &flags->context_tokens, 1, max_tokens,
                  "Most tokens of document and conversation together [the model's]");
  count<uint32_t>(app, "--chunk", &flags->prefill_chunk, 1, 4096, "Tokens per prefill step");
  count<uint32_t>(app, "--window", &flags->window_tokens, 1, 65536,
                  "Newest tokens in full precision, always attended [64]");
  value(app, "--memory-limit", "SIZE",
        "Host memory for the KV cache, such as 300M or 2G; pages beyond it go to disk [no limit]",
        [=](const std::string& given) { flags->memory_limit = size_of(given); });
  text(app, "--spill-directory", &flags->spill_directory, "DIR",
       "Directory of these pages, in a file that disappears at the end [/var/tmp]");
}

void add_strategy(CLI::App* app, SessionFlags* flags) {
  choice(app, "--strategy", "NAME", "Strategy of decode, which selects the tokens to read: %s",
         strategy_choices("auto"), [=](const std::string& given) { flags->strategy = given; });
  add_budget(app, flags);
  add_select_tokens(app, flags);
  count<uint32_t>(app, "--draft", &flags->draft_tokens, 0, 3,
                  "Tokens that the model's MTP layer drafts for each step of an answer [0]");
  flag(app, "--no-lookup", &flags->no_lookup,
       "No drafts from document and answer, with which answers are the same");
}

void add_passages(CLI::App* app, uint32_t* target) {
  count<uint32_t>(app, "--passages", target, 0, 64,
                  "Quote under an answer the N passages of the document that it attended most [0]");
}

void add_sampling(CLI::App* app, SamplingFlags* flags) {
  const std::string group = "Sampling";
  const auto real = [=](const char* name, float* target, float min, float max, const char* help) {
    value(app, name, "X", help, [=](const std::string& given) {
      *target = number<float>(given, min, max);
    })->group(group);
  };
  count<uint32_t>(app, "-n,--max-tokens", &flags->max_tokens, 1, 1u << 20,
                  "Most tokens of an answer [512]")
      ->group(group);
  real("--temperature", &flags->temperature, 0, 100, "0 takes the likeliest token each time [0]");
  count<uint32_t>(app, "--top-k", &flags->top_k, 0, 1u << 30,
                  "Only the N likeliest tokens; 0: all [0]")
      ->group(group);
  real("--top-p", &flags->top_p, 0, 1, "Only the likeliest tokens up to this probability [1]");
  real("--min-p", &flags->min_p, 0, 1,
       "Only tokens at least this likely, relative to the likeliest [0]");
  real("--repetition-penalty", &flags->repetition_penalty, 0.01f, 100,
       "Above 1: avoid the newest 256 tokens [1]");
  count<uint64_t>(app, "--seed", &flags->seed, 0, UINT64_MAX,
                  "The same seed gives the same answer [0]")
      ->group(group);
  choice(app, "--thinking", "NAME",
         "Whether a model that can think does so before it answers: %s [off]",
         {"off", "on", "show (its thought)"},
         [=](const std::string& given) {
           flags->thinks = given != "off", flags->shows_thought = given == "show";
         })
      ->group(group);
  count<uint32_t>(app, "--thinking-tokens", &flags->thinking_tokens, 1, 1u << 20,
                  "Most tokens of a thought, with --thinking on or show [2048]")
      ->group(group);
  app->add_option("--stop", flags->stop, "Text that ends an answer; may be given several times")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->group(group);
}

void add_document(CLI::App* app, SourceFlags* flags, const char* save_names,
                  const char* save_help) {
  text(app, "-f,--file", &flags->document, "FILE", "Document, plain text; - is standard input");
  text(app, save_names, &flags->save, "CACHE", save_help);
  flag(app, "--force", &flags->force,
       "Replace an existing file that is not a cache file of this document or of its beginning");
}

void add_source(CLI::App* app, SourceFlags* flags) {
  add_document(app, flags, "-s,--save",
               "Cache file: used if it holds this document, continued if it holds the beginning, "
               "written otherwise");
  text(app, "-c,--cache", &flags->cache, "CACHE", "Cache file in place of -f");
}

}  // namespace tool
