#include "store/page_store.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/checked.h"

namespace kvasir {

using format::SectionKind;

std::size_t StoreShape::extent_bytes() const {
  return PageShape::pages_bytes() + page.scales_bytes() + page.bounds_bytes() + page.means_bytes();
}

// The arrays of extent e of every layer and head, one after the other: [layers][kv_heads][the extent's array].
struct PageStore::Slab {
  std::atomic<uint32_t> references{1};
  const int8_t* pages = nullptr;
  const uint16_t* scales = nullptr;
  const int8_t* bounds = nullptr;
  const int8_t* means = nullptr;
  void* memory = nullptr;                 // owned, when private
  std::shared_ptr<const CacheFile> file;  // when mapped
  uint32_t index = 0;                     // its extent in the file

  ~Slab() { deallocate(memory); }
  const void* array(SectionKind kind) const {
    return kind == SectionKind::pages    ? static_cast<const void*>(pages)
           : kind == SectionKind::scales ? static_cast<const void*>(scales)
           : kind == SectionKind::bounds ? static_cast<const void*>(bounds)
                                         : static_cast<const void*>(means);
  }
};

// A counted reference. unique() acquires what the other owners did before they let go, so that writing is safe.
class PageStore::SlabRef {
 public:
  explicit SlabRef(Slab* slab) : slab_(slab) {}
  SlabRef(const SlabRef& other) : slab_(other.slab_) {
    if (slab_) slab_->references.fetch_add(1, std::memory_order_relaxed);
  }
  SlabRef(SlabRef&& other) noexcept : slab_(std::exchange(other.slab_, nullptr)) {}
  SlabRef& operator=(SlabRef other) noexcept {
    std::swap(slab_, other.slab_);
    return *this;
  }
  ~SlabRef() {
    if (slab_ && slab_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete slab_;
  }
  const Slab& operator*() const { return *slab_; }
  const Slab* operator->() const { return slab_; }
  bool writable() const { return slab_->memory && slab_->references.load(std::memory_order_acquire) == 1; }

 private:
  Slab* slab_;
};

PageStore::PageStore(const StoreShape& shape) : shape_(shape) {}
PageStore::PageStore(const PageStore& other) = default;
PageStore::PageStore(PageStore&&) noexcept = default;
PageStore& PageStore::operator=(PageStore&&) noexcept = default;
PageStore::~PageStore() = default;

namespace {

std::size_t array_bytes(const PageShape& page, SectionKind kind) {
  switch (kind) {
    case SectionKind::pages: return PageShape::pages_bytes();
    case SectionKind::scales: return page.scales_bytes();
    case SectionKind::bounds: return page.bounds_bytes();
    case SectionKind::means: return page.means_bytes();
    default: return 0;
  }
}

// Zeroes what page p takes of one head's array, whose layout is page.h's.
void clear_page(const PageShape& shape, SectionKind kind, uint32_t p, std::byte* array) {
  const auto clear = [&](std::size_t at, std::size_t size) { std::memset(array + at, 0, size); };
  const std::size_t dim = shape.dim, word = sizeof(float);
  switch (kind) {
    case SectionKind::pages: return clear(std::size_t{p} * page_bytes, page_bytes);
    case SectionKind::scales: return clear(shape.scales_bytes() / extent_pages * p, shape.scales_bytes() / extent_pages);
    case SectionKind::bounds:
      for (std::size_t b = p * shape.page_blocks(); b < (p + 1) * shape.page_blocks(); ++b) {
        const std::size_t channels = b / tile_blocks * 2 * dim * tile_blocks + b % tile_blocks * word;
        for (std::size_t c = 0; c < 2 * dim / 4; ++c) clear(channels + c * tile_blocks * word, word);
        clear(shape.extent_tiles() * 2 * dim * tile_blocks + b * word, word);
      }
      return;
    case SectionKind::means:
      for (std::size_t d = 0; d < dim / 4; ++d) clear((d * extent_pages + p) * word, word);
      clear(dim * (extent_pages + p), dim);
      for (std::size_t which : {std::size_t{0}, std::size_t{1}}) clear(2 * dim * extent_pages + (which * extent_pages + p) * word, word);
      return;
    default: return;
  }
}

template <class T>
const T* section_at(const CacheFile& file, SectionKind kind, uint64_t offset) {
  return reinterpret_cast<const T*>(file.bytes(kind).data() + offset);
}

}  // namespace

uint64_t PageStore::file_bytes(const StoreShape& shape, SectionKind kind, uint32_t pages) {
  return ceil_div(pages, extent_pages) * shape.heads_total() * array_bytes(shape.page, kind);
}

Status PageStore::map(const StoreShape& shape, std::shared_ptr<const CacheFile> file, uint32_t pages, PageStore* out) {
  PageStore store(shape);
  store.pages_ = pages;
  const uint32_t extents = store.extents();
  store.slabs_.reserve(extents);
  if (extents > 0) store.cache_ = std::make_shared<PageCache>(file, shape.page, shape.heads_total(), pages);
  const uint64_t heads = shape.heads_total();
  for (uint32_t e = 0; e < extents; ++e) {
    auto slab = std::make_unique<Slab>();
    slab->file = file;
    slab->index = e;
    slab->pages = section_at<int8_t>(*file, SectionKind::pages, e * heads * PageShape::pages_bytes());
    slab->scales = section_at<uint16_t>(*file, SectionKind::scales, e * heads * shape.page.scales_bytes());
    slab->bounds = section_at<int8_t>(*file, SectionKind::bounds, e * heads * shape.page.bounds_bytes());
    slab->means = section_at<int8_t>(*file, SectionKind::means, e * heads * shape.page.means_bytes());
    store.slabs_.emplace_back(slab.release());
  }
  *out = std::move(store);
  return {};
}

Status PageStore::write(SectionKind kind, const std::function<Status(const void*, std::size_t)>& write) const {
  const std::size_t bytes = array_bytes(shape_.page, kind);
  for (uint32_t e = 0; e < extents(); ++e) {
    const SlabRef& slab = slabs_[e];
    const void* data = slab->array(kind);
    if (!intact_extent(kind, e)) return damaged();
    if ((e + 1) * extent_pages <= pages_) {
      if (Status s = write(data, bytes * shape_.heads_total()); !s.ok()) return s;
      continue;
    }
    // After a step back the pages that are not sealed still hold what was taken back.
    Array<std::byte> array(bytes);
    for (std::size_t head = 0; head < shape_.heads_total(); ++head) {
      std::memcpy(array.data(), static_cast<const std::byte*>(data) + head * bytes, bytes);
      for (uint32_t p = pages_ % extent_pages; p < extent_pages; ++p) clear_page(shape_.page, kind, p, array.data());
      if (Status s = write(array.data(), bytes); !s.ok()) return s;
    }
  }
  return {};
}

ExtentView PageStore::extent(uint32_t layer, uint32_t head, uint32_t e) const {
  const std::size_t at = std::size_t{layer} * shape_.kv_heads + head;
  const SlabRef& slab = slabs_[e];
  return {slab->pages + at * PageShape::pages_bytes(),
          slab->scales + at * shape_.page.scales_bytes() / sizeof(uint16_t),
          slab->bounds + at * shape_.page.bounds_bytes(), slab->means + at * shape_.page.means_bytes()};
}

PageRef PageStore::page(uint32_t layer, uint32_t head, uint32_t p) const {
  const ExtentView view = extent(layer, head, p / extent_pages);
  const uint32_t i = p % extent_pages;
  return {view.pages + std::size_t{i} * page_bytes, view.scales + std::size_t{i} * 2 * shape_.page.page_tokens,
          ~uint64_t{0} >> (64 - shape_.page.page_tokens)};
}

Status PageStore::fetch(uint32_t layer, uint32_t head, std::span<const uint32_t> numbers, PageRef* refs, PageHold* hold) const {
  const auto is_mapped = [&](uint32_t p) { return slabs_[p / extent_pages]->file != nullptr; };
  const auto end = cache_ ? std::partition_point(numbers.begin(), numbers.end(), is_mapped) : numbers.begin();
  const auto mapped = static_cast<std::size_t>(end - numbers.begin());
  for (std::size_t i = mapped; i < numbers.size(); ++i) {
    const PageRef at = page(layer, head, numbers[i]);
    refs[i].data = at.data;
    refs[i].scales = at.scales;
  }
  return mapped ? cache_->fetch(layer * shape_.kv_heads + head, numbers.first(mapped), refs, hold) : Status();
}

void PageStore::set_cache_limit(uint64_t bytes) const {
  if (cache_) cache_->set_limit(bytes);
}

PageCache::Counts PageStore::cache_counts() const { return cache_ ? cache_->counts() : PageCache::Counts(); }

bool PageStore::intact(SectionKind kind, uint32_t layer, uint32_t head, uint32_t e, uint64_t offset, uint64_t size) const {
  const SlabRef& slab = slabs_[e];
  if (!slab->file) return true;
  const uint64_t bytes = array_bytes(shape_.page, kind);
  const uint64_t at = (uint64_t{slab->index} * shape_.heads_total() + uint64_t{layer} * shape_.kv_heads + head) * bytes;
  return slab->file->check(*slab->file->find(kind), at + offset, size);
}

bool PageStore::intact_extent(SectionKind kind, uint32_t e) const {
  const SlabRef& slab = slabs_[e];
  const uint64_t bytes = array_bytes(shape_.page, kind) * shape_.heads_total();
  return !slab->file || slab->file->check(*slab->file->find(kind), slab->index * bytes, bytes);
}

bool PageStore::intact_page(uint32_t layer, uint32_t head, uint32_t p) const {
  const uint64_t i = p % extent_pages, scales = shape_.page.scales_bytes() / extent_pages;
  return intact(SectionKind::pages, layer, head, p / extent_pages, i * page_bytes, page_bytes) &&
         intact(SectionKind::scales, layer, head, p / extent_pages, i * scales, scales);
}

bool PageStore::intact_bounds(uint32_t layer, uint32_t head, uint32_t e) const {
  return intact(SectionKind::bounds, layer, head, e, 0, shape_.page.bounds_bytes());
}

bool PageStore::intact_means(uint32_t layer, uint32_t head, uint32_t e) const {
  return intact(SectionKind::means, layer, head, e, 0, shape_.page.means_bytes());
}

Status PageStore::damaged() const {
  for (const SlabRef& slab : slabs_) {
    if (!slab->file) continue;
    if (Status s = slab->file->failure(); !s.ok()) return s;
    break;  // a store maps one file
  }
  return Status::error(Code::internal, "a page was reported as damaged and is not");
}

PageStore::SlabRef PageStore::new_slab() const {
  const std::size_t heads = shape_.heads_total();
  auto slab = std::make_unique<Slab>();
  slab->memory = allocate_zeroed(shape_.slab_bytes());
  if (!slab->memory) throw std::bad_alloc();
  auto* at = static_cast<int8_t*>(slab->memory);
  slab->pages = at;
  at += heads * PageShape::pages_bytes();
  slab->scales = reinterpret_cast<const uint16_t*>(at);
  at += heads * shape_.page.scales_bytes();
  slab->bounds = at;
  at += heads * shape_.page.bounds_bytes();
  slab->means = at;
  return SlabRef(slab.release());
}

// What is in a file is read past the mapping, of which it would be the only part that is touched.
Status PageStore::copy_slab(const Slab& from, SlabRef* to) const {
  for (SectionKind kind : sections) {
    const uint64_t bytes = array_bytes(shape_.page, kind) * shape_.heads_total();
    auto* data = static_cast<std::byte*>(const_cast<void*>((*to)->array(kind)));
    if (!from.file) {
      std::memcpy(data, from.array(kind), bytes);
    } else if (Status s = from.file->copy(*from.file->find(kind), from.index * bytes, bytes, data); !s.ok()) {
      return s;
    }
  }
  return {};
}

Status PageStore::reserve(uint32_t pages) {
  if (pages <= pages_) return {};
  const uint32_t last = pages_ / extent_pages;  // the slab that the next page goes to
  if (last < slabs_.size() && !slabs_[last].writable()) {
    SlabRef copy = new_slab();
    if (Status s = copy_slab(*slabs_[last], &copy); !s.ok()) return s;
    slabs_[last] = std::move(copy);
  }
  slabs_.resize(std::min<std::size_t>(slabs_.size(), last + 1), SlabRef(nullptr));  // what a truncation left
  const std::size_t wanted = ceil_div(pages, extent_pages);
  slabs_.reserve(wanted);
  while (slabs_.size() < wanted) slabs_.push_back(new_slab());
  return {};
}

void PageStore::seal(const Kernels& kernels, uint32_t layer, uint32_t head, uint32_t p, const float* k, const float* v) {
  const ExtentView view = extent(layer, head, p / extent_pages);
  kernels.seal_page(shape_.page, k, v, p % extent_pages, const_cast<int8_t*>(view.pages),
                    const_cast<uint16_t*>(view.scales), const_cast<int8_t*>(view.bounds),
                    const_cast<int8_t*>(view.means));
}

void PageStore::commit(uint32_t pages) { pages_ = pages; }

void PageStore::truncate(uint32_t pages) {
  pages_ = pages;
  slabs_.resize(extents(), SlabRef(nullptr));
  if (slabs_.empty()) cache_.reset();
}

uint64_t PageStore::private_bytes() const {
  uint64_t bytes = 0;
  for (const SlabRef& slab : slabs_) bytes += slab->memory ? shape_.slab_bytes() : 0;
  if (cache_) bytes += cache_->counts().bytes + cache_->file().private_bytes();
  return bytes;
}

uint64_t PageStore::mapped_bytes() const {
  uint64_t bytes = 0;
  for (const SlabRef& slab : slabs_) bytes += slab->file ? shape_.slab_bytes() : 0;
  return bytes;
}

}  // namespace kvasir
