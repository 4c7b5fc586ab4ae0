// The range of `dipr`, for known scores.
#pragma once

#include "select/selector.h"

namespace kvasir {

// The number of tokens that list `list` gets by scores, [rows][stride] of n tokens each: those
// within query.range of the row's largest score, sinks and window included, up to the budget. A
// shared list gets the tokens within any row's range; its row, the first one, becomes the scores to
// select by.
uint32_t count_in_range(const SelectorQuery& query, std::size_t list, float* scores,
                        uint32_t stride, uint32_t n, SelectorScratch* scratch);

}  // namespace kvasir
