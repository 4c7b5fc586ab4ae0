// The sealed pages of one sequence: 4 KiB pages of int8 K and V with their summaries, for every
// layer and KV head.
//
// Pages live in slabs: slab e holds extent e (16 pages) of every layer and head, so memory grows by
// slabs, files append by slabs, and the address of a page is arithmetic. A slab is private memory,
// a part of a mapped cache file, or spilled: its pages in a file without a name, the rest in
// memory. They come in this order: mapped, spilled, private. Forks share slabs and copy the last
// one when they write to it. Sealed pages never change while they are shared. Pages that are read
// one and all are read where the slab has them, through a mapping where they are in a file; chosen
// pages of a file through a cache of bounded size (page_cache.h).
//
// Threads: const functions may run together; seal() for different (layer, head) may run together;
// the rest is exclusive.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/kernels.h"
#include "backend/page.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "cachefile/cache_file.h"
#include "store/page_cache.h"
#include "store/spill_file.h"

namespace kvasir {

struct StoreShape {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  PageShape page;

  uint32_t heads_total() const { return layers * kv_heads; }
  std::size_t extent_bytes() const;  // of all three arrays of one extent
  std::size_t slab_bytes() const { return extent_bytes() * heads_total(); }
};

class PageStore {
 public:
  // The sections of a cache file that hold a store.
  static constexpr format::SectionKind sections[] = {
      format::SectionKind::pages, format::SectionKind::scales, format::SectionKind::bounds};

  explicit PageStore(const StoreShape& shape);
  PageStore(const PageStore& other);  // a fork: shares every slab
  PageStore(PageStore&&) noexcept;
  PageStore& operator=(PageStore&&) noexcept;
  ~PageStore();

  // Over a mapped file with `pages` sealed pages. The caller has validated the sections' sizes by
  // file_bytes().
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages,
                    PageStore* out);
  // Bytes of a section of this many pages, 0 for kinds that are not the store's.
  static uint64_t file_bytes(const StoreShape& shape, format::SectionKind kind, uint32_t pages);
  // Hands one section's arrays to `write`, piece by piece; pages that are not sealed as zeros.
  // Damaged source blocks (of a mapped file) are Code::corrupt.
  Status write(format::SectionKind kind,
               const std::function<Status(const void* data, std::size_t size)>& write) const;

  const StoreShape& shape() const { return shape_; }
  uint32_t pages() const { return pages_; }
  uint32_t extents() const {
    return static_cast<uint32_t>((pages_ + extent_pages - 1) / extent_pages);
  }

  ExtentView extent(uint32_t layer, uint32_t head, uint32_t e) const;
  // all its tokens, where the slab has them
  PageRef page(uint32_t layer, uint32_t head, uint32_t p) const;
  // What a thread attends of one list.
  struct Hold {
    // keeps: whether what is read of a mapped file stays for later ones.
    explicit Hold(bool keeps = true) : mapped(keeps) {}
    PageHold mapped, spilled;
    Array<uint32_t> numbers;  // of pages in the file that they were spilled to
    void release() { mapped.release(), spilled.release(); }
  };
  // Points refs[i].data and .scales at page numbers[i] (ascending), verified; the other fields are
  // left alone. Pages of a file are read into its cache and stay there until `hold` lets go of
  // them. Code::corrupt or Code::io where they cannot be read; throws std::bad_alloc.
  Status fetch(uint32_t layer, uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
               Hold* hold) const;
  // Many pages of a layer are fetched sooner where its scales are read first: one read has those of
  // all heads, and of each page alone it would be a block. Those of pages in the mapped file,
  // verified, of extents first .. end - 1: [mapped_extents()][kv_heads][16 pages][scales of a
  // page], as PageHold::set_scales() has it with a stride of layer_scales(). Code::corrupt,
  // Code::io; throws std::bad_alloc.
  Status read_scales(uint32_t layer, uint32_t first, uint32_t end, uint16_t* to) const;
  uint32_t mapped_extents() const;  // the first ones
  // of an extent
  std::size_t layer_scales() const {
    return shape_.kv_heads * shape_.page.scales_bytes() / sizeof(uint16_t);
  }
  // Memory for chosen pages of the mapped file and of what was spilled, shared with forks: bytes,
  // or PageCache::by_itself. Throws std::bad_alloc.
  void set_cache_limit(uint64_t bytes) const;
  PageCache::Counts cache_counts() const;  // zeros without a file

