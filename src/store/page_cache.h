// Selected pages of a file, mapped or spilled, in bounded private memory.
//
// Selection reads one page in fifty, scattered. Through a mapping that would make half of the file
// resident, because the system maps up to sixteen cached neighbours of each page that is touched.
// And a file that another process truncates, or a failing disk, would end the process with SIGBUS.
// So selected pages are read into slots of 4 KiB, neighbours by one system call, with the scales of
// their tokens where the file has them. Pages are verified after the read, so the bytes in use are
// the bytes that were checked. Successive tokens select mostly the same pages and find them in
// their slots by a look into a table.
//
// Layers and KV heads share slots, because some select twice as many different pages as others.
// CLOCK evicts. The heads of large models are divided into up to sixteen parts, each with slots, a
// table and a lock of its own, so that threads that attend heads of one layer seldom wait for each
// other: a lock is held for microseconds per list, never during a read. The forks of a sequence
// share the cache of its file. Threads: all functions may be called at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "backend/page.h"
#include "base/memory.h"
#include "base/status.h"

namespace kvasir {

class PageHold;

// A file with pages: extents of all heads, [extents][heads][16 pages][page_size()], with pages
// numbered through. Extents may be appended.
class PageSource {
 public:
  virtual ~PageSource() = default;
  virtual uint64_t extents() const = 0;
  virtual std::size_t page_size() const = 0;
  // Reads pages first, first + 1, ... into to[0], to[1], ... Code::corrupt, Code::io.
  virtual Status read(uint64_t first, std::span<std::byte* const> to) const = 0;
  // Bytes of scales of a page's tokens, stored in the order of the pages in blocks of 4096 bytes;
  // 0: the file has no scales.
  virtual uint32_t scale_bytes() const { return 0; }
  virtual Status read_scales(uint64_t block, std::byte* to) const {
    return (void)block, (void)to, Status();
  }
};

class PageCache {
 public:
  // A limit: a part of all pages, larger when a step needs it.
  static constexpr uint64_t by_itself = UINT64_MAX;

  // For the pages of `heads` heads, over all layers.
  PageCache(std::shared_ptr<const PageSource> source, uint32_t heads);
  ~PageCache();
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  // Points refs[i].data, and .scales where the file has them, at page numbers[i] of a head; leaves
  // the other fields. Numbers are distinct. The pages stay until `hold` is released; the former
  // content of `hold` is released first. Page p is page p % 16 of extent p / 16 of the file.
  // Code::corrupt or Code::io: nothing is held. Throws std::bad_alloc.
  Status fetch(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold);

  // Bytes of cached pages. Pages being attended may exceed it in memory of their own until their
  // release, so any limit works, 0 included. Empties the cache.
  void set_limit(uint64_t bytes);

  bool sizes_itself() const { return limit_ == by_itself; }

  struct Counts {
    uint64_t found = 0, read = 0;  // pages fetched: cached, and not cached
    uint64_t kept = 0;             // pages in the cache now
    uint64_t bytes = 0;            // memory of all of it now
  };
  Counts counts() const;

 private:
  friend class PageHold;
  struct Room;
  // Heads part, part + parts, part + 2 * parts, ...: the heads of a layer, which are attended at
  // the same time, are in different parts if there are enough parts.
  struct alignas(64) Part {
    mutable std::mutex mutex;  // guards the rest except the counts, and not the room's content
    Array<uint64_t> lists;     // [heads of the part] pages of the head's last list
    uint64_t step = 0;         // their sum: about the selection of one token
    // Null before the first fetch and after a new limit. A hold keeps the room that it was filled
    // from.
    std::shared_ptr<Room> room;
    std::atomic<uint64_t> found{0}, read{0};
  };

  std::shared_ptr<Room> room_for(uint32_t head, uint64_t list);
  uint64_t slots_of(uint32_t part, uint64_t slots) const;  // the part's slots
  uint32_t parts() const { return static_cast<uint32_t>(parts_.size()); }
  uint64_t page_of(uint32_t head, uint32_t number) const;  // index in the file
  Status read_missing(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
                      PageHold* hold) const;
  Status read_scales(uint32_t head, std::span<const uint32_t> numbers, const PageRef* refs,
                     const PageHold& hold) const;

  const std::shared_ptr<const PageSource> source_;
  const std::size_t page_size_;
  const uint32_t scale_bytes_;  // per page
  const uint32_t heads_;
  std::atomic<uint64_t> limit_{by_itself};
  std::vector<Part> parts_;
};

// The pages of one fetch, which stay in place while a thread attends them. The destructor releases
// them.
class PageHold {
 public:
  // keeps: pages that it reads stay cached for later fetches; otherwise they are private to the
  // hold.
  explicit PageHold(bool keeps = true) : keeps_(keeps) {}
  void set_keeps(bool keeps) { keeps_ = keeps; }
  // The scales of the head of the next fetches, where they have been read: those of page p are at
  // scales
  // + p / 16 * stride + p % 16 * the scales of a page. null: the cache reads them.
  void set_scales(const uint16_t* scales, std::size_t stride) {
    scales_ = scales, scales_stride_ = stride;
  }
  // pages of the last fetch that were not cached
  std::size_t read() const { return missing_.size(); }
  ~PageHold() { release(); }
  PageHold(const PageHold&) = delete;
  PageHold& operator=(const PageHold&) = delete;
  void release();  // keeps the memory of its own pages for the next ones

 private:
  friend class PageCache;
  struct Missing {
    uint32_t index;  // in the list
    uint32_t slot;
  };
  void begin(std::shared_ptr<PageCache::Room> room, std::size_t pages);
  void make_own_room(std::size_t pages, std::size_t page_size, std::size_t scales);
  std::shared_ptr<PageCache::Room> room_;
  Array<uint32_t> slots_;   // pinned
  Array<Missing> missing_;  // during a read
  bool keeps_;
  const uint16_t* scales_ = nullptr;
  std::size_t scales_stride_ = 0;
  std::size_t own_room_ = 0;     // pages of room in own_pages_
  Buffer<int8_t> own_pages_;     // pages without a slot
  Buffer<uint16_t> own_scales_;  // their scales
};

}  // namespace kvasir
