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

TEST_CASE("digits are not divided into threes from the right, or where a word goes on") {
  CHECK(words_of("tiny_aya", "x1234567.") == Words{"x", "1", "234", "567", "."});
  CHECK(words_of("tiny_aya", "123456") == Words{"123", "456"});
  CHECK(words_of("tiny_aya", "12") == Words{"12"});
  CHECK(words_of("tiny_aya", "1234x") == Words{"123", "4", "x"});
  CHECK(words_of("tiny_aya", "1234_1234") == Words{"123", "4", "_", "1", "234"});
  CHECK(words_of("cohere2moe", "1234") == Words{"1", "234"});
  CHECK(words_of("afmoe", "1234x12345") == Words{"1", "234", "x", "12", "345"});
  CHECK(words_of("superbpe", "a b 12345, 123456") ==
        Words{"a b ", "12", "345", ", ", "123", "456"});
}

TEST_CASE("a run of blanks is not divided by powers of two, or loses the blank of the next word") {
  const auto blanks = [](std::size_t n) { return std::string(n, ' '); };
  CHECK(words_of("jais-2", "a" + blanks(16) + "b") ==
        Words{"a", blanks(8), blanks(4), blanks(2), " ", " b"});
  CHECK(words_of("jais-2", blanks(1030)) == Words{blanks(512), blanks(512), blanks(4), blanks(2)});
  CHECK(words_of("jais-2", "a    \n   b") == Words{"a", "    \n", blanks(2), " b"});
}

TEST_CASE("letters and single spaces are divided where the family does not, or beyond two spaces") {
  CHECK(words_of("exaone-moe", "a few words. And  more\n\nit's 12") ==
        Words{"a few words", ".", " And", " ", " more", "\n\n", "it", "'s", " ", "1", "2"});
}

TEST_CASE("Han and other letters form one word in Kimi's family") {
  CHECK(words_of("kimi-k2", "a\xE4\xB8\xAD\xE6\x96\x87Word \xE4\xB8\xAD") ==
        Words{"a", "\xE4\xB8\xAD\xE6\x96\x87", "Word", " ", "\xE4\xB8\xAD"});
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
