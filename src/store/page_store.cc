#include "store/page_store.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "backend/first_failure.h"
#include "backend/parallel_chunks.h"
#include "base/checked.h"
#include "os/os.h"
#include "store/page_slab.h"

namespace kvasir {

using format::SectionKind;

// Bytes of slabs that are cleared between two looks at the cancel token.
constexpr std::size_t cleared_together = std::size_t{256} << 20;

std::size_t StoreShape::extent_bytes() const {
  return page.pages_size() + page.scales_bytes() + (is_selected() ? page.bounds_bytes() : 0);
}

PageStore::Spare::Spare() = default;
PageStore::Spare::Spare(const Spare&) {}
PageStore::Spare::Spare(Spare&&) noexcept = default;
PageStore::Spare& PageStore::Spare::operator=(Spare&&) noexcept = default;
PageStore::Spare::~Spare() = default;
PageStore::PageStore(const StoreShape& shape, uint32_t pages) : shape_(shape), pages_(pages) {}
PageStore::PageStore(const StoreShape& shape) : PageStore(shape, 0) {}
PageStore::PageStore(const PageStore& other) = default;
PageStore::PageStore(PageStore&&) noexcept = default;
PageStore& PageStore::operator=(PageStore&&) noexcept = default;
PageStore::~PageStore() = default;

namespace {

// Zeroes page p in the array of one head; page.h has the layout.
void clear_page(const PageShape& shape, SectionKind kind, uint32_t p, std::byte* array) {
  const auto clear = [&](std::size_t at, std::size_t size) { std::memset(array + at, 0, size); };
  const std::size_t dim = shape.dim, word = sizeof(float);
  switch (kind) {
    case SectionKind::pages:
      return clear(p * shape.page_size(), shape.page_size());
    case SectionKind::scales:
      return clear(shape.scales_bytes() / extent_pages * p, shape.scales_bytes() / extent_pages);
    case SectionKind::bounds:
      for (std::size_t b = p * shape.page_blocks(); b < (p + 1) * shape.page_blocks(); ++b) {
        const std::size_t channels =
            b / tile_blocks * 2 * dim * tile_blocks + b % tile_blocks * word;
        for (std::size_t c = 0; c < 2 * dim / 4; ++c)
          clear(channels + c * tile_blocks * word, word);
        clear(shape.extent_tiles() * 2 * dim * tile_blocks + b * word, word);
      }
      return;
    default:
      return;
  }
}

}  // namespace

void PageStore::drop(uint32_t e) { slabs_[e] = SlabRef(nullptr); }

void PageStore::skip(uint32_t extents) {
  slabs_.reserve(extents);
  while (slabs_.size() < extents) slabs_.emplace_back(nullptr);
  pages_ = extents * extent_pages;
}

bool PageStore::has(uint32_t e) const { return static_cast<bool>(slabs_[e]); }

PageStore::Runs PageStore::runs() const {
  const auto run_before = [&](uint32_t end) {
    ExtentRun run{end, end};
    while (run.begin > 0 && has(run.begin - 1)) --run.begin;
    return run;
  };
  Runs out = {run_before(extents())};
  for (;;) {
    uint32_t end = out.back().begin;
    while (end > 0 && !has(end - 1)) --end;
    if (end == 0) break;
    out.push_back(run_before(end));
  }
  std::reverse(out.begin(), out.end());
  return out;
}

Status PageStore::write(SectionKind kind,
                        const std::function<Status(const void*, std::size_t)>& write) const {
  const std::size_t bytes = array_bytes(shape_.page, kind);
  for (uint32_t e = 0; e < extents(); ++e) {
    const SlabRef& slab = slabs_[e];
    if (!slab) continue;
    const void* data = slab->array(kind);
    if (!intact_extent(kind, e)) return damaged();
    if ((e + 1) * extent_pages <= pages_) {
      Status s = write(data, bytes * shape_.heads_total());
      if (kind == SectionKind::pages) drop_resident_pages(slab, 0, pages_bytes());
      if (!s.ok()) return s;
      continue;
    }
    // After a rewind, pages that are not sealed still have the rewound tokens.
    Array<std::byte> array(bytes);
    for (std::size_t head = 0; head < shape_.heads_total(); ++head) {
      std::memcpy(array.data(), static_cast<const std::byte*>(data) + head * bytes, bytes);
      for (uint32_t p = pages_ % extent_pages; p < extent_pages; ++p)
        clear_page(shape_.page, kind, p, array.data());
      RETURN_IF_ERROR(write(array.data(), bytes));
    }
  }
  return {};
}

ExtentView PageStore::extent(uint32_t layer, uint32_t head, uint32_t e) const {
  const std::size_t at = std::size_t{layer} * shape_.kv_heads + head;
  const SlabRef& slab = slabs_[e];
  return {slab->pages + at * shape_.page.pages_size(),
          slab->scales + at * shape_.page.scales_bytes() / sizeof(uint16_t),
          slab->bounds ? slab->bounds + at * shape_.page.bounds_bytes() : nullptr};
}

PageRef PageStore::page(uint32_t layer, uint32_t head, uint32_t p) const {
  const ExtentView view = extent(layer, head, p / extent_pages);
  const uint32_t i = p % extent_pages;
  return {view.pages + i * shape_.page.page_size(),
          view.scales + std::size_t{i} * 2 * shape_.page.page_tokens,
          ~uint64_t{0} >> (64 - shape_.page.page_tokens)};
}

bool PageStore::in_mapping() const {
  return uses_mapping_ && cache_ && cache_->sizes_itself() &&
         uint64_t{pages_} * shape_.page.page_tokens <= max_tokens_in_mapping;
}

Status PageStore::fetch(uint32_t layer, uint32_t head, std::span<const uint32_t> numbers,
                        PageRef* refs, Hold* hold) const {
  hold->mapped.release();
  hold->spilled.release();
  const auto before = [&](auto&& holds) {
    return static_cast<std::size_t>(
        std::partition_point(numbers.begin(), numbers.end(),
                             [&](uint32_t p) { return holds(slabs_[p / extent_pages]); }) -
        numbers.begin());
  };
  const bool verifies = in_mapping();
  const std::size_t mapped =
      cache_ && !verifies ? before([](const SlabRef& slab) { return slab->file != nullptr; }) : 0;
  const std::size_t in_files =
      spilled_ ? before([](const SlabRef& slab) { return !slab.is_private(); }) : mapped;
  for (std::size_t i = mapped; i < numbers.size(); ++i) {
    const PageRef at = page(layer, head, numbers[i]);
    if (verifies && !intact_page(layer, head, numbers[i])) return damaged();
    refs[i].data = at.data;
    refs[i].scales = at.scales;
  }
  const uint32_t at = layer * shape_.kv_heads + head;
  if (mapped) RETURN_IF_ERROR(cache_->fetch(at, numbers.first(mapped), refs, &hold->mapped));
  if (in_files == mapped) return {};
  Array<uint32_t>& there = hold->numbers;
  there.clear();
  for (uint32_t p : numbers.subspan(mapped, in_files - mapped))
    there.push_back(slabs_[p / extent_pages]->index * extent_pages + p % extent_pages);
  return spilled_->fetch(at, there, refs + mapped, &hold->spilled);
}

void PageStore::set_cache_limit(uint64_t bytes) const {
  const uint64_t mapped = bytes == PageCache::by_itself || !spilled_
                              ? bytes
                              : bytes * (mapped_bytes() / shape_.slab_bytes()) / extents();
  if (cache_) cache_->set_limit(mapped);
  if (spilled_)
    spilled_->set_limit(!cache_ || bytes == PageCache::by_itself ? bytes : bytes - mapped);
}

PageCache::Counts PageStore::cache_counts() const {
  PageCache::Counts all = cache_ ? cache_->counts() : PageCache::Counts();
  if (!spilled_) return all;
  const PageCache::Counts spilled = spilled_->counts();
  return {all.found + spilled.found, all.read + spilled.read, all.kept + spilled.kept,
          all.bytes + spilled.bytes};
}

uint64_t PageStore::full_private_bytes() const {
  uint64_t slabs = 0;
  for (uint32_t e = 0; e < pages_ / extent_pages; ++e) slabs += slabs_[e] && slabs_[e].is_private();
  return slabs * shape_.slab_bytes();
}

PageStore::SlabRef PageStore::new_slab(SlabKind kind) const {
  const std::size_t heads = shape_.heads_total(),
                    pages = kind == SlabKind::summaries ? 0 : pages_bytes(),
                    size = shape_.slab_bytes() - pages_bytes() + pages;
  auto slab = std::make_unique<Slab>();
  slab->memory = kind == SlabKind::whole ? allocate_pages(size) : allocate_zeroed_pages(size);
  if (!slab->memory) throw std::bad_alloc();
  // All of it will be written. In huge pages it is cleared, and registered with a device, twice as
  // fast.
  os::prefer_huge_pages(slab->memory, size);
  auto* at = static_cast<int8_t*>(slab->memory);
  if (pages) slab->pages = at;
  at += pages;
  slab->scales = reinterpret_cast<const uint16_t*>(at);
  at += heads * shape_.page.scales_bytes();
  if (shape_.is_selected()) slab->bounds = at;
  return SlabRef(slab.release());
}

// Data of a file is read, not mapped: the mapping would be touched for nothing else.
Status PageStore::copy_slab(const Slab& from, SlabRef* to, ThreadPool* pool) const {
  FirstFailure failure;
  for (SectionKind kind : arrays(shape_)) {
    const uint64_t bytes = array_bytes(shape_.page, kind) * shape_.heads_total();
    auto* data = static_cast<std::byte*>(const_cast<void*>((*to)->array(kind)));
    parallel_chunks(bytes, pool, [&](uint64_t at, uint64_t size) {
      if (!from.file)
        std::memcpy(data + at, static_cast<const std::byte*>(from.array(kind)) + at, size);
      else if (Status s = from.file->copy(section_in(from, kind), from.index * bytes + at, size,
                                          data + at);
               !s.ok())
        failure.note(std::move(s));
    });
  }
  return std::move(failure).take();
}

Status PageStore::reserve(uint32_t pages, ThreadPool* pool, const Cancel* cancel) {
  return reserve(pages, 0, pool, cancel);
}

Status PageStore::reserve_filled(uint32_t pages, ThreadPool* pool, const Cancel* cancel) {
  return reserve(pages, pages / extent_pages, pool, cancel);
}

// uncleared: the first slabs, of which new ones are not cleared.
Status PageStore::reserve(uint32_t pages, uint32_t uncleared, ThreadPool* pool,
                          const Cancel* cancel) {
  if (pages <= pages_) return {};
  const uint32_t last = pages_ / extent_pages;  // the slab of the next page
  if (last < slabs_.size() && !slabs_[last].writable()) {
    SlabRef copy = new_slab(SlabKind::whole);
    RETURN_IF_ERROR(copy_slab(*slabs_[last], &copy, pool));
    slabs_[last].replace(std::move(copy));
  }
  // Slabs left by truncate().
  slabs_.resize(std::min<std::size_t>(slabs_.size(), last + 1), SlabRef(nullptr));
  const std::size_t wanted = ceil_div(pages, extent_pages);
  slabs_.reserve(wanted);
  while (slabs_.size() < wanted) {  // slabs made before a failure stay
    if (is_cancelled(cancel))
      return Status::error(Code::cancelled, "cancelled; the sequence is unchanged");
    if (spare_.slabs.empty() && slabs_.size() < uncleared)
      spare_.slabs.push_back(new_slab(SlabKind::whole));
    else if (spare_.slabs.empty())
      spare_.slabs =
          cleared_slabs(std::min(wanted - slabs_.size(),
                                 std::max<std::size_t>(1, cleared_together / shape_.slab_bytes())),
                        pool);
    slabs_.push_back(std::move(spare_.slabs.back()));
    spare_.slabs.pop_back();
  }
  return {};
}

void PageStore::touch(uint32_t layer, ExtentRun extents, ThreadPool* pool) {
  run_tasks(pool, extents.count(), [&](uint32_t task, uint32_t) {
    const Slab& slab = *slabs_[extents.begin + task];
    for (const SectionKind kind : arrays(shape_)) {
      const std::size_t bytes = array_bytes(shape_.page, kind) * shape_.kv_heads;
      auto* const at = static_cast<std::byte*>(const_cast<void*>(slab.array(kind))) + layer * bytes;
      for (std::size_t i = 0; i < bytes; i += system_page) at[i] = std::byte();
    }
  });
}

void PageStore::make_spare(uint32_t pages, ThreadPool* pool) {
  if (slabs_.size() + spare_.slabs.size() < ceil_div(pages, extent_pages))
    spare_.slabs.push_back(std::move(cleared_slabs(1, pool)[0]));
}

std::vector<PageStore::SlabRef> PageStore::cleared_slabs(std::size_t count,
                                                         ThreadPool* pool) const {
  std::vector<SlabRef> slabs;
  slabs.reserve(count);
  while (slabs.size() < count) slabs.push_back(new_slab(SlabKind::whole));
  constexpr std::size_t piece = std::size_t{2} << 20;
  const std::size_t bytes = shape_.slab_bytes(), pieces = ceil_div(bytes, piece);
  run_tasks(pool, static_cast<uint32_t>(count * pieces), [&](uint32_t task, uint32_t) {
    const std::size_t at = task % pieces * piece;
    std::memset(static_cast<std::byte*>(slabs[task / pieces]->memory) + at, 0,
                std::min(piece, bytes - at));
  });
  return slabs;
}

void PageStore::seal(const Kernels& kernels, uint32_t layer, uint32_t head, uint32_t p,
                     const float* k, const float* v) {
  const ExtentView view = extent(layer, head, p / extent_pages);
  kernels.seal_page(shape_.page, k, v, p % extent_pages, const_cast<int8_t*>(view.pages),
                    const_cast<uint16_t*>(view.scales), const_cast<int8_t*>(view.bounds));
}

void PageStore::commit(uint32_t pages) {
  for (uint32_t e = pages_ / extent_pages; e * extent_pages < pages; ++e)
    slabs_[e].touch(std::max(pages_, e * extent_pages) - e * extent_pages);
  pages_ = pages;
}

uint64_t PageStore::stamp(uint32_t e) const { return slabs_[e].stamp(); }

uint32_t PageStore::same_pages(uint32_t e, uint64_t stamp) const {
  return slabs_[e].same_pages(stamp);
}

// The `keep` of a Lasting.
class PageStore::Kept {
 public:
  explicit Kept(const SlabRef& slab) : slab_(slab) { slab_.keep(1); }
  ~Kept() { slab_.keep(-1); }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  bool is_last() const {
    return slab_->references.load(std::memory_order_acquire) ==
           slab_->kept.load(std::memory_order_acquire);
  }

