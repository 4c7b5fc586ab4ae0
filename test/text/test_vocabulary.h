// Small vocabularies that a test or a fuzz target changes, and the metadata that a file has of
// them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "../gguf/gguf_builder.h"
#include "text/tokenizer.h"

namespace kvasir::test {

// Bytes as GPT-2's vocabularies spell them: printable ones as they are, the others from U+0100 up.
inline std::string spell(std::string_view bytes) {
  const auto printable = [](unsigned byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
  };
  std::string out;
  for (const char c : bytes) {
    const unsigned byte = static_cast<unsigned char>(c);
    unsigned code = byte;
    if (!printable(byte)) {
      code = 0x100;
      for (unsigned b = 0; b < byte; ++b) code += printable(b) ? 0u : 1u;
    }
    if (code < 0x80) out.push_back(static_cast<char>(code));
    else out.append({static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))});
  }
  return out;
}

// A vocabulary that a test changes before it becomes a file.
struct TestVocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;
  std::vector<std::string> merges;

  Token add(std::string_view text, int32_t type = 1, float score = 0) {
    tokens.emplace_back(text);
    types.push_back(type);
    scores.push_back(score);
    return static_cast<Token>(tokens.size() - 1);
  }
  // Adds the merge of two byte strings and the token that it makes.
  Token merge(std::string_view left, std::string_view right) {
    merges.push_back(spell(left) + " " + spell(right));
    return add(spell(std::string(left).append(right)));
  }
};

// The 256 bytes, in order: the id of a byte is its value.
inline TestVocabulary byte_vocabulary() {
  TestVocabulary vocabulary;
  for (unsigned byte = 0; byte < 256; ++byte)
    vocabulary.add(spell(std::string(1, static_cast<char>(byte))));
  return vocabulary;
}

inline GgufBuilder bpe_file(const TestVocabulary& vocabulary, const char* pre = "gpt-2") {
  GgufBuilder builder;
  builder.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", pre);
  builder.key("tokenizer.ggml.tokens", vocabulary.tokens)
      .key("tokenizer.ggml.token_type", vocabulary.types);
  builder.key("tokenizer.ggml.merges", vocabulary.merges);
  return builder;
}

// <unk> <s> </s>, then the bytes: the id of a byte token is its value + 3.
inline TestVocabulary spm_vocabulary() {
  TestVocabulary vocabulary;
  vocabulary.add("<unk>", 2);
  vocabulary.add("<s>", 3);
  vocabulary.add("</s>", 3);
  for (unsigned byte = 0; byte < 256; ++byte) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", byte);
    vocabulary.add(text, 6);
  }
  return vocabulary;
}

inline GgufBuilder spm_file(const TestVocabulary& vocabulary) {
  GgufBuilder builder;
  builder.key("tokenizer.ggml.model", "llama").key("tokenizer.ggml.tokens", vocabulary.tokens);
  builder.key("tokenizer.ggml.token_type", vocabulary.types)
      .key("tokenizer.ggml.scores", vocabulary.scores);
  return builder;
}

// The tokens of spm_vocabulary(), with a list of merges.
inline GgufBuilder gemma4_file(const TestVocabulary& vocabulary) {
  GgufBuilder builder;
  builder.key("tokenizer.ggml.model", "gemma4").key("tokenizer.ggml.tokens", vocabulary.tokens);
  builder.key("tokenizer.ggml.token_type", vocabulary.types)
      .key("tokenizer.ggml.merges", vocabulary.merges);
  return builder;
}

}  // namespace kvasir::test
