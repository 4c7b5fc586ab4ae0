// Layers with experts: the GPU computes their mixers, the CPU their networks. The residual stream
// comes to host memory between the two.
#include <algorithm>
#include <atomic>

#include "base/checked.h"
#include "base/magnitude.h"
#include "engine/gpu_executor.h"

namespace kvasir {

// x += experts(norm(x))
Status GpuExecutor::run_experts(uint32_t layer) {
  const std::size_t cols = size_.width, bytes = n_ * cols * sizeof(float);
  float *const x = experts_x_.get(), *const h = experts_h_.get();
  enqueue(ops_.download(stream_, x, work_.x, bytes));
  enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  RETURN_IF_ERROR(wait("a layer"));

  constexpr uint32_t together = 16;  // rows of a task
  const auto by_rows = [&](auto&& f) {
    step_->pool->run(static_cast<uint32_t>(ceil_div(n_, together)), [&](uint32_t task, uint32_t) {
      const uint32_t first = task * together;
      if (!step_->cancel.fired()) f(first * cols, std::min(together, n_ - first));
    });
  };
  const Kernels& kernels = cpu_kernels();
  const float* weight = model_.weights().layers[layer].ffn_norm.weight.data();
  by_rows([&](std::size_t at, uint32_t rows) {
    kernels.rms_norm(x + at, weight, config_.norm_epsilon, rows, config_.width, h + at);
  });
  std::atomic<bool> good{experts_->run(layer, {n_, h, h, too_large}, step_->cancel, h)};
  by_rows([&](std::size_t at, uint32_t rows) {
    kernels.add(x + at, h + at, rows * cols);
    if (!all_below({x + at, rows * cols}, too_large)) good = false;
  });
  if (step_->cancel.fired()) return {};
  if (!good) return not_a_number("layer " + std::to_string(layer));
  enqueue(ops_.upload(stream_, work_.x, x, bytes));
  return {};
}

}  // namespace kvasir
