// Text to token ids and back, by the metadata of the model's GGUF file.
//
// A Tokenizer is immutable after load, owns its data and may be used by several threads. Time and
// memory are O(n log n) in any text.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "gguf/gguf.h"

namespace kvasir {

using Token = int32_t;

enum class TokenKind : uint8_t { normal, unknown, control, user_defined, unused, byte };

class SpecialMatcher;
class StringList;
class TokenSink;
class Vocabulary;
struct EncodeScratch;

class Tokenizer {
 public:
  virtual ~Tokenizer();

  // Reads `tokenizer.ggml.*`. Refuses, by name, what is unknown (Code::unsupported: model kind,
  // pre-tokenizer), inconsistent (Code::corrupt: array lengths, ids, kinds) or possibly slow
  // (Code::limit: too many or too long tokens). A file without tokenizer.ggml.pre means "default",
  // by definition of the format.
  static Status load(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);

  // Appends the ids of `text` to *out. parse_special: text that spells a control token becomes that
  // token; otherwise it is ordinary text. User-defined tokens always become themselves. Leftmost
  // wins, then longest. Adds no begin-of-text token (see bos()). Accepts bytes that are not UTF-8.
  // text_start: `text` begins a text or follows a special token (SentencePiece puts a space before
  // it); otherwise it continues one. A byte that the vocabulary cannot express becomes its unknown
  // token; without one the call fails and *out is unchanged.
  Status encode(std::string_view text, bool parse_special, bool text_start,
                Array<Token>* out) const;

  struct EncodeExtras {
    // Receives, for each appended id, the number of its bytes in the text. They sum to the text.
    // Blanks swallowed by a special token count with it. A space added before the text has no
    // bytes. Where several tokens spell one replaced character (a space by U+2581), its byte counts
    // with the last.
    Array<uint32_t>* lengths = nullptr;
    // Tested between words and during the merge of a long word: Code::cancelled. Finding the end of
    // a word is not interrupted.
    const Cancel* cancel = nullptr;
  };

  // encode() for consecutive parts, each with its own parse_special. Tokens form across the
  // boundaries as in one text, but no special token spans one. Used for a document between the
  // marks of its turn.
  struct Part {
    std::string_view text;
    bool parse_special;
  };
  Status encode(std::span<const Part> parts, bool text_start, Array<Token>* out) const {
    return encode(parts, text_start, out, {});
  }
  Status encode(std::span<const Part> parts, bool text_start, Array<Token>* out,
                const EncodeExtras& extras) const;

  // The bytes of one token; empty for control and unknown tokens unless `special`, and for invalid
  // ids. Not necessarily whole UTF-8 characters.
  std::string_view piece(Token token, bool special) const;

  uint32_t size() const;                          // number of tokens
  TokenKind kind(Token token) const;              // `unused` for an invalid id
  Token find(std::string_view token_text) const;  // as spelled in the vocabulary; -1 when absent
  Token bos() const;                              // -1 when there is none
  Token eos() const;                              // -1 when there is none
  bool add_bos() const;                           // the model expects bos() before the first token
  // The model expects eos() after a complete text (not before generation).
  bool add_eos() const;
  // SentencePiece: a decoded text loses its first space
  bool strips_leading_space() const { return space_prefix_; }
  // blanks after a control token are no text (Phi-3)
  bool strips_after_special() const { return strips_after_special_; }
  bool ends_turn(Token token) const;          // any of the model's end-of-turn / end-of-text tokens
  std::span<const Token> suppressed() const;  // never sampled; ascending
  bool starts_text(Token token) const;        // text after it is encoded with text_start
  const char* name() const { return name_.c_str(); }  // "bpe/qwen2", "spm", "gemma4"

 protected:
  Tokenizer(std::string name, std::unique_ptr<const Vocabulary> vocabulary, StringList pieces);
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Appends the ids of a non-empty text without special tokens. `begins`: like text_start.
  virtual Status encode_plain(std::string_view text, bool begins, EncodeScratch* scratch,
                              TokenSink* out) const = 0;

  const Vocabulary& vocabulary() const { return *vocabulary_; }

  bool space_prefix_ = false;
  bool strips_after_special_ = false;  // blanks after a control token are dropped (Phi-3)

 private:
  class Run;
  bool strips_after(Token token) const;

  std::string name_;
  std::unique_ptr<const Vocabulary> vocabulary_;
  std::unique_ptr<const StringList> pieces_;  // [tokens] bytes
  std::unique_ptr<const SpecialMatcher> specials_;
};

}  // namespace kvasir
