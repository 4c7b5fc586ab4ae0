// Completion for zsh: one function per command, which calls _arguments.
#include "describe.h"

#include <algorithm>

namespace tool {
namespace {

// For an explanation within single quotes.
std::string zsh_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  }
  return out;
}

std::string function_of(const std::string& command) {
  std::string name = "_" + command;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

std::string zsh_words(const std::vector<std::string>& all) {
  std::string text;
  for (const std::string& word : all) text.append(text.empty() ? "" : " ").append(word);
  return text;
}

// ":MESSAGE:ACTION" of _arguments; `free` is the action for any value.
std::string action(const ArgumentForm& form, const std::string& message, const char* free) {
  std::string action = free;
  if (form.kind == ValueKind::none) return "";
  if (form.kind == ValueKind::file) action = "_files";
  if (form.kind == ValueKind::folder) action = "_files -/";
  if (form.kind == ValueKind::choice) action = "(" + zsh_words(form.choices) + ")";
  if (form.kind == ValueKind::choices)
    action = "_values -s , " + message + " " + zsh_words(form.choices);
  return ":" + zsh_escaped(message) + ":" + action;
}

std::string option_spec(const ArgumentForm& form) {
  const bool flag = form.kind == ValueKind::none;
  std::string spec = form.repeated ? "'*'" : "'(" + zsh_words(form.names) + ")'";
  std::string names;
  for (const std::string& name : form.names) {
    names.append(names.empty() ? "" : ",").append(name);
    if (!flag) names += name.starts_with("--") ? "=" : "+";
  }
  spec += form.names.size() > 1 ? "{" + names + "}" : names;
  const std::string& name = form.names.back();
  return spec + "'[" + zsh_escaped(form.help) + "]" +
         action(form, name.substr(name.find_first_not_of('-')), " ") + "'";
}

std::string function_text(const CommandForm& command) {
  std::string text = "\n" + function_of(command.name) +
                     "() {\n  local curcontext=$curcontext state line\n  typeset -A opt_args\n"
                     "  _arguments -C -S";
  for (const ArgumentForm& form : command.options) text += " \\\n    " + option_spec(form);
  // with "()", options are completed in the place of a positional argument too
  int place = 1;
  for (const ArgumentForm& form : command.positionals) {
    text += " \\\n    '" + (form.repeated ? "*" : std::to_string(place)) +
            action(form, form.names[0], "()") + "'";
    ++place;
  }
  if (command.commands.empty()) return text + "\n}\n";
  text +=
      " \\\n    '(-)1:command:->command' \\\n    '(-)*::argument:->argument'\n  case $state in\n   "
      " command)\n      local -a commands=(";
  for (const CommandForm& inner : command.commands)
    text += "\n        '" + last_word(inner.name) + ":" + zsh_escaped(inner.help) + "'";
  text += "\n      )\n      _describe command commands ;;\n    argument)\n      case $line[1] in";
  for (const CommandForm& inner : command.commands)
    text += "\n        " + last_word(inner.name) + ") " + function_of(inner.name) + " ;;";
  return text + "\n      esac ;;\n  esac\n}\n";
}

}  // namespace

std::string zsh_completion(const CommandForm& grammar) {
  std::string text =
      "#compdef kvasir\n# Completion of kvasir's command line for zsh, made from its grammar.\n";
  for (const CommandForm* command : flat(grammar)) text += function_text(*command);
  // A file in $fpath is the function _kvasir itself and calls it.
  return text +
         "\nif [[ ${funcstack[1]-} == _kvasir ]]; then\n  _kvasir \"$@\"\nelse\n  compdef _kvasir "
         "kvasir\nfi\n";
}

}  // namespace tool
