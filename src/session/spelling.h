// The bytes of the document that each token spells.
//
// A token spells the bytes of its piece. Two exceptions follow from the tokens: begin-of-text
// spells none, and SentencePiece adds a space before a text. Other exceptions, such as blanks that
// a special token removes, are recorded here when the text is tokenized. A cache file has them in
// section `spelling`.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.h"
#include "cachefile/section_rules.h"
#include "text/tokenizer.h"

namespace kvasir {

class Spelling {
 public:
  static constexpr uint64_t unknown = UINT64_MAX;
  struct Entry {
    uint64_t token;  // index in the sequence, ascending
    uint64_t bytes;  // of the text; unknown: from this token on no bytes are known
  };
  static constexpr std::size_t max_entries = max_spelling_pairs;

  // Records tokens that follow token number `first` - 1, which is `previous` (-1: none).
  // lengths: [tokens] bytes of each.
  void add(const Tokenizer& tokenizer, Token previous, uint64_t first,
           std::span<const Token> tokens, std::span<const uint32_t> lengths);
  // Records that tokens from `first` on come from no text.
  void add_unknown(uint64_t first);
  // Keeps only the records of the first `tokens` tokens.
  void cut(uint64_t tokens);
  bool ends_unknown() const { return !entries_.empty() && entries_.back().bytes == unknown; }
  void restore(std::span<const Entry> entries) { entries_.assign(entries.begin(), entries.end()); }
  std::span<const Entry> entries() const { return entries_; }

  // Finds the token, at most `end`, that spells byte `byte` of the text. Returns `end` if unknown.
  uint64_t token_at(const Tokenizer& tokenizer, std::span<const Token> tokens, uint64_t end,
                    uint64_t byte) const;
  // offsets: [tokens + 1] bytes before each token, or `unknown`.
  void offsets(const Tokenizer& tokenizer, std::span<const Token> tokens,
               Array<uint64_t>* out) const;

 private:
  Array<Entry> entries_;
};

// A token may begin inside a UTF-8 character. Bytes, 0 to 3, from the start of token `first` back
// to the start of that character, and from the start of token `end` forward to its end.
uint32_t bytes_to_character_begin(const Tokenizer& tokenizer, std::span<const Token> tokens,
                                  uint64_t first);
uint32_t bytes_to_character_end(const Tokenizer& tokenizer, std::span<const Token> tokens,
                                uint64_t end);

}  // namespace kvasir
