// Upper bounds of section sizes from the header's shape and tokens. A reader applies them before it
// allocates, maps or reads anything of a size that the section table claims.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "cachefile/cache_header.h"
#include "cachefile/format.h"

namespace kvasir {

// Limits of the shape and the tokens that a header may claim.
constexpr uint32_t max_cache_layers = 1 << 16, max_cache_heads = 1 << 16;
constexpr uint64_t max_cache_tokens = uint64_t{1} << 32;
// Query heads per KV head for an unknown model.
constexpr uint32_t max_group = 256;
// Bound of any section, whatever the header says: a small file does no harm.
constexpr uint64_t small_section = uint64_t{1} << 20;

// The most bytes of a section of this kind in a cache of this shape and number of tokens. At least
// small_section; exactly that where shape or tokens exceed the limits above. group: query heads per
// KV head.
uint64_t max_section_bytes(format::SectionKind kind, const format::Identity& identity,
                           uint32_t group = max_group);

// Code::corrupt for a larger section. All sections of unknown kinds together may be as large as
// `pages`.
Status check_section_sizes(const CacheHeader& header, const char* path, uint32_t group = max_group);

}  // namespace kvasir
