// The command line's grammar as plain data, for completions of shells and the manual page. CLI11's
// definition, which --help prints, is the only list of commands and options.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tool {

// The value of an option or positional argument. none: a flag; choices: a list with commas
enum class ValueKind { none, free, file, folder, choice, choices };

struct ArgumentForm {
  std::vector<std::string> names;  // "-m", "--model"; one name if positional
  ValueKind kind = ValueKind::free;
  std::vector<std::string> choices;  // of that kind
  std::string value;                 // as in help: "FILE"; empty for a flag
  std::string help;                  // one line
  bool required = false;
  bool repeated = false;  // may be given several times
};

struct CommandForm {
  std::string name;    // with the commands around it: "kvasir library ask"
  std::string help;    // one line
  std::string footer;  // lines; examples are indented by two spaces
  std::vector<ArgumentForm> options;
  std::vector<ArgumentForm> positionals;  // in their order
  std::vector<CommandForm> commands;
};

// Without hidden commands.
CommandForm grammar_of(const CLI::App& app);
// All commands of a grammar, the outermost first. The pointers live as long as the grammar.
std::vector<const CommandForm*> flat(const CommandForm& grammar);
std::string last_word(const std::string& name);

// Completions for "bash", "zsh", "fish"; the manual page for "man". Throws CLI::ValidationError for
// others.
std::string described_as(const std::string& format, const CommandForm& grammar);
std::string bash_completion(const CommandForm& grammar);
std::string zsh_completion(const CommandForm& grammar);
std::string fish_completion(const CommandForm& grammar);
std::string manual_page(const CommandForm& grammar);

}  // namespace tool
