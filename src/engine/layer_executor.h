// Computes a run of consecutive layers on the CPU or on a GPU. The forward pass calls the same
// steps in the same order on every executor. The plan decides where attention runs.
//
//   plan                           what the step does where; allocates memory for it
//   begin                          the residual stream comes in
//     mixer(l), feed_forward(l)    for each layer of the run, in order
//   end                            the residual stream goes out
//   logits                         of the last executor
//   committed                      the store has the step's keys and values
//
// An executor belongs to one session. Everything may throw std::bad_alloc. A step that ends early,
// by an error, a cancel or an exception, ends with abandon().
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/execution_plan.h"
#include "engine/host_attention.h"
#include "engine/step.h"
#include "model/device_weights.h"
#include "model/model.h"

namespace kvasir {

class LayerExecutor {
 public:
  LayerExecutor(uint32_t first_layer, uint32_t end_layer)
      : first_layer_(first_layer), end_layer_(end_layer) {}
  virtual ~LayerExecutor() = default;
  uint32_t first_layer() const { return first_layer_; }
  uint32_t end_layer() const { return end_layer_; }

  // What a GPU may attend in the step, where `why` says why it is nothing.
  struct Request {
    HostAttention::GpuWork gpu = HostAttention::GpuWork::none;
    Fallback why = Fallback::none;
  };
  // Fills *run. Code::corrupt, Code::device, Code::cancelled.
  virtual Status plan(const StepContext& step, const Request& request, LayerRun* run) = 0;

  virtual Status begin(const StepContext& step) = 0;
  virtual Status mixer(uint32_t layer) = 0;         // x += mixer(norm(x))
  virtual Status feed_forward(uint32_t layer) = 0;  // x += ffn(norm(x))
  virtual Status end() = 0;
  virtual void abandon() noexcept {}
  // Of tokens [first, n) of the step that has ended; out: [n - first][vocabulary].
  virtual Status logits(uint32_t first, float* out) = 0;
  virtual void committed(const KvStore&) {}

 protected:
  // Magnitudes below it keep sums and differences finite. A larger one would lie in a saved
  // sequence for good, or be lost where a product rounds its inputs: Code::corrupt.
  static constexpr float too_large = 1e30f;

 private:
  const uint32_t first_layer_, end_layer_;
};

// Code::corrupt.
Status not_a_number(const std::string& where);

// Of layers from first_layer to the model's last. All arguments outlive it.
std::unique_ptr<LayerExecutor> make_cpu_executor(const Model& model, uint32_t first_layer,
                                                 HostAttention* attention, ThreadPool* pool);
// Of GPU `number`'s layers: weights is that one of Model::device_weights(). Code::device.
Status make_gpu_executor(const Model& model, int number, HostAttention* attention,
                         std::unique_ptr<LayerExecutor>* out);

}  // namespace kvasir
