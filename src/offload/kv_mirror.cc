#include "offload/kv_mirror.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "backend/first_failure.h"
#include "base/checked.h"
#include "os/os.h"

namespace kvasir {
namespace {

// extents, room for what is read and answered next: an eighth
constexpr uint32_t min_spare = 32, max_spare = 64;

// How many extents of the sketch are in a block of at most `large` bytes: up to 16 where they are
// small, fewer of large ones, and so many that little is lost where the device allocates whole
// blocks of its own.
uint32_t extents_of_block(std::size_t extent_bytes, uint64_t large) {
  const auto max_extents = static_cast<uint32_t>(
      std::clamp<uint64_t>(large / std::max<std::size_t>(extent_bytes, 1), 1, 16));
  uint32_t best = max_extents;
  for (uint32_t n = max_extents; n > max_extents / 2; --n)
    if (Device::allocated_size(n * extent_bytes) * best <
        Device::allocated_size(best * extent_bytes) * n)
      best = n;
  return best;
}

}  // namespace

KvMirror::KvMirror(const std::shared_ptr<Device>& device, std::shared_ptr<DeviceSketches> sketches,
                   const StoreShape& shape, uint32_t first, uint32_t layers, uint32_t heads)
    : device_(device), ops_(device->kernels()), sketches_(std::move(sketches)), shape_(shape),
      first_(first), layers_(layers), heads_(heads),
      block_extents_(extents_of_block(sketch_bytes(), device->info().block_bytes)) {}

KvMirror::~KvMirror() { release(); }

uint64_t KvMirror::bytes_of_fork() {
  const uint64_t its_buffers =
      std::apply([](const auto&... b) { return (b.taken() + ...); }, buffers());
  return 2 * Device::allocated_size(block_extents_ * sketch_bytes()) + its_buffers;
}

void KvMirror::release() {
  forget_regions();
  cannot_share_ = Fallback::none;
  ++generation_;
  extents_ = window_rows_ = 0;
  blocks_.clear();
  std::apply([](auto&... b) { (void(b = {}), ...); }, buffers());
  page_stamps_.clear(), sketch_stamps_.clear();
  forget_kept();
  basis_stamp_ = sinks_stamp_ = 0;
  windows_.clear();
  has_begun_ = false;
}

Fallback KvMirror::unfit(const KvStore& store, const HeadShape& heads) {
  if (store.budget().bytes > 0) return Fallback::memory_limit;
  if (store.window_tokens() == KvStore::keep_all) return Fallback::full_precision;
  if (std::find(std::begin(attended_dims), std::end(attended_dims), store.shape().page.dim) ==
      std::end(attended_dims))
    return Fallback::head_size;
  if (heads.group() > max_attended_group) return Fallback::group_size;
  return Fallback::none;
}

Status KvMirror::send(DeviceStream* stream, void* to, const void* from, std::size_t size) {
  int error = ops_.upload(stream, to, from, size);
  if (!error) error = ops_.wait(stream);
  return device_->status(error, purpose);
}

// Everything that depends on how long the sequence is, but for the sketch. What was there is gone
// when it moves.
Status KvMirror::make_room(const KvStore& store) {
  const PageShape& page = shape_.page;
  const uint32_t rows = static_cast<uint32_t>(round_up(
      std::max(store.window_count(), store.window_tokens() + 2 * page.page_tokens) + max_tokens,
      32));
  if (store.pages().extents() <= extents_ && rows <= window_rows_) return {};
  windows_.reserve(max_windows);  // committed() must not fail
  const uint32_t extents =
      std::max(extents_, store.pages().extents() +
                             std::clamp(store.pages().extents() / 8, min_spare, max_spare));
  const std::size_t heads = heads_total();
  extents_ = window_rows_ = 0;
  ++generation_;
  window_ = {};  // never old and new together
  addressed_ = 0;
  basis_stamp_ = sinks_stamp_ = 0;
  windows_.clear();
  Status s = sketch_at_.allocate(device_, extents, purpose);
  if (s.ok()) s = window_.allocate(device_, heads * 2 * rows * page.dim, purpose);
  if (s.ok()) s = pages_at_.allocate(device_, extents, purpose);
  if (s.ok()) s = scales_at_.allocate(device_, extents, purpose);
  if (s.ok()) s = basis_.allocate(device_, heads * page.dim * page.sketch_dim(), purpose);
  if (s.ok()) s = sinks_.allocate(device_, heads * 2 * page.page_tokens * page.dim, purpose);
  if (s.ok()) s = centre_.allocate(device_, heads * page.dim, purpose);
  if (s.ok()) s = counts_.allocate(device_, max_alone, purpose);
  if (s.ok()) s = budgets_.allocate(device_, layers_, purpose);
  if (s.ok() && !known_.get()) s = known_.allocate(device_, max_alone);
  if (!s.ok()) return s;
  blocks_moved_ = true;
  extents_ = extents;
  window_rows_ = rows;
  return {};
}

// Memory through which things go to the device, all sessions', until update() ends.
Status KvMirror::need_staging(const CancelLatch& cancel) {
  if (staged_.data) return {};
  // of a head's window
  const std::size_t head_bytes = std::size_t{2} * window_rows_ * shape_.page.dim * sizeof(float);
  return device_->stage(std::max({2 * sketch_bytes(), head_bytes, basis_.bytes(), sinks_.bytes(),
                                  2 * extents_ * sizeof(uint64_t)}),
                        cancel, &staged_);
}

// Then the next step writes behind these rows.
bool KvMirror::has_rows(const KvStore& store) {
  const auto at = std::find(windows_.begin(), windows_.end(), store.window_stamp());
  if (at == windows_.end()) return false;
  windows_.erase(at + 1, windows_.end());
  return true;
}

Status KvMirror::put_window(const UpdateRequest& request) {
  const KvStore& store = request.store;
  DeviceStream* const stream = request.streams.own;
  const std::size_t dim = shape_.page.dim, heads = heads_total();
  const bool puts_basis = store.sketch().built() && basis_stamp_ != store.sketch().basis_stamp();
  const bool puts_sinks = sinks_stamp_ != store.sinks_stamp() || sinks_stamp_ == 0,
             puts_rows = !has_rows(store);
  if (!puts_basis && !puts_sinks && !puts_rows) return {};
  if (request.cancel.fired()) return cancelled();
  RETURN_IF_ERROR(need_staging(request.cancel));
  auto* staged = reinterpret_cast<float*>(staged_.data);
  if (puts_basis) {
    const std::size_t size = dim * shape_.page.sketch_dim();
    for (uint32_t h = 0; h < heads; ++h)
      std::copy_n(store.sketch().query_basis(first_ + h / shape_.kv_heads, h % shape_.kv_heads),
                  size, staged + h * size);
    RETURN_IF_ERROR(send(stream, basis_.get(), staged, heads * size * sizeof(float)));
    basis_stamp_ = store.sketch().basis_stamp();
  }
  if (puts_sinks) {
    std::fill_n(staged, heads * dim, 0.0f);
    if (!store.centre().empty())
      std::copy_n(store.centre().data() + first_head() * dim, heads * dim, staged);
    RETURN_IF_ERROR(send(stream, centre_.get(), staged, heads * dim * sizeof(float)));
    if (!store.sink_floats().empty()) {
      const std::size_t size = 2 * shape_.page.page_tokens * dim;  // of a head
      std::copy_n(store.sink_floats().data() + first_head() * size, heads * size, staged);
      RETURN_IF_ERROR(send(stream, sinks_.get(), staged, heads * size * sizeof(float)));
    }
    sinks_stamp_ = store.sinks_stamp();
  }
  if (puts_rows) {
    windows_.clear();
    first_row_ = 0;
    const std::size_t size = std::size_t{window_rows_} * dim, filled = store.window_count() * dim,
                      together = staged_.bytes / (2 * size * sizeof(float));
    for (std::size_t first = 0; first < heads; first += together) {
      const std::size_t count = std::min(together, heads - first);
      request.pool->run(static_cast<uint32_t>(count), [&](uint32_t i, uint32_t) {
        const auto h = static_cast<uint32_t>(first) + i;
        const KvStore::Rows rows = store.window(first_ + h / shape_.kv_heads, h % shape_.kv_heads);
        std::copy_n(rows.k, filled, staged + i * 2 * size);
        std::copy_n(rows.v, filled, staged + (i * 2 + 1) * size);
      });
      RETURN_IF_ERROR(
          send(stream, window_.get() + first * 2 * size, staged, count * 2 * size * sizeof(float)));
    }
    windows_.push_back(store.window_stamp());
  }
  return {};
}

Status KvMirror::update(const UpdateRequest& request, const Wants& wants, bool* reads) {
  const KvStore& store = request.store;
  const PageStore& pages = store.pages();
  Status s = device_->status(ops_.wait(request.streams.own), purpose);
  note_changes(pages);
  uint32_t shared = pages.extents();
  // Pages that cannot be pinned are staged: always, or until the sequence is longer.
  const auto or_staged = [&](Status pinned) {
    if (pinned.code() != Code::unsupported && pinned.code() != Code::no_memory) return pinned;
    forget_regions();
    refused_extents_ = pinned.code() == Code::no_memory ? pages.extents() : 0;
    if (refused_extents_) cannot_share_ = Fallback::no_memory_to_pin;
    else if (cannot_share_ == Fallback::none) cannot_share_ = Fallback::cannot_pin;
    return Status();
  };
  if (refused_extents_ && refused_extents_ != pages.extents())
    refused_extents_ = 0, cannot_share_ = Fallback::none;
  if (s.ok() && wants.pages && cannot_share_ == Fallback::none && addressed_ < shared)
    s = or_staged(share_pages(store, request.devices, &shared));
  const struct Lease {
    Device::Staging& staging;
    ~Lease() { staging = {}; }
  } lease{staged_};
  if (s.ok()) s = make_room(store);
  if (s.ok() && wants.sketch) s = put_summaries(request);
  if (s.ok()) s = put_window(request);
  *reads = s.ok() && wants.pages && cannot_share_ == Fallback::none && shared == pages.extents();
  if (*reads && addressed_ < shared)
    s = or_staged(put_addresses(request)), *reads = s.ok() && cannot_share_ == Fallback::none;
  return s;
}

void KvMirror::begin_step(const KvStore& store, uint32_t rows) {
  kept_end_ = std::max(kept_end_, store.pages().pages() * shape_.page.page_quads());
  for (uint32_t i = 0; i < rows; ++i)
    known_.get()[i] = {store.pages().pages(), store.window_count() + i, ++step_,   kept_since_,
                       changed_from_,         changed_since_,           first_row_};
}

int KvMirror::enqueue_counts(uint32_t rows, DeviceStream* stream) const {
  return ops_.upload(stream, counts_.get(), known_.get(), rows * sizeof(DeviceCounts));
}

void KvMirror::committed(const KvStore& store, uint32_t n) {
  const DeviceCounts& before = *known_.get();
  const uint32_t sealed = (store.pages().pages() - before.pages) * shape_.page.page_tokens;
  if (windows_.empty() || store.window_count() + sealed != before.window + n) return;
  if (sealed > 0) {
    if (before.pages == 0) return;  // the host has centred its rows with the first page
    windows_.clear();
    first_row_ = window_row(before, sealed, window_rows_);
  }
  if (windows_.size() == max_windows) windows_.erase(windows_.begin());
  windows_.push_back(store.window_stamp());
}

DeviceKv KvMirror::layer(uint32_t layer, uint32_t row) const {
  const PageShape& page = shape_.page;
  const std::size_t heads = shape_.kv_heads, first = layer * heads;
  return {first_ + layer,
          shape_.kv_heads,
          heads_ / shape_.kv_heads,
          page.head_dim,
          page.dim,
          page.page_tokens,
          page.sketch_dim(),
          counts_.get() + row,
          budgets_.get() + layer,
          sketch_at_.get(),
          pages_at_.get(),
          scales_at_.get(),
          first * page.sketch_bytes(),
          first * PageShape::pages_bytes(),
          first * page.scales_bytes(),
          page.sketch_bytes(),
          basis_.get() + first * page.dim * page.sketch_dim(),
          sinks_.get() + first * 2 * page.page_tokens * page.dim,
          centre_.get() + first * page.dim,
          window_.get() + first * 2 * window_rows_ * page.dim,
          window_rows_,
          sink_logits_.empty() ? nullptr : sink_logits_[layer]};
}

}  // namespace kvasir
