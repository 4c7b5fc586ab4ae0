// How much of a question stands in documents as it is written, by blocks of neighbouring tokens.
//
//   features  the question's tokens, and its pairs of neighbouring ones
//   idf(f)    ln((all blocks + 1) / (blocks that have f + 1/2))
//   c[b]      share of the sum of idf that features in block b or b + 1 have
//
// Tokens that differ in a space before them, or in the case of ASCII letters, are one feature. Of a
// long question the last 512 tokens count.
#pragma once

#include <span>
#include <vector>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/status.h"
#include "text/tokenizer.h"

namespace kvasir {

// Tokens from `first` on; those from `sealed` on count as block 0, as in Attention::score_blocks().
struct BlockText {
  std::span<const Token> tokens;
  uint64_t first = 0, sealed = 0;
  uint32_t blocks = 1, block_tokens = 64;
};

// c: [documents][blocks]. Code::cancelled.
Status find_overlap(const Tokenizer& tokenizer, std::span<const Token> question,
                    std::span<const BlockText> documents, const Cancel* cancel, ThreadPool* pool,
                    std::vector<std::vector<float>>* c);

}  // namespace kvasir
