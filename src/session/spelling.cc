#include "session/spelling.h"

#include <algorithm>

namespace kvasir {
namespace {

// Bytes that a token spells, derived from the tokens alone. previous: -1: none.
uint64_t default_bytes(const Tokenizer& tokenizer, Token previous, Token token) {
  if (previous < 0 && tokenizer.add_bos() && token == tokenizer.bos()) return 0;
  const std::string_view piece = tokenizer.piece(token, true);
  const bool begins = previous < 0 || tokenizer.starts_text(previous);
  const bool has_space = tokenizer.strips_leading_space() && begins && piece.starts_with(' ');
  return piece.size() - (has_space ? 1 : 0);
}

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

constexpr uint32_t max_continuation = 3;  // bytes of a UTF-8 character after its first

}  // namespace

void Spelling::add(const Tokenizer& tokenizer, Token previous, uint64_t first,
                   std::span<const Token> tokens, std::span<const uint32_t> lengths) {
  if (!entries_.empty() && entries_.back().bytes == unknown) return;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Token before = i > 0 ? tokens[i - 1] : previous;
    if (lengths[i] == default_bytes(tokenizer, before, tokens[i])) continue;
    if (entries_.size() + 1 >= max_entries) return add_unknown(first + i);
    entries_.push_back({first + i, lengths[i]});
  }
}

void Spelling::add_unknown(uint64_t first) {
  if (!entries_.empty() && entries_.back().bytes == unknown) return;
  entries_.push_back({first, unknown});
}

void Spelling::cut(uint64_t tokens) {
  while (!entries_.empty() && entries_.back().token >= tokens) entries_.pop_back();
}

uint64_t Spelling::token_at(const Tokenizer& tokenizer, std::span<const Token> tokens, uint64_t end,
                            uint64_t byte) const {
  uint64_t at = 0;
  const Entry* entry = entries_.data();
  const Entry* const entries_end = entry + entries_.size();
  for (uint64_t t = 0; t < end; ++t) {
    uint64_t bytes = 0;
    if (entry != entries_end && entry->token == t) bytes = entry++->bytes;
    else bytes = default_bytes(tokenizer, t > 0 ? tokens[t - 1] : -1, tokens[t]);
    if (bytes == unknown) return end;
    at += bytes;
    if (at > byte) return t;
  }
  return end;
}

void Spelling::offsets(const Tokenizer& tokenizer, std::span<const Token> tokens,
                       Array<uint64_t>* out) const {
  out->assign(tokens.size() + 1, unknown);
  uint64_t at = 0;
  const Entry* entry = entries_.data();
  const Entry* const entries_end = entry + entries_.size();
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    (*out)[t] = at;
    uint64_t bytes = 0;
    if (entry != entries_end && entry->token == t) bytes = entry++->bytes;
    else bytes = default_bytes(tokenizer, t > 0 ? tokens[t - 1] : -1, tokens[t]);
    if (bytes == unknown) return;
    at += bytes;
  }
  out->back() = at;
}

uint32_t bytes_to_character_begin(const Tokenizer& tokenizer, std::span<const Token> tokens,
                                  uint64_t first) {
  if (first >= tokens.size()) return 0;
  std::string_view piece = tokenizer.piece(tokens[first], true);
  if (piece.empty() || !is_continuation(piece.front())) return 0;
  uint32_t back = 0;
  for (uint64_t t = first; t > 0 && back < max_continuation;) {
    piece = tokenizer.piece(tokens[--t], true);
    for (std::size_t i = piece.size(); i-- > 0 && back < max_continuation;) {
      ++back;
      if (!is_continuation(piece[i])) return back;
    }
  }
  return 0;  // no character begins within max_continuation bytes
}

uint32_t bytes_to_character_end(const Tokenizer& tokenizer, std::span<const Token> tokens,
                                uint64_t end) {
  uint32_t forward = 0;
  for (uint64_t t = end; t < tokens.size() && forward < max_continuation; ++t)
    for (const char byte : tokenizer.piece(tokens[t], true)) {
      if (!is_continuation(byte) || forward == max_continuation) return forward;
      ++forward;
    }
  return forward;
}

}  // namespace kvasir
