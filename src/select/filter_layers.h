// `filter-layers`: a few layers choose tokens for the layers after them (OmniKV, ICLR 2025, section
// 4). The parts of the choice, for tests.
#pragma once

#include <cstdint>
#include <span>

#include "backend/page.h"
#include "base/memory.h"
#include "select/selector.h"

namespace kvasir {

// Queries that `exponential` and `uniform` use: the authors' setting.
constexpr uint32_t filter_window_tokens = 16;

// The weight of the query `age` tokens before the newest one.
float filter_weight(FilterWindow window, uint32_t age);

// Converts ascending token numbers to pages; the references have no address yet. first: the number
// of token 0 of the store in `tokens`.
void tokens_to_pages(std::span<const uint32_t> tokens, uint32_t first, uint32_t page_tokens,
                     Array<PageRef>* refs, Array<uint32_t>* numbers);

}  // namespace kvasir
