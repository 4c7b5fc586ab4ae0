#include "describe.h"

#include <CLI/CLI.hpp>
#include <algorithm>

namespace tool {
namespace {

std::string in_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// The type's name shows the kind: FILE, DIR, N, "full|quest", "full|quest,...".
void set_kind(const std::string& type, ArgumentForm* form) {
  const bool lower_case = !type.empty() && type[0] >= 'a' && type[0] <= 'z';
  if (type == "FILE" || type == "CACHE") form->kind = ValueKind::file;
  if (type == "DIR") form->kind = ValueKind::folder;
  if (!lower_case || type.find('|') == std::string::npos) return;
  const std::string list = ",...";
  const bool several = type.ends_with(list);
  form->kind = several ? ValueKind::choices : ValueKind::choice;
  form->choices =
      CLI::detail::split(several ? type.substr(0, type.size() - list.size()) : type, '|');
}

ArgumentForm form_of(const CLI::Option& option) {
  ArgumentForm form;
  form.help = in_one_line(option.get_description());
  form.required = option.get_required();
  form.repeated = option.get_expected_max() > 1;
  if (option.get_positional()) form.names = {option.get_name(true)};
  for (const std::string& name : option.get_snames()) form.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) form.names.push_back("--" + name);
  if (option.get_items_expected_max() == 0) {  // a flag
    form.kind = ValueKind::none;
    return form;
  }
  form.value = option.get_option_text().empty() ? option.get_type_name() : option.get_option_text();
  set_kind(option.get_type_name(), &form);
  return form;
}

CommandForm form_of(const CLI::App& app, const std::string& before) {
  CommandForm form;
  form.name = before + app.get_name();
  form.help = in_one_line(app.get_description());
  form.footer = app.get_footer();
  for (const CLI::Option* option : app.get_options())
    (option->get_positional() ? form.positionals : form.options).push_back(form_of(*option));
  for (const CLI::App* command : app.get_subcommands(nullptr))
    if (!command->get_group().empty()) form.commands.push_back(form_of(*command, form.name + " "));
  return form;
}

}  // namespace

CommandForm grammar_of(const CLI::App& app) { return form_of(app, ""); }

std::vector<const CommandForm*> flat(const CommandForm& grammar) {
  std::vector<const CommandForm*> all = {&grammar};
  for (const CommandForm& command : grammar.commands) {
    const std::vector<const CommandForm*> inner = flat(command);
    all.insert(all.end(), inner.begin(), inner.end());
  }
  return all;
}

std::string last_word(const std::string& name) { return name.substr(name.rfind(' ') + 1); }

std::string described_as(const std::string& format, const CommandForm& grammar) {
  if (format == "bash") return bash_completion(grammar);
  if (format == "zsh") return zsh_completion(grammar);
  if (format == "fish") return fish_completion(grammar);
  if (format == "man") return manual_page(grammar);
  throw CLI::ValidationError("'" + format + "' is not bash, zsh, fish or man");
}

}  // namespace tool
