// Layers whose queries see a window. The GPU attends them in every mode of the others; the store of
// windows gets their keys and values as it gets those of the others.
#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::plan_windows(const StepContext& c, Fallback* why) {
  has_windows_ = windows_kv_.count > 0;
  if (!has_windows_ || !c.windows) return {};
  const auto prepare = [&] {
    return windows_.prepare(*c.windows, c.tokens() / rows_of(c), c.pool, stream_, c.cancel);
  };
  windows_.set_rows(rows_of(c));
  Status s = prepare();
  while (s.code() == Code::no_memory && release_one()) s = prepare();
  if (s.ok()) return {};
  has_windows_ = false;
  release_windows();
  if (s.code() != Code::no_memory || c.step.open) return s;
  *why = Fallback::no_room;
  return {};
}

// To out, which is not checked.
void GpuExecutor::enqueue_window(uint32_t layer, float* qkv, float* out) {
  const LayerConfig& c = config_.layer(layer);
  const Projected own = projected(layer, qkv),
                  kv = c.writes_kv ? own : projected(source_, work_.shared);
  // The ring loses tokens that later layers attend.
  const bool keeps = c.writes_kv && layer != source_ ? true : layer == last_sharing_;
  for (uint32_t row = 0; row < rows_; ++row) {
    windows_.set_row(row);
    const std::size_t q = std::size_t{row} * c.q_width(), at = std::size_t{row} * c.kv_width();
    // The next row sees those before it; of so few no token that is still seen is lost.
    enqueue(windows_.enqueue(stream_, c.kv - windows_kv_.first, weights_of(layer).sinks.get(),
                             {own.q + q, kv.k + at, kv.v + at, out + q},
                             rows_ > 1 ? c.writes_kv : keeps));
  }
}

Status GpuExecutor::mix_window(uint32_t layer) {
  switch (mode_) {
    case AttentionMode::cpu:
      return mix_window_for_cpu(layer);
    case AttentionMode::gpu_selective:
      if (replays_) return {};
      enqueue_attended(layer);
      enqueue_window(layer, attended(layer), work_.a);
      return {};
    case AttentionMode::co_execution:
      as_graph(hybrid_part(layer), [&] {
        enqueue_attended(layer);
        enqueue_window(layer, attended(layer), work_.a);
      });
      return {};
    case AttentionMode::gpu_prefill:
      RETURN_IF_ERROR(project_prefill(layer));
      enqueue_window(layer, prefill_slot(layer), prefill_output(layer));
      return copy_down(layer);
  }
  return {};
}

// The CPU attends the other layers.
Status GpuExecutor::mix_window_for_cpu(uint32_t layer) {
  const LayerConfig& config = config_.layer(layer);
  const std::size_t floats = n_ * (config.q_width() + 2 * config.kv_width());
  float* const qkv = layer == source_ ? work_.shared : work_.qkv;
  as_graph(local(layer), [&] {
    if (layer > first_layer()) complete_before(layer);
    enqueue_projection(layer, qkv);
    enqueue_window(layer, qkv, work_.a);
    if (!config.writes_kv) return;
    enqueue(ops_.download(stream_, host_qkv_.get(), qkv, floats * sizeof(float)));
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  });
  if (!config.writes_kv) return {};
  RETURN_IF_ERROR(wait("a layer"));
  const auto [q, k, v] = projected(layer, host_qkv_.get());
  host_->write(*step_, layer, {.q = q, .k = k, .v = v});
  return {};
}

}  // namespace kvasir
