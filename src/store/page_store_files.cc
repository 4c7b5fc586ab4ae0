// What a PageStore has in files: a mapped cache file, whose blocks are verified, and a spill file.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "os/os.h"
#include "store/page_slab.h"
#include "store/page_store.h"

namespace kvasir {

using format::SectionKind;

namespace {

// The pages of a cache file.
class MappedPages final : public PageSource {
 public:
  MappedPages(std::shared_ptr<const CacheFile> file, const PageShape& shape, uint32_t extents)
      : file_(std::move(file)), pages_(*file_->find(SectionKind::pages)),
        scales_(*file_->find(SectionKind::scales)), extents_(extents),
        scale_bytes_(static_cast<uint32_t>(shape.scales_bytes() / extent_pages)),
        page_size_(shape.page_size()) {}
  uint64_t extents() const override { return extents_; }
  std::size_t page_size() const override { return page_size_; }
  Status read(uint64_t first, std::span<std::byte* const> to) const override {
    constexpr std::size_t block = format::block_bytes;
    if (page_size_ == block) return file_->read(pages_, first, to);
    const std::size_t count = page_size_ / block;  // of a page
    std::byte* blocks[PageShape::of(max_latent_dim, true).page_size() / block];
    for (std::size_t i = 0; i < to.size(); ++i) {
      for (std::size_t b = 0; b < count; ++b) blocks[b] = to[i] + b * block;
      RETURN_IF_ERROR(file_->read(pages_, (first + i) * count, {blocks, count}));
    }
    return {};
  }
  uint32_t scale_bytes() const override { return scale_bytes_; }
  Status read_scales(uint64_t block, std::byte* to) const override {
    return file_->read(scales_, block, 1, to);
  }

