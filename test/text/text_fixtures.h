// What the tests of text share: files, tokenizers from files and from memory.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "gguf/gguf_builder.h"
#include "text/test_vocabulary.h"
#include "text/tokenizer.h"

namespace kvasir::test {

inline const std::string S = "\xE2\x96\x81";  // a space in vocabularies of SentencePiece

inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), path);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline Status load_tokenizer(std::span<const std::byte> file,
                             std::unique_ptr<const Tokenizer>* out) {
  Gguf gguf;
  if (Status status = Gguf::parse(file, &gguf); !status.ok()) return status;
  return Tokenizer::load(gguf, out);
}

inline std::unique_ptr<const Tokenizer> tokenizer_of_file(const std::string& path) {
  const std::string bytes = read_text(path);
  std::unique_ptr<const Tokenizer> tokenizer;
  const Status status = load_tokenizer(std::as_bytes(std::span(bytes)), &tokenizer);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return tokenizer;
}

inline std::unique_ptr<const Tokenizer> tokenizer_of(GgufBuilder& builder) {
  const std::vector<std::byte> file = builder.build();
  std::unique_ptr<const Tokenizer> tokenizer;
  const Status status = load_tokenizer(file, &tokenizer);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return tokenizer;
}

inline Status refusal_of(GgufBuilder& builder) {
  const std::vector<std::byte> file = builder.build();
  std::unique_ptr<const Tokenizer> tokenizer;
  Status status = load_tokenizer(file, &tokenizer);
  CHECK(!tokenizer);
  return status;
}

inline std::vector<Token> ids_of(const Tokenizer& tokenizer, std::string_view text,
                                 bool parse_special = false, bool text_start = true) {
  Array<Token> ids;
  const Status status = tokenizer.encode(text, parse_special, text_start, &ids);
  REQUIRE_MESSAGE(status.ok(), status.message());
  return {ids.begin(), ids.end()};
}

inline std::string text_of(const Tokenizer& tokenizer, const std::vector<Token>& ids) {
  std::string text;
  for (const Token id : ids) text += tokenizer.piece(id, true);
  return text;
}

}  // namespace kvasir::test
