// What the command line's grammar is made of: options, those that commands share, and commands.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "argument_values.h"

namespace tool {

// Help beside the options' names, in lines that fit a terminal of 100 columns.
std::string wrapped(const std::string& help);

void flag(CLI::App* app, const std::string& names, bool* target, const std::string& help);

// One option with a value that `take` reads; one name for the value in the help.
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
CLI::Option* count(CLI::App* app, const std::string& names, Number* target, Number least,
                   Number most, const std::string& help) {
  return value(app, names, "N", help,
               [=](const std::string& text) { *target = number<Number>(text, least, most); });
}

// Neither may be empty: a path, a name. The second one may be given several times.
CLI::Option* text(CLI::App* app, const std::string& names, std::string* target, const char* kind,
                  const std::string& help);
CLI::Option* texts(CLI::App* app, const std::string& names, std::vector<std::string>* target,
                   const char* kind, const std::string& help);

CLI::Validator not_empty();

// Of a command whose output replaces nothing without it.
void force(CLI::App* app, bool* target);

// Names that a value may have, as help lists them; what follows a space in one explains it: "linear
// (less from layer to layer)".
using Choices = std::vector<std::string>;

// One option whose value is one of these, or several with commas between them where `several` is
// set. The option keeps them as its type, "full|quest", or "full|quest,..." for several; help shows
// `kind` and, in place of %s, the choices.
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
void add_model(CLI::App* app, ModelFlags* flags);
void add_threads(CLI::App* app, SessionFlags* flags);
void add_choosing(CLI::App* app, SessionFlags* flags);  // how, whatever the strategy and budget
void add_select_tokens(CLI::App* app, uint32_t* target);
void add_budget(CLI::App* app, SessionFlags* flags);
void add_sparse_reading(CLI::App* app, SessionFlags* flags);
void add_reading(CLI::App* app, SessionFlags* flags);
void add_strategy(CLI::App* app, SessionFlags* flags);
void add_sampling(CLI::App* app, SamplingFlags* flags);
void add_passages(CLI::App* app, uint32_t* target);
void add_document(CLI::App* app, SourceFlags* flags, const char* save_names, const char* save_help);
void add_source(CLI::App* app, SourceFlags* flags);

using Command = std::function<void(Console&)>;

struct Grammar {
  CLI::App& app;
  GlobalFlags* global;
  Command* chosen;  // set by the subcommand that was given

  // A subcommand and its own arguments, which live as long as the command can be called.
  template <typename Arguments>
  std::pair<CLI::App*, std::shared_ptr<Arguments>> add(const char* name, const char* help,
                                                       void (*run)(Console&, const Arguments&)) {
    const auto arguments = std::make_shared<Arguments>();
    CLI::App* command = app.add_subcommand(name, help);
    command->callback([to = chosen, run, arguments] {
      *to = [run, arguments](Console& c) { run(c, *arguments); };
    });
    add_global(command, global);
    return {command, arguments};
  }
};

void add_library(Grammar& grammar);

// The commands that measure.
void add_bench(Grammar& grammar);
void add_eval(Grammar& grammar);
void add_recall(Grammar& grammar);
void add_calibrate(Grammar& grammar);

}  // namespace tool
