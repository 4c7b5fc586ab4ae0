#include "store/kv_store.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/stamp.h"

namespace kvasir {

constexpr uint32_t capacity_step = 64;  // rows: a decode grows the window seldom
constexpr uint64_t table_entry = 6;      // bytes a page of a head, in the table of those that are in memory: four, half as many more where it grows

KvStore::KvStore(const StoreShape& shape, uint32_t window_tokens)
    : pages_(shape), sketch_(shape), representatives_(shape, window_tokens), window_tokens_(window_tokens) {}

float* KvStore::window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row) {
  return const_cast<float*>(std::as_const(*this).window_row(layer, head, which, row));
}

const float* KvStore::window_row(uint32_t layer, uint32_t head, uint32_t which, uint32_t row) const {
  const std::size_t at = (std::size_t{layer} * shape().kv_heads + head) * 2 + which;
  return window_.get() + (at * capacity_ + row) * shape().page.dim;
}

KvStore::Rows KvStore::window(uint32_t layer, uint32_t head) const {
  return {window_row(layer, head, 0, 0), window_row(layer, head, 1, 0)};
}

KvStore::Rows KvStore::sinks(uint32_t layer, uint32_t head) const {
  const std::size_t size = std::size_t{shape().page.page_tokens} * shape().page.dim;
  const float* k = sinks_->data() + (std::size_t{layer} * shape().kv_heads + head) * 2 * size;
  return {k, k + size};
}

// Moves the window to a larger buffer, or to one that no copy of the timeline has; the old one stays until the new one is complete.
void KvStore::own_window(uint32_t rows, ThreadPool* pool) {
  if (rows <= capacity_ && is_sole(window_)) return;
  const bool only_grows = window_tokens_ == keep_all && rows > capacity_;
  const uint64_t wanted = std::max<uint64_t>({rows, window_count_, only_grows ? uint64_t{capacity_} * 3 / 2 : 0});
  const auto capacity = static_cast<uint32_t>(round_up(wanted, capacity_step));
  const std::size_t dim = shape().page.dim, planes = std::size_t{shape().heads_total()} * 2;
  std::shared_ptr<float[]> own = make_buffer<float>(planes * capacity * dim);
  run_tasks(pool, window_count_ > 0 ? static_cast<uint32_t>(planes) : 0, [&](uint32_t p, uint32_t) {
    std::copy_n(window_.get() + std::size_t{p} * capacity_ * dim, window_count_ * dim, own.get() + std::size_t{p} * capacity * dim);
  });
  window_ = std::move(own);
  capacity_ = capacity;
}

Status check_memory_budget(const MemoryBudget& budget, bool full_precision) {
  if (budget.bytes == 0) return {};
  if (full_precision) return Status::error(Code::bad_argument, "memory_budget is set: keys and values in full precision are kept in memory");
  os::File trial;
  return os::File::create_nameless(budget.spill_folder, &trial);
}

uint64_t KvStore::least_bytes(uint64_t tokens, uint32_t step) const {
  const PageShape& page = shape().page;
  const uint64_t heads = shape().heads_total(), extents = ceil_div(tokens, page.extent_tokens());
  const uint64_t summaries = shape().extent_bytes() - PageShape::pages_bytes() + page.sketch_bytes() + extent_pages * table_entry;
  const uint64_t rows = 2 * heads * (uint64_t{window_tokens_} + step + 2 * page.page_tokens + capacity_step + 1) * page.dim * sizeof(float);
  const uint64_t slabs = ceil_div(step, page.extent_tokens()) + 1;  // that a step fills, the first one in part before it
  return extents * heads * summaries + rows + slabs * shape().slab_bytes() + indexes_.private_bytes() + sketch_.basis_bytes() +
         representatives_.most_bytes(tokens, step) + pages_.table_bytes();
}

Status KvStore::check_budget(uint64_t tokens, uint64_t more, uint32_t step) const {
  step = std::max(step, budget_.step_tokens);
  const uint64_t least = least_bytes(tokens, step) + more;
  if (budget_.bytes == 0 || least <= budget_.bytes) return {};
  return Status::error(Code::limit, "memory_budget is %" PRIu64 " bytes: of %" PRIu64 " tokens, in steps of up to %u, window, summaries, indexes and "
                       "the pages of a step alone take %" PRIu64, budget_.bytes, tokens, step, least);
}

