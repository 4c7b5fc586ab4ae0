// An index of the sealed keys of one sequence: for every layer and KV head, lists of token numbers
// and the entry of a search. Strategies build and search it (select/graph/hnsw.cc,
// select/graph/ood.cc, select/research/ivf.cc). This file stores it: in memory, shared by forks,
// and in a section of a cache file per kind. An index has no keys: a search reads the keys that it
// compares in the pages.
//
// Items are tokens from first_token on, numbered from 0. The lists have levels: a graph's
// neighbours of every item (level 0) and of the few items of upper levels; or the items of every
// cluster. In memory and in the file a head is an array of 32-bit words:
//   levels, entry, floats, 0; lists and items of each level (2 words per level); for each level:
//   [lists] its items' numbers, ascending (missing in level 0, where they are 0 .. lists - 1);
//   [lists + 1] the beginning of each list; [items] the lists; at the end [floats] f32: centroids,
//   or the metric of `ood`
//
// A built index never changes. Threads: all functions may be called at once. An index from a file
// needs check() before head().
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "store/page_store.h"

namespace kvasir {

enum class IndexKind : uint32_t { hnsw = 0, ood = 1, ivf = 2 };
constexpr std::array all_index_kinds = {IndexKind::hnsw, IndexKind::ood, IndexKind::ivf};
format::SectionKind section_of(IndexKind kind);
const char* name_of(IndexKind kind);

class TokenIndex {
 public:
  using Words = Array<uint32_t>;

  struct Level {
    // The owners of the lists, ascending; empty: list i belongs to item i.
    std::span<const uint32_t> items;
    std::span<const uint32_t> begins;  // [lists + 1]
    std::span<const uint32_t> links;
    uint32_t lists() const { return static_cast<uint32_t>(begins.size() - 1); }
    std::span<const uint32_t> list(uint32_t i) const {
      return links.subspan(begins[i], begins[i + 1] - begins[i]);
    }
  };
  struct Head {
    uint32_t entry = 0;         // an item
    std::vector<Level> levels;  // at least one
    std::span<const float> floats;
  };

  // From heads encoded by encode(), [layers][kv_heads][graphs], for items first_token .. tokens - 1
  // of the store.
  struct Extent {
    uint32_t first_token = 0, tokens = 0;
    uint32_t built = 0;   // tokens at the build; later ones were inserted
    uint32_t graphs = 1;  // per KV head: one for the query heads of the group, or one for each
  };
  // Null when a head names an item that does not exist, and when cancelled.
  static std::shared_ptr<TokenIndex> make(IndexKind kind, const StoreShape& shape,
                                          const Extent& extent, std::vector<Words> heads,
                                          const CancelLatch* cancel = nullptr);
  // The words of one head from its lists. `items` of level 0 is empty.
  struct Lists {
    std::vector<uint32_t> items;
    std::vector<std::vector<uint32_t>> lists;
  };
  static Words encode(uint32_t entry, std::span<const Lists> levels, std::span<const float> floats);

  IndexKind kind() const { return kind_; }
  uint32_t first_token() const { return extent_.first_token; }
  // Tokens of the store that were sealed at the build or at the last insertion.
  uint32_t tokens() const { return extent_.tokens; }
  uint32_t built() const { return extent_.built; }
  uint32_t graphs() const { return extent_.graphs; }
  uint32_t items() const { return extent_.tokens - extent_.first_token; }
  // [graphs]
  std::span<const Head> heads(uint32_t layer, uint32_t kv_head) const {
    return std::span(views_).subspan(
        (std::size_t{layer} * shape_.kv_heads + kv_head) * extent_.graphs, extent_.graphs);
  }

  uint64_t bytes() const;  // of the words of all heads
  uint64_t private_bytes() const { return file_ ? 0 : bytes(); }
  const void* file() const { return file_.get(); }

  // The section: u32 version of the kind, first_token, tokens, valid tokens, built, graphs, 0, 0;
  // u64 [layers][kv_heads][graphs] words of each head; zeros up to a multiple of 4096; the words of
  // the heads. `valid`: tokens of the sequence that the index still covers.
  uint64_t file_bytes() const;
  Status write(uint32_t valid,
               const std::function<Status(const void* data, std::size_t size)>& write) const;
  // From a section of a mapped file, for a store with `sealed` tokens and groups of `group` query
  // heads. The words of the heads are not read before check(). *out stays null without a section.
  // Code::corrupt.
  static Status map(IndexKind kind, const StoreShape& shape, uint32_t group,
                    std::shared_ptr<const CacheFile> file, uint32_t sealed,
                    std::shared_ptr<TokenIndex>* out, uint32_t* valid);
  // The reason why a loader would refuse the output of write() for a store with `sealed` tokens;
  // null: none.
  const char* wrong(uint32_t valid, uint64_t sealed) const;
  // Verifies and validates a mapped index once; then every number in it can be followed.
  // Code::corrupt; Code::cancelled: the next call starts again.
  Status check(const Cancel* cancel);

 private:
  TokenIndex(IndexKind kind, const StoreShape& shape, const Extent& extent)
      : kind_(kind), shape_(shape), extent_(extent) {}
  std::size_t heads_total() const { return std::size_t{shape_.heads_total()} * extent_.graphs; }
  uint64_t head_bytes() const;  // of the section, before the words
  bool intact(std::size_t head) const;
  bool view(std::span<const uint32_t> words, Head* out) const;

  IndexKind kind_;
  StoreShape shape_;
  Extent extent_;
  // [layers][kv_heads][graphs], if private.
  std::vector<Words> words_;
  std::vector<std::span<const uint32_t>> mapped_;  // if in a file
  std::vector<Head> views_;  // [layers][kv_heads][graphs], empty before check()
  std::timed_mutex checking_;
  std::shared_ptr<const CacheFile> file_;
};

// The indexes of one sequence. Tokens up to `valid` are unchanged since the build. Tokens that were
// sealed later, or again after a rewind, are not in the index.
struct TokenIndexes {
  struct Entry {
    std::shared_ptr<TokenIndex> index;
    uint32_t valid = 0;
  };
  std::array<Entry, all_index_kinds.size()> entries;

  const Entry& of(IndexKind kind) const { return entries[static_cast<std::size_t>(kind)]; }
  Entry& of(IndexKind kind) { return entries[static_cast<std::size_t>(kind)]; }
  // The sequence goes back to `sealed` sealed tokens. Drops an index that covers none of them.
  void truncate(uint64_t sealed);
  uint64_t private_bytes() const;
};

}  // namespace kvasir
