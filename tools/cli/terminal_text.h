// Text of models, documents and file names, made safe for a terminal.
//
// A character that a terminal obeys, or that reorders text, becomes U+FFFD. So does each byte that
// is not UTF-8. Nothing is removed: the characters around it cannot form a new one.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tool {

// A character at the beginning of `text`, which is not empty.
struct Decoded {
  enum Kind { character, incomplete, invalid };  // incomplete: more bytes may make it a character
  Kind kind;
  size_t size;    // bytes; 1 if invalid
  char32_t code;  // if it is a character
};
Decoded decode(std::string_view text);

// C0 except tab, DEL, C1, line and paragraph separators, and the embeddings, overrides and isolates
// of bidirectional text.
bool is_control(char32_t code);

// A text in parts. The beginning of a character at the end of a part waits for the next part.
class TerminalText {
 public:
  enum class Newlines { keep, replace };

  explicit TerminalText(Newlines newlines) : newlines_(newlines) {}
  std::string next(std::string_view part);
  std::string end();  // the waiting bytes, replaced

 private:
  Newlines newlines_;
  std::string waiting_;
};

// A whole text, in one line.
std::string one_terminal_line(std::string_view text);

// The JSON with \u escapes for these characters. It must be UTF-8.
std::string with_escapes(std::string_view json);

}  // namespace tool
