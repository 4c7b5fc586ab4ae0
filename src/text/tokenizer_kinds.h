// The kinds of tokenizer behind Tokenizer::load, and what they share: merging a word and writing its tokens.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "base/memory.h"
#include "text/merge.h"
#include "text/tokenizer.h"
#include "text/vocabulary.h"

namespace kvasir {

Status load_bpe(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);
Status load_spm(const Gguf& gguf, std::unique_ptr<const Tokenizer>* out);

// Where each recent word of one encode() call has its tokens in the output, so that a word seen before is copied, not merged.
class WordCache {
 public:
  explicit WordCache(std::size_t text_size);

  // Appends the tokens of `word`, which encode_word appends to *out when they are not known. `word` lies in the text being encoded.
  template <class Encode>
  Status encode(std::string_view word, Array<Token>* out, Encode encode_word) {
    Entry& known = at(word);
    const std::size_t first = out->size();
    if (std::string_view(known.word, known.size) == word) {
      out->resize(first + known.count);
      std::copy_n(out->data() + known.first, known.count, out->data() + first);
      return {};
    }
    Status status = encode_word();
    known = {word.data(), word.size(), first, out->size() - first};
    return status;
  }

 private:
  struct Entry {
    const char* word = nullptr;  // in the text
    std::size_t size = 0;        // bytes
    std::size_t first = 0, count = 0;  // tokens, in the output
  };
  Entry& at(std::string_view word);  // where `word` is kept; what stands there may be another word

  Array<Entry> entries_;  // a power of two
};

// What one encode() call works with.
struct EncodeScratch {
  explicit EncodeScratch(std::size_t text_size) : cache(text_size) {}
  MergeRow row;
  std::string spelled;  // the word as the vocabulary spells it
  WordCache cache;
};

// Symbols, their merges and the fallback to bytes.
class MergeModel {
 public:
  explicit MergeModel(const Vocabulary& vocabulary) : vocabulary_(vocabulary), symbols_(vocabulary) { byte_tokens_.fill(-1); }

  SymbolTable& symbols() { return symbols_; }
  const SymbolTable& symbols() const { return symbols_; }
  MergeTable& merges() { return merges_; }
  void set_byte_token(unsigned char byte, Token token) { byte_tokens_[byte] = token; }

  // Merges the symbols in `row`, which cover `word`, and appends their tokens.
  Status finish(std::string_view word, MergeRow* row, Array<Token>* out) const;

 private:
  Status append_bytes(std::string_view bytes, Array<Token>* out) const;

  const Vocabulary& vocabulary_;
  SymbolTable symbols_;
  MergeTable merges_;
  std::array<Token, 256> byte_tokens_;
};

}  // namespace kvasir
