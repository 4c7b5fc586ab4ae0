// Text from a file or from the caller inside a message, a log line or JSON: printable UTF-8 on one
// line.
//
// Other text is escaped in ASCII: a byte as \x0A, a character as \u{202E}. Escaped are bytes that
// are not UTF-8, control characters, line separators, and characters that have no width or change
// the direction of the text, with which one line can imitate another. A backslash is not escaped,
// so quoting twice changes nothing.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kvasir {

// Writes `text` to `out` with a final zero, in at most `capacity` bytes (at least 32). Text that
// does not fit loses its middle, replaced by "...": a message keeps its subject and its reason.
void quote(std::string_view text, char* out, std::size_t capacity) noexcept;

// quote(), but text that does not fit loses its end, replaced by `gap`.
void quote_head(std::string_view text, std::string_view gap, char* out,
                std::size_t capacity) noexcept;

// The whole text as a JSON string with its quotation marks.
std::string json_string(std::string_view text);

// A name for a message, shortened if it is too long.
class Quoted {
 public:
  explicit Quoted(std::string_view name) noexcept { quote_head(name, "...", text_, sizeof text_); }
  const char* text() const { return text_; }

 private:
  char text_[100];
};

}  // namespace kvasir
