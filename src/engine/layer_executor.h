// Computes a run of consecutive layers on the CPU or on a GPU. The forward pass calls the same
// steps in the same order on every executor. The plan decides where attention runs.
//
//   plan                           plans the step and allocates its memory
//   begin                          loads the residual stream
//     mixer(l), feed_forward(l)    for each layer of the run, in order
//   end                            stores the residual stream
//   logits                         on the last executor only
//   committed                      after the store has committed the step's keys and values, of
//                                  its first `kept` tokens
//
// In a span (ForwardStep::chunk) each layer's chunk is a step of that layer alone: begin_layer(l),
// and of each chunk plan, begin, mixer(l), feed_forward(l), end, committed.
//
// An executor belongs to one session. Any function but abandon() may throw std::bad_alloc. After an
// error, a cancel or an exception the caller calls abandon() instead of the other steps.
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

  // The attention that a GPU may compute in the step; `why`: the reason if it is none.
  struct Request {
    HostAttention::GpuWork gpu = HostAttention::GpuWork::none;
    Fallback why = Fallback::none;
  };
  // Fills *run. Code::corrupt, Code::device, Code::cancelled.
  virtual Status plan(const StepContext& step, const Request& request, LayerRun* run) = 0;

  // After plan(): pinned memory for what the step begins with, the residual stream, cosines and
  // sines, one after another. After begin() only the executor's own work reads them. null: there is
  // none.
  virtual float* pinned_inputs(const StepContext&) { return nullptr; }
  // Within a step that had pinned_inputs(): the next one begins with this residual stream of n
  // tokens, which stays in pinned memory until then.
  virtual void bring_ahead(const float*, uint32_t) {}
  // No step of the text follows: releases what it kept, and waits for what came ahead.
  virtual void end_text() noexcept {}
  virtual Status begin(const StepContext& step) = 0;
  virtual Status mixer(uint32_t layer) = 0;         // x += mixer(norm(x))
  virtual Status feed_forward(uint32_t layer) = 0;  // x += ffn(norm(x))
  virtual Status end() = 0;
  virtual void abandon() noexcept {}
  virtual uint64_t recordings() const { return 0; }  // of graphs so far
  // Computes the logits of tokens [first, n) after end(). out: [n - first][vocabulary].
  virtual Status logits(uint32_t first, float* out) = 0;
  // The logits of the step's last n tokens, where they have come to host memory with the step;
  // otherwise null. Valid until the next step.
  virtual const float* finished_logits(uint32_t) const { return nullptr; }
  // ForwardStep::best[i], where the step has computed it; otherwise -1.
  virtual Token best(uint32_t) const { return -1; }
  // Writes the logits of the step of one token of which best() was taken, if they are still there.
  virtual bool last_logits(float*) { return false; }
  // Before the commit of a step of which the first tokens stay alone: states of recurrent layers in
  // host memory become those after them.
  virtual void keep_first(uint32_t) {}
  virtual void committed(const StepContext&, uint32_t) {}

  // The following steps are of chunks of this layer alone. Code::device, Code::cancelled.
  struct SpanLayer {
    uint32_t layer;
    bool is_last;                    // of the executor's layers
    std::span<const uint32_t> ends;  // of its chunks: tokens of the span before each one's end
    // [tokens][width] the residual stream in pinned memory; null: steps copy it. It is complete
    // after the last layer, and what logits need of it after their chunk.
    float* x;
    ThreadPool* pool;
    const CancelLatch& cancel;
  };
  virtual Status begin_layer(const SpanLayer&) { return {}; }
  // Releases what can be made again: another executor of the same device needs the memory.
  virtual void rest() noexcept {}

  // Magnitudes below this keep sums and differences finite. A larger one is Code::corrupt: it would
  // persist in a saved sequence, or be lost where a product rounds its inputs.
  static constexpr float too_large = 1e30f;

 protected:
  void move_to(uint32_t first_layer, uint32_t end_layer) {
    first_layer_ = first_layer, end_layer_ = end_layer;
  }

 private:
  uint32_t first_layer_, end_layer_;
};

// Abandons an executor's part of a step unless it is complete.
class StepPart {
 public:
  explicit StepPart(LayerExecutor* executor) : executor_(executor) {}
  ~StepPart() {
    if (executor_) executor_->abandon();
  }
  StepPart(const StepPart&) = delete;
  StepPart& operator=(const StepPart&) = delete;
  void complete() { executor_ = nullptr; }

 private:
  LayerExecutor* executor_;
};

Status step_cancelled();
// Returns Code::corrupt: NaN, infinity or a magnitude above too_large at `where`.
Status not_a_number(const std::string& where);

// Creates an executor of the layers from first_layer to the model's last. All arguments must
// outlive it.
std::unique_ptr<LayerExecutor> make_cpu_executor(const Model& model, uint32_t first_layer,
                                                 HostAttention* attention, ThreadPool* pool);
// Creates an executor of GPU `number`'s layers; `number` is an index of Model::device_weights().
// Code::device.
Status make_gpu_executor(const Model& model, int number, HostAttention* attention,
                         std::unique_ptr<LayerExecutor>* out);
// Creates an executor of chunks of spans, for the GPU's layers; of the last GPU also for all layers
// behind them. Weights that the GPU has no room for come through it (model/weight_stream.h). It
// computes after begin_layer() alone. Code::no_memory, Code::device.
Status make_span_executor(const Model& model, int number, HostAttention* attention,
                          std::unique_ptr<LayerExecutor>* out);

}  // namespace kvasir
