// Reorders the pages of an extent so that a general compressor finds more, and back. Keys and
// values are separated, because their byte frequencies differ. Keys are stored as the difference to
// the previous token, which removes what the keys of a head share, mostly the mean of each
// dimension. Every byte pattern survives.
#pragma once

#include <cstdint>

#include "backend/page.h"

namespace kvasir {

// [16 pages][K, V] to [K, V][16 pages], modulo 256. `from` and `to` do not overlap. page_tokens: 4,
// 8, 16, 32 or 64.
void split_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to);
void join_pages(uint32_t page_tokens, const uint8_t* from, uint8_t* to);

}  // namespace kvasir
