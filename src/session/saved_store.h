// Save and load of the data that every cache file has: the state of a sequence and its store.
// Sessions and external stores use it. docs/file-format.md describes the sections.
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
#include "store/recurrent_state.h"

namespace kvasir {

struct DraftState;

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
  bool long_rope = false;  // of a model with longrope: computed with its factors for long contexts

  uint64_t sealed_tokens() const { return uint64_t{pages} * page_tokens; }
  // Tokens that a session of the first `wanted` keeps, if windows and states can follow: complete
  // pages that are not in its window, or all.
  uint64_t kept_of(uint64_t wanted) const {
    const uint64_t sealed =
        (wanted - (wanted < window_tokens ? wanted : window_tokens)) / page_tokens;
    return sealed < pages ? sealed * page_tokens : wanted;
  }
  SectionFacts facts(uint32_t vocabulary) const { return {vocabulary, tokens, page_tokens}; }
};
// First part of load: reads only the 48 bytes of the section. Code::corrupt, Code::version,
// Code::io.
Status read_saved(const CachePeek& file, SavedSequence* out);
Status read_chat(const CachePeek& file, ChatRecord* out);  // an older library's file has none

// Which checkpoints of a file a sequence gets: those before its end or a rewind that follows.
struct WantedCheckpoints {
  CheckpointLimits limits;
  uint64_t tokens = 0;  // to which a rewind at most follows; the end: none does
};

// The stores of a sequence: of all tokens, of the layers that see a window, of the recurrent
// layers, and of the MTP layer, without pending rows. Each but the first may be null.
struct SavedStores {
  const KvStore& store;
  const KvStore* windows = nullptr;
  const RecurrentState* states = nullptr;
  const DraftState* drafts = nullptr;
};

// A section that does not belong to the stores.
struct SavedPart {
  format::SectionKind kind;
  const void* data;
  std::size_t bytes;
};

// Writes `state`, the parts and the stores. The function fills in the facts about the store in
// `state`, and shapes and tokens in `identity`. Code::corrupt: load would refuse the data
// (section_rules.h); nothing was written.
Status save_store(const std::string& path, format::Identity identity, const SavedStores& stores,
                  SavedSequence state, std::span<const SavedPart> parts, const Cancel* cancel,
                  Progress::Report report, const AtomicFile::BeforeRename& before_rename = {});

// Checks that the facts of a file agree with each other and with a store of this shape. Checks the
// size of every section: against these facts, or against the largest that a store for `group` query
// heads per KV head can write. Call before any allocation whose size comes from the file.
Status check_saved(const CachePeek& file, const StoreShape& shape, uint32_t group,
                   const SavedSequence& state);
// Maps the store of a file whose state is checked. `out` has the shape. group: query heads per KV
// head. memory: for the first `tokens` tokens, as KvStore::set_budget(); Code::bad_argument for a
// file in full precision.
Status load_store(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                  uint32_t group, const MemoryBudget& memory, uint64_t tokens, ThreadPool* pool,
                  const Cancel* cancel, KvStore* out);
// The same for a document that nothing is appended to. Centre, sinks and window are verified; the
// rows stay in the mapping.
Status map_store(const std::shared_ptr<const CacheFile>& file, const SavedSequence& state,
                 const SectionFacts& facts, const Cancel* cancel, KvStore* out);

// For callers that read further sections.
// version of the encoding of every section except the sketch, which has its own
constexpr uint32_t section_version = 1;
// Finds a section that must exist with exactly this size. Does not read it.
Status expect_section(const CachePeek& file, format::SectionKind kind, uint64_t bytes);
Status expect(const CacheFile& file, format::SectionKind kind, uint64_t bytes,
              const CacheFile::Section** out);
// The same, and verifies its checksums.
Status take(const CacheFile& file, format::SectionKind kind, uint64_t bytes, ThreadPool* pool,
            const Cancel* cancel, const std::byte** out);
// The same, and checks it by the rules of section_rules.h.
Status take(const CacheFile& file, format::SectionKind kind, uint64_t bytes,
            const SectionFacts& facts, ThreadPool* pool, const Cancel* cancel,
            const std::byte** out);

}  // namespace kvasir
