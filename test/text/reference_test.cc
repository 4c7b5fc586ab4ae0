// The ids of every fixture: strings that a reference tokenizer encoded, and the mini model's own
// prompt.
#include <nlohmann/json.hpp>

#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

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

TEST_CASE("the mini model's prompt is encoded otherwise than it was trained") {
  const auto tokenizer = tokenizer_of_file(FIXTURES "/../../examples/mini-reader-q8_0.gguf");
  const auto reference = nlohmann::json::parse(read_text(FIXTURES "/mini-reference.json"));
  const std::string prompt = read_text(FIXTURES "/mini-prompt.txt");
  const std::vector<Token> ids = ids_of(*tokenizer, prompt, true);
  CHECK(ids == reference["tokens"].get<std::vector<Token>>());
  CHECK(text_of(*tokenizer, ids) == prompt);
}
