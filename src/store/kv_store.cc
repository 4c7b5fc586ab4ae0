#include "store/kv_store.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>
#include <utility>

#include "backend/parallel_chunks.h"
#include "base/checked.h"
#include "base/stamp.h"
#include "cachefile/section_floats.h"
#include "os/os.h"
#include "store/window_rows.h"

namespace kvasir {

// Bytes per page and head in the table of cached pages: four, and half as many again where it
// grows.
constexpr uint64_t table_entry = 6;

KvStore::KvStore(const StoreShape& shape, uint32_t window_tokens)
    : pages_(shape), sketch_(shape), representatives_(shape, window_tokens),
      window_tokens_(window_tokens) {
  if (shape.window == 0) return;
  representatives_.drop();
  if (window_tokens != keep_all)
    window_tokens_ = static_cast<uint32_t>(std::min<uint64_t>(window_tokens, shape.window));
}

float* KvStore::window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row) {
  return const_cast<float*>(std::as_const(*this).window_row(layer, head, which, row));
}

const float* KvStore::window_row(uint32_t layer, uint32_t head, uint32_t which,
                                 uint32_t row) const {
  const uint32_t planes = shape().page.planes();  // where values are keys, both are the same row
  return plane((uint64_t{layer} * shape().kv_heads + head) * planes + which % planes) +
         std::size_t{row} * shape().page.dim;
}

KvStore::Rows KvStore::window(uint32_t layer, uint32_t head) const {
  return {window_row(layer, head, 0, 0), window_row(layer, head, 1, 0)};
}

KvStore::Rows KvStore::sinks(uint32_t layer, uint32_t head) const {
  const std::size_t size = std::size_t{shape().page.page_tokens} * shape().page.dim;
  const uint32_t planes = shape().page.planes();
  const float* k = sinks_.get() + (std::size_t{layer} * shape().kv_heads + head) * planes * size;
  return {k, k + (planes - 1) * size};
}

// Rows of room for a window that needs `rows` now. During prefill it gets the room of the largest
// step, because each move takes as long as a token. In full precision it only grows.
uint32_t KvStore::capacity_for(uint32_t rows) const {
  const uint64_t page = shape().page.page_tokens;
  uint64_t wanted = std::max(rows, window_count_);
  if (window_tokens_ != keep_all && window_count_ >= window_tokens_)
    wanted = std::max(wanted,
                      std::max<uint64_t>(window_count_, window_tokens_ + page) + page + spare_rows);
  else if (window_tokens_ == keep_all && rows > capacity_)
    wanted =
        std::max<uint64_t>(wanted, capacity_ > 0 ? uint64_t{capacity_} * 3 / 2
                                                 : rows + (window_count_ > 0 ? spare_rows : 0));
  // See min_bytes().
  if (budget_.bytes)
    wanted = std::max<uint64_t>(
        rows,
        std::min<uint64_t>(wanted, uint64_t{window_tokens_} + budget_.step_tokens + 2 * page));
  return static_cast<uint32_t>(round_up(wanted, capacity_step));
}

// All threads write a large window. few: of each plane only the first and the last rows.
static std::shared_ptr<float[]> make_rows(std::size_t floats, bool few = false) {
  std::shared_ptr<float[]> rows = make_buffer<float>(floats);
  const std::size_t bytes = floats * sizeof(float);
  few ? os::prefer_small_pages(rows.get(), bytes) : os::prefer_huge_pages(rows.get(), bytes);
  return rows;
}

