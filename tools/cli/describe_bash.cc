// Completion for bash: two tables made from the grammar, a `case` on the command and one on the
// option, and fixed functions.
#include "describe.h"

namespace tool {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all.append(all.empty() ? "" : " ").append(word);
  return all;
}

// The value of an argument for the fixed functions: "file", "folder", "choice WORDS",
// "choices WORDS", "free".
std::string value_kind(const ArgumentForm& form) {
  switch (form.kind) {
    case ValueKind::file:
      return "file";
    case ValueKind::folder:
      return "folder";
    case ValueKind::choice:
      return "choice " + joined(form.choices);
    case ValueKind::choices:
      return "choices " + joined(form.choices);
    case ValueKind::free:
      return "free";
    case ValueKind::none:
      break;
  }
  return "";
}

std::string command_case(const CommandForm& command) {
  std::string names, commands, positionals;
  for (const ArgumentForm& option : command.options)
    names += (names.empty() ? "" : " ") + joined(option.names);
  for (const CommandForm& inner : command.commands)
    commands += (commands.empty() ? "" : " ") + last_word(inner.name);
  for (const ArgumentForm& form : command.positionals)
    positionals += (positionals.empty() ? "'" : " '") + value_kind(form) + "'";
  return "    '" + command.name + "')\n      options='" + names + "'\n      commands='" + commands +
         "'\n      positionals=(" + positionals + ") ;;\n";
}

std::string option_cases(const CommandForm& command) {
  std::string cases;
  for (const ArgumentForm& option : command.options) {
    if (option.kind == ValueKind::none) continue;
    std::string patterns;
    for (const std::string& name : option.names)
      patterns.append(patterns.empty() ? "" : " | ").append("'" + command.name + " " + name + "'");
    cases += "    " + patterns + ") wanted='" + value_kind(option) + "' ;;\n";
  }
  return cases;
}

constexpr char complete_one[] = R"(
# Completes the word $2 by the kind $1 of _kvasir_command or _kvasir_option.
_kvasir_complete() {
  local kind=${1%% *} words=${1#* } word=$2
  case $kind in
    file) compopt -o default ;;
    folder) compopt -o dirnames ;;
    choice) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
    choices)
      compopt -o nospace
      COMPREPLY=($(compgen -P "${word%"${word##*,}"}" -W "$words" -- "${word##*,}")) ;;
  esac
}

_kvasir() {
  local command=kvasir options commands positionals wanted option= word i given=0 only_positionals=
  COMPREPLY=()
  _kvasir_command "$command"
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ -n $option && $word == = ]]; then
      continue # readline splits --option=value
    elif [[ -n $option ]]; then
      option=
    elif [[ -z $only_positionals && $word == -- ]]; then
      only_positionals=yes
    elif [[ -z $only_positionals && $word == -* ]]; then
      _kvasir_option "$command $word"
      [[ -n $wanted ]] && option=$word
    elif [[ " $commands " == *" $word "* ]]; then
      command="$command $word"
      _kvasir_command "$command"
    else
      ((++given))
    fi
  done
  word=${COMP_WORDS[COMP_CWORD]}
  if [[ -n $option ]]; then
    [[ $word == = ]] && word=
    _kvasir_option "$command $option"
    _kvasir_complete "$wanted" "$word"
  elif [[ -z $only_positionals && $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ -n $commands ]]; then
    COMPREPLY=($(compgen -W "$commands" -- "$word"))
  else
    _kvasir_complete "${positionals[given]-}" "$word"
  fi
}

complete -F _kvasir kvasir
)";

}  // namespace

std::string bash_completion(const CommandForm& grammar) {
  std::string text =
      "# Completion of kvasir's command line for bash, made from its grammar.\n\n"
      "# Sets options, commands and positionals of a command.\n_kvasir_command() {\n  case $1 in\n";
  for (const CommandForm* command : flat(grammar)) text += command_case(*command);
  text +=
      "  esac\n}\n\n# Sets wanted to the kind of an option's value; empty for a flag.\n"
      "_kvasir_option() {\n  wanted=\n  case $1 in\n";
  for (const CommandForm* command : flat(grammar)) text += option_cases(*command);
  return text + "  esac\n}\n" + complete_one;
}

}  // namespace tool
