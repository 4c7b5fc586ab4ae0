// Completion for fish: one `complete` per option of each command, with the command as its
// condition.
#include "describe.h"

namespace tool {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out + "'";
}

std::string fish_words(const std::vector<std::string>& all) {
  std::string text;
  for (const std::string& word : all) text.append(text.empty() ? "" : " ").append(word);
  return text;
}

// The values of an argument. -x: only these; -r: required.
std::string value_options(const ArgumentForm& form) {
  switch (form.kind) {
    case ValueKind::file:
      return " -r -F";
    case ValueKind::folder:
      return " -x -a '(__fish_complete_directories)'";
    case ValueKind::choice:
      return " -x -a " + quoted(fish_words(form.choices));
    case ValueKind::choices:
      return " -x -a \"(__fish_complete_list , 'printf %s\\\\n " + fish_words(form.choices) +
             "')\"";
    case ValueKind::free:
      return " -x";
    case ValueKind::none:
      break;
  }
  return "";
}

std::string option_line(const std::string& condition, const ArgumentForm& form) {
  std::string line = "complete -c kvasir -n " + condition;
  for (const std::string& name : form.names)
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  return line + value_options(form) + " -d " + quoted(form.help) + "\n";
}

std::string command_lines(const CommandForm& command) {
  const std::string condition = quoted("test \"$(__kvasir_command)\" = \"" + command.name + "\"");
  std::string lines = "\n# " + command.name + "\n";
  for (const CommandForm& inner : command.commands)
    lines += "complete -c kvasir -n " + condition + " -a " + last_word(inner.name) + " -d " +
             quoted(inner.help) + "\n";
  for (const ArgumentForm& form : command.options) lines += option_line(condition, form);
  for (const ArgumentForm& form : command.positionals) {
    if (form.kind == ValueKind::file) lines += "complete -c kvasir -n " + condition + " -F\n";
    if (form.kind == ValueKind::folder)
      lines += "complete -c kvasir -n " + condition + " -a '(__fish_complete_directories)'\n";
  }
  return lines;
}

}  // namespace

std::string fish_completion(const CommandForm& grammar) {
  std::string names;
  for (const CommandForm* command : flat(grammar)) names += " '" + command->name + "'";
  std::string text =
      "# Completion of kvasir's command line for fish, made from its grammar.\n\n"
      "# The command that the words before the cursor name.\n"
      "function __kvasir_command\n"
      "    set -l command kvasir\n"
      "    set -l words (commandline -opc)\n"
      "    for word in $words[2..]\n"
      "        contains -- \"$command $word\"" +
      names +
      "\n"
      "        and set command \"$command $word\"\n"
      "    end\n"
      "    echo $command\n"
      "end\n\n"
      "complete -c kvasir -f\n";
  for (const CommandForm* command : flat(grammar)) text += command_lines(*command);
  return text;
}

}  // namespace tool
