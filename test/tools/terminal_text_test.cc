// What a terminal is shown of a text from elsewhere.
#include "terminal_text.h"

#include <doctest/doctest.h>
#include <cstdint>

using namespace tool;

namespace {

const std::string bad = "\uFFFD";

// In parts of one size.
std::string shown(const std::string& text, size_t part = 1000) {
  TerminalText filter(TerminalText::Newlines::keep);
  std::string out;
  for (size_t at = 0; at < text.size(); at += part)
    out += filter.next(std::string_view(text).substr(at, part));
  return out += filter.end();
}

}  // namespace

TEST_CASE("a control character that is taken out does not make another one of its neighbours") {
  CHECK(shown("\xC2\x07\x9B"
              "2J") == bad + bad + bad + "2J");
  CHECK(shown("\xC2\xC2\x9B\x9B") == bad + bad + bad);
  CHECK(shown("\xE2\x80\x07\xAE") == bad + bad + bad + bad);
  CHECK(shown("\x1B[2J") == bad + "[2J");
  CHECK(shown("\xC2\r\x9B") == bad + bad + bad);
  CHECK(shown("a\r\x9B") == "a" + bad + bad);
}

TEST_CASE("whatever parts a text comes in it is shown the same") {
  const std::string text =
      "caf\u00E9 \u5317 \U0001F600\t\xC2\x9B \xC2\x07\x9B \u202Eabc\u2069 \r\n\r \x7F\xF0\x9F\x98 "
      "\xED\xA0\x80 \xC0\x9B\xFF end\xE2\x80";
  const std::string whole = shown(text);
  for (const size_t part : {1u, 2u, 3u, 4u, 5u, 7u}) CHECK(shown(text, part) == whole);
  CHECK(whole.find("caf\u00E9 \u5317 \U0001F600\t") == 0);
  CHECK(whole.find("\n" + bad + " ") !=
        std::string::npos);  // the line's end is one, the other return would go back in the line
}

TEST_CASE("nothing that a terminal obeys or that reorders text is shown") {
  for (uint32_t first = 0; first < 256; ++first)
    for (uint32_t second = 0; second < 256; ++second)
      for (uint32_t third : {0x07u, 0x1Bu, 0x80u, 0x9Bu, 0xAEu, 0xA8u, 0x41u}) {
        std::string text;
        for (const uint32_t byte : {first, second, third}) text += static_cast<char>(byte);
        const std::string clean = shown(text, 1);
        std::string_view rest = clean;
        while (!rest.empty()) {
          const Decoded one = decode(rest);
          REQUIRE(one.kind == Decoded::character);
          REQUIRE((!is_control(one.code) || one.code == '\n'));
          rest.remove_prefix(one.size);
        }
      }
}

TEST_CASE("text that is harmless stays as it is") {
  const std::string text =
      "Gr\u00FC\u00DFe,\t\u0645\u0631\u062D\u0628\u0627 \u05E9\u05DC\u05D5\u05DD \u4F60\u597D "
      "\U0001F44B\U0001F3FD \u200Dx\n";
  CHECK(shown(text, 1) == text);
  CHECK(one_terminal_line("a\nb\r\n\x9B") == "a" + bad + "b" + bad + bad + bad);
}

TEST_CASE("JSON says control characters by their numbers") {
  CHECK(with_escapes("{\n \"a\u009B\u202E\x7F\": \"\u00E9\\n\"}") ==
        "{\n \"a\\u009b\\u202e\\u007f\": \"\u00E9\\n\"}");
}