// Provides `rows` writable rows behind the committed ones; `alters`: the committed ones are
// writable too. Moves them to the beginning of the buffer, to a larger one, or to one without
// copies of the sequence. The old buffer stays until the new one is complete. In full precision it
// may have gigabytes, so a cancellation is tested between two planes of a copy.
Status KvStore::own_window(uint32_t rows, bool alters, ThreadPool* pool, const Cancel* cancel,
                           bool few) {
  const bool sole = is_sole(window_);
  appends_.here = sole || (appends_.here && !alters);
  if (appends_.here && first_row_ + rows <= capacity_) return {};
  const std::size_t dim = shape().page.dim, size = window_count_ * dim;
  const uint32_t planes = this->planes(), tasks = window_count_ > 0 ? planes : 0;
  if (sole && rows <= capacity_) {
    run_tasks(pool, tasks, [&](uint32_t p, uint32_t) {
      std::memmove(plane(p) - first_row_ * dim, plane(p), size * sizeof(float));
    });
    first_row_ = 0;
    return {};
  }
  const uint32_t capacity = capacity_for(rows);
  std::shared_ptr<float[]> own = make_rows(std::size_t{planes} * capacity * dim, few);
  const CancelLatch latch(cancel);
  run_tasks(pool, tasks, [&](uint32_t p, uint32_t) {
    if (!latch.fired()) std::copy_n(plane(p), size, own.get() + std::size_t{p} * capacity * dim);
  });
  if (latch.fired()) return Status::error(Code::cancelled, "cancelled; the sequence is unchanged");
  window_ = std::move(own);
  rows_file_.reset();
  capacity_ = capacity;
  first_row_ = 0;
  appends_.here = true;
  return {};
}

Status check_memory_budget(const MemoryBudget& budget, bool full_precision) {
  if (budget.bytes == 0) return {};
  if (full_precision)
    return Status::error(
        Code::bad_argument,
        "memory_limit is set: keys and values in full precision are kept in memory");
  os::File trial;
  return os::File::create_nameless(budget.spill_folder, &trial);
}

uint64_t KvStore::min_bytes(uint64_t tokens, uint32_t step) const {
  const PageShape& page = shape().page;
  const uint64_t heads = shape().heads_total(), extents = ceil_div(tokens, page.extent_tokens());
  const uint64_t summaries =
      shape().extent_bytes() - page.pages_size() + page.sketch_bytes() + extent_pages * table_entry;
  const uint64_t rows =
      page.planes() * heads *
      (uint64_t{window_tokens_} + step + 2 * page.page_tokens + capacity_step + 1) * page.dim *
      sizeof(float);
  // Slabs that a step fills; the first one may be partly full before it.
  const uint64_t slabs = ceil_div(step, page.extent_tokens()) + 1,
                 appended = rows_file_ ? 0 : rows + slabs * shape().slab_bytes();
  return extents * heads * summaries + appended + indexes_.private_bytes() +
         (rows_file_ ? 0 : sketch_.basis_bytes()) + representatives_.max_bytes(tokens, step) +
         pages_.table_bytes() +
         max_bytes(budget_.windows, window_tokens_, tokens, step, budget_.checkpoints) +
         budget_.states + drafts_bytes(tokens, step);
}

// What the MTP layer keeps of the sequence, of a copy to which it goes back, and of the rows behind
// the first draft, which are in a copy too. Up to `pending` rows wait for the next ones.
uint64_t KvStore::drafts_bytes(uint64_t tokens, uint32_t step) const {
  constexpr uint64_t pending = 64, copies = 3;
  const StoreShape& shape = budget_.drafts;
  if (shape.layers == 0) return 0;
  const PageShape& page = shape.page;
  const uint64_t extent = page.extent_tokens(), added = step + pending,
                 slabs = ceil_div(tokens, extent) + ceil_div(added, extent) + copies,
                 rows = copies * (window_tokens_ + added + 2 * page.page_tokens + spare_rows +
                                  capacity_step) +
                        page.page_tokens + 1;
  return slabs * shape.slab_bytes() + (rows * page.planes() * shape.heads_total() * page.dim +
                                       2 * (added + 1) * budget_.hidden_width) *
                                          sizeof(float);
}