Status KvStore::set_budget(const MemoryBudget& budget, uint64_t tokens) {
  budget_ = budget;
  let_go_ = budget_.bytes != 0;
  return keep_within_budget(tokens);
}

// What there is beside the least is for chosen pages of files, and a quarter of it for slabs that are full: they are spilled a few together. While
// nothing is in a file all of it is for slabs.
Status KvStore::keep_within_budget(uint64_t tokens, uint64_t more, uint32_t step) {
  if (budget_.bytes == 0) return {};
  if (Status s = check_budget(tokens, more, step); !s.ok()) return s;
  const uint64_t room = budget_.bytes - least_bytes(tokens, std::max(step, budget_.step_tokens)) - more;
  const uint64_t for_slabs = pages_.file_pages_bytes() > 0 ? room / 4 : room;
  const uint32_t then = std::max(pages_after(tokens), pages_.pages());
  const uint64_t coming = uint64_t{then / extent_pages - pages_.pages() / extent_pages} * shape().slab_bytes();
  const uint64_t full = pages_.full_private_bytes();
  const bool spills = full > 0 && full + coming > for_slabs;
  if (spills)
    if (Status s = pages_.spill(budget_.spill_folder, std::min(room / 8, for_slabs - std::min(for_slabs, coming))); !s.ok()) return s;
  const uint64_t limit = room - room / 4;
  if (spills || cache_limit_ == PageCache::by_itself || limit < cache_limit_ || limit / 2 > cache_limit_) {
    cache_limit_ = limit - limit / 8;  // some room to shrink: a new limit forgets what was kept
    pages_.set_cache_limit(cache_limit_ - cache_limit_ / 16);  // of its pages; their scales and the table of them take up to a fifteenth as much
  }
  const bool fits = pages_.file_pages_bytes() + pages_.full_private_bytes() + pages_.cache_counts().bytes <= room;
  if (const bool before = std::exchange(let_go_, !fits); !fits && !before) let_go();
  return {};
}

Status KvStore::shrink() {
  if (budget_.bytes == 0) return {};
  if (Status s = pages_.spill(budget_.spill_folder, 0); !s.ok()) return s;
  cache_limit_ = PageCache::by_itself;
  pages_.set_cache_limit(0);
  return {};
}

Status KvStore::prepare(uint32_t n, Together together, ThreadPool* pool) {
  if (Status s = prepare_rows(n, together, pool); !s.ok()) return s;
  return prepare_pages(n, pool);
}

Status KvStore::prepare_rows(uint32_t n, Together together, ThreadPool* pool) {
  if (Status s = keep_within_budget(tokens() + n, 0, n); !s.ok()) return s;
  // A text's steps all have a window before them but the first, which makes the room for it: not for more than was read.
  const bool text = n > capacity_step && window_tokens_ != keep_all;
  own_window(std::max(window_count_, text ? std::min(window_tokens_ + shape().page.page_tokens, window_count_ + n) : 0) + n, pool);
  sealed_ahead_.assign(shape().layers, false);
  budget_.step_tokens = std::max(budget_.step_tokens, n);  // the window does not shrink
  const uint32_t sealed = pages_after(window_count_ + n);
  return representatives_.prepare(n, pages_.pages() + sealed, pages_, together);
}

Status KvStore::prepare_pages(uint32_t n, ThreadPool* pool) {
  const uint32_t sealed = pages_after(window_count_ + n);
  if (sealed == 0) return {};
  const std::size_t dim = shape().page.dim;
  if (!sinks_ || (pages_.pages() == 0 && !is_sole(sinks_)))
    sinks_ = std::make_shared<Array<float>>(std::size_t{shape().heads_total()} * 2 * shape().page.page_tokens * dim);
  centre_.reserve(shape().heads_total() * dim);
  if (Status s = pages_.reserve(pages_.pages() + sealed, pool); !s.ok()) return s;
  return sketch_.reserve(pages_.pages() + sealed);
}

