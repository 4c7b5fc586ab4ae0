// Spans: the executor computes one layer at a time, and each chunk of it as a step. It holds the
// keys and values of that layer alone; the stores have those of the others. Weights that have no
// room on the GPU come to it while the layer before is computed. The residual stream of the next
// chunk comes, and that of the last one goes, while a chunk is computed.
#include <utility>

#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::begin_layer(const SpanLayer& span) {
  const uint32_t layer = span.layer;
  const LayerConfig& c = config_.layer(layer);
  if (!streamed_) return {};
  move_to(layer, layer + 1);
  if (layer == weights_.first_layer()) lacks_second_x_ = false;
  chunks_ = span.ends, chunk_ = 0, span_x_ = span.x, is_last_layer_ = span.is_last;
  const bool attends = c.has_attention();
  attention_number_ = {0, attends ? 1u : 0u};
  kv_ = {c.kv, attends && !c.is_windowed() ? 1u : 0u};
  windows_kv_ = {c.kv, attends && c.is_windowed() ? 1u : 0u};
  states_.move_to(c.state, c.is_recurrent() ? 1 : 0);
  if (windows_kv_.count > 0) windows_.move_to(c.kv);
  if (kv_.count > 0) {
    const float* const sinks = streamed_->layer(layer).sinks.get();
    prefill_attention_.move_to(c.kv);
    prefill_attention_.set_sink_logits(sinks ? std::vector<const float*>{sinks}
                                             : std::vector<const float*>());
  }
  return streamed_->bring(layer, span.pool, span.cancel);
}

// While the GPU computes a chunk, a part of the next layer comes.
Status GpuExecutor::advance_weights() {
  if (!streamed_ || error_) return {};
  return streamed_->advance(static_cast<uint32_t>(chunks_.size()), step_->pool, step_->cancel);
}

// Where so many bytes stay free besides. Without it the residual stream comes between chunks.
void GpuExecutor::make_second_stream(uint64_t besides) {
  if (next_x_ || lacks_second_x_) return;
  const std::size_t n = capacity_ * size_.width;
  lacks_second_x_ = device_->left() < n * sizeof(float) + besides ||
                    !second_x_.allocate(device_, n, "the next chunk").ok();
  if (!lacks_second_x_) next_x_ = second_x_.get();
}

// Uploads the residual stream of n tokens that comes next.
void GpuExecutor::bring(const float* x, uint32_t n) {
  coming_ = x;
  enqueue(ops_.upload(copies_, next_x_, x, n * size_.width * sizeof(float)));
}

// Until the next span or text. A chunk's stream that has come is uploaded again.
void GpuExecutor::release_stream() {
  wait_for_streams();
  forget_graphs();
  second_x_ = {}, next_x_ = nullptr, coming_ = nullptr, lacks_second_x_ = true;
  work_.place(size_, capacity_, memory_.get());
}

// The chunk's residual stream: it has come, or comes now.
void GpuExecutor::enqueue_stream() {
  const float* const x = step_->x;
  if (std::exchange(coming_, nullptr) == x) return std::swap(work_.x, next_x_);
  enqueue(ops_.after(stream_, copies_));  // what is there may be on its way to the host
  enqueue(ops_.upload(stream_, work_.x, x, n_ * size_.width * sizeof(float)));
}

// After what the chunk itself needs: copies to the GPU come one after the other.
void GpuExecutor::enqueue_next_stream() {
  const bool ends = chunk_ + 1 == chunks_.size();
  if (!next_x_ || (ends && (is_last_layer_ || chunk_ == 0))) return;
  // On copies_, after the download of what is there.
  const std::size_t next = ends ? 0 : chunk_ + 1;
  const uint32_t first = next > 0 ? chunks_[next - 1] : 0, n = chunks_[next] - first;
  if (n > capacity_) return;
  bring(span_x_ + first * size_.width, n);
}

// Whether the next chunk may begin while the GPU computes this one: what its attention needs is in
// the store by then, and the CPU reads nothing else of this one.
bool GpuExecutor::runs_on() const {
  return mode_ == AttentionMode::gpu_prefill && moves_stream() && chunk_ + 1 < chunks_.size() &&
         kv_.count > 0 && !(is_last_layer_ && step_->step.logits_wanted() > 0);
}

// Waits for the chunk before.
Status GpuExecutor::catch_up() {
  if (!std::exchange(is_behind_, false)) return {};
  enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  return wait("a step");
}

// The next chunk waits for its own residual stream, not until this one's is on the host. After the
// last layer the CPU may read it there.
Status GpuExecutor::end_chunk() {
  enqueue(ops_.after(stream_, copies_));
  enqueue(ops_.after(copies_, stream_));
  enqueue(ops_.download(copies_, step_->x, work_.x, n_ * size_.width * sizeof(float)));
  is_behind_ = runs_on();
  const bool is_end = ++chunk_ == chunks_.size(),
             is_read = is_last_layer_ && (is_end || step_->step.logits_wanted() > 0);
  return is_behind_ ? device_->status(error_, "a step")
                    : wait("a step", is_read ? copies_ : stream_);
}

void GpuExecutor::rest() noexcept {
  wait_for_streams();
  release_prefill(), release_hybrid(), release_selective();
  release_workspace();
  windows_.release();
}

Status make_span_executor(const Model& model, int number, HostAttention* attention,
                          std::unique_ptr<LayerExecutor>* out) {
  const std::vector<DeviceWeights>& all = model.device_weights();
  const auto i = static_cast<std::size_t>(number);
  const uint32_t end = i + 1 == all.size() ? model.config().depth() : all[i].end_layer();
  std::unique_ptr<WeightStream> stream;
  RETURN_IF_ERROR(WeightStream::open(model.weights(), model.config(), all[i], end, &stream));
  auto executor = std::make_unique<GpuExecutor>(model, number, attention, std::move(stream));
  RETURN_IF_ERROR(executor->open());
  *out = std::move(executor);
  return {};
}

}  // namespace kvasir
