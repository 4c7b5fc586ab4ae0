#include "terminal_text.h"

#include <algorithm>
#include <cstdint>

#include "number_text.h"

namespace tool {
namespace {

constexpr std::string_view replacement = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

Decoded decode(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Decoded::character, 1, lead};
  const size_t size = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (size == 0) return {Decoded::invalid, 1, 0};
  // The range of the second byte excludes overlong forms, surrogates and codes beyond U+10FFFF.
  const uint8_t min = lead == 0xE0   ? 0xA0
                      : lead == 0xF0 ? 0x90
                                     : 0x80,
                max = lead == 0xED   ? 0x9F
                      : lead == 0xF4 ? 0x8F
                                     : 0xBF;
  char32_t code = lead & (0xFFu >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size()) return {Decoded::incomplete, i, 0};
    if (byte(i) < (i == 1 ? min : 0x80) || byte(i) > (i == 1 ? max : 0xBF))
      return {Decoded::invalid, 1, 0};
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  return {Decoded::character, size, code};
}

bool is_control(char32_t code) {
  return (code < 0x20 && code != '\t') || (code >= 0x7F && code < 0xA0) ||
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
}

std::string TerminalText::next(std::string_view part) {
  waiting_ += part;
  std::string clean;
  size_t at = 0;
  while (at < waiting_.size()) {
    const std::string_view rest = std::string_view(waiting_).substr(at);
    if (newlines_ == Newlines::keep && rest.front() == '\r') {  // CR LF becomes LF
      if (rest.size() == 1) break;
      clean += rest[1] == '\n' ? "" : replacement;
      ++at;
      continue;
    }
    const Decoded one = decode(rest);
    if (one.kind == Decoded::incomplete) break;
    const bool keep = one.kind == Decoded::character &&
                      (!is_control(one.code) || (one.code == '\n' && newlines_ == Newlines::keep));
    clean += keep ? rest.substr(0, one.size) : replacement;
    at += one.size;
  }
  waiting_.erase(0, at);
  return clean;
}

std::string TerminalText::end() {
  std::string clean;
  for (size_t i = 0; i < waiting_.size(); ++i) clean += replacement;
  waiting_.clear();
  return clean;
}

std::string one_terminal_line(std::string_view text) {
  TerminalText shown(TerminalText::Newlines::replace);
  std::string line = shown.next(text);
  return line += shown.end();
}

std::string with_escapes(std::string_view json) {
  std::string escaped;
  escaped.reserve(json.size());
  while (!json.empty()) {
    const Decoded one = decode(json);
    if (one.kind == Decoded::character && one.code != '\n' && is_control(one.code))
      escaped += string_printf("\\u%04x", static_cast<unsigned>(one.code));
    else escaped += json.substr(0, one.size);
    json.remove_prefix(one.size);
  }
  return escaped;
}

}  // namespace tool