  // Writes the pages of private slabs that are full to a file in the folder, oldest first, until
  // such slabs have at most `keep` bytes. A failure leaves those that were written; every page is
  // still there. Throws std::bad_alloc likewise.
  Status spill(const std::string& folder, const std::shared_ptr<os::FileReaper>& reaper,
               uint64_t keep, const Cancel* cancel = nullptr);
  uint64_t full_private_bytes() const;  // of the slabs that spill() looks at
  uint64_t spilled_bytes() const;       // of pages that are in a file without a name
  // Lets go of what has been read through mappings of a layer's pages, which the process need not
  // have in memory. They must not be in use.
  void drop_resident_pages(uint32_t layer) const;

  // Whether the bytes are as they were written. Private memory always is; a mapped file's blocks
  // are checked at their first use.
  bool intact_page(uint32_t layer, uint32_t head, uint32_t p) const;
  bool intact_bounds(uint32_t layer, uint32_t head, uint32_t e) const;
  // Changes with what an extent holds; equal in stores that share it.
  uint64_t stamp(uint32_t e) const;
  // An extent's pages and scales of all layers and heads, where they stay what they are as long as
  // `keep` is held: in a mapped file, or in a slab that is full. Of others keep is null.
  struct Lasting {
    const int8_t* pages = nullptr;
    const uint16_t* scales = nullptr;
    // that they lie in: of a file all of its pages, and all of its scales; of a slab one, the other
    // is empty
    std::span<const std::byte> memory[2];
    std::shared_ptr<const void> keep;
  };
  Lasting lasting(uint32_t e) const;
  // No store has what a Lasting's keep holds. It may be wrong about what others let go of
  // meanwhile: nothing but time may depend on it.
  static bool is_last(const std::shared_ptr<const void>& keep);
  Status damaged() const;     // the error for a check that failed
  Status not_finite() const;  // and for pages that give a NaN or an infinity behind sound checksums

  // Makes room for pages up to `pages` in all: new slabs, and an own copy of a shared last slab.
  // Afterwards seal() and commit() cannot fail. Throws std::bad_alloc and leaves the store as it
  // was (room made so far is kept). Code::corrupt when what would be copied from a mapped file is
  // damaged: the copy would pass for intact. pool: who clears and copies slabs, the caller alone
  // where null. Code::cancelled, between two slabs: room made so far is kept.
  Status reserve(uint32_t pages, ThreadPool* pool = nullptr, const Cancel* cancel = nullptr);
  // Writes page p (pages() <= p < reserved) of one layer and head from k, v: [page_tokens][dim].
  // Not visible before commit().
  void seal(const Kernels& kernels, uint32_t layer, uint32_t head, uint32_t p, const float* k,
            const float* v);
  void commit(uint32_t pages);
  void truncate(uint32_t pages);  // forgets pages at the end

  // memory that this store's slabs and its file's cache and summaries take, shared ones included
  uint64_t private_bytes() const;
  uint64_t mapped_bytes() const;      // bytes of the mapped file that its pages and summaries take
  uint64_t file_pages_bytes() const;  // of pages that are in a file, mapped or without a name
  uint64_t table_bytes() const;       // memory for the mapped file's checksums, whatever its length

 private:
  struct Slab;
  class SlabRef;
  class Kept;
  enum class SlabKind { whole, summaries };  // what of it is in memory; whole: as it comes
  SlabRef new_slab(SlabKind kind) const;
  std::size_t pages_bytes() const { return PageShape::pages_bytes() * shape_.heads_total(); }
  Status copy_slab(const Slab& from, SlabRef* to, ThreadPool* pool) const;
  void drop_resident_pages(const SlabRef& slab, uint64_t offset, uint64_t size) const;
  bool intact_extent(format::SectionKind kind, uint32_t e) const;  // of all layers and heads
  bool intact(format::SectionKind kind, uint32_t layer, uint32_t head, uint32_t e, uint64_t offset,
              uint64_t size) const;
  StoreShape shape_;
  uint32_t pages_ = 0;
  std::vector<SlabRef> slabs_;
  // of the mapped slabs' file
  const CacheFile::Section *mapped_pages_ = nullptr, *mapped_scales_ = nullptr;
  // of chosen pages of the mapped slabs, which are the first ones; null without
  std::shared_ptr<PageCache> cache_;
  std::shared_ptr<SpillFile> spill_;    // of all spilled slabs; null before
  std::shared_ptr<PageCache> spilled_;  // of chosen pages in it
};

}  // namespace kvasir