Status KvStore::check_budget(uint64_t tokens, uint64_t more, uint32_t step) const {
  step = std::max(step, budget_.step_tokens);
  const uint64_t min_bytes_needed = min_bytes(tokens, step) + more;
  if (budget_.bytes == 0 || min_bytes_needed <= budget_.bytes) return {};
  return Status::error(Code::limit,
                       "memory_limit is %" PRIu64 " bytes: of %" PRIu64
                       " tokens, in steps of up to %u, window, summaries, indexes and "
                       "the pages of a step alone take %" PRIu64,
                       budget_.bytes, tokens, step, min_bytes_needed);
}

Status KvStore::set_budget(const MemoryBudget& budget, uint64_t tokens, const Cancel* cancel) {
  budget_ = budget;
  drop_resident_ = budget_.bytes != 0;
  return keep_within_budget(tokens, 0, 0, cancel);
}

// The budget beyond the minimum is for selected pages of files, and a quarter of it for full slabs,
// which are spilled a few at a time. While nothing is in a file, all of it is for slabs.
Status KvStore::keep_within_budget(uint64_t tokens, uint64_t more, uint32_t step,
                                   const Cancel* cancel) {
  if (budget_.bytes == 0) return {};
  RETURN_IF_ERROR(check_budget(tokens, more, step));
  const uint64_t room =
      budget_.bytes - min_bytes(tokens, std::max(step, budget_.step_tokens)) - more;
  const uint64_t for_slabs = pages_.file_pages_bytes() > 0 ? room / 4 : room;
  const uint32_t then = std::max(pages_after(tokens), pages_.pages());
  const uint64_t coming =
      uint64_t{then / extent_pages - pages_.pages() / extent_pages} * shape().slab_bytes();
  const uint64_t full = pages_.full_private_bytes();
  const bool spills = full > 0 && full + coming > for_slabs;
  const uint64_t kept = std::min(room / 8, for_slabs - std::min(for_slabs, coming));
  if (spills) RETURN_IF_ERROR(pages_.spill(budget_.spill_folder, budget_.reaper, kept, cancel));
  const uint64_t limit = room - room / 4;
  if (spills || cache_limit_ == PageCache::by_itself || limit < cache_limit_ ||
      limit / 2 > cache_limit_) {
    cache_limit_ = limit - limit / 8;  // room to shrink: a new limit empties the cache
    // The scales of cached pages, and their table, take up to a fifteenth as much.
    pages_.set_cache_limit(cache_limit_ - cache_limit_ / 16);
  }
  const bool fits =
      pages_.file_pages_bytes() + pages_.full_private_bytes() + pages_.cache_counts().bytes <= room;
  if (const bool before = std::exchange(drop_resident_, !fits); !fits && !before)
    drop_resident_pages();
  return {};
}

Status KvStore::shrink(const Cancel* cancel) {
  if (budget_.bytes == 0) return {};
  RETURN_IF_ERROR(pages_.spill(budget_.spill_folder, budget_.reaper, 0, cancel));
  cache_limit_ = PageCache::by_itself;
  pages_.set_cache_limit(0);
  return {};
}

Status KvStore::prepare(uint32_t n, Overlap overlap, ThreadPool* pool) {
  RETURN_IF_ERROR(prepare_rows(n, overlap, pool));
  return prepare_pages(n, pool);
}

Status KvStore::prepare_rows(uint32_t n, Overlap overlap, ThreadPool* pool, const Cancel* cancel,
                             bool few) {
  RETURN_IF_ERROR(keep_within_budget(tokens() + n, 0, n, cancel));
  // All steps of a prefill but the first follow a window; the first makes the room for it, and not
  // for more than the step has.
  const bool text = n > capacity_step && window_tokens_ != keep_all;
  const uint32_t sealed = pages_after(window_count_ + n);
  const uint32_t kept =
      text ? std::min(window_tokens_ + shape().page.page_tokens, window_count_ + n) : 0;
  const bool alters = sealed > 0 && centre_.empty();
  RETURN_IF_ERROR(own_window(std::max(window_count_, kept) + n, alters, pool, cancel, few));
  sealed_ahead_.assign(shape().layers, false), sketched_.assign(shape().layers, 0);
  centre_ahead_.clear(), in_span_ = false;
  budget_.step_tokens = std::max(budget_.step_tokens, n);  // the window does not shrink
  return representatives_.prepare(n, pages_.pages() + sealed, pages_, overlap);
}

