// How much of a question stands in documents as it is written, by blocks of neighbouring tokens.
//
//   features  the question's tokens, and its pairs of neighbouring ones
//   idf(f)    ln((all blocks + 1) / (blocks that have f + 1/2))
//   c[b]      of all features' idf, the part whose features stand in block b or b + 1
//
// Tokens that differ in a space before them, or in the case of ASCII letters, are one feature.
#pragma once

#include <span>
#include <vector>

#include "backend/thread_pool.h"
#include "text/tokenizer.h"

namespace kvasir {

// Tokens from `sealed` on count as block 0, as in Attention::score_blocks().
struct BlockText {
  std::span<const Token> tokens;
  uint64_t sealed = 0;
  uint32_t blocks = 1, block_tokens = 64;
};

// [documents][blocks]: c.
std::vector<std::vector<float>> find_overlap(const Tokenizer& tokenizer,
                                             std::span<const Token> question,
                                             std::span<const BlockText> documents,
                                             ThreadPool* pool);

}  // namespace kvasir