 private:
  const std::shared_ptr<const CacheFile> file_;
  const CacheFile::Section &pages_, &scales_;
  const uint32_t extents_, scale_bytes_;
  const std::size_t page_size_;
};

template <class T>
const T* section_at(const CacheFile& file, SectionKind kind, uint64_t offset) {
  return reinterpret_cast<const T*>(file.bytes(kind).data() + offset);
}

}  // namespace

uint64_t PageStore::file_bytes(const StoreShape& shape, SectionKind kind, uint32_t pages) {
  return ceil_div(pages, extent_pages) * shape.heads_total() * array_bytes(shape.page, kind);
}

SectionKind PageStore::section_of(const StoreShape& shape, SectionKind array) {
  if (shape.is_selected()) return array;
  if (shape.drafts)
    return array == SectionKind::pages ? SectionKind::drafts_pages : SectionKind::drafts_scales;
  return array == SectionKind::pages ? SectionKind::windows_pages : SectionKind::windows_scales;
}

const CacheFile::Section& PageStore::section_in(const Slab& slab, SectionKind array) const {
  return *slab.file->find(section_of(shape_, array));
}

Status PageStore::map(const StoreShape& shape, std::shared_ptr<const CacheFile> file,
                      uint32_t pages, PageStore* out) {
  return map(shape, std::move(file), pages, Runs{{0, PageStore(shape, pages).extents()}}, out);
}

Status PageStore::map(const StoreShape& shape, std::shared_ptr<const CacheFile> file,
                      uint32_t pages, const Runs& runs, PageStore* out) {
  PageStore store(shape, pages);
  const uint32_t extents = store.extents();
  const SectionKind pages_kind = section_of(shape, SectionKind::pages),
                    scales_kind = section_of(shape, SectionKind::scales);
  store.mapped_pages_ = file->find(pages_kind);
  store.mapped_scales_ = file->find(scales_kind);
  store.slabs_.reserve(extents);
  if (extents > 0 && shape.is_selected())
    store.cache_ = std::make_shared<PageCache>(
        std::make_shared<MappedPages>(file, shape.page, extents), shape.heads_total());
  const uint64_t heads = shape.heads_total();
  uint32_t index = 0;  // in the file
  std::size_t run = 0;
  for (uint32_t e = 0; e < extents; ++e) {
    while (run < runs.size() && runs[run].end <= e) ++run;
    if (run == runs.size() || e < runs[run].begin) {
      store.slabs_.emplace_back(nullptr);
      continue;
    }
    auto slab = std::make_unique<Slab>();
    slab->file = file;
    slab->index = index++;
    const uint64_t at = slab->index * heads;
    slab->pages = section_at<int8_t>(*file, pages_kind, at * shape.page.pages_size());
    slab->scales = section_at<uint16_t>(*file, scales_kind, at * shape.page.scales_bytes());
    if (shape.is_selected())
      slab->bounds = section_at<int8_t>(*file, SectionKind::bounds, at * shape.page.bounds_bytes());
    store.slabs_.emplace_back(slab.release());
  }
  *out = std::move(store);
  return {};
}

uint32_t PageStore::mapped_extents() const {
  if (!cache_) return 0;
  const auto end = std::partition_point(slabs_.begin(), slabs_.end(),
                                        [](const SlabRef& slab) { return slab->file != nullptr; });
  return static_cast<uint32_t>(end - slabs_.begin());
}

Status PageStore::read_scales(uint32_t layer, uint32_t first, uint32_t end, uint16_t* to) const {
  const uint64_t bytes = layer_scales() * sizeof *to;
  for (uint32_t e = first; e < end; ++e) {
    const Slab& slab = *slabs_[e];
    const uint64_t at = (uint64_t{slab.index} * shape_.layers + layer) * bytes;
    RETURN_IF_ERROR(slab.file->copy(*mapped_scales_, at, bytes,
                                    reinterpret_cast<std::byte*>(to + e * layer_scales())));
  }
  return {};
}

Status PageStore::spill(const std::string& folder, const std::shared_ptr<os::FileReaper>& reaper,
                        uint64_t keep, const Cancel* cancel) {
  uint64_t left = full_private_bytes();
  if (left > keep && !spill_) {
    std::shared_ptr<SpillFile> file;
    RETURN_IF_ERROR(
        SpillFile::create(folder, pages_bytes(), shape_.page.page_size(), reaper, &file));
    // Exists whenever the file does.
    spilled_ = std::make_shared<PageCache>(file, shape_.heads_total());
    spill_ = std::move(file);
  }
  for (uint32_t e = 0; e < pages_ / extent_pages && left > keep; ++e) {
    if (!slabs_[e].is_private()) continue;
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; spilled pages stay spilled");
    const Slab& from = *slabs_[e];
    SlabRef to = new_slab(SlabKind::summaries);
    for (SectionKind kind : {SectionKind::scales, SectionKind::bounds})
      std::memcpy(const_cast<void*>(to->array(kind)), from.array(kind),
                  array_bytes(shape_.page, kind) * shape_.heads_total());
    RETURN_IF_ERROR(to.spill(spill_, from.pages));
    slabs_[e] = std::move(to);
    left -= shape_.slab_bytes();
  }
  return {};
}

uint64_t PageStore::spilled_bytes() const {
  uint64_t slabs = 0;
  for (const SlabRef& slab : slabs_) slabs += slab && slab->spill != nullptr;
  return slabs * pages_bytes();
}

void PageStore::drop_resident_pages(uint32_t layer) const {
  const uint64_t size = shape_.page.pages_size() * shape_.kv_heads, offset = layer * size;
  for (const SlabRef& slab : slabs_) {
    if (!slab) continue;
    if (slab.is_private()) return;  // so are all later slabs
    drop_resident_pages(slab, offset, size);
  }
}

void PageStore::drop_resident_pages(const SlabRef& slab, uint64_t offset, uint64_t size) const {
  if (slab->file)
    slab->file->advise(section_in(*slab, SectionKind::pages), slab->index * pages_bytes() + offset,
                       size, os::Mapping::Advice::dont_need);
  else if (slab->spill) slab->mapping.advise(offset, size, os::Mapping::Advice::dont_need);
}

bool PageStore::intact(SectionKind kind, uint32_t layer, uint32_t head, uint32_t e, uint64_t offset,
                       uint64_t size) const {
  const SlabRef& slab = slabs_[e];
  if (!slab->file) return true;
  const uint64_t bytes = array_bytes(shape_.page, kind);
  const uint64_t at =
      (uint64_t{slab->index} * shape_.heads_total() + uint64_t{layer} * shape_.kv_heads + head) *
      bytes;
  return slab->file->check(section_in(*slab, kind), at + offset, size);
}

bool PageStore::intact_extent(SectionKind kind, uint32_t e) const {
  const SlabRef& slab = slabs_[e];
  const uint64_t bytes = array_bytes(shape_.page, kind) * shape_.heads_total();
  return !slab->file || slab->file->check(section_in(*slab, kind), slab->index * bytes, bytes);
}

bool PageStore::intact_page(uint32_t layer, uint32_t head, uint32_t p) const {
  const SlabRef& slab = slabs_[p / extent_pages];
  if (!slab->file) return true;
  const uint64_t scales = shape_.page.scales_bytes() / extent_pages;
  const uint64_t at =
      (uint64_t{slab->index} * shape_.heads_total() + uint64_t{layer} * shape_.kv_heads + head) *
          extent_pages +
      p % extent_pages;
  return slab->file->check(*mapped_pages_, at * shape_.page.page_size(), shape_.page.page_size()) &&
         slab->file->check(*mapped_scales_, at * scales, scales);
}

bool PageStore::intact_bounds(uint32_t layer, uint32_t head, uint32_t e) const {
  return intact(SectionKind::bounds, layer, head, e, 0, shape_.page.bounds_bytes());
}

// A store maps one file.
const CacheFile* PageStore::file() const {
  for (const SlabRef& slab : slabs_)
    if (slab && slab->file) return slab->file.get();
  return nullptr;
}

Status PageStore::damaged() const {
  if (const CacheFile* mapped = file()) RETURN_IF_ERROR(mapped->failure());
  return Status::error(Code::internal, "a page was reported as damaged and is not");
}

Status PageStore::check_file() const {
  const CacheFile* mapped = file();
  return mapped ? mapped->check_size() : Status();
}

Status PageStore::not_finite() const {
  const CacheFile* mapped = file();
  return Status::error(Code::corrupt, "%s: section '%s' has scales that are not finite",
                       mapped ? mapped->path().c_str() : "the sequence",
                       format::name_of(section_of(shape_, SectionKind::scales)));
}

uint64_t PageStore::mapped_bytes() const {
  uint64_t bytes = 0;
  for (const SlabRef& slab : slabs_) bytes += slab && slab->file ? shape_.slab_bytes() : 0;
  return bytes;
}

uint64_t PageStore::file_pages_bytes() const {
  uint64_t slabs = 0;
  for (const SlabRef& slab : slabs_) slabs += slab && !slab.is_private();
  return slabs * pages_bytes();
}

uint64_t PageStore::table_bytes() const {
  const CacheFile* mapped = shape_.is_selected() ? file() : nullptr;
  return mapped ? mapped->table_bytes() : 0;
}

}  // namespace kvasir