Status KvStore::prepare_pages(uint32_t n, ThreadPool* pool, const Cancel* cancel) {
  return reserve_sealed(pages_after(window_count_ + n), false, pool, cancel);
}

// Makes room for so many more pages. filled: see PageStore::reserve_filled().
Status KvStore::reserve_sealed(uint32_t sealed, bool filled, ThreadPool* pool,
                               const Cancel* cancel) {
  if (sealed == 0) return {};
  const std::size_t dim = shape().page.dim;
  if (shape().window == 0 && (!sinks_ || (pages_.pages() == 0 && !is_sole(sinks_)))) {
    std::shared_ptr<float[]> clear = make_buffer<float>(sinks_room());
    parallel_chunks(sinks_room() * sizeof(float), pool, [&](std::size_t at, std::size_t bytes) {
      std::memset(clear.get() + at / sizeof(float), 0, bytes);
    });
    sinks_ = std::move(clear);
  }
  centre_.reserve(shape().heads_total() * dim);
  const uint32_t all = pages_.pages() + sealed;
  RETURN_IF_ERROR(filled ? pages_.reserve_filled(all, pool, cancel)
                         : pages_.reserve(all, pool, cancel));
  return sketch_.reserve(pages_.pages() + sealed, pool);
}

Status KvStore::build_sketch(const KeySketch::QueryMoment& queries, const Kernels& kernels,
                             ThreadPool* pool, const Cancel* cancel, uint32_t open) {
  Status s = sketch_.build(pages_, queries, kernels, pool, cancel);
  drop_resident_pages();
  const uint32_t sealed = pages_after(window_count_ + open);
  if (!s.ok() || sealed == 0) return s;
  try {
    s = sketch_.reserve(pages_.pages() + sealed, pool);
  } catch (...) {
    sketch_.clear();  // commit() must not fail without room
    throw;
  }
  if (!s.ok()) sketch_.clear();
  return s;
}

void KvStore::add_to_sketch(uint32_t layer, uint32_t n, const KeySketch::QueryMoment& queries,
                            const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
                            KeySketch::Build* build) const {
  // Another executor may have computed layers before it, whose pages are sealed by the commit.
  const uint32_t sealed = pages_after(window_count_ + n);
  for (uint32_t l = sketch_.group_begin(layer); l <= layer && sealed > 0; ++l)
    if (!sealed_ahead_[l]) return;
  add_pages_to_sketch(layer, pages_.pages() + sealed, queries, kernels, pool, cancel, build);
}

void KvStore::add_pages_to_sketch(uint32_t layer, uint32_t count,
                                  const KeySketch::QueryMoment& queries, const Kernels& kernels,
                                  ThreadPool* pool, const Cancel* cancel,
                                  KeySketch::Build* build) const {
  if (count == 0 || build->is_abandoned()) return;
  try {
    if (!build->begun()) sketch_.begin(build);
    if (layer == no_layer) sketch_.cover_next(pages_, count, kernels, pool, cancel, build);
    else sketch_.add_layer(pages_, count, layer, queries, kernels, pool, cancel, build);
  } catch (const std::bad_alloc&) {
    build->abandon();
  }
}

