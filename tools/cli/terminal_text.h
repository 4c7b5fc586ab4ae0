// Text that a model, a document or a file's name brought, as a terminal may have it.
//
// A character that a terminal might obey, or that reorders what a person reads, becomes U+FFFD, and
// so does each byte that is not UTF-8. Nothing is removed: what stood on both sides of it cannot
// become a new character.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tool {

// A character at the beginning of `text`, which is not empty.
struct Decoded {
  enum Kind { character, incomplete, invalid };  // incomplete: more bytes may make it a character
  Kind kind;
  size_t size;    // bytes; of what is invalid 1
  char32_t code;  // of a character
};
Decoded decode(std::string_view text);

// C0 but for tab, DEL, C1, line and paragraph separators, embeddings, overrides and isolates of
// bidirectional text.
bool is_control(char32_t code);

// A text that comes in parts. The beginning of a character at the end of a part waits for the next
// one.
class TerminalText {
 public:
  enum class Newlines { keep, replace };

  explicit TerminalText(Newlines newlines) : newlines_(newlines) {}
  std::string next(std::string_view part);
  std::string end();  // what waited, replaced

 private:
  Newlines newlines_;
  std::string waiting_;
};

// A text that is whole, in one line.
std::string one_terminal_line(std::string_view text);

// The same JSON with such characters as \u escapes. What is not UTF-8 has been replaced before.
std::string with_escapes(std::string_view json);

}  // namespace tool
