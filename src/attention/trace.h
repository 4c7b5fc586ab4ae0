// Which parts of a document an answer attended: the attention of the last token of each step, by
// blocks of tokens.
//
// Heads that retrieve put much of a query's attention on few tokens, the others spread theirs over
// everything near and far. Shares that are summed as they are drown the first in the second, so a
// block counts with the square of the share that a query head gave it, summed over layers, query
// heads and steps. Measured: trace.cc.
//
// A step is begin_step(); for each layer begin_layer(), set_base() and add() for its query heads,
// end_layer(); and at last commit(). Until then nothing is visible. Threads: calls for different
// heads, or add() for different blocks of one, may run together. Sums do not depend on who runs
// what.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/thread_pool.h"
#include "base/memory.h"

namespace kvasir {

class Trace {
 public:
  // Neighbouring tokens of the sequence. share: of all that was counted, 0 to 1.
  struct Passage {
    uint64_t first, tokens;
    double share;
  };

  // The document ends before token `document` of the sequence; the tokens before `begin`, which are
  // marks and instructions, do not count. Throws std::bad_alloc.
  Trace(uint32_t heads, uint32_t block_tokens, uint64_t document, uint64_t begin = 0);
  uint64_t document() const { return document_; }
  uint64_t steps() const { return steps_; }

  void begin_step();
  void begin_layer();
  // What a query head's scores are taken relative to: at least the largest of them, so that
  // e^(score - base) is finite.
  void set_base(uint32_t head, float base) { bases_[head] = base; }
  // Scores of neighbouring tokens for a query head; -inf: was not read. base: the one that is set.
  void add(uint32_t head, uint64_t first, std::span<const float> scores, float base);
  // totals: [heads] ln of the sum of e^score over all that each query attended.
  void end_layer(const float* totals, ThreadPool* pool);
  void commit();

  // Those that stand out, the largest share first.
  std::vector<Passage> passages() const;

 private:
  const uint32_t heads_, block_tokens_;
  const uint64_t document_, begin_;  // tokens
  const uint32_t blocks_;
  uint64_t steps_ = 0;
  Array<float> bases_;    // [heads] of the layer that runs,
  Array<float> weights_;  // [heads][blocks] and sums of e^(score - base)
  Array<double> step_;    // [blocks] of the step that runs
  Array<double> sums_;    // [blocks]
};

}  // namespace kvasir
