// Gemma 4's BPE on vocabularies made for the purpose.
#include <random>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {}  // namespace

TEST_CASE("merges cross newlines, or do not cross words") {
  TestVocabulary vocabulary = spm_vocabulary();
  const Token space = vocabulary.add(S), a = vocabulary.add("a"), b = vocabulary.add("b"),
              newline = vocabulary.add("\n"), two = vocabulary.add("\n\n"),
              a_space = vocabulary.add("a" + S), a_space_b = vocabulary.add("a" + S + "b");
  vocabulary.add("a\n");
  vocabulary.merges = {"a " + S, "a" + S + " b", "a \n", "\n \n"};
  auto file = gemma4_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(std::string(tokenizer->name()) == "gemma4");
  CHECK(ids_of(*tokenizer, "a b") == std::vector<Token>{a_space_b});
  CHECK(ids_of(*tokenizer, "a" + S + "b") == std::vector<Token>{a_space_b});
  CHECK(ids_of(*tokenizer, "a  b") == std::vector<Token>{a_space, space, b});
  // no space is added before a text
  CHECK(ids_of(*tokenizer, "a\nb") == std::vector<Token>{a, newline, b});
  CHECK(ids_of(*tokenizer, "a\n\nb") == std::vector<Token>{a, two, b});
  CHECK(!tokenizer->strips_leading_space());
}

TEST_CASE("a run of newlines that is a token is merged") {
  TestVocabulary vocabulary = spm_vocabulary();
  const Token newline = vocabulary.add("\n"), three = vocabulary.add("\n\n\n");
  auto file = gemma4_file(vocabulary);  // without a merge
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "\n\n\n") == std::vector<Token>{three});
  CHECK(ids_of(*tokenizer, "\n\n") == std::vector<Token>{newline, newline});
}

TEST_CASE("a character without a token does not become its bytes") {
  auto file = gemma4_file(spm_vocabulary());
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "\xC3\xA9\xFF") == std::vector<Token>{3 + 0xC3, 3 + 0xA9, 3 + 0xFF});
  CHECK(text_of(*tokenizer, ids_of(*tokenizer, "a\n")) == "a\n");
}

TEST_CASE("the half of a merge that begins with a space is lost") {
  TestVocabulary vocabulary = spm_vocabulary();
  vocabulary.add("x");
  vocabulary.merges = {"  x"};  // " " and "x": no text has the first, which U+2581 spells
  auto file = gemma4_file(vocabulary);
  CHECK(ids_of(*tokenizer_of(file), "x").size() == 1);
  vocabulary.merges = {"x"};
  auto wrong = gemma4_file(vocabulary);
  CHECK(refusal_of(wrong).code() == Code::corrupt);
}

TEST_CASE("bytes are lost or changed on the way through Gemma 4's BPE") {
  const auto tokenizer = tokenizer_of_file(FIXTURES "/tokenizers/gemma4.gguf");
  CHECK(tokenizer->add_bos());
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::string bytes(random() % 1500, '\0');
    for (char& c : bytes)
      c = random() % 3 ? static_cast<char>(' ' + random() % 95) : static_cast<char>(random());
    CHECK(text_of(*tokenizer, ids_of(*tokenizer, bytes)) == bytes);
  }
}
