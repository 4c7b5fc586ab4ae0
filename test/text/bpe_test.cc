// Byte-level BPE on vocabularies made for the purpose.
#include <random>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr std::string_view kUnits[] = {"a", " ",   "\n",      "\xC3\xA9", "\xE4\xB8\xAD",
                                       "7", "'ll", "\xCC\x81"};

std::string random_bytes(std::mt19937* random, std::size_t size) {
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>((*random)());
  return bytes;
}

}  // namespace

TEST_CASE("bytes are lost or changed on the way through byte-level BPE") {
  std::mt19937 random(1);
  for (const char* name : {"ggml-vocab-gpt-2", "vocab-gpt-2", "vocab-llama-bpe", "vocab-qwen2"}) {
    const auto tokenizer = tokenizer_of_file(std::string(FIXTURES "/tokenizers/") + name + ".gguf");
    for (int round = 0; round < 50; ++round) {
      const std::string bytes = random_bytes(&random, random() % 2000);
      CHECK(text_of(*tokenizer, ids_of(*tokenizer, bytes)) == bytes);
      std::string mixed;  // characters, and now and then a byte that breaks one
      for (int i = 0; i < 200; ++i) {
        mixed += kUnits[random() % std::size(kUnits)];
        if (random() % 20 == 0) mixed.push_back(static_cast<char>(random()));
      }
      CHECK(text_of(*tokenizer, ids_of(*tokenizer, mixed)) == mixed);
    }
  }
}

TEST_CASE("merges happen in another order than the list's") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token bc = vocabulary.merge("b", "c"), ab = vocabulary.merge("a", "b"),
              aa = vocabulary.merge("a", "a");
  const Token abc = vocabulary.merge("a", "bc");
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  // bc first, so ab never forms
  CHECK(ids_of(*tokenizer, "abc") == std::vector<Token>{abc});
  CHECK(ids_of(*tokenizer, "abd") == std::vector<Token>{ab, 'd'});
  CHECK(ids_of(*tokenizer, "aaa") == std::vector<Token>{aa, 'a'});  // leftmost of equals
  CHECK(ids_of(*tokenizer, "aab") == std::vector<Token>{'a', ab});
  CHECK(ids_of(*tokenizer, "bcbc") == std::vector<Token>{bc, bc});
}

TEST_CASE("merges take the first plain token of their text, in any order of tokens and merges") {
  for (const bool in_order : {true, false}) {
    TestVocabulary vocabulary = byte_vocabulary();
    vocabulary.add("ab", 3);  // control: never text
    vocabulary.merges = {"a b", "c d", "ab cd"};
    std::vector<Token> first;
    for (const char* text : {"ab", "cd", "abcd"}) first.push_back(vocabulary.add(text));
    if (!in_order) vocabulary.merges = {"c d", "a b", "ab cd"};
    vocabulary.add("cd"), vocabulary.add("ab"), vocabulary.add("abcd");  // again
    auto file = bpe_file(vocabulary);
    const auto tokenizer = tokenizer_of(file);
    CHECK(ids_of(*tokenizer, "ab") == std::vector<Token>{first[0]});
    CHECK(ids_of(*tokenizer, "cd") == std::vector<Token>{first[1]});
    CHECK(ids_of(*tokenizer, "abcd") == std::vector<Token>{first[2]});
  }
}

TEST_CASE("a merge whose result is no token loses the text") {
  TestVocabulary vocabulary = byte_vocabulary();
  vocabulary.merges = {"x y", "xy z"};
  const Token xyz = vocabulary.add("xyz");
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(ids_of(*tokenizer, "xyz") == std::vector<Token>{xyz});
  CHECK(ids_of(*tokenizer, "xyw") == std::vector<Token>{'x', 'y', 'w'});
}

TEST_CASE("a word that is a token is merged although its family takes whole words") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token word = vocabulary.add(spell(" hello"));
  vocabulary.add("stop", 3);
  auto whole = bpe_file(vocabulary, "llama-bpe"), merged = bpe_file(vocabulary, "qwen2");
  CHECK(ids_of(*tokenizer_of(whole), " hello") == std::vector<Token>{word});
  CHECK(ids_of(*tokenizer_of(merged), " hello").size() == 6);
  // control is never text
  CHECK(ids_of(*tokenizer_of(whole), "stop") == std::vector<Token>{'s', 't', 'o', 'p'});
}

TEST_CASE("a byte that the vocabulary lacks is dropped in silence") {
  TestVocabulary vocabulary = byte_vocabulary();
  vocabulary.tokens['q'] = "missing";
  const Token unknown = vocabulary.add("<unk>", 2);
  auto without = bpe_file(vocabulary);
  const auto strict = tokenizer_of(without);
  Array<Token> ids = {1, 2};
  const Status status = strict->encode("abcq", false, true, &ids);
  CHECK(status.code() == Code::unsupported);
  CHECK(std::string(status.message()).find("0x71") != std::string::npos);
  CHECK(ids.size() == 2);
  auto with = bpe_file(vocabulary);
  with.key("tokenizer.ggml.unknown_token_id", static_cast<uint32_t>(unknown));
  CHECK(ids_of(*tokenizer_of(with), "aqb") == std::vector<Token>{'a', unknown, 'b'});
}

TEST_CASE("pieces of special, foreign and byte tokens are decoded as if they were spelled bytes") {
  TestVocabulary vocabulary = byte_vocabulary();
  const Token control = vocabulary.add("<|\xC4\xA0|>", 3), user = vocabulary.add("\xC4\xA0u", 4);
  const Token byte = vocabulary.add("<0x0A>", 6),
              foreign = vocabulary.add("\xE4\xB8\xAD\xC4\xA0", 1), unused = vocabulary.add("u", 5);
  const Token empty = vocabulary.add("", 1);
  auto file = bpe_file(vocabulary);
  const auto tokenizer = tokenizer_of(file);
  CHECK(tokenizer->piece(control, false).empty());
  CHECK(tokenizer->piece(control, true) == "<|\xC4\xA0|>");
  CHECK(tokenizer->piece(user, false) == "\xC4\xA0u");
  CHECK(tokenizer->piece(byte, false) == "\n");
  CHECK(tokenizer->piece(foreign, false) == "\xE4\xB8\xAD ");
  CHECK(tokenizer->piece(unused, false) == "u");
  CHECK(tokenizer->piece(empty, true).empty());
  CHECK(tokenizer->piece(-1, true).empty());
  CHECK(tokenizer->piece(static_cast<Token>(tokenizer->size()), true).empty());
  CHECK(tokenizer->kind(-1) == TokenKind::unused);
}
