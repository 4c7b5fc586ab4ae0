// Prefill: a GPU attends all tokens, or chosen tiles of them, over its copy of the pages. A layer
// goes to the store while the next ones are computed: there are several of what is delivered, each
// with a stream of its copies, so that the GPU has work while the CPU writes.
#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::plan_prefill(const StepContext& c, Fallback* why) {
  const uint32_t n = c.tokens(), size = c.store.pages().extents() + 1;
  if (!is_behind_) RETURN_IF_ERROR(device_->status(ops_.wait(stream_), "a step"));
  selective_.trim(), hybrid_.trim();
  *why = prefill_attention_.refuses(c.store, n);
  if (*why != Fallback::none) return release_prefill(), Status();
  if (refused_prefill_.is(size, n)) return *why = Fallback::no_room, Status();
  const auto prepare = [&] {
    RETURN_IF_ERROR(resize(n));
    RETURN_IF_ERROR(resize_prefill(c));
    return prefill_attention_.prepare(c.store, c.step.plan, HostAttention::probed_rows(c.step), n,
                                      c.step.follows, c.pool, stream_);
  };
  Status s = prepare();
  if (s.code() == Code::no_memory && !kept_halves_.empty()) give_up_halves(), s = prepare();
  if (s.code() == Code::no_memory && halves_.get()) release_halves(), s = prepare();
  if (s.code() == Code::no_memory && next_x_) release_stream(), s = prepare();
  if (s.code() == Code::no_memory && slots() > 2) slots_ = 2, s = prepare();
  if (s.code() == Code::no_memory && selective_.drop_hot_quads()) s = prepare();
  if (s.code() == Code::no_memory && selective_.holds_memory()) release_selective(), s = prepare();
  if (s.code() == Code::no_memory && hybrid_.holds_memory()) release_hybrid(), s = prepare();
  if (s.ok()) {
    refused_prefill_ = {};
    resize_halves(n);
    keeps_halves_ = keeps_halves(c), expects_more_ = c.step.follows > 0;
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

// Of a slot: q, k, v, lse, output.
std::size_t GpuExecutor::prefill_floats(uint32_t n) const {
  return n * (2 * size_.q + 2 * size_.kv) + lse_floats(n);
}

float* GpuExecutor::prefill_output(uint32_t layer) const {
  return prefill_slot(layer) + n_ * (size_.q + 2 * size_.kv) + lse_floats(n_);
}

// The host gets the queries that it wants: of the last tokens, and of the first ones where they are
// probed.
Status GpuExecutor::resize_prefill(const StepContext& c) {
  const uint32_t n = c.tokens();
  std::size_t narrowest = size_.q;
  for (uint32_t l = first_layer(); l < end_layer(); ++l)
    if (has_attention(l)) narrowest = std::min<std::size_t>(narrowest, config_.layer(l).q_width());
  first_query_ = n - HostAttention::queries_wanted(c);
  probed_queries_ = first_query_ > 0 ? HostAttention::probed_rows(c.step) : 0;
  host_slot_ = n * (size_.q + 2 * size_.kv) + lse_floats(n) - first_query_ * narrowest +
               probed_queries_ * size_.q;
  const std::size_t wanted = slots() * prefill_floats(n),
                    room = std::max(slots() * host_slot_, n * (size_.width + 2 * size_.angles));
  if (wanted * sizeof(float) > prefill_.bytes()) {
    prefill_ = {};
    RETURN_IF_ERROR(prefill_.allocate(device_, wanted, "layers' queries, keys and values"));
  }
  if (room <= prefill_host_room_) return {};
  if (prefill_host_.get()) wait_for_streams();
  prefill_host_ = {}, prefill_host_room_ = 0;
  RETURN_IF_ERROR(prefill_host_.allocate(device_, room, c.pool));
  return prefill_host_room_ = room, Status();
}

void GpuExecutor::release_halves() {
  if (halves_.get()) wait_for_streams();
  halves_ = {}, halves_room_ = 0;
  kept_halves_.give_up();
}

// Without room for them products of many tokens take longer.
void GpuExecutor::resize_halves(uint32_t n) {
  const std::size_t bytes =
      ops_.halves_bytes(device_->context(), n, static_cast<uint32_t>(size_.widest));
  if (bytes == 0 || n <= halves_room_) return;
  if (halves_.get()) wait_for_streams();
  halves_ = {}, halves_room_ = 0;
  if (!streamed_ && device_->left() < bytes + workspace_bytes(weights_.usual_step()))
    return;  // another session's, say
  if (halves_.allocate(device_, bytes, "weights in half precision").ok()) halves_room_ = n;
}

// Whether some steps of a text read the same halves. Streamed weights are replaced by another
// layer's soon.
bool GpuExecutor::keeps_halves(const StepContext& c) const {
  constexpr uint32_t least = 3;  // steps
  const uint64_t left = c.tokens() + c.step.follows;
  return !streamed_ && c.tokens() <= halves_room_ &&
         (!kept_halves_.empty() || left >= least * c.tokens());
}

// The copy of the first layers, which comes after them, overwrites them.
float* GpuExecutor::pinned_inputs(const StepContext& c) {
  const bool fits = c.tokens() * (size_.width + 2 * size_.angles) <= prefill_host_room_;
  const bool alone = first_layer() == 0 && has_end() && !c.step.inputs;
  return mode_ == AttentionMode::gpu_prefill && alone && fits ? prefill_host_.get() : nullptr;
}

// Where there is room for a usual workspace besides: another session may need that.
void GpuExecutor::bring_ahead(const float* x, uint32_t n) {
  make_second_stream(workspace_bytes(weights_.usual_step()));
  if (next_x_ && n <= capacity_) bring(x, n);
}

// What a text that is stopped has room for besides its own tokens goes too.
void GpuExecutor::end_text() noexcept {
  if (next_x_) release_stream();
  if (!kept_halves_.empty()) wait_for_streams();
  kept_halves_.release();
  if (std::exchange(expects_more_, false)) release_prefill();
  lacks_second_x_ = false, coming_ = nullptr;
}

// Whether the residual stream has come ahead; then it changes places with the last one.
bool GpuExecutor::takes_stream() {
  const float* const came = std::exchange(coming_, nullptr);
  if (!came) return false;
  enqueue(ops_.after(stream_, copies_));
  if (!step_->is_pinned || came != step_->x) return false;
  forget_graphs();  // they have the address
  return std::swap(work_.x, next_x_), true;
}

Status GpuExecutor::attend_prefill(uint32_t layer) {
  const auto [q, k, v] = projected(layer, prefill_slot(layer));
  float* lse = prefill_slot(layer) + n_ * (size_.q + 2 * size_.kv);
  RETURN_IF_ERROR(
      prefill_attention_.bring(step_->store, local_kv(layer), step_->pool, step_->cancel, stream_));
  enqueue(
      prefill_attention_.enqueue(stream_, local_kv(layer), q, k, v, prefill_output(layer), lse));
  return copy_down(layer);
}

// Of a layer that takes a slot: layers before it go to the store until the slot is free.
Status GpuExecutor::project_prefill(uint32_t layer) {
  if (layer > first_layer()) check_and_feed_forward(layer - 1, prefill_output(layer - 1));
  RETURN_IF_ERROR(deliver_all_but(slots() - 1, layer));
  enqueue_projection(layer, prefill_slot(layer));
  return {};
}

// Delivers layers before `end` until no more than `left` of them are under way.
Status GpuExecutor::deliver_all_but(std::size_t left, uint32_t end) {
  for (; undelivered_ < end && !step_->cancel.fired(); ++undelivered_) {
    if (!has_attention(undelivered_)) continue;
    if (attention_number_[local(end)] - attention_number_[local(undelivered_)] <= left) break;
    RETURN_IF_ERROR(deliver(undelivered_));
  }
  return {};
}

// After the attention of a layer is enqueued.
Status GpuExecutor::copy_down(uint32_t layer) {
  if (attention_number_[local(layer)] == 0) RETURN_IF_ERROR(begin_delivery());
  if (step_->cancel.fired()) return {};
  enqueue_copy(layer);
  return {};
}

Status GpuExecutor::begin_delivery() {
  for (std::size_t i = 0; i < slots(); ++i)
    if (!deliveries_[i])
      RETURN_IF_ERROR(
          device_->status(ops_.open_stream(device_->context(), &deliveries_[i]), "a stream"));
  probed_ = HostAttention::probed(step_->step), outputs_ = probed_.count;
  if (outputs_room_ >= outputs_) return {};
  outputs_room_ = 0;
  RETURN_IF_ERROR(prefill_outputs_.allocate(device_, slots() * outputs_ * size_.q));
  outputs_room_ = outputs_;
  return {};
}

void GpuExecutor::enqueue_copy(uint32_t layer) {
  DeviceStream* const copies = deliveries_[slot_of(layer)];
  enqueue(ops_.after(copies, stream_));
  const std::size_t first = n_ * (size_.q + 2 * size_.kv) + lse_floats(n_);
  const std::size_t outputs = outputs_ * size_.q;
  const float* from = prefill_slot(layer);
  const std::size_t width = config_.layer(layer).q_width(), absent = first_query_ * width;
  float* to = prefill_host_.get() + slot_of(layer) * host_slot_;
  enqueue(ops_.download(copies, to, from + absent, (first - absent) * sizeof(float)));
  if (probed_queries_ > 0)
    enqueue(
        ops_.download(copies, to + first - absent, from, probed_queries_ * width * sizeof(float)));
  if (outputs_ > 0) {
    float* to_outputs = prefill_outputs_.get() + slot_of(layer) * outputs;
    for (std::size_t t = 0; t < outputs_; ++t)
      enqueue(ops_.download(copies, to_outputs + t * width,
                            from + first + t * probed_.stride * width, width * sizeof(float)));
  }
  enqueue(ops_.download(copies, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
}

// Waits for a layer's copy, which then goes to the store. The first one makes the room, while the
// GPU has the layers of all slots to compute.
Status GpuExecutor::deliver(uint32_t layer) {
  DeviceStream* const copies = deliveries_[slot_of(layer)];
  RETURN_IF_ERROR(host_->reserve_pages(*step_));
  if (step_->meanwhile) (*step_->meanwhile)();
  RETURN_IF_ERROR(wait("a layer", copies));
  if (step_->cancel.fired()) return {};
  const LayerConfig& config = config_.layer(layer);
  const std::size_t absent = first_query_ * config.q_width();
  const float *const q = prefill_host_.get() + slot_of(layer) * host_slot_,
                     *const k = q + n_ * config.q_width() - absent,
                     *const lse = q + n_ * (size_.q + 2 * size_.kv) - absent;
  const float* outputs = prefill_outputs_.get() + slot_of(layer) * outputs_ * size_.q;
  RETURN_IF_ERROR(host_->take(*step_, layer,
                              {.q = q,
                               .k = k,
                               .v = k + n_ * config.kv_width(),
                               .first_query = first_query_,
                               .probed_q = probed_queries_ > 0 ? lse + lse_floats(n_) : nullptr,
                               .lse = lse,
                               .attended = outputs_ > 0 ? outputs : nullptr}));
  constexpr uint32_t layers_between = 4;  // the GPU has work while the CPU clears a slab
  if (attention_number_[local(layer)] % layers_between == 0) host_->reserve_ahead(*step_);
  if (config.is_windowed()) return {};
  enqueue(prefill_attention_.put_ahead(step_->store, local_kv(layer), slot_of(layer), step_->pool,
                                       copies));
  return {};
}

Status GpuExecutor::end_prefill() {
  const uint32_t last = end_layer() - 1;
  enqueue_last_feed_forward(last, prefill_output(last));
  RETURN_IF_ERROR(advance_weights());
  if (streamed_) host_->touch_ahead(*step_, last);
  RETURN_IF_ERROR(deliver_all_but(0, end_layer()));
  for (DeviceStream* copies : deliveries_)
    if (copies) enqueue(ops_.wait(copies));
  if (!runs_on()) {
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
    RETURN_IF_ERROR(wait("a step"));
  }
  if (!step_->cancel.fired()) host_->count_prefill(*step_, kv_.count);
  return {};
}

// Of tokens that something needs: those of the logits, or all where another executor goes on.
void GpuExecutor::enqueue_last_feed_forward(uint32_t layer, float* a) {
  const uint32_t wanted = ends_model() ? step_->step.logits_wanted() : n_;
  if (wanted == 0) return;
  const uint32_t first = n_ - wanted;
  of_last_rows(first,
               [&] { check_and_feed_forward(layer, a + first * config_.layer(layer).q_width()); });
}

}  // namespace kvasir