bool KvStore::take_sketch(KeySketch::Build&& build, const Kernels& kernels, ThreadPool* pool,
                          const Cancel* cancel) {
  try {
    const bool taken = sketch_.take(pages_, kernels, pool, cancel, std::move(build));
    drop_resident_pages();
    return taken;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void KvStore::write(uint32_t layer, uint32_t n, const float* k, const float* v, ThreadPool* pool) {
  run_tasks(pool, 2 * shape().kv_heads, [&](uint32_t task, uint32_t) {
    task % 2 ? write_values(layer, task / 2, {0, n}, v) : write_keys(layer, task / 2, {0, n}, k);
  });
}

void KvStore::observe(uint32_t layer, uint32_t n, const float* q, uint32_t heads) {
  for (uint32_t h = 0; h < shape().kv_heads; ++h) observe(layer, h, n, q, heads);
}

void KvStore::observe(uint32_t layer, uint32_t head, uint32_t n, const float* q, uint32_t heads) {
  const uint32_t kv_heads = shape().kv_heads, group = heads / kv_heads,
                 head_dim = shape().page.head_dim;
  const float* centre =
      centre_.empty() ? nullptr
                      : centre_.data() + (std::size_t{layer} * kv_heads + head) * shape().page.dim;
  representatives_.observe(
      layer, head, {window_row(layer, head, 0, 0), window_count_, centre}, n,
      {q + std::size_t{head} * group * head_dim, group, std::size_t{heads} * head_dim});
}

void KvStore::commit(uint32_t n, const Kernels& kernels, ThreadPool* pool) {
  const uint32_t count = window_count_ + n;
  const uint32_t sealed = pages_after(count);
  window_count_ = count;
  window_stamp_ = new_stamp();
  if (sealed == 0) {
    drop_unseen();
    return representatives_.commit(n, pages_, pool);
  }
  const uint32_t first = pages_.pages(), tokens = shape().page.page_tokens, dim = shape().page.dim;
  if (centre_.empty()) begin_centre(count, pool);
  if (first == 0 && sinks_) {
    sinks_stamp_ = new_stamp();
    const std::size_t size = std::size_t{tokens} * dim;
    run_tasks(pool, planes(),
              [&](uint32_t i, uint32_t) { std::copy_n(plane(i), size, sinks_.get() + i * size); });
  }
  const bool ahead =
      std::find(sealed_ahead_.begin(), sealed_ahead_.end(), false) == sealed_ahead_.end();
  pool->run(ahead ? 0 : shape().heads_total(), [&](uint32_t task, uint32_t) {
    const uint32_t l = task / shape().kv_heads, h = task % shape().kv_heads;
    for (uint32_t p = 0; p < sealed && !sealed_ahead_[l]; ++p)
      pages_.seal(kernels, l, h, first + p, window_row(l, h, 0, p * tokens),
                  window_row(l, h, 1, p * tokens));
  });
  first_row_ += sealed * tokens;  // the other rows stay in place
  window_count_ = count - sealed * tokens;
  pages_.commit(first + sealed);
  end_sketch(kernels, pool);
  representatives_.commit(n, pages_, pool);
  drop_unseen();
}

uint32_t KvStore::pages_after(uint64_t tokens) const {
  return tokens <= window_tokens_
             ? 0
             : static_cast<uint32_t>((tokens - window_tokens_) / shape().page.page_tokens);
}

uint64_t KvStore::private_bytes() const {
  const std::size_t rows = rows_file_ ? 0 : window_floats() + sinks_size();
  const uint64_t tables = rows_file_ && pages_.pages() == 0 ? rows_file_->private_bytes() : 0;
  return tables + pages_.private_bytes() + sketch_.private_bytes() +
         representatives_.private_bytes() + indexes_.private_bytes() +
         (rows + centre_.size()) * sizeof(float);
}

std::size_t KvStore::window_floats() const {
  return std::size_t{planes()} * capacity_ * shape().page.dim;
}

std::size_t KvStore::sinks_room() const {
  return std::size_t{planes()} * shape().page.page_tokens * shape().page.dim;
}

std::size_t KvStore::window_size() const {
  return std::size_t{planes()} * window_count_ * shape().page.dim;
}

Status KvStore::write_window(const std::function<Status(const void*, std::size_t)>& write) const {
  const std::size_t size = std::size_t{window_count_} * shape().page.dim * sizeof(float);
  for (uint32_t i = 0; i < planes(); ++i) RETURN_IF_ERROR(write(plane(i), size));
  return {};
}

KvStore KvStore::restore(PageStore pages, KeySketch sketch, Representatives representatives,
                         uint32_t window_tokens, const SavedRows& saved,
                         const MemoryBudget& budget) {
  KvStore store(pages.shape(), window_tokens);
  store.window_stamp_ = new_stamp();
  store.sinks_stamp_ = new_stamp();
  store.pages_ = std::move(pages);
  store.sketch_ = std::move(sketch);
  store.representatives_ = std::move(representatives);
  store.budget_ = budget;
  const std::size_t dim = store.shape().page.dim, heads = store.shape().heads_total();
  if (saved.has_centre) store.centre_.resize(heads * dim);
  if (saved.has_sinks) store.sinks_ = make_rows(store.sinks_room());
  store.window_count_ = saved.window_count;
  store.dropped_ = saved.dropped;
  store.checkpoints_ = saved.checkpoints;
  store.capacity_ = store.capacity_for(saved.window_count);
  store.window_ = make_rows(std::size_t{store.planes()} * store.capacity_ * dim);
  store.appends_.here = true;
  return store;
}

Status KvStore::check_file() const {
  return rows_file_ ? rows_file_->check_size() : pages_.check_file();
}

// rows_file_ keeps a reference of its own, so that sinks_ and window_ are never sole, and never
// written.
KvStore KvStore::map(PageStore pages, KeySketch sketch, uint32_t window_tokens,
                     const MappedRows& rows) {
  KvStore store(pages.shape(), window_tokens);
  store.window_stamp_ = new_stamp();
  store.sinks_stamp_ = new_stamp();
  store.pages_ = std::move(pages);
  store.sketch_ = std::move(sketch);
  store.representatives_.drop();
  store.centre_.assign(rows.centre.begin(), rows.centre.end());
  const auto in_file = [&](std::span<const float> floats) {
    return std::shared_ptr<float[]>(rows.file, const_cast<float*>(floats.data()));
  };
  if (!rows.sinks.empty()) store.sinks_ = in_file(rows.sinks);
  store.window_ = in_file(rows.window);
  store.rows_file_ = rows.file;
  store.rows_checked_.reset(new std::atomic<bool>[store.shape().layers]());
  store.capacity_ = store.window_count_ = rows.window_count;
  return store;
}

Status KvStore::check_rows(uint32_t layer, const CancelLatch& cancel) const {
  constexpr std::size_t piece = std::size_t{256} << 10;  // floats between two looks at `cancel`
  if (has_checked_rows(layer)) return {};
  RETURN_IF_ERROR(sketch_.check_bases(layer));
  const struct {
    format::SectionKind kind;
    std::span<const float> all;
  } parts[] = {{format::SectionKind::sinks, sink_floats()},
               {format::SectionKind::window, {window_.get(), window_floats()}}};
  for (const auto& [kind, all] : parts) {
    if (all.empty()) continue;
    const std::size_t n = all.size() / shape().layers, end = (layer + std::size_t{1}) * n;
    const CacheFile::Section& section = *rows_file_->find(kind);
    for (std::size_t at = layer * n, size; at < end; at += size) {
      if (cancel.fired()) return {};
      size = std::min(piece, end - at);
      if (!rows_file_->check(section, at * sizeof(float), size * sizeof(float)))
        return rows_file_->failure();
      if (wrong_floats(all.subspan(at, size))) return not_finite(*rows_file_, section);
    }
  }
  rows_checked_[layer].store(true, std::memory_order_release);
  return {};
}

KvStore::Restored KvStore::restored() {
  return {centre_.empty() ? nullptr : centre_.data(), sinks_.get(), window_.get(),
          std::size_t{capacity_} * shape().page.dim};
}

}  // namespace kvasir
