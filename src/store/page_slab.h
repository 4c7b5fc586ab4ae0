// The slabs of a PageStore and counted references to them; for its files.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "base/stamp.h"
#include "os/os.h"
#include "store/page_store.h"

namespace kvasir {

// Bytes of one array of an extent, of a layer and head.
inline std::size_t array_bytes(const PageShape& page, format::SectionKind kind) {
  switch (kind) {
    case format::SectionKind::pages:
      return page.pages_size();
    case format::SectionKind::scales:
      return page.scales_bytes();
    case format::SectionKind::bounds:
      return page.bounds_bytes();
    default:
      return 0;
  }
}

// The arrays of extent e for every layer and head: [layers][kv_heads][the extent's array].
struct PageStore::Slab {
  std::atomic<uint32_t> references{1};
  std::atomic<uint32_t> kept{0};  // references that a Lasting holds
  const int8_t* pages = nullptr;
  const uint16_t* scales = nullptr;
  const int8_t* bounds = nullptr;
  void* memory = nullptr;                 // private: owned
  std::shared_ptr<const CacheFile> file;  // mapped
  std::shared_ptr<SpillFile> spill;       // spilled
  os::Mapping mapping;                    // spilled: its pages
  uint32_t index = 0;                     // number of the extent in either file

  ~Slab() {
    deallocate_pages(memory);
    if (spill) spill->discard(index);
  }
  const void* array(format::SectionKind kind) const {
    return kind == format::SectionKind::pages    ? static_cast<const void*>(pages)
           : kind == format::SectionKind::scales ? static_cast<const void*>(scales)
                                                 : static_cast<const void*>(bounds);
  }
};

// A counted reference. unique() acquires the writes that other owners made before they released it,
// so that writing is safe. The stamp is here and not in the slab, because every token compares all
// stamps; a slab changes only when it has one reference.
class PageStore::SlabRef {
 public:
  explicit SlabRef(Slab* slab) : slab_(slab) {}
  SlabRef(const SlabRef& other) : slab_(other.slab_), content_(other.content_) {
    if (slab_) slab_->references.fetch_add(1, std::memory_order_relaxed);
  }
  SlabRef(SlabRef&& other) noexcept
      : slab_(std::exchange(other.slab_, nullptr)), content_(other.content_) {}
  SlabRef& operator=(SlabRef other) noexcept {
    std::swap(slab_, other.slab_);
    content_ = other.content_;
    return *this;
  }
  ~SlabRef() {
    if (slab_ && slab_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete slab_;
  }
  // A slab with the same content takes its place; the stamp stays.
  void replace(SlabRef same) { std::swap(slab_, same.slab_); }
  // For a slab without other references. Afterwards its pages are in the file.
  Status spill(const std::shared_ptr<SpillFile>& file, const int8_t* pages) {
    RETURN_IF_ERROR(file->append(pages, &slab_->index));
    slab_->spill = file;
    RETURN_IF_ERROR(file->map(slab_->index, &slab_->mapping));
    slab_->pages = reinterpret_cast<const int8_t*>(slab_->mapping.data());
    return {};
  }
  // pages: the first ones, which stay as they are.
  void touch(uint32_t pages) { content_ = {new_stamp(), content_.stamp, pages}; }
  uint64_t stamp() const { return content_.stamp; }
  uint32_t same_pages(uint64_t stamp) const {
    return stamp == content_.stamp ? extent_pages : stamp == content_.before ? content_.pages : 0;
  }
  void keep(int more) {
    slab_->kept.fetch_add(static_cast<uint32_t>(more), std::memory_order_acq_rel);
  }
  const Slab& operator*() const { return *slab_; }
  const Slab* operator->() const { return slab_; }
  explicit operator bool() const { return slab_ != nullptr; }
  bool is_private() const { return slab_->memory && !slab_->spill; }
  bool writable() const {
    return is_private() && slab_->references.load(std::memory_order_acquire) == 1;
  }

 private:
  Slab* slab_;
  struct Content {
    uint64_t stamp = new_stamp();  // PageStore::stamp()
    // of what was there before: so many of its first pages are there still
    uint64_t before = 0;
    uint32_t pages = 0;
  } content_;
};

}  // namespace kvasir
