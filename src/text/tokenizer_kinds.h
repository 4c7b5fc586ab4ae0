// The kinds of tokenizer behind Tokenizer::load, and their common parts: merging a word and writing
// its tokens.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/cancel.h"
#include "base/memory.h"
#include "text/merge.h"
#include "text/tokenizer.h"
#include "text/vocabulary.h"

namespace kvasir {

Status load_bpe(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);
Status load_spm(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);
Status load_gemma4(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);

// The output of encode(): the tokens of a text in order, each with its number of bytes in the text.
class TokenSink {
 public:
  // lengths: null, or an array that gets one entry per token.
  TokenSink(Array<Token>* tokens, Array<uint32_t>* lengths)
      : tokens_(tokens), lengths_(lengths), first_(tokens->size()),
        first_length_(lengths ? lengths->size() : 0) {}

  void push(Token token, std::size_t bytes) {
    tokens_->push_back(token);
    if (lengths_) lengths_->push_back(static_cast<uint32_t>(bytes));
  }
  std::size_t size() const { return tokens_->size() - first_; }  // tokens written so far
  // Writes tokens [first, first + count) again.
  void repeat(std::size_t first, std::size_t count) {
    repeat(tokens_, first_ + first, count);
    if (lengths_) repeat(lengths_, first_length_ + first, count);
  }
  // The lengths of the tokens from `first` on, for correction; empty when not requested.
  std::span<uint32_t> lengths_from(std::size_t first) {
    return lengths_ ? std::span<uint32_t>(*lengths_).subspan(first_length_ + first)
                    : std::span<uint32_t>();
  }
  void clear() {
    tokens_->resize(first_);
    if (lengths_) lengths_->resize(first_length_);
  }

 private:
  template <class T>
  static void repeat(Array<T>* array, std::size_t first, std::size_t count) {
    const std::size_t end = array->size();
    array->resize(end + count);
    std::copy_n(array->begin() + static_cast<std::ptrdiff_t>(first), count,
                array->begin() + static_cast<std::ptrdiff_t>(end));
  }

  Array<Token>* tokens_;
  Array<uint32_t>* lengths_;
  std::size_t first_, first_length_;  // sizes before the call
};

// The place of each recent word's tokens in the output of one encode() call, so that a repeated
// word is copied, not merged.
class WordCache {
 public:
  explicit WordCache(std::size_t text_size);

  // Appends the tokens of `word`, by encode_word if they are unknown. `word` is a part of the text
  // being encoded.
  template <class Encode>
  Status encode(std::string_view word, TokenSink* out, Encode encode_word) {
    Entry& known = at(word);
    const std::size_t first = out->size();
    if (std::string_view(known.word, known.size) == word) {
      out->repeat(known.first, known.count);
      return {};
    }
    Status status = encode_word();
    known = {word.data(), word.size(), first, out->size() - first};
    return status;
  }

 private:
  struct Entry {
    const char* word = nullptr;        // in the text
    std::size_t size = 0;              // bytes
    std::size_t first = 0, count = 0;  // tokens, in the output
  };
  Entry& at(std::string_view word);  // the entry of `word`, which may hold another word

  Array<Entry> entries_;  // a power of two
};

// Scratch memory of one encode() call.
struct EncodeScratch {
  EncodeScratch(std::size_t text_size, const Cancel* token) : cancel(token), cache(text_size) {}
  static Status cancelled() {
    return Status::error(Code::cancelled, "cancelled while the text was split into tokens");
  }

  CancelPoll cancel;
  MergeRow row;
  std::string spelled;  // the word in the vocabulary's spelling
  WordCache cache;
};

// Symbols, their merges and the fallback to bytes.
class MergeModel {
 public:
  explicit MergeModel(const Vocabulary& vocabulary)
      : vocabulary_(vocabulary), symbols_(vocabulary) {
    byte_tokens_.fill(-1);
  }

  SymbolTable& symbols() { return symbols_; }
  const SymbolTable& symbols() const { return symbols_; }
  MergeTable& merges() { return merges_; }
  Status load_list(const Gguf& gguf);  // of merges, in the file: tokenizer.ggml.merges
  void set_byte_token(unsigned char byte, Token token) { byte_tokens_[byte] = token; }

  // Merges the symbols in `row`, which cover `word`, and appends their tokens with their lengths in
  // `word`.
  Status finish(std::string_view word, EncodeScratch* scratch, TokenSink* out) const;

 private:
  Status append_bytes(std::string_view bytes, TokenSink* out) const;

  const Vocabulary& vocabulary_;
  SymbolTable symbols_;
  MergeTable merges_;
  std::array<Token, 256> byte_tokens_;
};

}  // namespace kvasir
