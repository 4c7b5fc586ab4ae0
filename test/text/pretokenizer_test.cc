// What each family makes of numbers, cases, contractions and blanks, where they differ.
#include "text/pretokenizer.h"

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

using Words = std::vector<std::string>;

CancelPoll never(nullptr);

Words words_of(const char* family, std::string_view text) {
  std::unique_ptr<const Pretokenizer> pretokenizer;
  const Status created = Pretokenizer::create(family, &pretokenizer);
  REQUIRE_MESSAGE(created.ok(), created.message());
  Words words;
  const Status status = pretokenizer->split(text, &never, [&](std::string_view word) {
    words.emplace_back(word);
    return Status();
  });
  REQUIRE_MESSAGE(status.ok(), status.message());
  return words;
}

}  // namespace

TEST_CASE("numbers are grouped as another family does") {
  CHECK(words_of("gpt-2", "x12345") == Words{"x", "12345"});
  CHECK(words_of("smollm", "x123") == Words{"x", "1", "2", "3"});
  CHECK(words_of("qwen2", "x123") == Words{"x", "1", "2", "3"});
  CHECK(words_of("llama-bpe", "x12345") == Words{"x", "123", "45"});
  CHECK(words_of("gpt-4o", "x12345") == Words{"x", "123", "45"});
  CHECK(words_of("deepseek-v3", "x12345") == Words{"x", "123", "45"});
  CHECK(words_of("tekken", "x123") == Words{"x", "1", "2", "3"});
  CHECK(words_of("falcon", "x12345") == Words{"x", "123", "45"});
  CHECK(words_of("viking", "x12") == Words{"x", "1", "2"});
  CHECK(words_of("deepseek-llm", "x12345") == Words{"x", "12345"});
  CHECK(words_of("deepseek-coder", "x12") == Words{"x", "1", "2"});
}

TEST_CASE("letter cases divide words in families that ignore them, or do not where they do") {
  CHECK(words_of("gpt-4o", "HelloWorld") == Words{"Hello", "World"});
  CHECK(words_of("tekken", "HTTPServer") == Words{"HTTPServer"});
  CHECK(words_of("tekken", "helloWorld \xC3\x89t\xC3\xA9\xC3\x89t\xC3\xA9") ==
        Words{"hello", "World", " \xC3\x89t\xC3\xA9", "\xC3\x89t\xC3\xA9"});
  CHECK(words_of("llama-bpe", "HelloWorld") == Words{"HelloWorld"});
}

TEST_CASE("contractions are found in the wrong case or place") {
  CHECK(words_of("gpt-2", "it's IT'S") == Words{"it", "'s", " IT", "'", "S"});
  CHECK(words_of("qwen2", "it's IT'S") == Words{"it", "'s", " IT", "'S"});
  CHECK(words_of("gpt-4o", "it's x") == Words{"it's", " x"});
}

TEST_CASE("blanks go with the wrong word") {
  CHECK(words_of("gpt-2", "a  b \n") == Words{"a", " ", " b", " \n"});
  CHECK(words_of("qwen2", "a  b \n\n c") == Words{"a", " ", " b", " \n\n", " c"});
  CHECK(words_of("deepseek-llm", "a b  ") == Words{"a", " b", "  "});
  CHECK(words_of("deepseek-llm", "a  1") == Words{"a", "  ", "1"});
  CHECK(words_of("bloom", "a, b") == Words{"a", ",", " b"});
  // U+180E is no white space, U+0085 and U+3000 are.
  CHECK(words_of("gpt-2",
                 "a\xE1\xA0\x8E"
                 "b") == Words{"a", "\xE1\xA0\x8E", "b"});
  CHECK(words_of("gpt-2", "!\xC2\x85\xE3\x80\x80!") == Words{"!", "\xC2\x85", "\xE3\x80\x80", "!"});
}

TEST_CASE("bytes that are no UTF-8 are dropped, or taken for letters") {
  CHECK(words_of("gpt-2",
                 "a\xFF"
                 "b") == Words{"a", "\xFF", "b"});
  CHECK(words_of("gpt-2", "\xE4\xB8") == Words{"\xE4\xB8"});
  CHECK(words_of("qwen2", std::string_view("a\0b", 3)) == Words{"a", std::string("\0b", 2)});
}

TEST_CASE("a word that fails does not stop the cutting") {
  std::unique_ptr<const Pretokenizer> pretokenizer;
  REQUIRE(Pretokenizer::create("falcon", &pretokenizer).ok());
  int calls = 0;
  const Status status = pretokenizer->split("a b c", &never, [&](std::string_view) {
    ++calls;
    return Status::error(Code::cancelled, "stop");
  });
  CHECK(status.code() == Code::cancelled);
  CHECK(calls == 1);
}