void KvStore::write(uint32_t layer, uint32_t n, const float* k, const float* v, ThreadPool* pool) {
  run_tasks(pool, 2 * shape().kv_heads, [&](uint32_t task, uint32_t) {
    task % 2 ? write_values(layer, task / 2, n, v) : write_keys(layer, task / 2, n, k);
  });
}

void KvStore::write_keys(uint32_t layer, uint32_t head, uint32_t n, const float* k) {
  const uint32_t heads = shape().kv_heads, head_dim = shape().page.head_dim, dim = shape().page.dim;
  float* to = window_row(layer, head, 0, window_count_);
  const float* centre = centre_.empty() ? nullptr : centre_.data() + (std::size_t{layer} * heads + head) * dim;
  for (uint32_t i = 0; i < n; ++i, to += dim) {
    const float* from = k + (std::size_t{i} * heads + head) * head_dim;
    for (uint32_t d = 0; d < head_dim; ++d) to[d] = from[d] - (centre ? centre[d] : 0.0f);
    std::fill(to + head_dim, to + dim, 0.0f);
  }
}

void KvStore::write_values(uint32_t layer, uint32_t head, uint32_t n, const float* v) {
  const uint32_t heads = shape().kv_heads, head_dim = shape().page.head_dim, dim = shape().page.dim;
  float* to = window_row(layer, head, 1, window_count_);
  for (uint32_t i = 0; i < n; ++i, to += dim) {
    std::copy_n(v + (std::size_t{i} * heads + head) * head_dim, head_dim, to);
    std::fill(to + head_dim, to + dim, 0.0f);
  }
}

void KvStore::observe(uint32_t layer, uint32_t n, const float* q, uint32_t heads) {
  for (uint32_t h = 0; h < shape().kv_heads; ++h) observe(layer, h, n, q, heads);
}

void KvStore::observe(uint32_t layer, uint32_t head, uint32_t n, const float* q, uint32_t heads) {
  const uint32_t kv_heads = shape().kv_heads, group = heads / kv_heads, head_dim = shape().page.head_dim;
  const float* centre = centre_.empty() ? nullptr : centre_.data() + (std::size_t{layer} * kv_heads + head) * shape().page.dim;
  representatives_.observe(layer, head, window_row(layer, head, 0, 0), window_count_, n, q + std::size_t{head} * group * head_dim, group,
                           std::size_t{heads} * head_dim, centre);
}

void KvStore::pop() {
  representatives_.reserve_rewind();
  representatives_.rewind(tokens() - 1);
  --window_count_;
  window_stamp_ = new_stamp();
}

// The mean key of the window without the sinks, which are outliers; subtracted from every row that the window holds.
void KvStore::fix_centre(uint32_t rows, ThreadPool* pool) {
  const uint32_t dim = shape().page.dim;
  const uint32_t first = rows > shape().page.page_tokens ? shape().page.page_tokens : 0;
  centre_.assign(shape().heads_total() * dim, 0.0f);  // room made in prepare()
  pool->run(shape().heads_total(), [&](uint32_t at, uint32_t) {
    const uint32_t l = at / shape().kv_heads, h = at % shape().kv_heads;
    float* centre = centre_.data() + std::size_t{at} * dim;
    double sums[max_head_dim] = {};
    for (uint32_t r = first; r < rows; ++r) {
      const float* row = window_row(l, h, 0, r);
      for (uint32_t d = 0; d < dim; ++d) sums[d] += static_cast<double>(row[d]);
    }
    for (uint32_t d = 0; d < dim; ++d) centre[d] = static_cast<float>(sums[d] / (rows - first));
    for (uint32_t r = 0; r < rows; ++r) {
      float* row = window_row(l, h, 0, r);
      for (uint32_t d = 0; d < dim; ++d) row[d] -= centre[d];
    }
  });
}

