// What the files of Attention share: a thread's scratch, and states and rows as parts of arrays.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention.h"
#include "backend/first_failure.h"
#include "base/checked.h"

namespace kvasir {

// Query rows of neighbouring tokens for which one scan of the summaries serves. Their scores are a
// float for each row and block of 16 tokens, or quad of 4: an L2 cache of 1 MiB has them up to
// 170,000 tokens, or 43,000.
constexpr uint32_t scanned_rows = 24;
// of the store that one task of a single block, or one call of a kernel, reads
constexpr uint32_t part_tokens = 8192;

struct Attention::Worker {
  Array<float> q;           // [block_rows][dim]
  Array<int8_t> q8, split;  // [block_rows][dim], [block_rows][2 * dim]
  Array<float> scale;       // [block_rows]
  Array<uint32_t> limits;   // [block_rows]
  Array<float> state;       // o [block_rows][dim], m [block_rows], l [block_rows]
  Array<std::byte> scratch;
  SelectorScratch selector;
  Selection selection;
  Array<uint32_t> numbers;        // of what is fetched together,
  Array<PageRef> pages;           // and where it lies
  Array<float> read_m, read_l;    // [rows] before the samples are added
  Array<float> bounds;            // [group][blocks]
  Array<uint32_t> unread_tokens;  // [blocks] that a list has not
  // as state: sinks and window by the scores as they are, where a cap is set
  Array<float> near;
  Array<float> shifts;  // [block_rows]
  // [block_rows][tokens of a page] scores; k, v [tokens of a page][dim] of a page
  Array<float> capped;
  Array<float> traced;   // [group][tokens of a page] scores
  PageStore::Hold hold;  // of what a question reads
  uint64_t missed = 0;   // pages that had to be read for it
  ReadCounts counts;
  Comparison::Scratch compare;
};

inline std::size_t state_floats(uint32_t rows, uint32_t dim) {
  return std::size_t{rows} * (dim + 16) + 16;
}

// A state over floats, empty. o stays 64-byte aligned because rows * dim is a multiple of 16.
inline AttentionState empty_state(float* at, uint32_t rows, uint32_t dim) {
  AttentionState s{at, at + std::size_t{rows} * dim,
                   at + std::size_t{rows} * dim + round_up(rows, 16)};
  std::fill_n(s.o, std::size_t{rows} * dim, 0.0f);
  std::fill_n(s.m, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(s.l, rows, 0.0f);
  return s;
}

// From `row` on.
inline AttentionState row_of(const AttentionState& s, uint32_t row, uint32_t dim) {
  return {s.o + std::size_t{row} * dim, s.m + row, s.l + row};
}

}  // namespace kvasir
