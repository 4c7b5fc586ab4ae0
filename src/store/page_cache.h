// The chosen pages of a mapped file, in bounded private memory.
//
// Choosing reads one page in fifty, here and there. Through a mapping that would make half of the file resident, because the system maps up
// to sixteen cached neighbours around each page that is touched, and a file that another process cuts, or a disk that
// fails, would end the process by SIGBUS. So chosen pages are read into slots of 4 KiB: neighbours by one system call, verified when they
// are read, so that the bytes that are used are the bytes that were checked. Successive tokens choose mostly the same pages and
// find them there.
//
// Each layer and KV head has its share of the slots and finds the slot of a page in a table; CLOCK chooses what makes room. The forks of
// a timeline share the cache of its file. Threads: all functions may run together.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "base/memory.h"
#include "base/status.h"
#include "compute/page.h"
#include "store/cache_file.h"

namespace kvasir {

class PageHold;

class PageCache {
 public:
  static constexpr uint64_t by_itself = UINT64_MAX;  // as a limit: a share of the pages, more where a list needs it

  // Over the pages of `heads` heads (of all layers together): [extents][heads][16 pages][4096], `pages` of each head.
  PageCache(std::shared_ptr<const CacheFile> file, uint32_t heads, uint32_t pages);
  ~PageCache();
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  // Points refs[i].data at page numbers[i] of a head; the other fields are left alone. The pages stay there until `hold` lets go of them;
  // what it held before it lets go of first. Numbers ascending. Code::corrupt or Code::io: nothing is held. Throws std::bad_alloc.
  Status fetch(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold);

  // Bytes of pages that are kept, divided evenly among the heads. What is being attended stays beyond it, in memory of its own, until it
  // is let go of: any limit works, also 0. Throws std::bad_alloc.
  void set_limit(uint64_t bytes);

  struct Counts {
    uint64_t found = 0, read = 0;  // pages fetched: those that were there, and those that were not
    uint64_t kept = 0;             // pages that are there now
    uint64_t bytes = 0;            // of memory that all of it takes now
  };
  Counts counts() const;
  const CacheFile& file() const { return *file_; }

 private:
  friend class PageHold;
  struct Room;
  struct Shard;

  void build_room(uint64_t slots);
  void make_room_for(uint64_t list);
  void enter_room(uint32_t head);
  Status read_missing(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold);
  void publish(std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold);

  const std::shared_ptr<const CacheFile> file_;
  const CacheFile::Section& section_;
  const uint32_t heads_, pages_;
  std::unique_ptr<Shard[]> shards_;       // [heads]
  std::mutex room_change_;                // after a shard's
  std::shared_ptr<const Room> room_;      // shards move into it when nothing is pinned in their old one
  std::atomic<uint32_t> room_number_{0};
  std::atomic<uint64_t> own_slots_{0};    // of a room that the cache chose itself; UINT64_MAX when it was told
};

// What a thread attends: pages of one fetch, which stay where they are meanwhile. Lets go when it is destroyed. Does not outlive the cache
// while it holds pages of it.
class PageHold {
 public:
  PageHold() = default;
  ~PageHold() { release(); }
  PageHold(const PageHold&) = delete;
  PageHold& operator=(const PageHold&) = delete;
  void release();

 private:
  friend class PageCache;
  void begin(PageCache* cache, PageCache::Shard* shard, std::size_t pages);
  struct Missing {
    uint32_t index;  // in the list that is fetched
    uint32_t slot;
  };
  PageCache* cache_ = nullptr;
  PageCache::Shard* shard_ = nullptr;
  Array<uint32_t> slots_;    // pinned
  Array<Missing> missing_;   // while they are read
  Buffer<int8_t> beside_;    // pages for which there was no slot
};

}  // namespace kvasir
