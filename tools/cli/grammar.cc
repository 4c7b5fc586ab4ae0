#include "grammar.h"

#include "failure.h"
#include "number_text.h"
#include "strategies.h"

namespace tool {

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

CLI::Validator not_empty() {
  return {[](const std::string& given) { return std::string(given.empty() ? "it is empty" : ""); },
          ""};
}

void force(CLI::App* app, bool* target) {
  flag(app, "--force", target, "Replace the file that is there");
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
  flag(app, "--json", &flags->json, "One JSON document on standard output, errors included");
  flag(app, "-q,--quiet", &flags->quiet, "Only results and errors");
}

void add_model(CLI::App* app, ModelFlags* flags) {
  text(app, "-m,--model", &flags->path, "FILE", "The model's weights, a GGUF file")->required();
  choice(app, "--chat-format", "NAME", "Instead of the one recognised in the model: %s",
         {"raw", "chatml", "llama3", "llama2", "mistral", "mistral-v3", "mistral-tekken", "gemma",
          "phi", "phi4", "deepseek", "deepseek-v2", "zephyr"},
         [=](const std::string& given) { flags->chat_format = given; });
  choice(app, "--device", "NAME",
         "Where weights are multiplied: %s, cuda:1, cuda:0,cuda:1 or cuda:all for several; auto: "
         "on GPUs, where there are any [cpu]",
         {"cpu", "auto", "cuda"}, [=](const std::string& given) { flags->device = given; });
  value(app, "--device-memory", "SIZE",
        "What the model may take of each GPU's, as 4G; layers that do not fit stay on the CPU. "
        "Without it what is free",
        [=](const std::string& given) { flags->device_memory = size_of(given); });
}

void add_threads(CLI::App* app, SessionFlags* flags) {
  count<uint32_t>(app, "-t,--threads", &flags->threads, 1, 1024,
                  "Threads; without it all processors");
}

void add_choosing(CLI::App* app, SessionFlags* flags) {
  value(app, "--dense-layers", "N",
        "Layers that read everything, those that a choice serves worst; without it the strategy "
        "decides",
        [=](const std::string& given) { flags->dense_layers = number<uint32_t>(given, 0, 1024); });
  value(app, "--coverage", "P%",
        "bounded reads what keeps the expected error of its sample below 100% less this, from a "
        "quarter of the budget to four times it",
        [=](const std::string& given) {
          const Budget share = budget_of(given);
          if (share.tokens != 0)
            throw Failure(exit_usage,
                          "'" + given + "' is a number of tokens: write a share, as 95%");
          flags->coverage = share.fraction;
        });
  value(app, "--filter-layers", "N,N,...",
        "Layers that choose for those after them, where the strategy is filter-layers; without it "
        "those that "
        "`kvasir calibrate` has found",
        [=](const std::string& given) {
          for (const std::string& part : parts_of(given)) number<uint32_t>(part, 0, 1023);
          flags->filter_layers = given;
        });
  choice(app, "--filter-window", "NAME", "Of which queries they take the attention: %s [last]",
         {"last", "exponential", "uniform (of 16)"},
         [=](const std::string& given) { flags->filter_window = filter_window_of(given); });
  flag(app, "--separate-heads", &flags->separate_heads,
       "Query heads of a group choose each for itself");
  flag(app, "--head-graphs", &flags->head_graphs,
       "Of ood and dipr-graph: a graph for each query head, made from its own queries, not one for "
       "the group");
}

void add_select_tokens(CLI::App* app, uint32_t* target) {
  count<uint32_t>(
      app, "--select-tokens", target, 1, 1024,
      "Of quest: neighbouring tokens that are chosen together, such as 16, 32, 64 [16]");
}

static void add_spreading(CLI::App* app, SessionFlags* flags) {
  choice(app, "--budget-schedule", "NAME", "How the budget is spread over layers: %s [uniform]",
         {"uniform", "linear (less from layer to layer)", "pyramid (much less)"},
         [=](const std::string& given) { flags->schedule = schedule_of(given); });
  count<uint32_t>(app, "--search-breadth", &flags->search_breadth, 1, 1u << 30,
                  "How far an index is searched: tokens kept at a time, or clusters read; without "
                  "it as the budget needs");
}

void add_budget(CLI::App* app, SessionFlags* flags) {
  value(app, "--budget", "N|P%",
        "What a strategy may read in each layer and head: tokens, or a share of the document",
        [=](const std::string& given) { flags->budget = budget_of(given); });
  add_choosing(app, flags);
  add_spreading(app, flags);
}

void add_sparse_reading(CLI::App* app, SessionFlags* flags) {
  choice(app, "--prefill", "NAME",
         "Read a long document sparsely, which is several times faster: %s; without it exactly",
         {"bounded", "quest (faster still, worse)", "flat (to compare, as those that follow)",
          "filter-layers", "window"},
         [=](const std::string& given) { flags->prefill = given; });
  value(app, "--prefill-budget", "P%", "What sparse reading chooses of the text before [10%]",
        [=](const std::string& given) {
          const Budget budget = budget_of(given);
          if (budget.tokens != 0)
            throw Failure(exit_usage,
                          "'" + given + "' is a number of tokens: write a share, as 5%");
          flags->prefill_budget = budget.fraction;
        });
  count<uint64_t>(app, "--prefill-exact", &flags->prefill_exact, 0, max_tokens,
                  "Tokens at the document's end that are read exactly all the same [0]");
}

void add_reading(CLI::App* app, SessionFlags* flags) {
  add_threads(app, flags);
  add_sparse_reading(app, flags);
  count<uint64_t>(app, "--context", &flags->context, 1, max_tokens,
                  "Tokens the document and the conversation may have; without it what the model "
                  "was trained for");
  count<uint32_t>(app, "--chunk", &flags->chunk, 1, 4096, "Tokens read together");
  count<uint32_t>(app, "--window", &flags->window, 1, 65536,
                  "Newest tokens kept in full precision and always read");
  value(app, "--memory", "SIZE",
        "What keys and values may take of it, as 300M or 2G; the rest is on disk. Without it no "
        "limit",
        [=](const std::string& given) { flags->memory = size_of(given); });
  text(app, "--spill-folder", &flags->spill_folder, "FOLDER",
       "Where on disk; gone at the end [/var/tmp]");
}

void add_strategy(CLI::App* app, SessionFlags* flags) {
  choice(app, "--strategy", "NAME", "What an answer reads of the document: %s",
         strategy_choices("auto"), [=](const std::string& given) { flags->strategy = given; });
  add_budget(app, flags);
  add_select_tokens(app, &flags->select_tokens);
}

void add_passages(CLI::App* app, uint32_t* target) {
  count<uint32_t>(app, "--passages", target, 0, 64,
                  "Quote under an answer the N passages of the document that it attended most [0]");
}

void add_sampling(CLI::App* app, SamplingFlags* flags) {
  const std::string group = "Sampling";
  const auto real = [=](const char* name, float* target, float least, float most,
                        const char* help) {
    value(app, name, "X", help, [=](const std::string& given) {
      *target = number<float>(given, least, most);
    })->group(group);
  };
  count<uint32_t>(app, "-n,--max-tokens", &flags->max_tokens, 1, 1u << 20,
                  "Longest answer, tokens [512]")
      ->group(group);
  real("--temperature", &flags->temperature, 0, 100, "0 takes the likeliest token each time [0]");
  count<uint32_t>(app, "--top-k", &flags->top_k, 0, 1u << 30,
                  "Only the N likeliest tokens; 0: all [0]")
      ->group(group);
  real("--top-p", &flags->top_p, 0, 1,
       "Only the likeliest tokens of this probability together [1]");
  real("--min-p", &flags->min_p, 0, 1,
       "Only tokens at least this likely, relative to the likeliest [0]");
  real("--repetition-penalty", &flags->repetition_penalty, 0.01f, 100,
       "Above 1: avoid what was said lately [1]");
  count<uint64_t>(app, "--seed", &flags->seed, 0, UINT64_MAX,
                  "The same seed gives the same answer [0]")
      ->group(group);
  app->add_option("--stop", flags->stop,
                  "Ends an answer where it comes up; may be given several times")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->group(group);
}

void add_document(CLI::App* app, SourceFlags* flags, const char* save_names,
                  const char* save_help) {
  text(app, "-f,--file", &flags->document, "FILE", "The document, plain text; - is standard input");
  text(app, save_names, &flags->save, "CACHE", save_help);
  flag(app, "--force", &flags->force,
       "Replace a file that is there, also one that holds anything but this document or its "
       "beginning");
}

void add_source(CLI::App* app, SourceFlags* flags) {
  add_document(app, flags, "-s,--save",
               "Keep what was read in this file, and use it the next time: if it holds this "
               "document, nothing is read");
  text(app, "-c,--cache", &flags->cache, "CACHE", "A saved document instead of -f");
}

}  // namespace tool
