// The sealed pages of one sequence: 4 KiB pages of int8 K and V with their summaries, for every
// layer and KV head.
//
// Pages are stored in slabs. Slab e holds extent e (16 pages) of every layer and head, so memory
// grows by slabs, files append slabs, and the address of a page is arithmetic. A slab is mapped (a
// part of a mapped cache file), spilled (pages in a file without a name, the rest in memory) or
// private memory, in this order. Forks share slabs and copy the last one before they write to it.
// Sealed pages never change while they are shared. Code that reads all pages reads them in their
// slab, through a mapping where they are in a file. Selected pages of a file are read through a
// cache of bounded size (page_cache.h).
//
// Threads: const functions may be called at once; seal() for different (layer, head) may overlap;
// the others are exclusive.
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
  // Newest tokens that a query sees; 0: all. A store with a window may drop extents that no query
  // can see. No strategy selects in it, so its pages have no bounds.
  uint64_t window = 0;
  // Of the MTP layer: its pages have sections of their own. No strategy selects in it.
  bool drafts = false;

  bool is_selected() const { return window == 0 && !drafts; }
  uint32_t heads_total() const { return layers * kv_heads; }
  std::size_t extent_bytes() const;  // of all arrays of an extent
  bool operator==(const StoreShape&) const = default;
  std::size_t slab_bytes() const { return extent_bytes() * heads_total(); }
};

// Extents begin .. end - 1.
struct ExtentRun {
  uint32_t begin = 0, end = 0;
  uint32_t count() const { return end - begin; }
};

class PageStore {
 public:
  // The arrays of a store.
  static constexpr format::SectionKind sections[] = {
      format::SectionKind::pages, format::SectionKind::scales, format::SectionKind::bounds};
  // Those of a store of this shape, and the section of a cache file that holds one of them.
  static std::span<const format::SectionKind> arrays(const StoreShape& shape) {
    return std::span(sections).first(shape.is_selected() ? 3 : 2);
  }
  static format::SectionKind section_of(const StoreShape& shape, format::SectionKind array);

  explicit PageStore(const StoreShape& shape);
  PageStore(const PageStore& other);  // a fork: shares every slab
  PageStore(PageStore&&) noexcept;
  PageStore& operator=(PageStore&&) noexcept;
  ~PageStore();

