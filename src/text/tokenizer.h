// Text to token ids and back, as the model's own GGUF metadata says.
//
// A Tokenizer is immutable after load and shared by threads; it owns all it needs, so the file may
// go. Time and memory are linear (times log) in the text, whatever is in it.
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

  // Reads `tokenizer.ggml.*`. Refuses by name what it does not know (Code::unsupported: model kind,
  // pre-tokenizer) and what does not fit together (Code::corrupt: array lengths, ids, kinds), or
  // could be slow (Code::limit: tokens that are too many or too long). A file without
  // tokenizer.ggml.pre means "default", as the format says.
  static Status load(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);

  // Appends the ids of `text` to *out. parse_special: text that spells a control token becomes that
  // token; otherwise it is ordinary text. User-defined tokens always become themselves. Leftmost
  // wins, then longest. No begin-of-text token is added (see bos()). Bytes that are not UTF-8 are
  // accepted. text_start: whether `text` begins a text or follows a special token (SentencePiece
  // puts a space before it) or continues one. A byte that the vocabulary cannot express becomes its
  // unknown token; without one the call fails and *out is as it was.
  Status encode(std::string_view text, bool parse_special, bool text_start,
                Array<Token>* out) const;

  struct EncodeExtras {
    // Receives, for each id appended, how many bytes of the text it stands for. Together they are
    // the text: blanks that a special token swallows count with it, a space that was put before the
    // text is none of its bytes, and where several tokens spell one character that was replaced (a
    // space by U+2581), its byte counts with the last.
    Array<uint32_t>* lengths = nullptr;
    // Looked at between words and while a long one is merged: Code::cancelled. Finding where one
    // word ends is not interrupted.
    const Cancel* cancel = nullptr;
  };

  // The same for parts that follow each other, each with its own parse_special: tokens form across
  // the seams, as if the parts had been one text, but no special token reaches across one. A
  // document between the marks of its turn is encoded so.
  struct Part {
    std::string_view text;
    bool parse_special;
  };
  Status encode(std::span<const Part> parts, bool text_start, Array<Token>* out) const {
    return encode(parts, text_start, out, {});
  }
  Status encode(std::span<const Part> parts, bool text_start, Array<Token>* out,
                const EncodeExtras& extras) const;

  // The bytes of one token; empty for control and unknown tokens unless `special`, and for numbers
  // that are no token. Not necessarily whole UTF-8 characters.
  std::string_view piece(Token token, bool special) const;

  uint32_t size() const;                          // number of tokens
  TokenKind kind(Token token) const;              // of a token; `unused` for NaN or infinity
  Token find(std::string_view token_text) const;  // as spelled in the vocabulary; -1 when absent
  Token bos() const;                              // -1 when there is none
  Token eos() const;                              // -1 when there is none
  bool add_bos() const;                           // the model wants bos() before the first token
  // the model wants eos() after a complete text (no generation follows)
  bool add_eos() const;
  // SentencePiece: a decoded text loses its first space
  bool strips_leading_space() const { return space_prefix_; }
  // blanks after a control token are no text (Phi-3)
  bool strips_after_special() const { return strips_after_special_; }
  bool ends_turn(Token token) const;    // any of the model's end-of-turn / end-of-text tokens
  bool starts_text(Token token) const;  // what follows it is encoded with text_start
  const char* name() const { return name_.c_str(); }  // "bpe/qwen2", "spm"

 protected:
  Tokenizer(std::string name, std::unique_ptr<const Vocabulary> vocabulary, StringList pieces);
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Appends the ids of text without special tokens, which is not empty. `begins`: as text_start.
  virtual Status encode_plain(std::string_view text, bool begins, EncodeScratch* scratch,
                              TokenSink* out) const = 0;

  const Vocabulary& vocabulary() const { return *vocabulary_; }

  bool space_prefix_ = false;
  bool strips_after_special_ = false;  // blanks after a control token are no text (Phi-3)

 private:
  class Run;
  bool strips_after(Token token) const;

  std::string name_;
  std::unique_ptr<const Vocabulary> vocabulary_;
  std::unique_ptr<const StringList> pieces_;  // [tokens] bytes
  std::unique_ptr<const SpecialMatcher> specials_;
};

}  // namespace kvasir
