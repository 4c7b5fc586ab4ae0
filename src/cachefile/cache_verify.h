// Checking a cache file by reading it: in memory that does not grow with the file, and with a look
// at the cancel token after each MiB.
#pragma once

#include <cstdint>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/cache_header.h"
#include "os/os.h"

namespace kvasir {

// Every byte of a file whose header has been read: tables, sections, and the zeros between
// sections. Code::corrupt with the offset, Code::io, Code::cancelled. Throws std::bad_alloc.
Status verify_cache(const os::File& file, const CacheHeader& header, Progress* progress,
                    const Cancel* cancel);

// A section's checksum table alone. Its first `first_blocks` checksums, which it must have, go to
// `out`: [first_blocks].
Status check_table(const os::File& file, const CacheHeader::Entry& section, const Cancel* cancel,
                   uint64_t first_blocks, uint64_t* out);

// The errors for a block, at `offset` of the file, and for a table that do not match.
Status section_damaged(const os::File& file, const CacheHeader::Entry& section, uint64_t offset);
Status table_damaged(const os::File& file, const CacheHeader::Entry& section);

}  // namespace kvasir
