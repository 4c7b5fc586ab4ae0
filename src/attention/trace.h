// Records which parts of a document an answer attended: the attention of the last token of each
// step, by blocks of tokens.
//
// Retrieval heads concentrate attention on few tokens; other heads spread it over the document. In
// a sum of plain shares the spread attention would dominate. So a block counts with the square of
// its share, summed over layers, query heads and steps. trace.cc has measurements.
//
// A step is begin_step(); for each layer begin_layer(), set_base() and add() for its query heads,
// end_layer(); then commit(). Nothing is visible before commit(). Threads: calls for different
// heads, or add() for different blocks of a head, may overlap. Sums do not depend on the assignment
// of calls to threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/thread_pool.h"
#include "base/memory.h"

namespace kvasir {

class Trace {
 public:
  // Neighbouring tokens of the sequence. share: of all counted attention, 0 to 1.
  struct Passage {
    uint64_t first, tokens;
    double share;
  };

  // document: the token of the sequence before which the document ends. begin: the number of tokens
  // of marks and instructions before it, which do not count. Throws std::bad_alloc.
  Trace(uint32_t heads, uint32_t block_tokens, uint64_t document, uint64_t begin = 0);
  uint64_t document() const { return document_; }
  uint64_t steps() const { return steps_; }

  void begin_step();
  void begin_layer();
  // Sets the number subtracted from a query head's scores. It is at least the largest score, so
  // that e^(score - base) is finite.
  void set_base(uint32_t head, float base) { bases_[head] = base; }
  // Adds scores of neighbouring tokens for a query head; -inf: not read. base: of set_base().
  void add(uint32_t head, uint64_t first, std::span<const float> scores, float base);
  // totals: [heads] log-sum-exp of the scores that each query attended.
  void end_layer(const float* totals, ThreadPool* pool);
  void commit();
  // Counts what `other` recorded in `tokens` tokens from `from` on as that of tokens from `to` on.
  // All are multiples of block_tokens.
  void take(const Trace& other, uint64_t from, uint64_t to, uint64_t tokens);

  // What shares relate to: the sum of all blocks and the largest one, of one document or several.
  struct Scale {
    double sum = 0, largest = 0;
  };
  double sum() const;
  double largest() const;
  // Returns the passages with the largest shares, in descending order.
  std::vector<Passage> passages(Scale of) const;
  std::vector<Passage> passages() const { return passages({sum(), largest()}); }
  static constexpr std::size_t max_passages = 64;

 private:
  const uint32_t heads_, block_tokens_;
  const uint64_t document_, begin_;  // tokens
  const uint32_t blocks_;
  uint64_t steps_ = 0;
  Array<float> bases_;    // [heads] of the running layer
  Array<float> weights_;  // [heads][blocks] of the running layer: sums of e^(score - base)
  Array<double> step_;    // [blocks] of the running step
  Array<double> sums_;    // [blocks]
};

}  // namespace kvasir
