// Special tokens in text, and texts made of parts.
#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

std::vector<Token> parts_of(const Tokenizer& tokenizer, std::vector<Tokenizer::Part> parts) {
  Array<Token> ids;
  const Status status = tokenizer.encode(parts, true, &ids);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return {ids.begin(), ids.end()};
}

}  // namespace

TEST_CASE("text that spells a control token becomes it unasked") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token end = vocabulary.add("<|im_end|>", 3), user = vocabulary.add("<tab>", 4);
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "a<|im_end|>", true) == std::vector<Token>{'a', end});
  CHECK(ids_of(*tokenizer, "a<|im_end|>", false).size() == 11);
  // user-defined tokens always count
  CHECK(ids_of(*tokenizer, "<tab>", true) == std::vector<Token>{user});
  CHECK(ids_of(*tokenizer, "<tab>", false) == std::vector<Token>{user});
  CHECK(ids_of(*tokenizer, "<|im_end|", true).size() == 9);
}

TEST_CASE("overlapping special tokens are not taken leftmost and longest") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token one = vocabulary.add("<a", 3), two = vocabulary.add("<a><", 3),
              three = vocabulary.add("><b>", 3);
  const Token hidden = vocabulary.add("<user", 4);
  vocabulary.add("<user>", 3);
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "<a><b>", true) == std::vector<Token>{two, 'b', '>'});
  CHECK(ids_of(*tokenizer, "<a>", true) == std::vector<Token>{one, '>'});
  CHECK(ids_of(*tokenizer, "x><b>", true) == std::vector<Token>{'x', three});
  // the longer one is control
  CHECK(ids_of(*tokenizer, "<user>", false) == std::vector<Token>{hidden, '>'});
}

TEST_CASE("a seam between parts cuts a word, or joins a special token") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token ab = vocabulary.merge("a", "b"), end = vocabulary.add("<end>", 3);
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(parts_of(*tokenizer, {{"<end>a", true}, {"b", false}}) == std::vector<Token>{end, ab});
  CHECK(parts_of(*tokenizer, {{"a", true}, {"b<end>", false}, {"<end>", true}}) ==
        std::vector<Token>{ab, '<', 'e', 'n', 'd', '>', end});
  CHECK(parts_of(*tokenizer, {{"<en", true}, {"d>", true}}) ==
        std::vector<Token>{'<', 'e', 'n', 'd', '>'});
  CHECK(parts_of(*tokenizer, {{"", true}, {"", false}}).empty());
  CHECK(parts_of(*tokenizer, {}).empty());
}

TEST_CASE("parts of a prompt are encoded otherwise than the prompt") {
  const auto tokenizer = tokenizer_of_file(FIXTURES "/../../examples/mini-reader-q8_0.gguf");
  const std::string prompt = read_text(FIXTURES "/mini-prompt.txt");
  const std::vector<Token> whole = ids_of(*tokenizer, prompt, true);
  for (const std::size_t cut : {std::size_t{0}, std::size_t{19}, prompt.size() / 2, prompt.size()})
    CHECK(parts_of(*tokenizer, {{std::string_view(prompt).substr(0, cut), true},
                                {std::string_view(prompt).substr(cut), true}}) == whole);
}
