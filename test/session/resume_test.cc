// Stopped prefill goes on at the byte that it reported, whatever the tokenizer does with blanks,
// marks and unknown bytes.
#include "helpers.h"
#include "text/text_fixtures.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

// Characters are tokens, and a space joins the letter after it: every break is at the
// beginning of a token.
TestVocabulary letters(TestVocabulary vocabulary) {
  vocabulary.add("\xE2\x96\x81");
  for (char c = 'a'; c <= 'z'; ++c) vocabulary.add(std::string(1, c), 1, -9);
  for (char c = 'a'; c <= 'z'; ++c) vocabulary.add("\xE2\x96\x81" + std::string(1, c), 1, -1);
  return vocabulary;
}

std::shared_ptr<const Model> model_with(const TestVocabulary& vocabulary, const char* chat) {
  return model_over(spm_file(vocabulary), static_cast<uint32_t>(vocabulary.tokens.size()), chat);
}

TestVocabulary with_marks(TestVocabulary vocabulary) {
  for (const char* mark : {"<|system|>", "<|user|>", "<|end|>", "<|assistant|>"})
    vocabulary.add(mark, 3);
  return vocabulary;
}

TestVocabulary without_bytes() {
  TestVocabulary vocabulary;
  vocabulary.add("<unk>", 2);
  vocabulary.add("<s>", 3);
  vocabulary.add("</s>", 3);
  return letters(std::move(vocabulary));
}

std::unique_ptr<Session> session_of(const std::shared_ptr<const Model>& model, uint32_t chunk) {
  SessionOptions o;
  o.threads = 1;
  o.prefill_chunk = chunk;
  return open_session(model, o);
}

const std::string marked_document =
    "  some words\n and  a \xC3\xA9tude <|end|> \n the rest \xE4\xB8\xAD</s>is <s> here<|user|>";

// Reads chunk by chunk, each call stopped after its first one and taken up where it says.
void check_resumed(const std::shared_ptr<const Model>& model, const std::string& text,
                   uint32_t chunk, bool special) {
  CAPTURE(chunk);
  CAPTURE(special);
  const auto whole = session_of(model, chunk), broken = session_of(model, chunk);
  uint64_t tokens = 0, bytes = 0;
  REQUIRE(whole->prefill(text, special, nullptr, {}, &tokens, &bytes).ok());
  CHECK(bytes == text.size());
  std::size_t at = 0;
  for (int round = 0; round < 200; ++round) {
    const std::size_t before = broken->tokens().size();
    const Status s = broken->prefill(
        std::string_view(text).substr(at), special, nullptr, [](uint64_t, uint64_t) { return 1; },
        &tokens, &bytes);
    CHECK((s.ok() || s.code() == Code::cancelled));
    CHECK(broken->tokens().size() == before + tokens);
    at += bytes;
    REQUIRE(at <= text.size());
    if (s.ok()) break;
  }
  CHECK(at == text.size());
  CHECK(std::vector<Token>(broken->tokens().begin(), broken->tokens().end()) ==
        std::vector<Token>(whole->tokens().begin(), whole->tokens().end()));
}

}  // namespace

TEST_CASE(
    "a stopped document is taken up at the byte it names, with the same tokens: SentencePiece") {
  const auto raw = model_with(with_marks(letters(spm_vocabulary())), "raw");
  const auto phi = model_with(with_marks(letters(spm_vocabulary())), "phi");
  const auto unknowns = model_with(without_bytes(), "raw");
  for (const auto& model : {raw, phi, unknowns})
    for (uint32_t chunk : {4u, 5u, 7u, 16u})
      for (bool special : {false, true}) check_resumed(model, marked_document, chunk, special);
}

TEST_CASE(
    "a stopped document is taken up at the byte it names, with the same tokens: byte-level BPE") {
  TestVocabulary bytes = byte_vocabulary();
  for (const char* mark : {"<|im_start|>", "<|im_end|>", "<|end|>", "<s>"}) bytes.add(mark, 3);
  const auto model =
      model_over(bpe_file(bytes), static_cast<uint32_t>(bytes.tokens.size()), "chatml");
  for (uint32_t chunk : {32u, 33u, 50u})
    for (bool special : {false, true}) check_resumed(model, marked_document, chunk, special);
}

TEST_CASE("a turn into which nothing was read is not kept") {
  const auto model = model_with(with_marks(letters(spm_vocabulary())), "raw");
  // The begin-of-text token and the space before the text are not bytes of the text.
  for (uint32_t chunk : {1u, 2u}) {
    const auto session = session_of(model, chunk);
    uint64_t tokens = 7, bytes = 7;
    CHECK(session
              ->prefill(
                  "\xC3\xA9", false, nullptr, [](uint64_t, uint64_t) { return 1; }, &tokens, &bytes)
              .code() == Code::cancelled);
    CHECK(tokens == 0);
    CHECK(bytes == 0);
    CHECK(session->tokens().empty());
  }
}

TEST_CASE("cutting a long text into tokens is stopped, and nothing was added") {
  const auto model = model_with(letters(spm_vocabulary()), "raw");
  const auto session = session_of(model, 16);
  Cancel cancel;
  cancel.fire();
  uint64_t tokens = 7, bytes = 7;
  // More tokens than the context holds: only a call that does not cut all of it says `cancelled`.
  const std::string text(1 << 20, 'x');
  CHECK(session->prefill(text, false, &cancel, {}, &tokens, &bytes).code() == Code::cancelled);
  CHECK(tokens == 0);
  CHECK(bytes == 0);
  GenerateOptions o;
  o.cancel = &cancel;
  Answer answer;
  CHECK(session->generate(text, o, {}, &answer).code() == Code::cancelled);
  CHECK(session->tokens().empty());
}
