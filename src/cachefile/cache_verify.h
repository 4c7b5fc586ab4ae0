// Verification of a cache file by reading it, in bounded memory. The cancel token is tested after
// each MiB.
#pragma once

#include <cstdint>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/cache_header.h"
#include "os/os.h"

namespace kvasir {

// Verifies every byte of a file whose header has been read: tables, sections, and the zeros between
// sections. Code::corrupt with the offset, Code::io, Code::cancelled. Throws std::bad_alloc.
Status verify_cache(const os::File& file, const CacheHeader& header, Progress* progress,
                    const Cancel* cancel);

// Verifies the checksum table of a section. Copies its first `first_blocks` checksums, which it
// must have, to out: [first_blocks].
Status check_table(const os::File& file, const CacheHeader::Entry& section, const Cancel* cancel,
                   uint64_t first_blocks, uint64_t* out);

// The errors for a block at `offset` of the file, and for a table, whose checksums do not match.
Status section_damaged(const os::File& file, const CacheHeader::Entry& section, uint64_t offset);
Status table_damaged(const os::File& file, const CacheHeader::Entry& section);

}  // namespace kvasir