 private:
  SlabRef slab_;
};

bool PageStore::is_last(const std::shared_ptr<const void>& keep) {
  return static_cast<const Kept*>(keep.get())->is_last();
}

PageStore::Lasting PageStore::lasting(uint32_t e) const {
  const SlabRef& slab = slabs_[e];
  if (slab->spill || (!slab->file && (e + 1) * extent_pages > pages_)) return {};
  auto keep = std::make_shared<const Kept>(slab);
  if (slab->file)
    return {slab->pages,
            slab->scales,
            {slab->file->bytes(section_of(shape_, SectionKind::pages)),
             slab->file->bytes(section_of(shape_, SectionKind::scales))},
            std::move(keep)};
  const std::size_t size = pages_bytes() + shape_.page.scales_bytes() * shape_.heads_total();
  return {slab->pages,
          slab->scales,
          {{static_cast<const std::byte*>(slab->memory), size}, {}},
          std::move(keep)};
}

void PageStore::drop_spare() { spare_.slabs.clear(); }

void PageStore::truncate(uint32_t pages) {
  if (pages < pages_ && pages % extent_pages > 0)
    slabs_[pages / extent_pages].touch(pages % extent_pages);
  pages_ = pages;
  slabs_.resize(extents(), SlabRef(nullptr));
  if (slabs_.empty()) cache_.reset(), spill_.reset(), spilled_.reset();
}

uint64_t PageStore::private_bytes() const {
  uint64_t bytes = spare_.slabs.size() * shape_.slab_bytes();
  for (const SlabRef& slab : slabs_)
    bytes += !slab               ? 0
             : slab.is_private() ? shape_.slab_bytes()
             : slab->spill       ? shape_.slab_bytes() - pages_bytes()
                                 : 0;
  // The store of all tokens counts for the file.
  if (const CacheFile* mapped = shape_.is_selected() ? file() : nullptr)
    bytes += mapped->private_bytes();
  return bytes + cache_counts().bytes;
}

}  // namespace kvasir
