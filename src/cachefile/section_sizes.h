// How large a section can be, by the header's shape and tokens: before a reader allocates, maps or
// reads anything by the size that the section table gives.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "cachefile/cache_header.h"
#include "cachefile/format.h"

namespace kvasir {

// Of the shape and the tokens that a header may claim.
constexpr uint32_t max_cache_layers = 1 << 16, max_cache_heads = 1 << 16;
constexpr uint64_t max_cache_tokens = uint64_t{1} << 32;
// Query heads of a KV head, where the model is not known.
constexpr uint32_t max_group = 256;
// Of any section, whatever the header says: a small file does no harm.
constexpr uint64_t small_section = uint64_t{1} << 20;

// The most bytes that a section of this kind takes in a cache of this shape and so many tokens;
// small_section at least, and exactly that where the shape or the tokens are past the limits above.
// group: query heads of a KV head.
uint64_t max_section_bytes(format::SectionKind kind, const format::Identity& identity,
                           uint32_t group = max_group);

// Code::corrupt where a section is larger than that. All sections of kinds that this reader does
// not know together are at most as large as `pages` may be.
Status check_section_sizes(const CacheHeader& header, const char* path, uint32_t group = max_group);

}  // namespace kvasir