  // A store in a mapped file with `pages` sealed pages. The caller has validated the sections'
  // sizes with file_bytes(). runs: the extents in the file, of a store with a window.
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages,
                    PageStore* out);
  using Runs = std::vector<ExtentRun>;  // ascending; the last one is the newest
  static Status map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages,
                    const Runs& runs, PageStore* out);
  // Bytes of a section for so many pages; 0 for kinds of other parts.
  static uint64_t file_bytes(const StoreShape& shape, format::SectionKind kind, uint32_t pages);
  // Passes the arrays of one section to `write`, piece by piece; unsealed pages as zeros, dropped
  // extents not at all. Damaged
  // source blocks (of a mapped file) are Code::corrupt.
  Status write(format::SectionKind kind,
               const std::function<Status(const void* data, std::size_t size)>& write) const;

  const StoreShape& shape() const { return shape_; }
  uint32_t pages() const { return pages_; }
  uint32_t extents() const {
    return static_cast<uint32_t>((pages_ + extent_pages - 1) / extent_pages);
  }

  // Drops a full extent; its pages may not be used any more. For a store with a window.
  void drop(uint32_t e);
  // Makes an empty store with a window begin with so many dropped extents. Throws std::bad_alloc.
  void skip(uint32_t extents);
  bool has(uint32_t e) const;
  // The extents that were not dropped. The last run may be empty. Throws std::bad_alloc.
  Runs runs() const;

  ExtentView extent(uint32_t layer, uint32_t head, uint32_t e) const;
  // The page with all its tokens, in its slab.
  PageRef page(uint32_t layer, uint32_t head, uint32_t p) const;
  // The pages of one list that a thread attends.
  struct Hold {
    // keeps: pages read from a mapped file stay cached.
    explicit Hold(bool keeps = true) : mapped(keeps) {}
    PageHold mapped, spilled;
    Array<uint32_t> numbers;  // of spilled pages, in their file
    void release() { mapped.release(), spilled.release(); }
  };
  // Points refs[i].data and .scales at page numbers[i] (ascending), verified; leaves the other
  // fields. Pages of a file are read into its cache and stay until `hold` is released.
  // Code::corrupt or Code::io when they cannot be read; throws std::bad_alloc.
  Status fetch(uint32_t layer, uint32_t head, std::span<const uint32_t> numbers, PageRef* refs,
               Hold* hold) const;
  // Reads the scales of a layer's mapped pages, verified, of extents first .. end - 1:
  // [mapped_extents()][kv_heads][16 pages][scales of a page], the layout of PageHold::set_scales()
  // with stride layer_scales(). A fetch of many pages is faster after it: one read has the scales
  // of all heads; each page alone would need a block. Code::corrupt, Code::io; throws
  // std::bad_alloc.
  Status read_scales(uint32_t layer, uint32_t first, uint32_t end, uint16_t* to) const;
  // Makes fetch() use pages in the mapping where the store has up to max_tokens_in_mapping and the
  // cache has no limit. Nearly all pages of so short a document are soon needed, and copies of them
  // take longer to make than to attend.
  static constexpr uint64_t max_tokens_in_mapping = 16384;
  void use_mapping() { uses_mapping_ = true; }
  bool in_mapping() const;
  uint32_t mapped_extents() const;  // they come first
  // Scales per extent.
  std::size_t layer_scales() const {
    return shape_.kv_heads * shape_.page.scales_bytes() / sizeof(uint16_t);
  }
  // Memory for selected pages of the mapped file and of the spill file, shared with forks: bytes,
  // or PageCache::by_itself. Throws std::bad_alloc.
  void set_cache_limit(uint64_t bytes) const;
  PageCache::Counts cache_counts() const;  // zeros without a file

  // Writes the pages of full private slabs to a file in the folder, oldest first, until such slabs
  // have at most `keep` bytes. A failure, or std::bad_alloc, keeps those that were written; no page
  // is lost.
  Status spill(const std::string& folder, const std::shared_ptr<os::FileReaper>& reaper,
               uint64_t keep, const Cancel* cancel = nullptr);
  uint64_t full_private_bytes() const;  // of the slabs that spill() may write
  uint64_t spilled_bytes() const;       // of pages that are in a file without a name
  // Drops resident pages of the mapping of a layer, which must not be in use.
  void drop_resident_pages(uint32_t layer) const;

  // Whether the bytes are as written. Private memory always is; the blocks of a mapped file are
  // verified at their first use.
  bool intact_page(uint32_t layer, uint32_t head, uint32_t p) const;
  bool intact_extent(format::SectionKind kind, uint32_t e) const;  // of all layers and heads
  bool intact_bounds(uint32_t layer, uint32_t head, uint32_t e) const;
  // Changes with the content of an extent; equal in stores that share it, and in a copy of it that
  // reserve() makes.
  uint64_t stamp(uint32_t e) const;
  // How many of an extent's first pages are as they were when this was its stamp, at least.
  uint32_t same_pages(uint32_t e, uint64_t stamp) const;
  // Pages and scales of an extent, all layers and heads, whose content is constant while `keep` is
  // held: in a mapped file, or in a full slab. For others keep is null.
  struct Lasting {
    const int8_t* pages = nullptr;
    const uint16_t* scales = nullptr;
    // The memory that contains them. Of a file: all of its pages, and all of its scales. Of a slab:
    // one range; the other is empty.
    std::span<const std::byte> memory[2];
    std::shared_ptr<const void> keep;
  };
  Lasting lasting(uint32_t e) const;
  // Whether no store shares the memory of `keep` any more. Other threads may change that at any
  // time, so only speed may depend on it.
  static bool is_last(const std::shared_ptr<const void>& keep);
  Status damaged() const;     // the error for a check that failed
  Status check_file() const;  // CacheFile::check_size() of the mapped file, where there is one
  Status not_finite() const;  // for pages with NaN or infinity under correct checksums

  // Makes room for `pages` pages in all: new slabs, and an own copy of a shared last slab.
  // Afterwards seal() and commit() cannot fail. Throws std::bad_alloc and leaves the store
  // unchanged (room made so far is kept). Code::corrupt when a block to be copied from a mapped
  // file is damaged: the copy would look intact. pool: clears and copies slabs; null: the caller
  // does. Code::cancelled, between groups of slabs: room made so far is kept.
  Status reserve(uint32_t pages, ThreadPool* pool = nullptr, const Cancel* cancel = nullptr);
  // reserve() for pages all of which are sealed before the store is used: clears no full new slab.
  // After a failure the store is of no use.
  Status reserve_filled(uint32_t pages, ThreadPool* pool, const Cancel* cancel);
  // Touches the memory of a layer in extents that it has none of the pages of: the system clears it
  // now, while the caller has time.
  void touch(uint32_t layer, ExtentRun extents, ThreadPool* pool);
  // Makes one slab ahead, where a later reserve() of so many pages would make one. Throws
  // std::bad_alloc.
  void make_spare(uint32_t pages, ThreadPool* pool);
  void drop_spare();
  // Writes page p (pages() <= p < reserved) of one layer and head from k, v: [page_tokens][dim].
  // Not visible before commit().
  void seal(const Kernels& kernels, uint32_t layer, uint32_t head, uint32_t p, const float* k,
            const float* v);
  void commit(uint32_t pages);
  // Shows so many of the pages that were sealed: the others stay, and commit() shows them again.
  void show(uint32_t pages) { pages_ = pages; }
  void truncate(uint32_t pages);  // drops pages at the end

  // Memory of the slabs, the caches and the summaries, shared ones included.
  uint64_t private_bytes() const;
  uint64_t mapped_bytes() const;      // of its pages and summaries in the mapped file
  uint64_t file_pages_bytes() const;  // of pages in a file, mapped or spilled
  uint64_t table_bytes() const;       // memory of the mapped file's checksums, for its whole length

 private:
  PageStore(const StoreShape& shape, uint32_t pages);  // without their slabs
  struct Slab;
  class SlabRef;
  class Kept;
  enum class SlabKind { whole, summaries };  // which part is in memory; whole: as in private slabs
  SlabRef new_slab(SlabKind kind) const;
  std::vector<SlabRef> cleared_slabs(std::size_t count, ThreadPool* pool) const;
  Status reserve(uint32_t pages, uint32_t uncleared, ThreadPool* pool, const Cancel* cancel);
  std::size_t pages_bytes() const { return shape_.page.pages_size() * shape_.heads_total(); }
  const CacheFile::Section& section_in(const Slab& slab, format::SectionKind array) const;
  const CacheFile* file() const;  // of the mapped slabs, or null
  Status copy_slab(const Slab& from, SlabRef* to, ThreadPool* pool) const;
  void drop_resident_pages(const SlabRef& slab, uint64_t offset, uint64_t size) const;
  bool intact(format::SectionKind kind, uint32_t layer, uint32_t head, uint32_t e, uint64_t offset,
              uint64_t size) const;
  StoreShape shape_;
  uint32_t pages_ = 0;
  std::vector<SlabRef> slabs_;  // by extent; null: dropped
  struct Spare {
    Spare();
    Spare(const Spare&);  // without slabs: they belong to one store
    Spare(Spare&&) noexcept;
    Spare& operator=(Spare&&) noexcept;
    ~Spare();
    std::vector<SlabRef> slabs;
  } spare_;  // made ahead, cleared
  // Of the file of the mapped slabs.
  const CacheFile::Section *mapped_pages_ = nullptr, *mapped_scales_ = nullptr;
  bool uses_mapping_ = false;
  // Selected pages of the mapped slabs, which come first; null without any.
  std::shared_ptr<PageCache> cache_;
  std::shared_ptr<SpillFile> spill_;    // of all spilled slabs; null before the first
  std::shared_ptr<PageCache> spilled_;  // its selected pages
};

}  // namespace kvasir