void KvStore::seal(uint32_t layer, uint32_t n, const Kernels& kernels, ThreadPool* pool) {
  const uint32_t sealed = pages_after(window_count_ + n), heads = shape().kv_heads;
  if (sealed == 0 || centre_.empty()) return;
  constexpr uint32_t together = 4;  // pages of a task
  const auto tasks = static_cast<uint32_t>(ceil_div(sealed, together));
  const std::size_t page = std::size_t{shape().page.page_tokens} * shape().page.dim;
  pool->run(heads * tasks, [&](uint32_t task, uint32_t) {
    const uint32_t h = task % heads, first = task / heads * together;
    for (uint32_t p = first; p < std::min(sealed, first + together); ++p)
      pages_.seal(kernels, layer, h, pages_.pages() + p, window_row(layer, h, 0, 0) + p * page, window_row(layer, h, 1, 0) + p * page);
  });
  sealed_ahead_[layer] = true;
}

void KvStore::commit(uint32_t n, const Kernels& kernels, ThreadPool* pool) {
  const uint32_t count = window_count_ + n;
  const uint32_t sealed = pages_after(count);
  window_count_ = count;
  window_stamp_ = new_stamp();
  if (sealed == 0) return representatives_.commit(n, pages_, pool);
  const uint32_t first = pages_.pages(), tokens = shape().page.page_tokens, dim = shape().page.dim;
  if (centre_.empty()) fix_centre(count, pool);
  if (first == 0) {
    sinks_stamp_ = new_stamp();
    const std::size_t size = std::size_t{tokens} * dim;
    for (uint32_t i = 0; i < shape().heads_total() * 2; ++i)
      std::copy_n(window_.get() + std::size_t{i} * capacity_ * dim, size, sinks_->data() + i * size);
  }
  const uint32_t kept = count - sealed * tokens;
  pool->run(shape().heads_total(), [&](uint32_t task, uint32_t) {
    const uint32_t l = task / shape().kv_heads, h = task % shape().kv_heads;
    float* k = window_row(l, h, 0, 0);
    float* v = window_row(l, h, 1, 0);
    for (uint32_t p = 0; p < sealed && !sealed_ahead_[l]; ++p) {
      const std::size_t at = std::size_t{p} * tokens * dim;
      pages_.seal(kernels, l, h, first + p, k + at, v + at);
    }
    const std::size_t from = std::size_t{sealed} * tokens * dim;
    std::memmove(k, k + from, std::size_t{kept} * dim * sizeof(float));
    std::memmove(v, v + from, std::size_t{kept} * dim * sizeof(float));
  });
  window_count_ = kept;
  pages_.commit(first + sealed);
  sketch_.append(pages_, kernels, pool);
  representatives_.commit(n, pages_, pool);
}

Status KvStore::rewind(uint64_t tokens, const Kernels& kernels) {
  representatives_.reserve_rewind();
  window_stamp_ = new_stamp();
  if (tokens == 0) {
    cut(0);
    return {};
  }
  if (tokens >= sealed_tokens()) {
    const uint64_t kept = tokens - sealed_tokens();
    if (kept >= window_tokens_ || pages_.pages() == 0) {
      window_count_ = static_cast<uint32_t>(kept);
      representatives_.rewind(tokens);
      return {};
    }
  }
  // The window must hold window_tokens (or everything): reopen the pages that reach into it.
  const uint32_t page_tokens = shape().page.page_tokens, dim = shape().page.dim;
  const uint64_t begin = tokens > window_tokens_ ? (tokens - window_tokens_) / page_tokens : 0;
  const auto first = static_cast<uint32_t>(begin);
  const uint32_t end = std::min<uint32_t>(pages_.pages(), static_cast<uint32_t>(ceil_div(tokens, page_tokens)));
  for (uint32_t l = 0; l < shape().layers; ++l)
    for (uint32_t h = 0; h < shape().kv_heads; ++h)
      for (uint32_t p = first; p < end; ++p)
        if (!pages_.intact_page(l, h, p)) return pages_.damaged();

  const auto kept = static_cast<uint32_t>(tokens > sealed_tokens() ? tokens - sealed_tokens() : 0);
  const uint32_t reopened = (end - first) * page_tokens;
  KvStore shorter(shape(), window_tokens_);
  shorter.centre_ = centre_;
  shorter.sinks_ = sinks_;
  shorter.own_window(reopened + kept);
  for (uint32_t l = 0; l < shape().layers; ++l) {
    for (uint32_t h = 0; h < shape().kv_heads; ++h) {
      for (uint32_t p = first; p < end; ++p) {
        const PageRef page = pages_.page(l, h, p);
        float* k = shorter.window_row(l, h, 0, (p - first) * page_tokens);
        float* v = shorter.window_row(l, h, 1, (p - first) * page_tokens);
        if (p == 0) {  // the sinks were kept in full
          std::copy_n(sinks(l, h).k, std::size_t{page_tokens} * dim, k);
          std::copy_n(sinks(l, h).v, std::size_t{page_tokens} * dim, v);
        } else {
          kernels.unseal_page(shape().page, page.data, page.scales, k, v);
        }
      }
      for (uint32_t which = 0; which < 2; ++which)
        std::copy_n(window_row(l, h, which, 0), std::size_t{kept} * dim, shorter.window_row(l, h, which, reopened));
    }
  }
  pages_.truncate(first);
  sketch_.truncate(first);
  representatives_.rewind(tokens);
  indexes_.truncate(sealed_tokens());
  if (first == 0) sinks_.reset();  // they are made again when the first page is sealed; some of them may have been taken back
  window_ = std::move(shorter.window_);
  capacity_ = shorter.capacity_;
  window_count_ = static_cast<uint32_t>(tokens - sealed_tokens());
  return {};
}

