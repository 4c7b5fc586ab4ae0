// Text to token ids and back, as the model's own GGUF metadata says.
//
// A Tokenizer is immutable after load and shared by threads. Time and memory are linear (times log) in the text, whatever is in it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "gguf/gguf.h"

namespace kvasir {

using Token = int32_t;

enum class TokenKind : uint8_t { normal, unknown, control, user_defined, unused, byte };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Reads `tokenizer.ggml.*`. Refuses by name what it does not know (model kind, pre-tokenizer).
  static Status load(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);

  // Appends the ids of `text` to *out. parse_special: text that spells a control token becomes that token;
  // otherwise it is ordinary text. No begin-of-text token is added (see bos()). Bytes that are not UTF-8 are accepted.
  // text_start: whether `text` begins a text (SentencePiece puts a space before it) or follows other tokens.
  virtual Status encode(std::string_view text, bool parse_special, bool text_start, Array<Token>* out) const = 0;

  // The bytes of one token; empty for control tokens unless `special`. Not necessarily whole UTF-8 characters.
  virtual std::string_view piece(Token token, bool special) const = 0;

  uint32_t size() const;               // number of tokens
  TokenKind kind(Token token) const;
  Token find(std::string_view token_text) const;  // as spelled in the vocabulary; -1 when absent
  Token bos() const;                   // -1 when there is none
  Token eos() const;                   // -1 when there is none
  bool add_bos() const;                // the model wants bos() before the first token
  bool strips_leading_space() const;   // SentencePiece: the first piece of a decoded text loses its space
  bool ends_turn(Token token) const;   // any of the model's end-of-turn / end-of-text tokens
  const char* name() const;            // "bpe/qwen2", "spm"

 protected:
  // the implementer's shared vocabulary
};

}  // namespace kvasir
