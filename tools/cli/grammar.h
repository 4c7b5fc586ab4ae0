// The building blocks of the command line's grammar: commands, options, and the options that
// commands share.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "argument_values.h"

namespace tool {

// Help in lines that fit next to the names of options in 100 columns.
std::string wrapped(const std::string& help, size_t columns = 64);

// The last part of a command's help. Lines of 100 columns; an indented line stays as it is.
void footer(CLI::App* app, const std::string& text);

void flag(CLI::App* app, const std::string& names, bool* target, const std::string& help);

// Adds an option with one value, which `take` parses. `kind` names the value in the help.
template <typename Take>
CLI::Option* value(CLI::App* app, const std::string& names, const char* kind,
                   const std::string& help, Take take) {
  const auto named = [=](const std::string& given) {
    try {
      take(given);
    } catch (const CLI::ValidationError& error) {
      throw CLI::ValidationError(names.substr(names.find(',') + 1) + ": " + error.what());
    }
  };
  return app->add_option_function<std::string>(names, named, wrapped(help))->type_name(kind);
}

template <typename Number>
CLI::Option* count(CLI::App* app, const std::string& names, Number* target, Number min, Number max,
                   const std::string& help) {
  return value(app, names, "N", help,
               [=](const std::string& text) { *target = number<Number>(text, min, max); });
}

// A path or a name, which must not be empty. The second form may be given several times.
CLI::Option* text(CLI::App* app, const std::string& names, std::string* target, const char* kind,
                  const std::string& help);
CLI::Option* texts(CLI::App* app, const std::string& names, std::vector<std::string>* target,
                   const char* kind, const std::string& help);

CLI::Validator not_empty();
CLI::Validator not_blank();  // more than spaces

// The positional questions of a command.
void add_questions(CLI::App* app, std::vector<std::string>* target, const std::string& help);

// --force of a command that otherwise replaces no file.
void force(CLI::App* app, bool* target);

// The values of an option, as help lists them. Text after a space explains a value: "linear (fewer
// tokens from layer to layer)".
using Choices = std::vector<std::string>;

// Sets an option's type to its choices: "full|quest", or "full|quest,..." with `several`, a list
// with commas. Help shows `kind`, and the choices in place of %s.
CLI::Option* described_choice(CLI::Option* option, const char* kind, const Choices& choices,
                              bool several);
std::string with_choices(const std::string& help, const Choices& choices);

template <typename Take>
CLI::Option* choice(CLI::App* app, const std::string& names, const char* kind,
                    const std::string& help, const Choices& choices, Take take,
                    bool several = false) {
  return described_choice(value(app, names, kind, with_choices(help, choices), take), kind, choices,
                          several);
}

// Options that commands share.
void add_global(CLI::App* app, GlobalFlags* flags);
void add_vocabulary(CLI::App* app, ModelFlags* flags);  // the model's file, to tokenize
void add_model(CLI::App* app, ModelFlags* flags);
void add_threads(CLI::App* app, SessionFlags* flags);
void add_selection(CLI::App* app, SessionFlags* flags);  // parameters besides budget and blocks
void add_select_tokens(CLI::App* app, SessionFlags* flags);
void add_budget(CLI::App* app, SessionFlags* flags);
void add_instructions(CLI::App* app, SessionFlags* flags);
void add_sparse_prefill(CLI::App* app, SessionFlags* flags);
void add_prefill_options(CLI::App* app, SessionFlags* flags);
void add_strategy(CLI::App* app, SessionFlags* flags);
void add_sampling(CLI::App* app, SamplingFlags* flags);
void add_passages(CLI::App* app, uint32_t* target);
void add_document(CLI::App* app, SourceFlags* flags, const char* save_names, const char* save_help);
void add_source(CLI::App* app, SourceFlags* flags);

using Command = std::function<void(Console&)>;

struct Grammar {
  CLI::App& app;
  GlobalFlags* global;
  Command* chosen;  // set by the parsed subcommand

  // Adds a subcommand. Its arguments live as long as the command can be called.
  template <typename Arguments>
  std::pair<CLI::App*, std::shared_ptr<Arguments>> add(const char* name, const char* help,
                                                       void (*run)(Console&, const Arguments&)) {
    const auto arguments = std::make_shared<Arguments>();
    CLI::App* command = app.add_subcommand(name, help);
    command->callback([to = chosen, run, arguments] {
      *to = [run, arguments](Console& console) { run(console, *arguments); };
    });
    add_global(command, global);
    return {command, arguments};
  }
};

void add_library(Grammar& grammar);

// Measuring commands.
void add_bench(Grammar& grammar);
void add_eval(Grammar& grammar);
void add_recall(Grammar& grammar);
void add_calibrate(Grammar& grammar);

}  // namespace tool
