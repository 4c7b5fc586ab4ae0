// Shared by the files of Attention: the scratch of a thread, and views of states and rows in
// arrays.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention.h"
#include "backend/first_failure.h"
#include "base/checked.h"

namespace kvasir {

// Query rows of neighbouring tokens per scan of the summaries. A scan writes a float per row and
// block of 16 tokens, or quad of 4. They fit an L2 cache of 1 MiB up to 170,000 tokens (blocks), or
// 43,000 (quads).
constexpr uint32_t scanned_rows = 24;
// tokens of the store per task of a single block, and per kernel call
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
  Array<uint32_t> numbers;  // of the pages of one fetch
  Array<PageRef> pages;     // and their addresses
  // [rows] sums before the samples are added; or of sinks and window, of rows that select
  Array<float> read_m, read_l;
  Array<float> bounds;            // [group][blocks]
  Array<uint32_t> unread_tokens;  // [blocks] tokens that a list does not have
  // as state: sinks and window by uncapped scores, if a cap is set
  Array<float> near;
  Array<float> shifts;  // [block_rows]
  // [block_rows][tokens of a page] scores; k, v [tokens of a page][dim] of a page
  Array<float> capped;
  Array<float> traced;   // scores that are not kept: of a trace, or of documents
  PageStore::Hold hold;  // pages of a query batch
  uint64_t missed = 0;   // pages of the batch that were read from the file
  // Of a head that a thread attends alone: shares of one task and of all, and the choice.
  Array<float> task_sums, sums;
  Selection choice;
  ReadCounts counts;
  Comparison::Scratch compare;
};

inline std::size_t state_floats(uint32_t rows, uint32_t dim) {
  return std::size_t{rows} * (dim + 16) + 16;
}

// The state in the floats at `at`. o stays 64-byte aligned because rows * dim is a multiple of 16.
inline AttentionState state_at(float* at, uint32_t rows, uint32_t dim) {
  float* const m = at + std::size_t{rows} * dim;
  return {at, m, m + round_up(rows, 16)};
}

inline AttentionState empty_state(float* at, uint32_t rows, uint32_t dim) {
  const AttentionState s = state_at(at, rows, dim);
  std::fill_n(s.o, std::size_t{rows} * dim, 0.0f);
  std::fill_n(s.m, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(s.l, rows, 0.0f);
  return s;
}

// The score of a query with its head's centre, which centring subtracted from all of its scores.
float centre_score(const AttentionRequest& req, uint32_t head, const QueryRows& row);
// a . b in double precision, in several sums, which do not wait for each other.
float dot(const float* a, const float* b, uint32_t n);

// The centre of a head where values are centred keys (PageShape::latent); null otherwise, or where
// keys have none.
inline const float* value_centre(const AttentionRequest& req, uint32_t head) {
  const StoreShape& shape = req.store.shape();
  if (!shape.page.latent || req.store.centre().empty()) return nullptr;
  return req.store.centre().data() +
         (std::size_t{req.layer} * shape.kv_heads + head) * shape.page.dim;
}

// Adds it to outputs, [rows][head_dim], which are means of values. l: [rows] of their states.
inline void add_value_centre(const float* centre, const float* l, uint32_t rows, uint32_t head_dim,
                             float* out) {
  for (uint32_t r = 0; centre && r < rows; ++r, out += head_dim)
    if (l[r] > 0)
      for (uint32_t d = 0; d < head_dim; ++d) out[d] += centre[d];
}

// Returns the rows of a state from `row` on.
inline AttentionState row_of(const AttentionState& s, uint32_t row, uint32_t dim) {
  return {s.o + std::size_t{row} * dim, s.m + row, s.l + row};
}

// SelectorQuery::first_extent of one of `tasks` tasks.
inline uint32_t first_extent_of(const PageStore& pages, uint32_t task, uint32_t tasks) {
  return static_cast<uint32_t>(uint64_t{pages.extents()} * task / tasks);
}

}  // namespace kvasir
