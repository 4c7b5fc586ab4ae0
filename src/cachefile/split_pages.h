// An extent's pages in an order that a general compressor makes more of, and back. Keys and values
// are set apart, because each have their own frequencies; of keys the difference to the token
// before is kept, because what a head's keys have in common, most of a dimension's mean, then falls
// away. Every byte pattern comes back as it was.
#pragma once

#include <cstdint>

#include "backend/page.h"

namespace kvasir {

// [16 pages][K, V] to [K, V][16 pages], modulo 256. `from` and `to` do not overlap. page_tokens: 8,
// 16, 32 or 64.
void split_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to);
void join_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to);

}  // namespace kvasir
