// The tokens of a model: spellings, kinds and special roles, checked once at load. No algorithm.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "gguf/gguf.h"
#include "text/merge.h"
#include "text/tokenizer.h"

namespace kvasir {

// Many short strings in one allocation, by number.
class StringList {
 public:
  std::size_t size() const { return ends_.size(); }
  std::size_t bytes() const { return bytes_.size(); }  // of all strings
  void reserve(std::size_t strings, std::size_t bytes);
  void add(std::string_view text);
  std::string_view operator[](std::size_t i) const;

 private:
  Array<char> bytes_;
  Array<uint64_t> ends_;
};

// Finds the number of a string in a StringList; of equal strings the first.
class TextIndex {
 public:
  void reserve(std::size_t strings);
  // Returns false where the list's string was added before.
  bool add(const StringList& list, uint32_t number);
  // What find() reads first, or null. An index exceeds the cache: prefetch it before. (A function
  // that only prefetches has no effect for compilers, which drop its calls.)
  const void* first_slot(std::string_view text) const;
  uint32_t find(const StringList& list, std::string_view text) const;  // UINT32_MAX when absent

 private:
  struct Slot {
    uint32_t number = UINT32_MAX;  // UINT32_MAX: free
    uint32_t hash = 0;             // the low half; spares most comparisons of different texts
  };
  void grow(std::size_t capacity);
  std::size_t place(const StringList& list, std::string_view text, uint32_t hash) const;

  Array<Slot> slots_;  // open addressing, a power of two, at most half full
  std::size_t used_ = 0;
};

struct SpecialIds {
  Token bos = -1, eos = -1, unknown = -1;
};

class Vocabulary {
 public:
  // `defaults` apply where the metadata have no value. Refuses lengths that do not match and
  // invalid ids.
  static Status load(const Gguf& gguf, SpecialIds defaults, bool adds_bos, Vocabulary* out);

  uint32_t size() const { return static_cast<uint32_t>(kinds_.size()); }
  std::string_view text(Token token) const { return texts_[static_cast<std::size_t>(token)]; }
  std::size_t text_bytes() const { return texts_.bytes(); }  // of all tokens
  TokenKind kind(Token token) const { return kinds_[static_cast<std::size_t>(token)]; }
  bool contains(Token token) const { return token >= 0 && static_cast<uint32_t>(token) < size(); }

  Token find(std::string_view text) const;  // -1 when absent
  // find(), but only tokens that ordinary text may become: never control, unknown or byte tokens.
  Token find_plain(std::string_view text) const;
  // Whether find_plain(text(token)) is known to be the token.
  bool is_found_plain(Token token) const { return repeated_.empty() && is_plain(kind(token)); }
  const void* first_slot(std::string_view text) const { return index_.first_slot(text); }

  const SpecialIds& special() const { return special_; }
  bool adds_bos() const { return adds_bos_; }
  bool adds_eos() const { return adds_eos_; }
  bool ends_turn(Token token) const;
  std::span<const Token> suppressed() const { return suppressed_; }

  // The byte of a token `<0x0A>`; -1 for other spellings.
  static int byte_of(std::string_view spelling);

 private:
  static bool is_plain(TokenKind kind) {
    return kind == TokenKind::normal || kind == TokenKind::user_defined ||
           kind == TokenKind::unused;
  }
  Status load_texts(const Gguf& gguf);
  Status load_kinds(const Gguf& gguf);
  Status load_special(const Gguf& gguf, SpecialIds defaults);
  Status load_suppressed(const Gguf& gguf);
  void find_turn_ends();

  StringList texts_;              // [tokens]
  std::vector<TokenKind> kinds_;  // [tokens]
  TextIndex index_;
  TextIndex plain_index_;           // of plain tokens whose text index_ finds in another token
  std::vector<uint32_t> repeated_;  // tokens whose text an earlier token has
  SpecialIds special_;
  bool adds_bos_ = false, adds_eos_ = false;
  std::vector<Token> turn_ends_;   // sorted once loaded
  std::vector<Token> suppressed_;  // sorted, fewer than there are tokens
};

// The texts of merges: the plain tokens, and others that merges need.
class SymbolTable {
 public:
  explicit SymbolTable(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}
  Symbol find(std::string_view text) const;  // kNoSymbol when absent
  // guess: where the text is likely, which takes no search.
  Symbol find_or_add(std::string_view text, Symbol guess = kNoSymbol);
  const void* first_slot(std::string_view text) const { return vocabulary_.first_slot(text); }
  bool is_token(Symbol symbol) const { return symbol < vocabulary_.size(); }
  std::string_view text(Symbol symbol) const;

 private:
  const Vocabulary& vocabulary_;
  StringList extra_;  // symbol number: vocabulary size + index
  TextIndex index_;
};

}  // namespace kvasir
