#include "store/key_sketch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "base/checked.h"
#include "base/stamp.h"
#include "cachefile/format_fields.h"
#include "cachefile/section_floats.h"
#include "cachefile/section_rules.h"
#include "os/os.h"
#include "store/sketch_bases.h"

namespace kvasir {

using format::SectionKind;

namespace {

// Heads whose moments are in memory at once.
constexpr uint32_t group_heads = 64;
// Parts of a moment, where there are few heads. Each part reads all keys of the sample.
constexpr uint32_t max_moment_parts = 4;

// A workspace per thread, which the thread makes at its first task.
template <class W>
class Workspaces {
 public:
  explicit Workspaces(const ThreadPool& pool) : made_(pool.threads()) {}
  template <class... Args>
  W& of(uint32_t worker, const Args&... args) {
    if (!made_[worker]) made_[worker] = std::make_unique<W>(args...);
    return *made_[worker];
  }

 private:
  std::vector<std::unique_ptr<W>> made_;
};

// Finds the bases of heads of a store, by its first `count` pages.
class BasesBuild {
 public:
  BasesBuild(const PageStore& pages, uint32_t count, uint32_t heads,
             const KeySketch::QueryMoment& queries, const Kernels& kernels, ThreadPool* pool,
             const CancelLatch& latch)
      : pages_(pages), count_(count), queries_(queries), kernels_(kernels), pool_(pool),
        latch_(latch), dim_(pages.shape().page.dim), group_(std::min(group_heads, heads)),
        bounds_(moment_parts(
            dim_, std::min<uint32_t>(max_moment_parts,
                                     static_cast<uint32_t>(ceil_div(pool->threads(), group_))))),
        keys_(make_buffer<float>(group_ * square())),
        factors_(make_buffer<float>(group_ * square())), samples_(*pool), moments_(*pool),
        finders_(*pool) {}

  // a, b: of all heads of the store, [dim][sketch_dim] each; those from `first` to `end` are
  // written. Returns false if a page of a mapped file is damaged. Stops where the latch fires.
  bool run(uint32_t first, uint32_t end, float* a, float* b) {
    const uint32_t m = pages_.shape().page.sketch_dim();
    for (; first < end && intact_ && !latch_.fired(); first += group_) {
      const uint32_t count = std::min(group_, end - first);
      find_moments(first, count);
      pool_->run(count, [&](uint32_t i, uint32_t worker) {
        if (!intact_ || latch_.fired()) return;
        const std::size_t at = (std::size_t{first} + i) * dim_ * m;
        finders_.of(worker, kernels_, dim_, m)
            .find(keys_.get() + i * square(), factors_.get() + i * square(), a + at, b + at);
      });
    }
    return intact_;
  }

 private:
  std::size_t square() const { return std::size_t{dim_} * dim_; }

  // The moments of the keys, and the factors of those of queries, of a group of heads.
  void find_moments(uint32_t first, uint32_t count) {
    const auto parts = static_cast<uint32_t>(bounds_.size() - 1);
    pool_->run(count * (parts + 1), [&](uint32_t task, uint32_t worker) {
      if (!intact_ || latch_.fired()) return;
      const uint32_t i = task / (parts + 1), part = task % (parts + 1),
                     layer = (first + i) / pages_.shape().kv_heads,
                     head = (first + i) % pages_.shape().kv_heads;
      if (part < parts) {
        if (!KeySample(pages_, count_, layer, head)
                 .add(kernels_, bounds_[part], bounds_[part + 1], &samples_.of(worker),
                      keys_.get() + i * square()))
          intact_ = false;
        return;
      }
      std::vector<double>& moment = moments_.of(worker);
      moment.assign(square(), 0.0);
      if (queries_) queries_(layer, head, moment.data());
      factor_queries(kernels_, moment, dim_, factors_.get() + i * square());
    });
  }

