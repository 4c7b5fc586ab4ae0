// What strategies share that choose blocks of tokens.
#pragma once

#include <cmath>

#include "select/selector.h"

namespace kvasir {

// An empty choice of `lists` lists.
inline void begin_selection(uint32_t lists, Selection* out) {
  out->lists.resize(lists);
  out->page_numbers.resize(lists);
  for (uint32_t i = 0; i < lists; ++i) out->lists[i].clear(), out->page_numbers[i].clear();
  out->tokens = out->summary_bytes = 0;
  out->intact = true;
}

// The heads' shares of attention beside sinks and window, when a block counts for e^score * tokens; their sum, into the first row.
// scores: [rows][stride], n of each row.
inline void add_shares(const SelectorQuery& query, float tokens, float* scores, uint32_t stride, uint32_t n) {
  const float log_tokens = std::log(tokens);
  for (uint32_t r = 0; r < query.rows.rows; ++r) {
    float* row = scores + std::size_t{r} * stride;
    query.kernels.attention_shares(row, n, query.near_m[r] - log_tokens, query.near_l[r]);
    if (r > 0) query.kernels.add(scores, row, n);
  }
}

// The best of the blocks from `first` on, by scores [lists][stride] at scores + first, as pages with their tokens' bits. Uses `chosen` and
// `bytes` of the scratch.
void choose_blocks(const SelectorQuery& query, uint32_t first, uint32_t blocks, uint32_t stride, SelectorScratch* scratch, Selection* out);

}  // namespace kvasir
