// Helpers for strategies that choose blocks of tokens.
#pragma once

#include <algorithm>
#include <cmath>

#include "select/selector.h"

namespace kvasir {

// An empty selection with `lists` lists.
inline void begin_selection(uint32_t lists, Selection* out) {
  out->lists.resize(lists);
  out->page_numbers.resize(lists);
  for (uint32_t i = 0; i < lists; ++i) out->lists[i].clear(), out->page_numbers[i].clear();
  out->tokens = out->summary_bytes = out->keys_scanned = 0;
  for (auto& tokens : out->found) tokens.clear();
  out->intact = true;
  out->sampled = false;
}

// Takes pages from `first` on and before `end` out of all lists and samples.
void remove_pages(uint32_t first, uint32_t end, Selection* out);

// Converts scores to shares of attention, with sinks and window included, where a block counts for
// e^score * tokens. Sums them into the first row when the rows share a list. scores:
// [rows][stride], n per row.
inline void to_shares(const SelectorQuery& query, float tokens, float* scores, uint32_t stride,
                      uint32_t n) {
  const float log_tokens = std::log(tokens);
  for (uint32_t r = 0; r < query.rows.rows; ++r) {
    const float m = query.near_m[r] - log_tokens;
    query.kernels.attention_shares(scores + std::size_t{r} * stride, 1, stride, n, &m,
                                   query.near_l + r);
  }
}
inline void add_shares(const SelectorQuery& query, float tokens, float* scores, uint32_t stride,
                       uint32_t n) {
  constexpr uint32_t rows_at_once = 16;
  const float log_tokens = std::log(tokens);
  for (uint32_t first = 0; first < query.rows.rows; first += rows_at_once) {
    const uint32_t rows = std::min(rows_at_once, query.rows.rows - first);
    float m[rows_at_once], *row_scores = scores + std::size_t{first} * stride;
    for (uint32_t r = 0; r < rows; ++r) m[r] = query.near_m[first + r] - log_tokens;
    query.kernels.attention_shares(row_scores, rows, stride, n, m, query.near_l + first);
    if (first > 0) query.kernels.add(scores, row_scores, n);
  }
}

// Blocks that may be selected: block_tokens tokens each, numbered from token 0; parts of a page, or
// several pages.
struct BlockRange {
  uint32_t block_tokens;
  uint32_t first, end;  // blocks that may be selected
  uint32_t stride;      // of a row of scores
  uint32_t row = 0;     // row of the scores for the first list
};

// Selects the `count` best blocks by the list's row of the scores, [rows][stride] with block b at
// b, as pages of that list with their tokens' bits. Uses `chosen` and `bytes` of the scratch.
void choose_list(const SelectorQuery& query, const BlockRange& range, std::size_t list,
                 uint32_t count, SelectorScratch* scratch, Selection* out);
// Selects as many blocks as the budget has, for every list.
void choose_blocks(const SelectorQuery& query, const BlockRange& range, SelectorScratch* scratch,
                   Selection* out);

}  // namespace kvasir
