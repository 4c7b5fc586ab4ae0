// The manual page, in the man macros of groff and mandoc.
#include <algorithm>

#include "describe.h"
#include "kvasir.h"

namespace tool {
namespace {

// the day of the last change of this page
constexpr char changed_on[] = "2026-11-25";

std::string man_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '-') {
      out += "\\-";
    } else if (c == '\\') {
      out += "\\e";
    } else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) {
      out += std::string("\\&") + c;
    } else {
      out += c;
    }
  }
  return out;
}

// In short source lines.
std::string filled(const std::string& text) {
  constexpr size_t columns = 68;
  std::string lines, line;
  for (size_t from = 0; from < text.size();) {
    const size_t end = std::min(text.find(' ', from), text.size());
    if (!line.empty() && line.size() + 1 + (end - from) > columns) {
      lines += man_escaped(line) + "\n";
      line.clear();
    }
    line.append(line.empty() ? "" : " ").append(text, from, end - from);
    from = end + 1;
  }
  return lines + man_escaped(line) + "\n";
}

std::string bold(const std::string& text) { return "\\fB" + man_escaped(text) + "\\fR"; }
std::string italic(const std::string& text) { return "\\fI" + man_escaped(text) + "\\fR"; }

std::string option_item(const ArgumentForm& form) {
  std::string names;
  for (const std::string& name : form.names) names += (names.empty() ? "" : ", ") + bold(name);
  if (!form.value.empty()) names += " " + italic(form.value);
  return ".TP\n" + names + "\n" + filled(form.help);
}

std::string positional_item(const ArgumentForm& form) {
  return ".TP\n" + italic(form.names[0]) + "\n" + filled(form.help);
}

std::string synopsis(const CommandForm& command) {
  std::string line = bold(command.name);
  for (const ArgumentForm& form : command.options)
    if (form.required) line += " " + bold(form.names[0]) + " " + italic(form.value);
  line += " [" + italic("options") + "]";
  if (!command.commands.empty()) line += " " + italic("command");
  for (const ArgumentForm& form : command.positionals) {
    const std::string name = italic(form.names[0]);
    line += form.required ? " " + name : " [" + name + "]";
    if (form.repeated) line += " ...";
  }
  return line + "\n";
}

// The footer as paragraphs; indented lines stay as they are.
std::string footer_text(const std::string& footer) {
  std::string text;
  bool literal = false, paragraph = false;
  for (size_t from = 0; from <= footer.size();) {
    const size_t end = std::min(footer.find('\n', from), footer.size());
    const std::string line = footer.substr(from, end - from);
    from = end + 1;
    const bool indented = line.starts_with("  ");
    if (literal && !indented) text += ".EE\n";
    if (!literal && indented) text += ".PP\n.EX\n";
    if (!line.empty() && !indented && !paragraph) text += ".PP\n";
    if (!line.empty()) text += indented ? man_escaped(line) + "\n" : filled(line);
    literal = indented;
    paragraph = !line.empty() && !indented;
  }
  return literal ? text + ".EE\n" : text;
}

std::string items(const CommandForm& command) {
  std::string text;
  for (const ArgumentForm& form : command.positionals) text += positional_item(form);
  for (const ArgumentForm& form : command.options) text += option_item(form);
  return text;
}

}  // namespace

std::string manual_page(const CommandForm& grammar) {
  const uint32_t version = kv_version();
  const std::string number = std::to_string(version / 10000) + "." +
                             std::to_string(version / 100 % 100) + "." +
                             std::to_string(version % 100);
  std::string help = grammar.help;
  if (help.ends_with('.')) help.pop_back();
  std::string text = ".TH KVASIR 1 " + std::string(changed_on) + " \"kvasir " + number +
                     "\"\n.SH NAME\n" + man_escaped(grammar.name) + " \\- " + man_escaped(help) +
                     "\n.SH SYNOPSIS\n";
  for (const CommandForm* command : flat(grammar))
    if (command->commands.empty())
      text += (text.ends_with("SYNOPSIS\n") ? "" : ".br\n") + synopsis(*command);
  text += ".SH OPTIONS\n" + items(grammar) + ".SH DESCRIPTION\n" + filled(grammar.help) +
          footer_text(grammar.footer);
  text += ".SH COMMANDS\n";
  for (const CommandForm* command : flat(grammar)) {
    if (command == &grammar) continue;
    text += ".SS " + man_escaped(command->name) + "\n" + filled(command->help + ".") + ".PP\n" +
            synopsis(*command);
    text += items(*command) + footer_text(command->footer);
  }
  return text;
}

}  // namespace tool
