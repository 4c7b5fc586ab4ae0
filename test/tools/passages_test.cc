// Quoting: from where in a text to where.
#include <doctest/doctest.h>

#include "passages.h"

using tool::quoted;

namespace {

std::string quote(const std::string& text, const std::string& part) {
  const size_t at = text.find(part);
  REQUIRE(at != std::string::npos);
  return quoted(text, at, at + part.size());
}

}  // namespace

TEST_CASE("a quotation is of whole sentences, on one line") {
  const std::string text = "It rained. The code of\n the  gate is 17. He left! Why?";
  CHECK(quote(text, "gate is") == "The code of the gate is 17.");
  CHECK(quote(text, " The") == "The code of the gate is 17.");
  CHECK(quote(text, "17.") == "The code of the gate is 17.");
  CHECK(quote(text, "17. He") == "The code of the gate is 17. He left!");
}

TEST_CASE("where no sentence begins or ends it is of whole words") {
  CHECK(quote("one two three four", "wo thr") == "two three");
  CHECK(quote("one two three four", "one") == "one");
  CHECK(quote("one two three four", "four") == "four");
  CHECK(quoted("", 0, 0).empty());
  CHECK(quoted("  \n ", 1, 3).empty());
}

TEST_CASE("no character is cut where a text has neither sentences nor words") {
  const std::string text = "\u5317\u95e8\u7684\u5bc6\u7801";
  CHECK(quoted(text.substr(1), 2, 4) == text.substr(3));
  CHECK(quoted(text.substr(0, 7), 0, 7) == text.substr(0, 6));
  CHECK(quoted(text, 0, 3) == text);
}
