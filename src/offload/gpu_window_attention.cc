#include "offload/gpu_window_attention.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "backend/kernels.h"
#include "base/memory.h"
#include "model/gpu_workspace.h"

namespace kvasir {

constexpr const char* what = "keys and values of windows";
constexpr std::size_t max_staged = std::size_t{16} << 20;  // bytes that are copied together

GpuWindowAttention::GpuWindowAttention(const std::shared_ptr<Device>& device,
                                       const ModelConfig& config, uint32_t first, uint32_t layers)
    : device_(device), ops_(device->kernels()), heads_(config.windows), first_(first),
      layers_(layers), window_(static_cast<uint32_t>(config.window)), room_(window_room(config)),
      chunked_(config.chunked), softcap_(config.attention_softcap) {}

bool GpuWindowAttention::lays_out(uint32_t n) const {
  return window_lays_out(n, heads_.head_dim, softcap_);
}

void GpuWindowAttention::release_prefill() {
  keys_ = {}, values_ = {}, q_ = {};
  q_scale_ = {}, largest_ = {}, sink_scores_ = {}, lse_ = {};
  rows_room_ = q_room_ = 0;
}

void GpuWindowAttention::release() {
  if (holds_memory()) ++generation_;
  ring_ = {}, states_ = {}, position_ = {};
  release_prefill();
  states_room_ = 0, stamp_ = 0;
}

Status GpuWindowAttention::make_room(uint32_t n) {
  if (!ring_.get()) {
    ++generation_;
    stamp_ = 0;
    RETURN_IF_ERROR(ring_.allocate(device_, heads_total() * head_floats(), what));
  }
  if (!position_.get()) RETURN_IF_ERROR(position_.allocate(device_, max_alone, what));
  if (!position_host_.get()) RETURN_IF_ERROR(position_host_.allocate(device_, max_alone));
  if (lays_out(n)) return make_prefill_room(n);
  release_prefill();
  const std::size_t floats = max_window_state_floats(n, heads_.heads, heads_.head_dim);
  if (floats <= states_room_) return {};
  ++generation_;
  states_room_ = 0, states_ = {};  // never old and new together
  RETURN_IF_ERROR(states_.allocate(device_, floats, what));
  states_room_ = floats;
  return {};
}

// Each array grows alone, and is never there old and new together.
Status GpuWindowAttention::make_prefill_room(uint32_t n) {
  const std::size_t kv_heads = heads_.kv_heads, dim = PageShape::of(heads_.head_dim).dim;
  const uint32_t rows = window_prefill_rows(window_, n),
                 q_rows = window_query_rows(n, heads_.group());
  if (!largest_.get()) RETURN_IF_ERROR(largest_.allocate(device_, kv_heads * 2, what));
  if (rows > rows_room_) {
    rows_room_ = 0, keys_ = {}, values_ = {};
    RETURN_IF_ERROR(keys_.allocate(device_, kv_heads * rows * dim, what));
    RETURN_IF_ERROR(values_.allocate(device_, kv_heads * rows * dim, what));
    rows_room_ = rows;
  }
  if (q_rows <= q_room_) return {};
  q_room_ = 0, q_ = {}, q_scale_ = {}, sink_scores_ = {}, lse_ = {};
  RETURN_IF_ERROR(q_.allocate(device_, kv_heads * q_rows * dim, what));
  RETURN_IF_ERROR(q_scale_.allocate(device_, kv_heads * q_rows, what));
  RETURN_IF_ERROR(sink_scores_.allocate(device_, kv_heads * q_rows, what));
  RETURN_IF_ERROR(lse_.allocate(device_, kv_heads * q_rows, what));
  q_room_ = q_rows;
  return {};
}

Status GpuWindowAttention::prepare(const KvStore& store, uint32_t n, ThreadPool* pool,
                                   DeviceStream* stream, const CancelLatch& cancel) {
  if (const int error = ops_.wait(stream)) return device_->status(error, what);
  RETURN_IF_ERROR(make_room(n));
  n_ = n;
  if (std::exchange(under_way_, false)) stamp_ = 0;
  if (store.tokens() == 0 || (stamp_ != 0 && stamp_ == store.window_stamp())) return {};
  stamp_ = 0;
  RETURN_IF_ERROR(put_rows(store, pool, stream, cancel));
  stamp_ = store.window_stamp();
  return {};
}

// Copies what the next query sees, some heads at a time.
Status GpuWindowAttention::put_rows(const KvStore& store, ThreadPool* pool, DeviceStream* stream,
                                    const CancelLatch& cancel) {
  const PageStore& pages = store.pages();
  const uint64_t end = store.tokens(), first = chunked_
                                                   ? end - end % window_
                                                   : end - std::min<uint64_t>(end, window_ - 1);
  const PageShape& page = store.shape().page;
  for (auto p = static_cast<uint32_t>(first / page.page_tokens); p < pages.pages(); ++p)
    if (!pages.has(p / extent_pages))
      return Status::error(Code::internal, "tokens of a window have been dropped");
  const std::size_t bytes = head_floats() * sizeof(float);
  const auto together = static_cast<uint32_t>(
      std::clamp<std::size_t>(max_staged / bytes, 1, std::max(heads_total(), 1u)));
  Device::Staging staged;
  RETURN_IF_ERROR(device_->stage(together * bytes, cancel, &staged));
  auto* rows = reinterpret_cast<float*>(staged.data);
  const std::size_t unsealed_floats = std::size_t{2} * page.page_tokens * page.dim;
  const Buffer<float> unsealed = make_buffer<float>(together * unsealed_floats);
  for (uint32_t at = 0; at < heads_total(); at += together) {
    if (cancel.fired())
      return Status::error(Code::cancelled, "cancelled; the sequence is as it was");
    const uint32_t count = std::min(together, heads_total() - at);
    std::atomic<bool> intact{true};
    pool->run(count, [&](uint32_t task, uint32_t) {
      if (!fill(store, at + task, first, unsealed.get() + task * unsealed_floats,
                rows + task * head_floats()))
        intact = false;
    });
    if (!intact) return pages.damaged();
    int error = ops_.upload(stream, ring_.get() + at * head_floats(), rows, count * bytes);
    if (!error) error = ops_.wait(stream);
    if (error) return device_->status(error, what);
  }
  return {};
}

// Tokens from `first` on of a head. Returns false if a page of a mapped file is damaged.
bool GpuWindowAttention::fill(const KvStore& store, uint32_t of_all, uint64_t first,
                              float* unsealed, float* to) const {
  const PageShape& page = store.shape().page;
  const uint32_t layer = first_ + of_all / heads_.kv_heads, head = of_all % heads_.kv_heads,
                 dim = heads_.head_dim;
  const std::size_t values = std::size_t{room_} * dim,
                    head_at = std::size_t{layer} * heads_.kv_heads + head;
  const float* centre =
      store.centre().empty() ? nullptr : store.centre().data() + head_at * page.dim;
  const auto put = [&](uint64_t token, const float* k, const float* v) {
    float* row = to + token % room_ * dim;
    for (uint32_t d = 0; d < dim; ++d) row[d] = k[d] + (centre ? centre[d] : 0.0f);
    std::copy_n(v, dim, row + values);
  };
  const uint64_t sealed = store.sealed_tokens();
  float* const unsealed_values = unsealed + std::size_t{page.page_tokens} * page.dim;
  for (uint64_t token = first; token < sealed;) {
    const auto p = static_cast<uint32_t>(token / page.page_tokens);
    if (!store.pages().intact_page(layer, head, p)) return false;
    const PageRef ref = store.pages().page(layer, head, p);
    cpu_kernels().unseal_page(page, ref.data, ref.scales, unsealed, unsealed_values);
    for (auto t = static_cast<uint32_t>(token % page.page_tokens); t < page.page_tokens;
         ++t, ++token)
      put(token, unsealed + std::size_t{t} * page.dim, unsealed_values + std::size_t{t} * page.dim);
  }
  const KvStore::Rows rows = store.window(layer, head);
  for (uint64_t token = std::max(first, store.window_begin()); token < store.tokens(); ++token) {
    const std::size_t at = (token - store.window_begin()) * page.dim;
    put(token, rows.k + at, rows.v + at);
  }
  return true;
}

int GpuWindowAttention::begin(uint64_t position, DeviceStream* stream) {
  under_way_ = true;
  position_of_step_ = position;
  for (uint32_t i = 0; i < rows_; ++i) position_host_.get()[i] = position + i;
  return ops_.upload(stream, position_.get(), position_host_.get(), rows_ * sizeof position);
}

DeviceWindow GpuWindowAttention::window(uint32_t layer, const float* sinks) const {
  return {.n = n_,
          .heads = heads_.heads,
          .kv_heads = heads_.kv_heads,
          .head_dim = heads_.head_dim,
          .window = window_,
          .chunked = chunked_,
          .room = room_,
          .position = position_.get() + row_,
          .ring = ring_.get() + layer * heads_.kv_heads * head_floats(),
          .sinks = sinks,
          .softcap = softcap_,
          .states = states_.get()};
}

// The step attends the tokens that its first query sees, and its own.
DevicePrefill GpuWindowAttention::prefill(uint32_t layer, const float* sinks) const {
  const DeviceWindow w = window(layer, sinks);
  const uint64_t first = first_seen_of(w, position_of_step_);
  const PageShape page = PageShape::of(heads_.head_dim);
  return {.kv_heads = heads_.kv_heads,
          .group = heads_.group(),
          .head_dim = heads_.head_dim,
          .dim = page.dim,
          .page_tokens = page.page_tokens,
          .n = n_,
          .pages = 0,
          .window = static_cast<uint32_t>(position_of_step_ - first),
          .pages_at = nullptr,
          .scales_at = nullptr,
          .pages_offset = 0,
          .scales_offset = 0,
          .sinks = nullptr,
          .centre = nullptr,
          .window_rows = w.ring,
          .window_room = room_,
          .room = rows_room_,
          .q_room = window_query_rows(n_, heads_.group()),
          .keys = keys_.get(),
          .values = values_.get(),
          .q = q_.get(),
          .q_scale = q_scale_.get(),
          .largest = largest_.get(),
          .sink_logits = sinks,
          .sink_scores = sinks ? sink_scores_.get() : nullptr,
          .seen = window_,
          .ring_first = static_cast<uint32_t>(first % room_),
          .chunked = chunked_,
          .position = position_of_step_};
}

int GpuWindowAttention::enqueue(DeviceStream* stream, uint32_t layer, const float* sinks,
                                const Rows& rows, bool keeps) const {
  const DeviceWindow w = window(layer, sinks);
  int error = 0;
  if (lays_out(n_)) {
    const DevicePrefill r = prefill(layer, sinks);
    error = ops_.prepare_prefill(stream, r, rows.q, rows.k, rows.v);
    if (!error) error = ops_.attend_prefill(stream, r, rows.out, lse_.get());
  } else {
    error = ops_.attend_window(stream, w, rows.q, rows.k, rows.v, rows.out);
  }
  return error || !keeps ? error : ops_.keep_window(stream, w, rows.k, rows.v);
}

void GpuWindowAttention::committed(const KvStore& store) {
  if (std::exchange(under_way_, false)) stamp_ = store.window_stamp();
}

}  // namespace kvasir