  const PageStore& pages_;
  uint32_t count_;
  const KeySketch::QueryMoment& queries_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  const CancelLatch& latch_;
  uint32_t dim_, group_;
  std::vector<uint32_t> bounds_;  // of the parts of a moment
  Buffer<float> keys_, factors_;  // [group_][dim_][dim_]
  Workspaces<KeySample::Workspace> samples_;
  Workspaces<std::vector<double>> moments_;
  Workspaces<BasisFinder> finders_;
  std::atomic<bool> intact_{true};
};

// Zeroes page p of an extent for all heads; page.h has the layout.
void clear_page(const StoreShape& shape, uint32_t p, int8_t* extent) {
  const PageShape& page = shape.page;
  const std::size_t lines = std::size_t{quad_tokens} * page.sketch_dim() / 8,
                    tile_bytes = lines * tile_blocks * 4;
  for (uint32_t at = 0; at < shape.heads_total(); ++at, extent += page.sketch_bytes())
    for (uint32_t i = p * page.page_quads(); i < (p + 1) * page.page_quads(); ++i) {
      int8_t* quad = extent + i / tile_blocks * tile_bytes + i % tile_blocks * 4;
      for (std::size_t line = 0; line < lines; ++line)
        std::memset(quad + line * tile_blocks * 4, 0, 4);
      std::memset(extent + page.quad_tiles() * tile_bytes + i * sizeof(uint16_t), 0,
                  sizeof(uint16_t));
    }
}

}  // namespace

// Not cleared.
KeySketch::Extent KeySketch::new_extent() const {
  auto* memory = static_cast<int8_t*>(allocate(extent_bytes()));
  if (!memory) throw std::bad_alloc();
  std::shared_ptr<int8_t> owner(memory, [](int8_t* p) { deallocate(p); });
  return {memory, std::move(owner), new_stamp()};
}

void KeySketch::seal(Extent* extent, const PageStore& pages, const Bases& bases, uint32_t at,
                     uint32_t page, const Kernels& kernels) const {
  const PageRef ref = pages.page(at / shape_.kv_heads, at % shape_.kv_heads, page);
  kernels.seal_sketch(shape_.page, bases.data + at * basis_floats(), ref.data, ref.scales,
                      page % extent_pages, extent->memory.get() + at * shape_.page.sketch_bytes());
}

// The same for any number of threads, as the bases are: layers find them in different steps. With
// more heads a GPU waits for them.
uint32_t KeySketch::group_layers() const {
  constexpr uint32_t heads = 8;
  return static_cast<uint32_t>(ceil_div(heads, shape_.kv_heads));
}

void KeySketch::begin(Build* build) const {
  build->bases_ = std::make_shared<Bases>(2 * shape_.heads_total() * basis_floats());
  build->extents_.clear(), build->behind_.clear();
  build->found_.assign(shape_.layers, false);
  build->covered_.assign(shape_.layers, 0);
}

// By the first `count` pages. False: a page of a mapped file is damaged.
bool KeySketch::find_bases(const PageStore& pages, uint32_t count, Layers layers,
                           const QueryMoment& queries, const Kernels& kernels, ThreadPool* pool,
                           const CancelLatch& latch, Build* build) const {
  float* const a = build->bases_->floats.get();
  const uint32_t heads = shape_.kv_heads;
  return BasesBuild(pages, count, (layers.end - layers.first) * heads, queries, kernels, pool,
                    latch)
      .run(layers.first * heads, layers.end * heads, a, a + shape_.heads_total() * basis_floats());
}

// New extents are not cleared: cover() does that.
void KeySketch::make_room(uint32_t count, Build* build) const {
  const std::size_t extents = ceil_div(count, extent_pages);
  build->extents_.reserve(extents);
  while (build->extents_.size() < extents) build->extents_.push_back(new_extent());
}

// Adds the pages before `count` that layers with bases miss, for which there is room. The first
// page of a head's extent clears it: clearing the memory of all layers in one step stops a GPU for
// 0.3 s (131,072 tokens, 8B shape). False: a page of a mapped file is damaged.
bool KeySketch::cover(const PageStore& pages, uint32_t count, Layers layers, const Kernels& kernels,
                      ThreadPool* pool, const CancelLatch& latch, Build* build) const {
  const auto extents = static_cast<uint32_t>(ceil_div(count, extent_pages));
  const std::vector<uint32_t>& covered = build->covered_;
  const uint32_t first = layers.first * shape_.kv_heads,
                 heads = (layers.end - layers.first) * shape_.kv_heads,
                 first_extent = *std::min_element(covered.begin() + layers.first,
                                                  covered.begin() + layers.end) /
                                extent_pages;
  std::atomic<bool> intact{true};
  pool->run((extents - std::min(first_extent, extents)) * heads, [&](uint32_t task, uint32_t) {
    const uint32_t at = first + task % heads, e = first_extent + task / heads,
                   layer = at / shape_.kv_heads, head = at % shape_.kv_heads;
    const std::size_t bytes = shape_.page.sketch_bytes();
    if (!intact || latch.fired()) return;
    if (covered[layer] <= e * extent_pages)
      std::memset(build->extents_[e].memory.get() + at * bytes, 0, bytes);
    for (uint32_t p = std::max(e * extent_pages, covered[layer]);
         p < std::min(count, (e + 1) * extent_pages); ++p) {
      if (!intact || latch.fired()) return;
      if (pages.intact_page(layer, head, p))
        seal(&build->extents_[e], pages, *build->bases_, at, p, kernels);
      else intact = false;
    }
  });
  return intact;
}

Status KeySketch::build(const PageStore& pages, const QueryMoment& queries, const Kernels& kernels,
                        ThreadPool* pool, const Cancel* cancel) {
  if (pages.pages() == 0) return {};
  const CancelLatch latch(cancel);
  const uint32_t count = pages.pages();
  const Layers all{0, shape_.layers};
  Build made;
  begin(&made);
  make_room(count, &made);
  if (!find_bases(pages, count, all, queries, kernels, pool, latch, &made) ||
      !cover(pages, count, all, kernels, pool, latch, &made))
    return pages.damaged();
  if (latch.fired())
    return Status::error(Code::cancelled, "cancelled; the sketch of the keys is unchanged");
  replace(std::move(made), count);
  return {};
}

// Of the last layers first, in whole extents.
void KeySketch::cover_next(const PageStore& pages, uint32_t count, const Kernels& kernels,
                           ThreadPool* pool, const Cancel* cancel, Build* build) const {
  constexpr uint32_t least = 512;  // pages
  const CancelLatch latch(cancel);
  std::vector<uint32_t>& behind = build->behind_;
  if (!build->covers_ || behind.empty()) return;
  make_room(count, build);
  for (uint32_t left = std::max(least, count / build->parts_);
       left >= extent_pages && !behind.empty();) {
    const uint32_t layer = behind.back(), begin = build->covered_[layer],
                   end = std::min(count, (begin + left) / extent_pages * extent_pages);
    const bool covers = cover(pages, end, {layer, layer + 1}, kernels, pool, latch, build);
    if (covers && !latch.fired()) build->covered_[layer] = end;
    if (!covers || latch.fired() || end == count) behind.pop_back();
    left -= std::min(left, end - begin);
  }
}

void KeySketch::add_layer(const PageStore& pages, uint32_t count, uint32_t layer,
                          const QueryMoment& queries, const Kernels& kernels, ThreadPool* pool,
                          const Cancel* cancel, Build* build) const {
  constexpr std::size_t most_behind = 2;  // layers: with more, take() would have much to do
  const CancelLatch latch(cancel);
  std::vector<uint32_t>& behind = build->behind_;
  behind.reserve(shape_.layers);
  if (build->found_[layer] && build->covered_[layer] < count) behind.push_back(layer);
  const Layers group{group_begin(layer), layer + 1};
  const bool finds = !build->found_[layer] &&
                     group.end == std::min(group.first + group_layers(), shape_.layers) &&
                     ++build->groups_ % build->steps_left_ == 0;
  if (finds && find_bases(pages, count, group, queries, kernels, pool, latch, build) &&
      !latch.fired())
    for (uint32_t l = group.first; l < group.end; ++l) build->found_[l] = true, behind.push_back(l);
  if (!finds || behind.size() > most_behind) cover_next(pages, count, kernels, pool, cancel, build);
}

bool KeySketch::take(const PageStore& pages, const Kernels& kernels, ThreadPool* pool,
                     const Cancel* cancel, Build&& build) {
  const CancelLatch latch(cancel);
  const uint32_t count = pages.pages();
  const std::vector<uint32_t>& covered = build.covered();
  if (!build.complete() || *std::max_element(covered.begin(), covered.end()) > count) return false;
  make_room(count, &build);
  if (!cover(pages, count, {0, shape_.layers}, kernels, pool, latch, &build) || latch.fired())
    return false;
  replace(std::move(build), count);
  return true;
}

void KeySketch::replace(Build&& build, uint32_t pages) {
  bases_ = std::move(build.bases_);
  basis_stamp_ = new_stamp();
  extents_ = std::move(build.extents_);
  file_.reset();
  pages_ = built_pages_ = pages;
}

Status KeySketch::reserve(uint32_t pages, ThreadPool* pool) {
  if (!built() || pages <= pages_) return {};
  const uint32_t last = pages_ / extent_pages;  // the extent of the next page
  extents_.resize(std::min<std::size_t>(extents_.size(), last + 1));
  if (last < extents_.size() && !(extents_[last].memory && is_sole(extents_[last].memory))) {
    Extent copy = new_extent();
    if (!extents_[last].memory)
      for (uint32_t at = 0; at < shape_.heads_total(); ++at)
        if (!intact(at / shape_.kv_heads, at % shape_.kv_heads, last)) return damaged();
    std::memcpy(copy.memory.get(), extents_[last].data, extent_bytes());
    extents_[last] = std::move(copy);
  }
  const std::size_t wanted = ceil_div(pages, extent_pages);
  std::vector<Extent> more;
  more.reserve(wanted - std::min(wanted, extents_.size()));
  while (extents_.size() + more.size() < wanted) more.push_back(new_extent());
  run_tasks(pool, static_cast<uint32_t>(more.size()),
            [&](uint32_t i, uint32_t) { std::memset(more[i].memory.get(), 0, extent_bytes()); });
  extents_.insert(extents_.end(), std::make_move_iterator(more.begin()),
                  std::make_move_iterator(more.end()));
  return {};
}

// Pages up to `end` of some heads, which are counted over all layers.
void KeySketch::append_heads(const PageStore& pages, uint32_t first_head, uint32_t heads,
                             uint32_t end, const Kernels& kernels, ThreadPool* pool,
                             const CancelLatch& latch) {
  const uint32_t first = pages_ / extent_pages, extents = (end - 1) / extent_pages + 1 - first;
  pool->run(built() && end > pages_ ? heads * extents : 0, [&](uint32_t task, uint32_t) {
    const uint32_t at = first_head + task % heads, e = first + task / heads,
                   last = latch.fired() ? 0 : std::min(end, (e + 1) * extent_pages);
    for (uint32_t p = std::max(pages_, e * extent_pages); p < last; ++p)
      seal(&extents_[e], pages, *bases_, at, p, kernels);
  });
}

bool KeySketch::append(const PageStore& pages, const Kernels& kernels, ThreadPool* pool,
                       const Cancel* cancel) {
  if (!built() || pages.pages() <= pages_) return true;
  const CancelLatch latch(cancel);
  append_heads(pages, 0, shape_.heads_total(), pages.pages(), kernels, pool, latch);
  return !latch.fired() && (appended(pages), true);
}

void KeySketch::appended(const PageStore& pages) {
  if (!built() || pages.pages() <= pages_) return;
  for (uint32_t e = pages_ / extent_pages; e < pages.extents(); ++e)
    extents_[e].stamp = new_stamp();
  pages_ = pages.pages();
}

void KeySketch::truncate(uint32_t pages) {
  if (pages >= pages_) return;
  if (pages == 0) return clear();
  pages_ = pages;
  built_pages_ = std::min(built_pages_, pages);
  extents_.resize(ceil_div(pages, extent_pages));
}

void KeySketch::clear() {
  pages_ = built_pages_ = 0;
  bases_.reset();
  extents_.clear();
  file_.reset();
}

const int8_t* KeySketch::extent(uint32_t layer, uint32_t head, uint32_t e) const {
  return extents_[e].data +
         (std::size_t{layer} * shape_.kv_heads + head) * shape_.page.sketch_bytes();
}

const float* KeySketch::query_basis(uint32_t layer, uint32_t head) const {
  return bases_->data +
         (shape_.heads_total() + std::size_t{layer} * shape_.kv_heads + head) * basis_floats();
}

bool KeySketch::intact(uint32_t layer, uint32_t head, uint32_t e) const {
  if (extents_[e].memory) return true;
  const uint64_t at = extents_at_ + uint64_t{e} * extent_bytes() +
                      (uint64_t{layer} * shape_.kv_heads + head) * shape_.page.sketch_bytes();
  return file_->check(*file_->find(SectionKind::sketch), at, shape_.page.sketch_bytes());
}

Status KeySketch::copy(uint32_t e, uint32_t first, uint32_t heads, std::byte* to) const {
  const std::size_t at = first * shape_.page.sketch_bytes(),
                    size = heads * shape_.page.sketch_bytes();
  if (!extents_[e].memory)
    return file_->copy(*file_->find(SectionKind::sketch),
                       extents_at_ + uint64_t{e} * extent_bytes() + at, size, to);
  std::memcpy(to, extents_[e].data + at, size);
  return {};
}

Status KeySketch::damaged() const {
  if (file_) RETURN_IF_ERROR(file_->failure());
  return Status::error(Code::internal, "a sketch was reported as damaged and is not");
}

uint64_t KeySketch::private_bytes() const {
  uint64_t bytes = bases_ && bases_->floats ? bases_->size * sizeof(float) : 0;
  for (const Extent& e : extents_) bytes += e.memory ? extent_bytes() : 0;
  return bytes;
}

uint64_t KeySketch::head_bytes() const {
  return round_up(basis_bytes() + format::sketch_counts_bytes, format::block_bytes);
}

uint64_t KeySketch::file_bytes() const {
  return built() ? head_bytes() + ceil_div(pages_, extent_pages) * extent_bytes() : 0;
}

Status KeySketch::write(const std::function<Status(const void*, std::size_t)>& write) const {
  if (!built()) return {};
  Array<std::byte> head(head_bytes());
  auto* floats = std::copy_n(bases_->data, bases_->size, reinterpret_cast<float*>(head.data()));
  const uint32_t counts[] = {built_pages_, pages_};
  std::memcpy(floats, counts, sizeof counts);
  RETURN_IF_ERROR(write(head.data(), head.size()));
  Array<int8_t> last;
  // A failed step may have made room for more.
  for (std::size_t e = 0; e < ceil_div(pages_, extent_pages); ++e) {
    for (uint32_t at = 0; at < shape_.heads_total(); ++at)
      if (!intact(at / shape_.kv_heads, at % shape_.kv_heads, static_cast<uint32_t>(e)))
        return damaged();
    const bool whole = (e + 1) * extent_pages <= pages_;
    if (!whole) {  // after a rewind it still has the rewound pages
      last.assign(extents_[e].data, extents_[e].data + extent_bytes());
      for (uint32_t p = pages_ % extent_pages; p < extent_pages; ++p)
        clear_page(shape_, p, last.data());
    }
    RETURN_IF_ERROR(write(whole ? extents_[e].data : last.data(), extent_bytes()));
  }
  return {};
}

const char* KeySketch::wrong(uint32_t pages) const {
  if (!built()) return nullptr;
  if (const char* reason = wrong_sketch(built_pages_, pages_, pages)) return reason;
  return wrong_floats({bases_->data, bases_->size});
}

// The sizes of a mapped sketch.
Status KeySketch::check_map(const CacheFile& file, const KeySketch& sketch, uint32_t pages,
                            uint32_t* built_pages) {
  const CacheFile::Section& section = *file.find(SectionKind::sketch);
  const auto corrupt = [&](const char* reason) {
    return Status::error(Code::corrupt, "%s: section 'sketch' %s; nothing was loaded",
                         file.path().c_str(), reason);
  };
  const uint64_t extents = ceil_div(pages, extent_pages);
  if (pages == 0 || section.bytes != sketch.head_bytes() + extents * sketch.extent_bytes())
    return corrupt("does not have the size of the pages' sketch");
  uint32_t counts[2];
  RETURN_IF_ERROR(file.copy(section, sketch.basis_bytes(), sizeof counts,
                            reinterpret_cast<std::byte*>(counts)));
  if (const char* reason = wrong_sketch(counts[0], counts[1], pages)) return corrupt(reason);
  *built_pages = counts[0];
  return {};
}

void KeySketch::map_extents(std::shared_ptr<const CacheFile> file, uint32_t pages,
                            uint32_t built_pages, std::shared_ptr<const Bases> bases) {
  bases_ = std::move(bases);
  basis_stamp_ = new_stamp();
  built_pages_ = built_pages, pages_ = pages;
  extents_at_ = head_bytes();
  const auto* data =
      reinterpret_cast<const int8_t*>(file->bytes(SectionKind::sketch).data() + extents_at_);
  for (uint64_t e = 0; e < ceil_div(pages, extent_pages); ++e)
    extents_.push_back({data + e * extent_bytes(), nullptr, new_stamp()});
  file_ = std::move(file);
}

Status KeySketch::map(const StoreShape& shape, std::shared_ptr<const CacheFile> file,
                      uint32_t pages, ThreadPool* pool, const Cancel* cancel, KeySketch* out) {
  KeySketch sketch(shape);
  uint32_t built_pages = 0;
  RETURN_IF_ERROR(check_map(*file, sketch, pages, &built_pages));
  const auto bytes = static_cast<std::size_t>(sketch.basis_bytes());
  auto bases = std::make_shared<Bases>(bytes / sizeof(float));
  os::prefer_huge_pages(bases->floats.get(), bytes);
  RETURN_IF_ERROR(copy_floats(*file, *file->find(SectionKind::sketch), 0, 1, bases->size, pool,
                              cancel, [&](uint64_t) { return bases->floats.get(); }));
  sketch.map_extents(std::move(file), pages, built_pages, std::move(bases));
  *out = std::move(sketch);
  return {};
}

Status KeySketch::map_in_place(const StoreShape& shape, std::shared_ptr<const CacheFile> file,
                               uint32_t pages, KeySketch* out) {
  KeySketch sketch(shape);
  uint32_t built_pages = 0;
  RETURN_IF_ERROR(check_map(*file, sketch, pages, &built_pages));
  auto bases = std::make_shared<Bases>(
      reinterpret_cast<const float*>(file->bytes(SectionKind::sketch).data()),
      static_cast<std::size_t>(sketch.basis_bytes() / sizeof(float)));
  sketch.map_extents(std::move(file), pages, built_pages, std::move(bases));
  *out = std::move(sketch);
  return {};
}

Status KeySketch::check_bases(uint32_t layer) const {
  if (!bases_ || bases_->floats) return {};
  const std::size_t floats = shape_.kv_heads * basis_floats();
  const float* const at = query_basis(layer, 0);
  const CacheFile::Section& section = *file_->find(SectionKind::sketch);
  if (!file_->check(section, static_cast<uint64_t>(at - bases_->data) * sizeof(float),
                    floats * sizeof(float)))
    return damaged();
  return wrong_floats({at, floats}) ? not_finite(*file_, section) : Status();
}

}  // namespace kvasir
