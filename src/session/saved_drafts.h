// Save and load of what a sequence keeps for its MTP layer. docs/file-format.md describes the
// sections. The rows lie as those of the sequence: int8 pages, and both ends in full precision.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/cancel.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "cachefile/cache_peek.h"
#include "session/drafter.h"
#include "session/saved_store.h"

namespace kvasir {

// Bytes of section `drafts` of a state without pending rows.
uint64_t drafts_section_bytes(const DraftState& drafts);
// Passes the bytes of that section to `write`.
Status write_drafts(const DraftState& drafts,
                    const std::function<Status(const void* data, std::size_t size)>& write);
// *what: the first number that load would refuse, or null. Code::cancelled.
Status find_wrong_drafts(const DraftState& drafts, const Cancel* cancel, const char** what);

// Maps the rows of a checked file, which belong to its whole sequence. `out` has no tokens, and the
// shape and the window of the session's. width: numbers of a hidden state. *found: whether the file
// has them; sections of an unknown version count as missing. Code::corrupt, Code::io.
Status load_drafts(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                   std::size_t width, ThreadPool* pool, const Cancel* cancel, DraftState* out,
                   bool* found);

// Tokens whose rows a file of any model says that it has; not checked. Code::corrupt, Code::io.
// Throws std::bad_alloc.
Status count_saved_drafts(const CachePeek& file, uint64_t* out);

}  // namespace kvasir
