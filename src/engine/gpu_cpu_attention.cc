// A step whose attention the CPU computes, between two waits a layer.
#include "engine/gpu_executor.h"

namespace kvasir {

Status GpuExecutor::project_for_cpu(uint32_t layer) {
  const std::size_t floats = n_ * (size_.q + 2 * size_.kv);
  as_graph(local(layer), [&] {
    if (layer > first_layer()) complete_before(layer);
    enqueue_projection(layer, work_.qkv);
    enqueue(ops_.download(stream_, host_qkv_.get(), work_.qkv, floats * sizeof(float)));
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  });
  return wait("a layer");
}

Status GpuExecutor::attend_on_cpu(uint32_t layer) {
  const auto [q, k, v] = projected(layer, host_qkv_.get());
  host_->write(*step_, layer, {.q = q, .k = k, .v = v});
  return host_->attend(*step_, layer, q, host_a_.get());
}

Status GpuExecutor::end_on_cpu() {
  as_graph(layers(), [&] {
    complete_before(end_layer());
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  });
  RETURN_IF_ERROR(advance_weights());
  return wait("a step");
}

// The rest of the layer before this one. The CPU has attended it, or the GPU through a window.
void GpuExecutor::complete_before(uint32_t layer) {
  const std::size_t floats = n_ * config_.layer(layer - 1).q_width();
  if (has_attention(layer - 1) && !attends_window(layer - 1))
    enqueue(ops_.upload(stream_, work_.a, host_a_.get(), floats * sizeof(float)));
  check_and_feed_forward(layer - 1, work_.a);
}

}  // namespace kvasir
