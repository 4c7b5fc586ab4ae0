// The chosen pages of a file, mapped or spilled to, in bounded private memory.
//
// Choosing reads one page in fifty, here and there. Through a mapping that would make half of the
// file resident, because the system maps up to sixteen cached neighbours around each page that is
// touched, and a file that another process cuts, or a disk that fails, would end the process by
// SIGBUS. So chosen pages are read into slots of 4 KiB, neighbours by one system call, and the
// scales of their tokens beside them where the file has them; verified when they are read, so that
// the bytes that are used are the bytes that were checked. Successive tokens choose mostly the same
// pages and find them there, at the cost of a look into a table.
//
// Layers and KV heads share slots, because some choose twice as many different pages as others;
// CLOCK chooses what makes room. Those of large models are dealt out to up to sixteen parts, each
// with slots, a table and a lock of its own, so that threads that attend heads of one layer seldom
// wait for each other: a lock is held for microseconds a list, never while reading. The forks of a
// sequence share the cache of its file. Threads: all functions may run together.
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

// A file with pages: extents of all heads, [extents][heads][16 pages][4096], so that pages are
// numbered through. Extents may be added.
class PageSource {
 public:
  virtual ~PageSource() = default;
  virtual uint64_t extents() const = 0;
  // Pages first, first + 1, ... into to[0], to[1], ... Code::corrupt, Code::io.
  virtual Status read(uint64_t first, std::span<std::byte* const> to) const = 0;
  // Scales of a page's tokens, which lie as the pages do, in blocks of 4096 bytes; 0: they are not
  // in the file.
  virtual uint32_t scale_bytes() const { return 0; }
  virtual Status read_scales(uint64_t block, std::byte* to) const {
    return (void)block, (void)to, Status();
  }
};

class PageCache {
 public:
  // as a limit: a share of the pages, more where a step needs it
  static constexpr uint64_t by_itself = UINT64_MAX;

  // Over the pages of `heads` heads (of all layers together).
  PageCache(std::shared_ptr<const PageSource> source, uint32_t heads);
  ~PageCache();
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  // Points refs[i].data, and .scales where the file has them, at page numbers[i] of a head; the
  // rest is left alone. No page comes twice. The pages stay there until `hold` lets go of them;
  // what it held before it lets go of first. Page p is the file's page p % 16 of extent p / 16.
  // Code::corrupt or Code::io: nothing is held. Throws std::bad_alloc.
  Status fetch(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold);

  // Bytes of pages that are kept. What is being attended stays beyond it, in memory of its own,
  // until it is let go of: any limit works, also 0. Forgets what was kept.
  void set_limit(uint64_t bytes);

  struct Counts {
    uint64_t found = 0, read = 0;  // pages fetched: those that were there, and those that were not
    uint64_t kept = 0;             // pages that are there now
    uint64_t bytes = 0;            // of memory that all of it takes now
  };
  Counts counts() const;

 private:
  friend class PageHold;
  struct Room;
  // The heads part, part + parts, part + 2 * parts, ...: those of a layer, which are attended
  // together, fall into different ones where there are as many.
  struct alignas(64) Part {
    mutable std::mutex mutex;  // guards the rest but the counts, not what is in the room
    Array<uint64_t> lists;     // [heads of the part] pages of the last list
    uint64_t step = 0;         // their sum: about what a token chooses
    // null before the first fetch, and after a new limit; a hold keeps the one that it was filled
    // from
    std::shared_ptr<Room> room;
    std::atomic<uint64_t> found{0}, read{0};
  };

  std::shared_ptr<Room> room_for(uint32_t head, uint64_t list);
  uint64_t slots_of(uint32_t part, uint64_t slots) const;  // its share of all
  uint32_t parts() const { return static_cast<uint32_t>(parts_.size()); }
  uint64_t page_of(uint32_t head, uint32_t number) const;  // in the file
  Status read_missing(uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
                      PageHold* hold) const;
  Status read_scales(uint32_t head, std::span<const uint32_t> numbers, const PageRef* refs,
                     const PageHold& hold) const;

  const std::shared_ptr<const PageSource> source_;
  const uint32_t scale_bytes_;  // of a page's tokens
  const uint32_t heads_;
  std::atomic<uint64_t> limit_{by_itself};
  std::vector<Part> parts_;
};

// What a thread attends: the pages of one fetch, which stay where they are meanwhile. Lets go when
// it is destroyed.
class PageHold {
 public:
  // keeps: pages that it brings stay for later fetches; otherwise they are its own.
  explicit PageHold(bool keeps = true) : keeps_(keeps) {}
  void set_keeps(bool keeps) { keeps_ = keeps; }
  // Of the head that is fetched from now on, where somebody has read them: page p's lie at scales +
  // p / 16 * stride + p % 16 * those of a page. null: the cache reads what it wants of them.
  void set_scales(const uint16_t* scales, std::size_t stride) {
    scales_ = scales, scales_stride_ = stride;
  }
  std::size_t read() const { return missing_.size(); }  // pages of the last fetch that had to be
  ~PageHold() { release(); }
  PageHold(const PageHold&) = delete;
  PageHold& operator=(const PageHold&) = delete;
  void release();  // memory for pages of its own stays for the next ones

 private:
  friend class PageCache;
  struct Missing {
    uint32_t index;  // in the list that is fetched
    uint32_t slot;
  };
  void begin(std::shared_ptr<PageCache::Room> room, std::size_t pages);
  void make_room_beside(std::size_t pages, std::size_t scales);
  std::shared_ptr<PageCache::Room> room_;
  Array<uint32_t> slots_;   // pinned
  Array<Missing> missing_;  // while they are read
  bool keeps_;
  const uint16_t* scales_ = nullptr;
  std::size_t scales_stride_ = 0;
  std::size_t room_beside_ = 0;     // pages that there is room for in
  Buffer<int8_t> beside_;           // pages for which there was no slot,
  Buffer<uint16_t> scales_beside_;  // and their scales
};

}  // namespace kvasir
