// Spans: the same tokens go through a layer chunk by chunk before they go through the next one.
//
// The rows of a layer in the window's buffer are its room: a chunk is written behind the window,
// its pages are sealed, and what is left of it is the window of the next chunk. Every layer begins
// with the rows before the span and ends with those behind it, at the same place of its planes.
#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/stamp.h"
#include "store/kv_store.h"
#include "store/window_rows.h"

namespace kvasir {

bool KvStore::can_span() const {
  return budget_.bytes == 0 && window_tokens_ != keep_all && !representatives_.known();
}

Status KvStore::begin_span(uint64_t n, uint32_t chunk, ThreadPool* pool, const Cancel* cancel) {
  // As prepare_rows(): a window grows to as many rows before pages leave it.
  const auto kept = static_cast<uint32_t>(
      std::min<uint64_t>(window_tokens_ + shape().page.page_tokens, window_count_ + n));
  RETURN_IF_ERROR(own_window(std::max(window_count_, kept) + chunk, true, pool, cancel));
  RETURN_IF_ERROR(reserve_sealed(pages_after(window_count_ + n), true, pool, cancel));
  sealed_ahead_.assign(shape().layers, false);
  centre_ahead_.clear(), in_span_ = true;
  budget_.step_tokens = std::max(budget_.step_tokens, chunk);
  span_ = {pages_.pages(), window_count_, first_row_, sinks_stamp_, !centre_.empty(), {}};
  window_stamp_ = new_stamp();
  if (!span_.has_centre) span_.centre.assign(shape().heads_total() * shape().page.dim, 0.0f);
  return {};
}

void KvStore::begin_layer() {
  if (!span_.has_centre && !centre_.empty()) span_.centre.swap(centre_);
  pages_.show(span_.pages);
  sinks_stamp_ = span_.sinks_stamp;
  window_count_ = span_.window_count, first_row_ = span_.first_row;
}

// Where the buffer ends, the layer's rows move to its beginning.
Status KvStore::prepare_chunk(uint32_t layer, uint32_t n, ThreadPool* pool) {
  if (first_row_ + window_count_ + n <= capacity_) return {};
  if (window_count_ + n > capacity_)
    return Status::error(Code::internal, "a chunk of a span has no room behind its window");
  const std::size_t dim = shape().page.dim, size = window_count_ * dim * sizeof(float);
  const uint32_t planes = layer == no_layer ? 0 : shape().kv_heads * shape().page.planes();
  run_tasks(pool, planes, [&](uint32_t p, uint32_t) {
    float* const rows = plane(uint64_t{layer} * planes + p);
    std::memmove(rows - first_row_ * dim, rows, size);
  });
  first_row_ = 0;
  return {};
}

void KvStore::touch_next_layer(uint32_t layer, uint32_t n, ThreadPool* pool) {
  const uint32_t first = pages_.pages(), end = first + pages_after(window_count_ + n);
  if (!in_span_ || layer + 1 >= shape().layers || end == first) return;
  pages_.touch(layer + 1,
               {static_cast<uint32_t>(ceil_div(first, extent_pages)),
                static_cast<uint32_t>(ceil_div(end, extent_pages))},
               pool);
}

void KvStore::end_chunk(uint32_t layer, uint32_t n, const Kernels& kernels, ThreadPool* pool) {
  const uint32_t count = window_count_ + n, sealed = pages_after(count),
                 rows = sealed * shape().page.page_tokens;
  if (sealed > 0) begin_pages(layer, count, pool);
  if (layer != no_layer && !sealed_ahead_[layer]) seal(layer, n, kernels, pool);
  if (layer != no_layer) sealed_ahead_[layer] = false;
  first_row_ += rows, window_count_ = count - rows;
  if (sealed > 0) pages_.commit(pages_.pages() + sealed);
}

// What commit() makes of the first rows that are sealed: the centre and the sinks.
void KvStore::begin_pages(uint32_t layer, uint32_t rows, ThreadPool* pool) {
  const uint32_t heads = layer == no_layer ? 0 : shape().kv_heads;
  if (!span_.has_centre && centre_.empty()) {
    centre_.swap(span_.centre);
    fix_centre(rows, layer * heads, heads, pool);
  }
  if (pages_.pages() > 0 || !sinks_) return;
  sinks_stamp_ = new_stamp();
  const uint32_t planes = heads * shape().page.planes();
  const std::size_t size = std::size_t{shape().page.page_tokens} * shape().page.dim;
  for (uint32_t p = layer * planes; p < (layer + 1) * planes; ++p)
    std::copy_n(plane(p), size, sinks_.get() + p * size);
}

void KvStore::add_span_to_sketch(uint32_t layer, uint64_t n, const KeySketch::QueryMoment& queries,
                                 const Kernels& kernels, ThreadPool* pool, const Cancel* cancel,
                                 KeySketch::Build* build) const {
  add_pages_to_sketch(layer, span_.pages + pages_after(span_.window_count + n), queries, kernels,
                      pool, cancel, build);
}

Status KvStore::commit_span(const Kernels& kernels, ThreadPool* pool, const Cancel* cancel) {
  const uint32_t pages = pages_.pages();
  pages_.show(span_.pages);
  if (pages > span_.pages) pages_.commit(pages);
  window_stamp_ = new_stamp();
  if (!sketch_.append(pages_, kernels, pool, cancel))
    return Status::error(Code::cancelled, "cancelled; the sequence is as it was before the span");
  drop_unseen();
  return {};
}

}  // namespace kvasir
