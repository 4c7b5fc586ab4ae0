// Save and load of the store of layers that see a window. docs/file-format.md describes its
// sections.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/cancel.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "cachefile/format_fields.h"
#include "session/saved_store.h"
#include "store/kv_store.h"

namespace kvasir {

// Section `windows`: which tokens the store has.
struct SavedWindows {
  uint32_t rows = 0;                  // in full precision, the newest tokens
  uint32_t pages = 0;                 // sealed, those that were dropped included
  std::vector<uint64_t> checkpoints;  // ascending
  PageStore::Runs runs;               // extents in the file

  static SavedWindows of(const KvStore& windows);
  std::array<uint8_t, format::windows_bytes> encode() const;
  uint32_t extents() const;
  // As KvStore::resume_point(), of the store in the file.
  uint64_t resume_point(const StoreShape& shape, const SavedSequence& state, uint64_t tokens) const;
  // The first contradiction, or null. Load and save apply the same rules.
  const char* wrong(const StoreShape& shape, const SavedSequence& state) const;
};

// Checks that the file has windows of this shape, or none where it has no layers, and that their
// facts and the sizes of their sections agree with `state`. Call before any allocation whose size
// comes from the file. Code::corrupt, Code::version, Code::io.
Status check_windows(const CachePeek& file, const StoreShape& shape, const SavedSequence& state,
                     SavedWindows* out);
// Maps the store of a checked file, with the checkpoints of `wanted`. `out` has its shape and its
// window.
Status load_windows(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                    const SavedWindows& saved, const WantedCheckpoints& wanted, ThreadPool* pool,
                    const Cancel* cancel, KvStore* out);

}  // namespace kvasir
