// The range of `dipr` over scores that are known, whoever found them.
#pragma once

#include "select/selector.h"

namespace kvasir {

// How many tokens list `list` gets by scores, [rows][stride] of n tokens each: those within
// query.range of the row's largest score, sinks and window included, up to the budget. Of a list
// that all rows share: those that are within any row's range; its row, the first one, becomes what
// they count by.
uint32_t count_in_range(const SelectorQuery& query, std::size_t list, float* scores,
                        uint32_t stride, uint32_t n, SelectorScratch* scratch);

}  // namespace kvasir
