// SentencePiece-style BPE on vocabularies made for the purpose.
#include <random>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {}  // namespace

TEST_CASE("pieces merge in another order than their scores'") {
  TestVocabulary vocabulary = spm_vocabulary();
  const Token space = vocabulary.add(S, 1, -9), a = vocabulary.add("a", 1, -9),
              b = vocabulary.add("b", 1, -9);
  const Token ab = vocabulary.add("ab", 1, -2), ba = vocabulary.add("ba", 1, -1),
              sa = vocabulary.add(S + "a", 1, -3);
  auto file = spm_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "aba") == std::vector<Token>{sa, ba});
  CHECK(ids_of(*tokenizer, "aba", false, false) == std::vector<Token>{a, ba});
  CHECK(ids_of(*tokenizer, "ab") == std::vector<Token>{space, ab});
  CHECK(ids_of(*tokenizer, "abab", false, false) == std::vector<Token>{a, ba, b});
  CHECK(ids_of(*tokenizer, "b a", false, false) == std::vector<Token>{b, sa});
  // U+2581 is a space
  CHECK(ids_of(*tokenizer, "b" + S + "a", false, false) == std::vector<Token>{b, sa});
  CHECK(ids_of(*tokenizer, "", false, true).empty());
}

TEST_CASE("a token that reaches across a space is never found") {
  TestVocabulary vocabulary = spm_vocabulary();
  for (const std::string& c : {S, std::string("o"), std::string("f")}) vocabulary.add(c, 1, -9);
  const Token of = vocabulary.add("of", 1, -1), of_ = vocabulary.add("of" + S, 1, -2),
              ofof = vocabulary.add("of" + S + "of", 1, -3);
  auto file = spm_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "of of", false, false) == std::vector<Token>{ofof});
  CHECK(ids_of(*tokenizer, "of of of", false, false) == std::vector<Token>{of_, ofof});
  CHECK(ids_of(*tokenizer, "of", false, false) == std::vector<Token>{of});
}

TEST_CASE("what is no piece does not fall back to bytes") {
  auto file = spm_file(spm_vocabulary());
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "\xC3\xA9\xFF", false, false) ==
        std::vector<Token>{3 + 0xC3, 3 + 0xA9, 3 + 0xFF});
  CHECK(ids_of(*tokenizer, " ", false, false) == std::vector<Token>{3 + 0xE2, 3 + 0x96, 3 + 0x81});
  CHECK(ids_of(*tokenizer, "a") == std::vector<Token>{3 + 0xE2, 3 + 0x96, 3 + 0x81, 3 + 'a'});
  // Text that spells byte or control tokens is text.
  CHECK(ids_of(*tokenizer, "<0x41>", true, false).size() == 6);
  CHECK(ids_of(*tokenizer, "<s>", false, false).size() == 3);
}

TEST_CASE("without byte tokens a character is lost instead of unknown") {
  TestVocabulary vocabulary;
  vocabulary.add("<unk>", 2);
  vocabulary.add("<s>", 3);
  vocabulary.add("</s>", 3);
  const Token a = vocabulary.add("a");
  auto file = spm_file(vocabulary);
  CHECK(ids_of(*tokenizer_of(file),
               "a\xE4\xB8\xAD"
               "a",
               false, false) == std::vector<Token>{a, 0, a});
}

TEST_CASE("the space before a text appears where the file says no, or not after a special token") {
  TestVocabulary vocabulary = spm_vocabulary();
  const Token space = vocabulary.add(S), a = vocabulary.add("a");
  auto plain = spm_file(vocabulary), without = spm_file(vocabulary);
  without.key("tokenizer.ggml.add_space_prefix", false);
  const auto with_prefix = tokenizer_of(plain), no_prefix = tokenizer_of(without);
  CHECK(with_prefix->strips_leading_space());
  CHECK(ids_of(*with_prefix, "a<s>a", true) == std::vector<Token>{space, a, 1, space, a});
  CHECK(ids_of(*with_prefix, "a<s>a", true, false) == std::vector<Token>{a, 1, space, a});
  CHECK(!no_prefix->strips_leading_space());
  CHECK(ids_of(*no_prefix, "a<s>a", true) == std::vector<Token>{a, 1, a});
}

TEST_CASE("bytes are lost or changed on the way through SentencePiece") {
  const auto tokenizer = tokenizer_of_file(FIXTURES "/tokenizers/ggml-vocab-llama-spm.gguf");
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    std::string bytes(random() % 1500, '\0');
    for (char& c : bytes)
      c = random() % 3 ? static_cast<char>(' ' + random() % 95) : static_cast<char>(random());
    CHECK(text_of(*tokenizer, ids_of(*tokenizer, bytes, false, false)) == bytes);
    const std::string prefixed = text_of(*tokenizer, ids_of(*tokenizer, bytes));
    CHECK(prefixed == (bytes.empty() ? "" : " " + bytes));
  }
}

TEST_CASE("blanks after Phi-3's special tokens count as text") {
  TestVocabulary vocabulary = spm_vocabulary();
  const Token space = vocabulary.add(S), a = vocabulary.add("a");
  const Token user = vocabulary.add("<|user|>", 3), end = vocabulary.add("<|end|>", 3);
  vocabulary.add("<|assistant|>", 3);
  auto file = spm_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "<|user|>\n \ta<|end|>\n", true) ==
        std::vector<Token>{user, space, a, end});
  // but not after <s>
  CHECK(ids_of(*tokenizer, "<s> a", true) == std::vector<Token>{1, space, space, a});
  Array<Token> ids;
  const Tokenizer::Part parts[] = {{"<|user|>\n", true}, {"\n\na", false}, {"<|end|>", true}};
  REQUIRE(tokenizer->encode(parts, true, &ids).ok());
  CHECK(std::vector<Token>(ids.begin(), ids.end()) == std::vector<Token>{user, space, a, end});
}
