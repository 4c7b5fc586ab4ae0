// The command line's grammar as plain data, and what is made of it for others: completions for
// shells and the manual's page. CLI11's definition, which --help prints, is the only list of
// commands and options.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tool {

// What is said for an option or in a command's own place.
// nothing: a flag; choices: several, with commas between them
enum class ValueKind { nothing, free, file, folder, choice, choices };

struct ArgumentForm {
  std::vector<std::string> names;  // "-m", "--model"; of a positional argument its one name
  ValueKind kind = ValueKind::free;
  std::vector<std::string> choices;  // of that kind
  std::string value;                 // as help writes it: "FILE"; of a flag empty
  std::string help;                  // one line
  bool required = false;
  bool repeated = false;  // may be said several times
};

struct CommandForm {
  std::string name;    // with those it belongs to: "kvasir library ask"
  std::string help;    // one line
  std::string footer;  // lines; examples are indented by two spaces
  std::vector<ArgumentForm> options;
  std::vector<ArgumentForm> positionals;  // in their order
  std::vector<CommandForm> commands;
};

// Without commands that help does not list.
CommandForm grammar_of(const CLI::App& app);
// All commands of a grammar, the outermost first. They live as long as it.
std::vector<const CommandForm*> flat(const CommandForm& grammar);
std::string last_word(const std::string& name);

// "bash", "zsh", "fish": completions; "man": the manual's page. Throws CLI::ValidationError for
// others.
std::string described_as(const std::string& what, const CommandForm& grammar);
std::string bash_completion(const CommandForm& grammar);
std::string zsh_completion(const CommandForm& grammar);
std::string fish_completion(const CommandForm& grammar);
std::string manual_page(const CommandForm& grammar);

}  // namespace tool
