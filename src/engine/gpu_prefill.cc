// Prefill: a GPU attends all tokens over its copy of the pages. A layer goes to the store while
// the next one is computed: there are two of what is delivered, and a stream of their copies.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::plan_prefill(const StepContext& c, Fallback* why) {
  const uint32_t n = c.tokens(), size = c.store.pages().extents() + 1;
  selective_.trim(), hybrid_.trim();
  *why = prefill_attention_.refuses(c.store, n);
  if (*why != Fallback::none) return release_prefill(), Status();
  if (refused_prefill_.is(size, n)) return *why = Fallback::no_room, Status();
  const auto prepare = [&] {
    RETURN_IF_ERROR(resize(n));
    RETURN_IF_ERROR(resize_prefill(n));
    return prefill_attention_.prepare(c.store, n, c.pool, stream_);
  };
  Status s = prepare();
  if (s.code() == Code::no_memory && selective_.drop_hot_quads()) s = prepare();
  if (s.code() == Code::no_memory && selective_.holds_memory()) release_selective(), s = prepare();
  if (s.code() == Code::no_memory && hybrid_.holds_memory()) release_hybrid(), s = prepare();
  if (s.ok()) {
    refused_prefill_ = {};
    mode_ = AttentionMode::gpu_prefill;
    return {};
  }
  if (s.code() == Code::cancelled) return s;  // what has come stays
  release_prefill();
  if (s.code() != Code::no_memory) return s;
  refused_prefill_ = {size, n};
  return *why = Fallback::no_room, Status();
}

std::size_t GpuExecutor::lse_floats(uint32_t n) const {
  return round_up(std::size_t{n} * config_.heads, 4);  // outputs are read 16 bytes at a time
}

// Of one of two layers: q, k, v, lse, output.
std::size_t GpuExecutor::prefill_floats(uint32_t n) const {
  return n * (2 * size_.q + 2 * size_.kv) + lse_floats(n);
}

float* GpuExecutor::prefill_output(uint32_t layer) const {
  return prefill_slot(layer) + n_ * (size_.q + 2 * size_.kv) + lse_floats(n_);
}

Status GpuExecutor::resize_prefill(uint32_t n) {
  if (slots() * prefill_floats(n) * sizeof(float) <= prefill_.bytes()) return {};
  prefill_ = {}, prefill_host_ = {}, prefill_host_room_ = 0;
  const std::size_t room = slots() * (prefill_floats(n) - n * size_.q);
  Status s = prefill_.allocate(device_, slots() * prefill_floats(n),
                               "two layers' queries, keys and values");
  if (s.ok()) s = prefill_host_.allocate(device_, room);
  s.ok() ? void(prefill_host_room_ = room) : void(prefill_ = {});
  return s;
}

Status GpuExecutor::attend_prefill(uint32_t layer) {
  const auto [q, k, v] = projected(layer, prefill_slot(layer));
  float* lse = prefill_slot(layer) + n_ * (size_.q + 2 * size_.kv);
  RETURN_IF_ERROR(
      prefill_attention_.bring(step_->store, local_kv(layer), step_->pool, step_->cancel));
  enqueue(
      prefill_attention_.enqueue(stream_, local_kv(layer), q, k, v, prefill_output(layer), lse));
  return deliver_before(layer);
}

// The last layer with attention before this one, or no_layer.
uint32_t GpuExecutor::attention_before(uint32_t layer) const {
  while (layer > first_layer())
    if (has_attention(--layer)) return layer;
  return no_layer;
}

// While a layer with attention and those behind it are computed, the one before it goes to the
// store.
Status GpuExecutor::deliver_before(uint32_t layer) {
  const uint32_t before = attention_before(layer);
  if (before == no_layer) RETURN_IF_ERROR(begin_delivery());
  else RETURN_IF_ERROR(deliver(before));
  if (step_->cancel.fired()) return {};
  enqueue_copy(layer);
  return before == no_layer ? host_->reserve_pages(*step_) : Status();
}

Status GpuExecutor::begin_delivery() {
  outputs_ = host_->outputs_wanted(step_->step);
  if (outputs_room_ >= outputs_) return {};
  outputs_room_ = 0;
  RETURN_IF_ERROR(prefill_outputs_.allocate(device_, slots() * outputs_ * size_.q));
  outputs_room_ = outputs_;
  return {};
}

void GpuExecutor::enqueue_copy(uint32_t layer) {
  enqueue(ops_.after(copies_, stream_));
  const std::size_t first = n_ * (size_.q + 2 * size_.kv) + lse_floats(n_);
  const std::size_t outputs = outputs_ * size_.q;
  const float* from = prefill_slot(layer);
  float* to = prefill_host_.get() + slot_of(layer) * first;
  enqueue(ops_.download(copies_, to, from, first * sizeof(float)));
  if (outputs_ > 0) {
    float* to_outputs = prefill_outputs_.get() + slot_of(layer) * outputs;
    enqueue(ops_.download(copies_, to_outputs, from + first, outputs * sizeof(float)));
  }
  enqueue(ops_.download(copies_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
}

// Waits for a layer's copy, which then goes to the store.
Status GpuExecutor::deliver(uint32_t layer) {
  RETURN_IF_ERROR(wait("a layer", copies_));
  if (step_->cancel.fired()) return {};
  const std::size_t floats = n_ * (size_.q + 2 * size_.kv);
  float* const rows = prefill_host_.get() + slot_of(layer) * (floats + lse_floats(n_));
  const auto [q, k, v] = projected(layer, rows);
  const float* outputs = prefill_outputs_.get() + slot_of(layer) * outputs_ * size_.q;
  RETURN_IF_ERROR(host_->take(*step_, layer,
                              {.q = q,
                               .k = k,
                               .v = v,
                               .lse = rows + floats,
                               .attended = outputs_ > 0 ? outputs : nullptr}));
  if (config_.layer(layer).is_windowed()) return {};
  enqueue(prefill_attention_.put_ahead(step_->store, local_kv(layer), step_->pool, copies_));
  return {};
}

Status GpuExecutor::end_prefill() {
  const uint32_t last = end_layer() - 1;
  enqueue_last_feed_forward(last, prefill_output(last));
  RETURN_IF_ERROR(advance_weights());
  RETURN_IF_ERROR(deliver(attention_before(end_layer())));
  enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  enqueue(ops_.wait(copies_));
  RETURN_IF_ERROR(wait("a step"));
  if (!step_->cancel.fired()) host_->count_prefill(*step_, kv_.count);
  return {};
}

// Of tokens that something needs: those of the logits, or all where another executor goes on.
void GpuExecutor::enqueue_last_feed_forward(uint32_t layer, float* a) {
  const uint32_t wanted = ends_model() ? step_->step.logits_wanted() : n_;
  if (wanted == 0) return;
  const uint32_t n = std::exchange(n_, wanted), first = n - wanted;
  first_row_ = first;
  work_.x += first * size_.width, work_.y += first * size_.parallel;
  check_and_feed_forward(layer, a + first * config_.layer(layer).q_width());
  work_.x -= first * size_.width, work_.y -= first * size_.parallel, n_ = n;
  first_row_ = 0;
}

}  // namespace kvasir
