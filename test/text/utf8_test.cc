// Incremental UTF-8: wherever the bytes are cut, the characters that come out are the same.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <string_view>

#include "text/utf8.h"

using namespace kvasir;

namespace {

std::string decode(std::string_view a, std::string_view b = {}, std::string_view c = {}) {
  Utf8Stream stream;
  std::string out;
  stream.push(a, &out);
  stream.push(b, &out);
  stream.push(c, &out);
  stream.finish(&out);
  return out;
}

constexpr std::string_view kBad = "\xEF\xBF\xBD";

}  // namespace

TEST_CASE("a character that is cut anywhere comes out damaged") {
  const std::string text = "a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\xA6\x99\xF4\x8F\xBF\xBF\xED\x9F\xBFz";
  for (std::size_t i = 0; i <= text.size(); ++i) {
    for (std::size_t j = i; j <= text.size(); ++j)
      CHECK(decode(std::string_view(text).substr(0, i), std::string_view(text).substr(i, j - i),
                   std::string_view(text).substr(j)) == text);
  }
}

TEST_CASE("part of a character is given out before it is whole") {
  Utf8Stream stream;
  std::string out;
  for (const char* byte : {"\xF0", "\x9F", "\xA6"}) {
    stream.push(byte, &out);
    CHECK(out.empty());
  }
  stream.push("\x99", &out);
  CHECK(out == "\xF0\x9F\xA6\x99");
  stream.push("\xE4\xB8", &out);
  stream.reset();
  stream.finish(&out);
  CHECK(out == "\xF0\x9F\xA6\x99");
}

TEST_CASE("bytes that form no character pass, or swallow the characters after them") {
  const auto bad = [](int n) {
    std::string out;
    while (n-- > 0) out += kBad;
    return out;
  };
  CHECK(decode("\x80") == bad(1));
  CHECK(decode("\xFF\xFE") == bad(2));
  CHECK(decode("\xC0\xAF") == bad(2));          // overlong
  CHECK(decode("\xE0\x80\xAF") == bad(3));      // overlong
  CHECK(decode("\xED\xA0\x80") == bad(3));      // surrogate
  CHECK(decode("\xF4\x90\x80\x80") == bad(4));  // beyond U+10FFFF
  CHECK(decode("\xE4\xB8"
               "a") == bad(1) + "a");  // one for the maximal part
  CHECK(decode("\xF0\x9F\xA6"
               "\xC3\xA9") == bad(1) + "\xC3\xA9");
  CHECK(decode("\xE4\xB8") == bad(1));  // at the end
  CHECK(decode("\xC3") == bad(1));
}

TEST_CASE("the decoder's output depends on how random bytes are cut, or is no UTF-8") {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (auto n = random() % 12; n > 0; --n)
      bytes.push_back("\x00\x41\x7F\x80\xA0\xBF\xC2\xE0\xED\xF0\xF4\xFF"[random() % 12]);
    const std::string whole = decode(bytes);
    for (std::size_t i = 0; i <= bytes.size(); ++i)
      CHECK(decode(std::string_view(bytes).substr(0, i), std::string_view(bytes).substr(i)) ==
            whole);
    std::size_t length;
    for (std::string_view rest = whole; !rest.empty(); rest.remove_prefix(length))
      REQUIRE(utf8_step(rest, &length) == Utf8::valid);
  }
}
