// What every saved sequence has: its small facts and its store. Sessions and caches without a model
// write and read it by this; what the sections hold is in docs/file-format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "cachefile/section_rules.h"
#include "session/chat_record.h"
#include "store/kv_store.h"

namespace kvasir {

// The state section of a cache file; see docs/file-format.md.
struct SavedSequence {
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
  SectionFacts facts(uint32_t vocabulary) const { return {vocabulary, tokens, page_tokens}; }
};
// The first part of loading: reads the section's 48 bytes alone. Code::corrupt, Code::version,
// Code::io.
Status read_saved(const CachePeek& file, SavedSequence* out);
Status read_chat(const CachePeek& file, ChatRecord* out);  // an older library's file has none

// A section besides those of the store.
struct SavedPart {
  format::SectionKind kind;
  const void* data;
  std::size_t bytes;
};

// Writes `state`, whose facts about the store are filled in, the parts and the store. `identity`
// likewise needs no shape and no tokens. Code::corrupt where a loader would refuse what would be
// written (section_rules.h): nothing has been written then.
Status save_store(const std::string& path, format::Identity identity, const KvStore& store,
                  SavedSequence state, std::span<const SavedPart> parts, const Cancel* cancel,
                  Progress::Report report, const AtomicFile::BeforeRename& before_rename = {});

// Whether a file's facts fit each other and a store of this shape, and every section is as large as
// they say, or as a store for `group` query heads of a KV head can make it: before anything is
// allocated by a size that the file gives.
Status check_saved(const CachePeek& file, const StoreShape& shape, uint32_t group,
                   const SavedSequence& state);
// The store of a file whose state is checked, mapped; `out` has the shape. group: query heads of a
// KV head. memory: for the first `tokens` tokens, as KvStore::set_budget(); Code::bad_argument
// where the file is in full precision.
Status load_store(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                  uint32_t group, const MemoryBudget& memory, uint64_t tokens, ThreadPool* pool,
                  const Cancel* cancel, KvStore* out);

// For those who read further sections.
// of every section's own encoding but the sketch's, which has its own
constexpr uint32_t section_version = 1;
// A section that must be there with exactly this size. Nothing of it is read.
Status expect(const CacheFile& file, format::SectionKind kind, uint64_t bytes,
              const CacheFile::Section** out);
// The same, its checksums verified.
Status take(const CacheFile& file, format::SectionKind kind, uint64_t bytes, ThreadPool* pool,
            const Cancel* cancel, const std::byte** out);
// The same, and that it is a section as section_rules.h has it.
Status take(const CacheFile& file, format::SectionKind kind, uint64_t bytes,
            const SectionFacts& facts, ThreadPool* pool, const Cancel* cancel,
            const std::byte** out);

}  // namespace kvasir
