#include "offload/gpu_prefill_attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/checked.h"

namespace kvasir {

constexpr const char* in_prefill = "a text that is read";
// bytes of pages that are on their way together
constexpr std::size_t min_half = std::size_t{8} << 20;

GpuPrefillAttention::GpuPrefillAttention(const std::shared_ptr<Device>& device,
                                         const HeadShape& heads, const StoreShape& shape,
                                         uint32_t first, uint32_t layers)
    : device_(device), ops_(device->kernels()), heads_(heads), shape_(shape), first_(first),
      layers_(layers) {}

Fallback GpuPrefillAttention::refuses(const KvStore& store, uint32_t n) const {
  constexpr uint32_t few = 64;  // tokens: for fewer the pages are not copied
  if (n == 1 || (n <= few && !holds_memory())) return Fallback::few_tokens;
  if (store.budget().bytes > 0) return Fallback::memory_limit;
  if (store.window_tokens() == KvStore::keep_all) return Fallback::full_precision;
  if (std::find(std::begin(attended_dims), std::end(attended_dims), shape_.page.dim) ==
      std::end(attended_dims))
    return Fallback::head_size;
  return Fallback::none;
}

void GpuPrefillAttention::release() {
  blocks_.clear(), addresses_.clear(), stamps_.clear();
  pages_at_ = {}, scales_at_ = {};
  keys_ = {}, values_ = {}, q_ = {};
  q_scale_ = {}, largest_ = {}, sinks_ = {}, centre_ = {}, window_ = {}, sink_scores_ = {},
  parts_ = {};
  staging_ = {};
  room_ = q_room_ = part_room_ = window_room_ = extents_room_ = 0;
  placed_ = 0;
  sinks_stamp_ = staging_half_ = 0;
}

// Arrays that every layer fills anew are never there old and new together.
Status GpuPrefillAttention::make_room(const KvStore& store, uint32_t n) {
  RETURN_IF_ERROR(make_step_room(store, n));
  RETURN_IF_ERROR(make_window_room(store));
  RETURN_IF_ERROR(make_extent_room(store, n));
  return make_staging_room();
}

// For the keys and values of a layer in full precision, and the queries of a step.
Status GpuPrefillAttention::make_step_room(const KvStore& store, uint32_t n) {
  const std::size_t kv_heads = shape_.kv_heads, dim = shape_.page.dim;
  const auto rows = static_cast<uint32_t>(round_up(store.tokens() + n, prefill_keys));
  const auto q_rows =
      static_cast<uint32_t>(round_up(std::size_t{n} * heads_.group(), prefill_rows));
  if (rows > room_) {
    room_ = 0, keys_ = {}, values_ = {};
    const auto more = static_cast<uint32_t>(round_up(rows + rows / 8 + 4 * n, prefill_keys));
    RETURN_IF_ERROR(keys_.allocate(device_, kv_heads * more * dim, in_prefill));
    RETURN_IF_ERROR(values_.allocate(device_, kv_heads * more * dim, in_prefill));
    room_ = more;
  }
  if (q_rows > q_room_) {
    q_room_ = 0, q_ = {}, q_scale_ = {}, sink_scores_ = {};
    RETURN_IF_ERROR(q_.allocate(device_, kv_heads * q_rows * dim, in_prefill));
    RETURN_IF_ERROR(q_scale_.allocate(device_, kv_heads * q_rows, in_prefill));
    if (!sink_logits_.empty())
      RETURN_IF_ERROR(sink_scores_.allocate(device_, kv_heads * q_rows, in_prefill));
    q_room_ = q_rows;
  }
  make_part_room(n);
  return largest_.get() ? Status() : largest_.allocate(device_, kv_heads * 2, in_prefill);
}

// For parts of a small step's keys. Without room for them it takes longer.
void GpuPrefillAttention::make_part_room(uint32_t n) {
  constexpr uint32_t most_each = 4;
  const uint32_t dim = shape_.page.dim;
  const auto blocks = static_cast<uint32_t>(
      shape_.kv_heads * ceil_div(std::size_t{n} * heads_.group(), prefill_block_rows(dim)));
  const uint32_t wanted =
      2 * blocks > max_prefill_parts ? 0 : std::min(most_each * blocks, max_prefill_parts);
  if (wanted <= part_room_) return;
  part_room_ = 0, parts_ = {};
  if (parts_.allocate(device_, wanted * prefill_part_floats(dim), in_prefill).ok())
    part_room_ = wanted;
}

// For the window, the sinks and the centre of every layer.
Status GpuPrefillAttention::make_window_room(const KvStore& store) {
  const std::size_t dim = shape_.page.dim, heads = heads_total();
  const uint32_t window = std::max(store.window_count(), 1u), page_tokens = shape_.page.page_tokens;
  if (window > window_room_) {
    window_room_ = 0, window_ = {};
    const auto more =
        static_cast<uint32_t>(round_up(std::max(window, store.window_tokens() + page_tokens), 16));
    RETURN_IF_ERROR(window_.allocate(device_, heads * 2 * more * dim, in_prefill));
    window_room_ = more;
  }
  if (!sinks_.get())
    RETURN_IF_ERROR(sinks_.allocate(device_, heads * 2 * page_tokens * dim, in_prefill));
  return centre_.get() ? Status() : centre_.allocate(device_, heads * dim, in_prefill);
}

// For the addresses of `extents` extents.
Status GpuPrefillAttention::make_address_room(uint32_t extents) {
  extents_room_ = 0, placed_ = 0, pages_at_ = {}, scales_at_ = {};
  RETURN_IF_ERROR(pages_at_.allocate(device_, extents, in_prefill));
  RETURN_IF_ERROR(scales_at_.allocate(device_, extents, in_prefill));
  extents_room_ = extents;
  return {};
}

// For the extents of pages, also those that the step will seal, so that these can be put ahead.
// Makes room for a quarter more at a time, within the budget; where that is too much, for as many
// as are needed.
Status GpuPrefillAttention::make_extent_room(const KvStore& store, uint32_t n) {
  const uint32_t extents = store.pages().extents();
  if (extents > extents_room_) RETURN_IF_ERROR(make_address_room(extents + extents / 2 + 64));
  const auto after = static_cast<uint32_t>(
      ceil_div(store.pages().pages() + store.pages_after(store.window_count() + n), extent_pages));
  const std::size_t size = pages_size() + scales_size();
  while (after > addresses_.size()) {
    const auto has = static_cast<uint32_t>(addresses_.size()),
               needed = extents - std::min(has, extents);
    uint32_t more = std::max(after - has, has / 4);
    blocks_.emplace_back();
    Status s = blocks_.back().allocate(device_, more * size, in_prefill);
    if (s.code() == Code::no_memory && needed > 0 && more > needed)
      s = blocks_.back().allocate(device_, (more = needed) * size, in_prefill);
    if (!s.ok()) {
      blocks_.pop_back();
      if (needed == 0 && s.code() == Code::no_memory) return {};
      return s;
    }
    stamps_.resize(has + more, 0);  // the addresses last: they say how much there is
    addresses_.reserve(has + more);
    for (uint32_t e = 0; e < more; ++e)
      addresses_.push_back(reinterpret_cast<uint64_t>(blocks_.back().get()) + e * size);
    if (addresses_.size() > extents_room_)
      RETURN_IF_ERROR(make_address_room(static_cast<uint32_t>(addresses_.size())));
  }
  return {};
}

Status GpuPrefillAttention::make_staging_room() {
  const std::size_t floats = heads_total() * 2 * shape_.page.dim * sizeof(float);
  const std::size_t half =
      std::max({min_half, pages_size() + scales_size(), floats * window_room_ / 2 + 1,
                floats * shape_.page.page_tokens, addresses_.size() * 2 * sizeof(uint64_t)});
  if (half <= staging_half_) return {};
  staging_half_ = 0, staging_ = {};
  RETURN_IF_ERROR(staging_.allocate(device_, 2 * half));
  staging_half_ = half;
  return {};
}

// The extents that are others than what the device has.
Status GpuPrefillAttention::put_pages(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                                      const CancelLatch& cancel) {
  const PageStore& pages = store.pages();
  std::vector<uint32_t> wanted;
  for (uint32_t e = 0; e < pages.extents(); ++e)
    if (stamps_[e] != pages.stamp(e)) wanted.push_back(e);
  if (wanted.empty() && placed_ == addresses_.size()) return {};
  const std::size_t size = pages_size() + scales_size();
  const auto together = static_cast<uint32_t>(staging_half_ / size);
  std::byte* half = staging_.get();
  std::atomic<bool> intact{true};
  for (std::size_t at = 0; at < wanted.size(); at += together) {
    if (cancel.fired())
      return (void)ops_.wait(stream),
             Status::error(Code::cancelled, "cancelled; the sequence is as it was");
    const auto count = static_cast<uint32_t>(std::min<std::size_t>(together, wanted.size() - at));
    pool->run(count * layers_, [&](uint32_t task, uint32_t) {
      const uint32_t e = wanted[at + task / layers_], layer = task % layers_;
      const uint32_t there = std::min(extent_pages, pages.pages() - e * extent_pages);
      for (uint32_t h = 0; h < shape_.kv_heads; ++h)
        for (uint32_t p = 0; p < there; ++p)
          if (!pages.intact_page(first_ + layer, h, e * extent_pages + p)) intact = false;
      const ExtentView view = pages.extent(first_ + layer, 0, e);
      const std::size_t its_pages = pages_size() / layers_, its_scales = scales_size() / layers_;
      std::byte* to = half + task / layers_ * size;
      std::memcpy(to + layer * its_pages, view.pages, its_pages);
      std::memcpy(to + pages_size() + layer * its_scales, view.scales, its_scales);
    });
    if (!intact) return pages.damaged();
    int error = ops_.wait(stream);  // for the other half, which is filled next
    for (uint32_t i = 0; i < count && !error; ++i)
      error = ops_.upload(stream, reinterpret_cast<void*>(addresses_[wanted[at + i]]),
                          half + i * size, size);
    if (error) return device_->status(error, in_prefill);
    for (uint32_t i = 0; i < count; ++i) stamps_[wanted[at + i]] = pages.stamp(wanted[at + i]);
    half = half == staging_.get() ? staging_.get() + staging_half_ : staging_.get();
  }
  if (const int error = ops_.wait(stream)) return device_->status(error, in_prefill);
  auto* at = reinterpret_cast<uint64_t*>(staging_.get());
  for (std::size_t e = 0; e < addresses_.size(); ++e)
    at[e] = addresses_[e], at[addresses_.size() + e] = addresses_[e] + pages_size();
  int error = ops_.upload(stream, pages_at_.get(), at, addresses_.size() * sizeof(uint64_t));
  if (!error)
    error = ops_.upload(stream, scales_at_.get(), at + addresses_.size(),
                        addresses_.size() * sizeof(uint64_t));
  if (!error) error = ops_.wait(stream);
  if (!error) placed_ = addresses_.size();
  return device_->status(error, in_prefill);
}

int GpuPrefillAttention::put_ahead(const KvStore& store, uint32_t layer, ThreadPool* pool,
                                   DeviceStream* stream) {
  const PageStore& pages = store.pages();
  const uint32_t first = pages.pages() / extent_pages;
  const auto end = static_cast<uint32_t>(
      ceil_div(pages.pages() + store.pages_after(store.window_count() + n_), extent_pages));
  const std::size_t its_pages = pages_size() / layers_, its_scales = scales_size() / layers_,
                    size = its_pages + its_scales;
  if (layer == 0) ahead_ = 0;
  if (!store.sealed_ahead(first_ + layer) || end > addresses_.size() ||
      (end - first) * size > 2 * staging_half_)
    return 0;
  std::byte* staged = staging_.get();
  pool->run((end - first) * shape_.kv_heads, [&](uint32_t task, uint32_t) {
    const uint32_t e = task / shape_.kv_heads, h = task % shape_.kv_heads;
    const ExtentView view = pages.extent(first_ + layer, h, first + e);
    std::memcpy(staged + e * size + h * PageShape::pages_bytes(), view.pages,
                PageShape::pages_bytes());
    std::memcpy(staged + e * size + its_pages + h * shape_.page.scales_bytes(), view.scales,
                shape_.page.scales_bytes());
  });
  int error = 0;
  for (uint32_t e = first; e < end && !error; ++e, staged += size) {
    stamps_[e] = 0;
    error = ops_.upload(stream, reinterpret_cast<void*>(addresses_[e] + layer * its_pages), staged,
                        its_pages);
    if (!error)
      error = ops_.upload(
          stream, reinterpret_cast<void*>(addresses_[e] + pages_size() + layer * its_scales),
          staged + its_pages, its_scales);
  }
  ++ahead_;
  return error;
}

void GpuPrefillAttention::committed(const KvStore& store) {
  if (std::exchange(ahead_, 0) < layers_) return;
  for (uint32_t e = pages_ / extent_pages; e < store.pages().extents(); ++e)
    stamps_[e] = store.pages().stamp(e);
}

// What is in full precision.
Status GpuPrefillAttention::put_rows(const KvStore& store, ThreadPool* pool, DeviceStream* stream) {
  const std::size_t dim = shape_.page.dim, heads = heads_total(),
                    filled = store.window_count() * dim;
  auto* staged = reinterpret_cast<float*>(staging_.get());
  int error = 0;
  centred_ = !store.centre().empty();
  if (sinks_stamp_ != store.sinks_stamp()) {
    const std::size_t rows = 2 * shape_.page.page_tokens * dim,
                      size = store.sink_floats().empty() ? 0 : heads * rows,
                      centre = centred_ ? heads * dim : 0;
    if (size > 0) std::copy_n(store.sink_floats().data() + first_head() * rows, size, staged);
    if (centred_) std::copy_n(store.centre().data() + first_head() * dim, centre, staged + size);
    error = ops_.upload(stream, sinks_.get(), staged, size * sizeof(float));
    if (!error) error = ops_.upload(stream, centre_.get(), staged + size, centre * sizeof(float));
    if (!error) error = ops_.wait(stream);
    if (error) return device_->status(error, in_prefill);
    sinks_stamp_ = store.sinks_stamp();
  }
  if (filled == 0) return {};
  const std::size_t room = std::size_t{window_room_} * dim;
  pool->run(static_cast<uint32_t>(heads), [&](uint32_t h, uint32_t) {
    const KvStore::Rows rows = store.window(first_ + h / shape_.kv_heads, h % shape_.kv_heads);
    std::copy_n(rows.k, filled, staged + h * 2 * room);
    std::copy_n(rows.v, filled, staged + (h * 2 + 1) * room);
  });
  error = ops_.upload(stream, window_.get(), staged, heads * 2 * room * sizeof(float));
  // the staging memory is left alone until the stream has been waited for
  return device_->status(error, in_prefill);
}

Status GpuPrefillAttention::prepare(const KvStore& store, uint32_t n, ThreadPool* pool,
                                    DeviceStream* stream, const CancelLatch& cancel) {
  Status s = device_->status(ops_.wait(stream), in_prefill);
  if (s.ok()) s = make_room(store, n);
  if (s.ok()) s = put_pages(store, pool, stream, cancel);
  if (s.ok()) s = put_rows(store, pool, stream);
  n_ = n, pages_ = store.pages().pages(), window_count_ = store.window_count(), ahead_ = 0;
  return s;
}

int GpuPrefillAttention::enqueue(DeviceStream* stream, uint32_t layer, const float* q,
                                 const float* k, const float* v, float* out, float* lse) const {
  const PageShape& page = shape_.page;
  const std::size_t first = std::size_t{layer} * shape_.kv_heads;
  const auto q_rows =
      static_cast<uint32_t>(round_up(std::size_t{n_} * heads_.group(), prefill_rows));
  const float* const sinks = sink_logits_.empty() ? nullptr : sink_logits_[layer];
  const DevicePrefill r{shape_.kv_heads,
                        heads_.group(),
                        page.head_dim,
                        page.dim,
                        page.page_tokens,
                        n_,
                        pages_,
                        window_count_,
                        pages_at_.get(),
                        scales_at_.get(),
                        first * PageShape::pages_bytes(),
                        first * page.scales_bytes(),
                        sinks_.get() + first * 2 * page.page_tokens * page.dim,
                        centred_ ? centre_.get() + first * page.dim : nullptr,
                        window_.get() + first * 2 * window_room_ * page.dim,
                        window_room_,
                        room_,
                        q_rows,
                        keys_.get(),
                        values_.get(),
                        q_.get(),
                        q_scale_.get(),
                        largest_.get(),
                        sinks,
                        sinks ? sink_scores_.get() : nullptr,
                        0,
                        0,
                        false,
                        0,
                        parts_.get(),
                        part_room_};
  const int error = ops_.prepare_prefill(stream, r, q, k, v);
  return error ? error : ops_.attend_prefill(stream, r, out, lse);
}

}  // namespace kvasir