uint32_t KvStore::pages_after(uint64_t tokens) const {
  return tokens <= window_tokens_ ? 0 : static_cast<uint32_t>((tokens - window_tokens_) / shape().page.page_tokens);
}

void KvStore::cut(uint32_t pages) {
  representatives_.reserve_rewind();
  pages_.truncate(pages);
  sketch_.truncate(pages);
  representatives_.rewind(sealed_tokens());
  indexes_.truncate(sealed_tokens());
  window_count_ = 0;
  window_stamp_ = new_stamp();
  if (pages > 0) return;
  sinks_stamp_ = new_stamp();
  centre_.clear();  // the next text is another one: it gets its own
  sinks_.reset();
}

uint64_t KvStore::private_bytes() const {
  return pages_.private_bytes() + sketch_.private_bytes() + representatives_.private_bytes() + indexes_.private_bytes() +
         (window_floats() + sinks_size() + centre_.size()) * sizeof(float);
}

std::size_t KvStore::window_floats() const { return std::size_t{shape().heads_total()} * 2 * capacity_ * shape().page.dim; }

std::size_t KvStore::sinks_size() const { return sinks_ ? sinks_->size() : 0; }

std::size_t KvStore::window_size() const {
  return std::size_t{shape().heads_total()} * 2 * window_count_ * shape().page.dim;
}

Array<float> KvStore::window_copy() const {
  Array<float> out(window_size());
  const std::size_t size = std::size_t{window_count_} * shape().page.dim;
  for (uint32_t i = 0; i < shape().heads_total() * 2; ++i)
    std::copy_n(window_.get() + std::size_t{i} * capacity_ * shape().page.dim, size, out.data() + i * size);
  return out;
}

KvStore KvStore::restore(PageStore pages, KeySketch sketch, Representatives representatives, uint32_t window_tokens, uint32_t window_count,
                         std::span<const float> centre, std::span<const float> sinks, std::span<const float> window, ThreadPool* pool) {
  KvStore store(pages.shape(), window_tokens);
  store.window_stamp_ = new_stamp();
  store.sinks_stamp_ = new_stamp();
  store.pages_ = std::move(pages);
  store.sketch_ = std::move(sketch);
  store.representatives_ = std::move(representatives);
  store.centre_.assign(centre.begin(), centre.end());
  if (!sinks.empty()) store.sinks_ = std::make_shared<Array<float>>(sinks.begin(), sinks.end());
  store.own_window(window_count);
  const std::size_t dim = store.shape().page.dim, size = window_count * dim;
  run_tasks(pool, store.shape().heads_total() * 2, [&](uint32_t i, uint32_t) {
    std::copy_n(window.data() + i * size, size, store.window_.get() + std::size_t{i} * store.capacity_ * dim);
  });
  store.window_count_ = window_count;
  return store;
}

}  // namespace kvasir
