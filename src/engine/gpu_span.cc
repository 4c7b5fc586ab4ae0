// Spans: the executor computes one layer at a time, and each chunk of it as a step. It holds the
// keys and values of that layer alone; the stores have those of the others. Weights that have no
// room on the GPU come to it while the layer before is computed.
#include <utility>

#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::begin_layer(const SpanLayer& span) {
  const uint32_t layer = span.layer;
  const LayerConfig& c = config_.layer(layer);
  if (!streamed_) return {};
  move_to(layer, layer + 1);
  span_chunks_ = span.chunks;
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
  return streamed_->advance(span_chunks_, step_->pool, step_->cancel);
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
