// Text from a file or from the caller as a part of a message, of a line of the log or of JSON:
// printable UTF-8 on one line.
//
// What is not printable is spelled in ASCII: a byte as \x0A, a character as \u{202E}. Not printable
// are bytes that are not UTF-8, control characters, line separators, and characters that have no
// width or change the direction of what follows, by which a line can be made to look like another
// one. A backslash stays as it is, so that text that was quoted once is not changed again.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvasir {

// Writes `text` so to `out`, with a zero at its end, in at most `capacity` bytes (at least 32).
// What does not fit is left out of the middle, where "..." stands for it: a message keeps its
// subject and its reason.
void quote(std::string_view text, char* out, std::size_t capacity) noexcept;

// The same, but what does not fit is cut from the end, where `gap` stands for it.
void quote_head(std::string_view text, std::string_view gap, char* out,
                std::size_t capacity) noexcept;

// All of it as a string of JSON, with its quotation marks.
std::string json_string(std::string_view text);

// A name for a message: what is longer than a name may be is cut short.
class Quoted {
 public:
  explicit Quoted(std::string_view name) noexcept { quote_head(name, "...", text_, sizeof text_); }
  const char* text() const { return text_; }

 private:
  char text_[100];
};

}  // namespace kvasir
