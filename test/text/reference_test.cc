// The ids of every fixture: strings that a reference tokenizer encoded, and the mini model's own
// prompt.
#include <nlohmann/json.hpp>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// The metadata of the file `name` with another pre-tokenizer.
std::unique_ptr<const Tokenizer> with_pretokenizer(const std::string& bytes, const char* name) {
  Gguf gguf;
  REQUIRE(Gguf::parse(std::as_bytes(std::span(bytes)), &gguf).ok());
  TestVocabulary vocabulary;
  const auto tokens = gguf.get_strings("tokenizer.ggml.tokens"),
             merges = gguf.get_strings("tokenizer.ggml.merges");
  for (const std::string_view token : *tokens) vocabulary.tokens.emplace_back(token);
  for (const std::string_view merge : *merges) vocabulary.merges.emplace_back(merge);
  vocabulary.types = *gguf.get_ints("tokenizer.ggml.token_type");
  auto file = bpe_file(vocabulary, name);
  return tokenizer_of(file);
}

void check_vocabulary(const std::string& name) {
  CAPTURE(name);
  const auto tokenizer = tokenizer_of_file(FIXTURES "/tokenizers/" + name + ".gguf");
  const auto cases = nlohmann::json::parse(read_text(FIXTURES "/tokenizers/" + name + ".json"));
  REQUIRE(cases.size() == 125);
  for (const auto& entry : cases) {
    const auto text = entry["text"].get<std::string>();
    CAPTURE(text);
    CHECK(ids_of(*tokenizer, text) == entry["ids"].get<std::vector<Token>>());
  }
}

}  // namespace

TEST_CASE("ids of a GPT-2 vocabulary differ from the reference") {
  check_vocabulary("ggml-vocab-gpt-2");
  check_vocabulary("vocab-gpt-2");
}

TEST_CASE("ids of a Llama 3 vocabulary differ from the reference") {
  check_vocabulary("vocab-llama-bpe");
}

TEST_CASE("ids of a Qwen 2 vocabulary differ from the reference") {
  check_vocabulary("vocab-qwen2");
}

TEST_CASE("ids of a SentencePiece vocabulary differ from the reference") {
  check_vocabulary("ggml-vocab-llama-spm");
}

TEST_CASE("ids of a Gemma 4 vocabulary differ from the reference") { check_vocabulary("gemma4"); }

TEST_CASE("ids of a family of pre-tokenizers differ from the reference") {
  const std::string bytes = read_text(FIXTURES "/tokenizers/pretokenizers.gguf");
  const auto reference =
      nlohmann::json::parse(read_text(FIXTURES "/tokenizers/pretokenizers.json"));
  const auto texts = reference["texts"].get<std::vector<std::string>>();
  REQUIRE(texts.size() == 125);
  std::size_t names = 0;
  for (const auto& family : reference["families"]) {
    for (const auto& name : family["names"]) {
      CAPTURE(name);
      ++names;
      const auto tokenizer = with_pretokenizer(bytes, name.get<std::string>().c_str());
      for (std::size_t i = 0; i < texts.size(); ++i) {
        CAPTURE(texts[i]);
        if (!family["ids"][i].is_null())  // no reference is sure
          CHECK(ids_of(*tokenizer, texts[i]) == family["ids"][i].get<std::vector<Token>>());
      }
    }
  }
  CHECK(names == 35);
}

TEST_CASE("the mini model's prompt is encoded otherwise than it was trained") {
  const auto tokenizer = tokenizer_of_file(FIXTURES "/../../examples/mini-reader-q8_0.gguf");
  const auto reference = nlohmann::json::parse(read_text(FIXTURES "/mini-reference.json"));
  const std::string prompt = read_text(FIXTURES "/mini-prompt.txt");
  const std::vector<Token> ids = ids_of(*tokenizer, prompt, true);
  CHECK(ids == reference["tokens"].get<std::vector<Token>>());
  CHECK(text_of(*tokenizer, ids) == prompt);
}
