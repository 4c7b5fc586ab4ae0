// BPE over characters: spaces are spelled U+2581, and a character that no token covers becomes a
// token for each of its bytes. The common part of SentencePiece-style BPE and of Gemma 4's.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "text/tokenizer_kinds.h"

namespace kvasir {

constexpr std::string_view kSpelledSpace = "\xE2\x96\x81";  // U+2581

// The size of the first character of `text`; a byte that is not UTF-8 counts as one.
std::size_t character_size(std::string_view text);

class CharacterBpe : public Tokenizer {
 public:
  // The bytes of each token.
  static StringList decode_pieces(const Vocabulary& vocabulary);

 protected:
  CharacterBpe(std::string name, std::unique_ptr<const Vocabulary> vocabulary, StringList pieces)
      : Tokenizer(std::move(name), std::move(vocabulary), std::move(pieces)),
        model_(Tokenizer::vocabulary()) {}

  void load_bytes();  // after the merges

  // Appends the tokens of a word. prefix: spell a space before it.
  Status encode_word(std::string_view word, bool prefix, EncodeScratch* scratch,
                     TokenSink* out) const;
  Status encode_cached(std::string_view word, EncodeScratch* scratch, TokenSink* out) const {
    return scratch->cache.encode(word, out, [&] { return encode_word(word, false, scratch, out); });
  }

  MergeModel model_;

 private:
  std::array<Symbol, 128> ascii_{};
};

}  // namespace kvasir
