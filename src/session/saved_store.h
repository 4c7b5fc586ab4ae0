// What every saved timeline has: its small facts and its store. Sessions and caches without a model write and read it by this; what the
// sections hold is in store/format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "store/cache_file.h"
#include "store/kv_store.h"

namespace kvasir {

// The state section of a cache file; see store/format.md.
struct SavedTimeline {
  uint32_t turn = 0;
  uint32_t full_precision = 0;
  uint32_t window_tokens = 0;
  uint32_t window_count = 0;
  uint32_t pages = 0;
  uint32_t page_tokens = 0;
  uint64_t tokens = 0;
  uint64_t document_tokens = 0;
  uint32_t document_turn = 0;
  uint32_t probed_pages = 0;

  uint64_t sealed_tokens() const { return uint64_t{pages} * page_tokens; }
};
Status read_saved(const CacheFile& file, SavedTimeline* out);

// A section beside those of the store.
struct SavedPart {
  format::SectionKind kind;
  const void* data;
  std::size_t bytes;
};

// Writes `state`, whose facts about the store are filled in, the parts and the store. `identity` likewise needs no shape and no tokens.
Status save_store(const std::string& path, format::Identity identity, const KvStore& store, SavedTimeline state, std::span<const SavedPart> parts,
                  const Cancel* cancel, Progress::Report report, const AtomicFile::BeforeRename& before_rename = {});

// Whether a file's facts fit each other and a store of this shape.
Status check_saved(const CacheFile& file, const StoreShape& shape, const SavedTimeline& state);
// The store of a file whose state is checked, mapped; `out` has the shape. group: query heads of a KV head. memory: for the first `tokens` tokens, as
// KvStore::set_budget(); Code::bad_argument where the file is in full precision.
Status load_store(const std::shared_ptr<const CacheFile>& file, const SavedTimeline& state, uint32_t group, const MemoryBudget& memory,
                  uint64_t tokens, ThreadPool* pool, const Cancel* cancel, KvStore* out);

// For those who read further sections.
constexpr uint32_t section_version = 1;  // of every section's own encoding but the sketch's, which has its own
// A section that must be there with exactly this size. Nothing of it is read.
Status expect(const CacheFile& file, format::SectionKind kind, uint64_t bytes, const CacheFile::Section** out);
// The same, its checksums verified.
Status take(const CacheFile& file, format::SectionKind kind, uint64_t bytes, ThreadPool* pool, const std::byte** out);
// Float sections hold what was computed: none of it is NaN or infinite.
Status check_finite(const CacheFile& file, format::SectionKind kind, std::span<const float> values);
inline std::span<const float> floats(const std::byte* at, uint64_t bytes) {
  return {reinterpret_cast<const float*>(at), static_cast<std::size_t>(bytes / sizeof(float))};
}

}  // namespace kvasir
