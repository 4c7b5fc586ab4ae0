// Drafts by lookup: the tokens that followed the newest ones where these occurred before, in the
// document, a question or an answer.
//
// There is no index: a step scans the sequence from its end for the two newest tokens, and compares
// backwards from each place that has them. For 131,072 tokens that takes 0.1 to 0.2 ms on a busy
// core of an AMD EPYC, where a step of the model takes milliseconds. So nothing is built at a load,
// kept in memory, saved, or cut by a rewind. A scan ends after 65,536 comparisons.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory.h"
#include "text/tokenizer.h"

namespace kvasir {

struct LookupMatch {
  static constexpr uint32_t min_length = 2, max_length = 32;

  uint32_t length = 0;  // newest tokens that occur before, 0: fewer than min_length
  uint64_t end = 0;     // the token after them there

  bool found() const { return length > 0; }
};

// The longest run of newest tokens, of which `next` is the last, after the sequence's tokens, that
// occurs before; of several places the newest.
LookupMatch find_newest(std::span<const Token> tokens, Token next);

// Appends `count` tokens that followed a match. Where they reach the end of the sequence they go on
// with themselves: a repetition goes on.
void append_lookup(std::span<const Token> tokens, Token next, const LookupMatch& match,
                   uint32_t count, Array<Token>* out);

}  // namespace kvasir
