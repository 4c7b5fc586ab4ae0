// What leaves full precision: rows become pages, and the keys get their centre.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "store/kv_store.h"

namespace kvasir {

constexpr uint32_t task_pages = 4;  // pages per task

void KvStore::write_keys(uint32_t layer, uint32_t head, RowRange rows, const float* k) {
  const std::size_t at = std::size_t{layer} * shape().kv_heads + head;
  copy_keys(head, rows, k, centre_.empty() ? nullptr : centre_.data() + at * shape().page.dim,
            window_row(layer, head, 0, window_count_ + rows.first));
}

void KvStore::write_values(uint32_t layer, uint32_t head, RowRange rows, const float* v) {
  if (shape().page.latent) return;
  copy_values(head, rows, v, window_row(layer, head, 1, window_count_ + rows.first));
}

// Of some of a step's rows: the keys of a head without their centre, padded; null: none.
void KvStore::copy_keys(uint32_t head, RowRange rows, const float* k, const float* centre,
                        float* to) const {
  const uint32_t heads = shape().kv_heads, head_dim = shape().page.head_dim, dim = shape().page.dim;
  for (uint32_t i = rows.first; i < rows.end; ++i, to += dim) {
    const float* from = k + (std::size_t{i} * heads + head) * head_dim;
    for (uint32_t d = 0; d < head_dim; ++d) to[d] = from[d] - (centre ? centre[d] : 0.0f);
    std::fill(to + head_dim, to + dim, 0.0f);
  }
}

void KvStore::copy_values(uint32_t head, RowRange rows, const float* v, float* to) const {
  const uint32_t heads = shape().kv_heads, head_dim = shape().page.head_dim, dim = shape().page.dim;
  for (uint32_t i = rows.first; i < rows.end; ++i, to += dim) {
    std::copy_n(v + (std::size_t{i} * heads + head) * head_dim, head_dim, to);
    std::fill(to + head_dim, to + dim, 0.0f);
  }
}

// The mean key of the window without the sinks, which are outliers. Subtracts it from every row of
// the window. Of the given heads, which are counted over all layers.
void KvStore::fix_centre(uint32_t rows, uint32_t first_head, uint32_t heads, ThreadPool* pool) {
  const uint32_t dim = shape().page.dim;
  const uint32_t first = rows > shape().page.page_tokens ? shape().page.page_tokens : 0;
  pool->run(heads, [&](uint32_t task, uint32_t) {
    const uint32_t at = first_head + task, l = at / shape().kv_heads, h = at % shape().kv_heads;
    float* centre = centre_.data() + std::size_t{at} * dim;
    double sums[max_dim] = {};
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
  const auto tasks = static_cast<uint32_t>(ceil_div(sealed, task_pages));
  const std::size_t page = std::size_t{shape().page.page_tokens} * shape().page.dim;
  pool->run(heads * tasks, [&](uint32_t task, uint32_t) {
    const uint32_t h = task % heads, first = task / heads * task_pages;
    for (uint32_t p = first; p < std::min(sealed, first + task_pages); ++p)
      pages_.seal(kernels, layer, h, pages_.pages() + p, window_row(layer, h, 0, 0) + p * page,
                  window_row(layer, h, 1, 0) + p * page);
  });
  end_seal(layer, sealed, kernels, pool);
}

// A span's pages come to the sketch when the span ends.
void KvStore::end_seal(uint32_t layer, uint32_t sealed, const Kernels& kernels, ThreadPool* pool) {
  if (!in_span_) {
    sketch_.append_layer(pages_, layer, pages_.pages() + sealed, kernels, pool);
    sketched_[layer] = sketch_.basis_stamp();
  }
  sealed_ahead_[layer] = true;
}

// Adds the layers that were not sealed ahead, or before the sketch got its bases.
void KvStore::end_sketch(const Kernels& kernels, ThreadPool* pool) {
  const auto lacks = [&](uint64_t stamp) { return stamp != sketch_.basis_stamp(); };
  if (std::all_of(sketched_.begin(), sketched_.end(), lacks))
    return void(sketch_.append(pages_, kernels, pool));
  for (uint32_t l = 0; l < shape().layers; ++l)
    if (lacks(sketched_[l])) sketch_.append_layer(pages_, l, pages_.pages(), kernels, pool);
  sketch_.appended(pages_);
}

// The centre of the first rows that are sealed. Layers that were sealed ahead have theirs.
void KvStore::begin_centre(uint32_t rows, ThreadPool* pool) {
  const std::size_t heads = shape().kv_heads, size = heads * shape().page.dim;
  centre_.assign(shape().layers * size, 0.0f);  // prepare() made the room
  if (centre_ahead_.empty()) return fix_centre(rows, 0, shape().heads_total(), pool);
  for (uint32_t l = 0; l < shape().layers; ++l) {
    if (sealed_ahead_[l])
      std::copy_n(centre_ahead_.data() + l * size, size, centre_.data() + l * size);
    else fix_centre(rows, static_cast<uint32_t>(l * heads), static_cast<uint32_t>(heads), pool);
  }
  centre_ahead_.clear();
}

bool KvStore::can_seal_rows(uint32_t n) const {
  const bool begins = window_count_ == 0 && pages_.pages() == 0 && !in_span_;
  return budget_.bytes == 0 && !representatives_.known() && pages_after(window_count_ + n) > 0 &&
         (!centre_.empty() || begins);
}

// fix_centre() of a layer whose rows are the step's.
void KvStore::find_centre(uint32_t layer, uint32_t n, const float* k, ThreadPool* pool) {
  const uint32_t heads = shape().kv_heads, head_dim = shape().page.head_dim, dim = shape().page.dim,
                 first = n > shape().page.page_tokens ? shape().page.page_tokens : 0;
  if (centre_ahead_.empty()) centre_ahead_.assign(shape().heads_total() * dim, 0.0f);
  constexpr uint32_t part = 32;  // dimensions of a task
  const auto parts = static_cast<uint32_t>(ceil_div(head_dim, part));
  pool->run(heads * parts, [&](uint32_t task, uint32_t) {
    const uint32_t h = task / parts, at = task % parts * part,
                   count = std::min(part, head_dim - at);
    double sums[part] = {};
    for (uint32_t r = first; r < n; ++r) {
      const float* row = k + (std::size_t{r} * heads + h) * head_dim + at;
      for (uint32_t d = 0; d < count; ++d) sums[d] += static_cast<double>(row[d]);
    }
    float* centre = centre_ahead_.data() + (std::size_t{layer} * heads + h) * dim + at;
    for (uint32_t d = 0; d < count; ++d) centre[d] = static_cast<float>(sums[d] / (n - first));
  });
}

// Of the rows that seal_rows() does not seal, and of those that it leaves in the window too.
void KvStore::write_unsealed(uint32_t layer, uint32_t head, const StepRows& rows,
                             const float* centre) {
  const uint32_t tokens = shape().page.page_tokens, n = rows.count,
                 sinks = pages_.pages() > 0 ? 0 : tokens - std::min(tokens, window_count_),
                 end = pages_after(window_count_ + n) * tokens;
  for (const RowRange range : {RowRange{0, std::min(n, std::max(sinks, rows.attended))},
                               RowRange{std::max(window_count_, end) - window_count_, n}}) {
    copy_keys(head, range, rows.k, centre, window_row(layer, head, 0, window_count_ + range.first));
    write_values(layer, head, range, rows.v);
  }
}

// Page p of the step, of heads [first, end). It is made of a copy of its rows: those that are in
// the window, then the step's, which have all heads next to each other.
void KvStore::seal_copies(uint32_t layer, uint32_t p, uint32_t first, uint32_t end,
                          const StepRows& rows, const float* centres, const Kernels& kernels) {
  const uint32_t tokens = shape().page.page_tokens, dim = shape().page.dim,
                 planes = shape().page.planes(), begin = p * tokens,
                 old = std::min(std::max(window_count_, begin) - begin, tokens),
                 from = begin + old - window_count_;
  const std::size_t floats = std::size_t{tokens} * dim;
  const Buffer<float> copies = make_buffer<float>((end - first) * planes * floats);
  const auto copy = [&](uint32_t h, uint32_t which) {
    return copies.get() + ((h - first) * planes + which % planes) * floats;
  };
  for (uint32_t h = first; h < end; ++h)
    for (uint32_t which = 0; which < planes; ++which)
      std::copy_n(window_row(layer, h, which, begin), old * dim, copy(h, which));
  for (uint32_t t = old; t < tokens; ++t) {
    const RowRange row{from + t - old, from + t - old + 1};
    for (uint32_t h = first; h < end; ++h)
      copy_keys(h, row, rows.k, centres + std::size_t{h} * dim, copy(h, 0) + t * dim);
    for (uint32_t h = first; h < end && planes > 1; ++h)
      copy_values(h, row, rows.v, copy(h, 1) + t * dim);
  }
  for (uint32_t h = first; h < end; ++h)
    pages_.seal(kernels, layer, h, pages_.pages() + p, copy(h, 0), copy(h, 1));
}

void KvStore::seal_rows(uint32_t layer, const StepRows& rows, const Kernels& kernels,
                        ThreadPool* pool) {
  constexpr uint32_t together = 8;  // heads of a task: their copies fit the cache of a core
  const uint32_t heads = shape().kv_heads, dim = shape().page.dim,
                 groups = static_cast<uint32_t>(ceil_div(heads, together));
  if (centre_.empty()) find_centre(layer, rows.count, rows.k, pool);
  const float* centres =
      (centre_.empty() ? centre_ahead_ : centre_).data() + std::size_t{layer} * heads * dim;
  pool->run(heads + groups * pages_after(window_count_ + rows.count), [&](uint32_t task, uint32_t) {
    if (task < heads) return write_unsealed(layer, task, rows, centres + std::size_t{task} * dim);
    const uint32_t first = (task - heads) % groups * together;
    seal_copies(layer, (task - heads) / groups, first, std::min(heads, first + together), rows,
                centres, kernels);
  });
  end_seal(layer, pages_after(window_count_ + rows.count), kernels, pool);
}

}  // namespace kvasir
