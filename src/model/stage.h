// A part of the forward pass that one processor or device computes: some consecutive layers without their attention and, in the last stage, the
// output. Stages hand the residual stream on through host memory. The store stays with the processor; so does attention, but for what a stage takes
// over itself.
//
//   begin                                        the residual stream comes in
//     project(l) ... attention ... complete(l)   for every layer of the stage, in order
//     or attend, which does all of that          where can_attend() has said so
//     or read, which does it for a text          where can_read() has said so
//   end                                          it goes out
//   logits                                       of the last stage
//
// A stage belongs to one session. What project() returns stays until the stage's next project() or end(); everything may throw
// std::bad_alloc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/cancel.h"
#include "base/status.h"
#include "compute/kernels.h"
#include "compute/thread_pool.h"
#include "model/attention.h"
#include "model/beside.h"
#include "model/device_weights.h"
#include "model/model.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

class Stage {
 public:
  Stage(uint32_t first_layer, uint32_t end_layer) : first_layer_(first_layer), end_layer_(end_layer) {}
  virtual ~Stage() = default;
  uint32_t first_layer() const { return first_layer_; }
  uint32_t end_layer() const { return end_layer_; }

  struct Step {
    uint32_t n = 0;               // tokens
    float* x = nullptr;           // [n][width] the residual stream: where it comes from and, at end(), goes to
    const float *cos = nullptr, *sin = nullptr;  // [n][rope dim / 2]
    const CancelLatch* cancel = nullptr;         // once it has fired, results are meaningless
    ThreadPool* pool = nullptr;
  };
  // The step stays as it is until end().
  virtual Status begin(const Step& step) = 0;

  struct Projected {
    float *q, *k, *v;  // [n][heads * head_dim], [n][kv_heads * head_dim] twice, after RoPE
    float* a;          // [n][heads * head_dim] where attention's output is to be put
  };
  virtual Status project(uint32_t layer, Projected* out) = 0;
  // Of the tokens before `first` nothing is wanted: attention has put zeros for them, and they may be left as they are.
  virtual Status complete(uint32_t layer, uint32_t first) = 0;
  virtual Status end() = 0;

  // A step's attention, for a stage that may compute it itself.
  struct Attending {
    const KvStore& store;
    const Plan& plan;
    ThreadPool* pool;
    const CancelLatch& cancel;
    uint32_t wanted = 0;  // of the step's newest tokens logits will be asked for,
    bool output = false;  // and these of the last one alone: they may be computed along with the rest
    uint32_t devices = 1;  // stages that share its pages with a device in one step
    bool exact = false;    // all is attended in every layer
  };
  // Before begin(), or without. *why_not null: attend() can take the place of project() to complete(). Otherwise too where attends_beside(): in its layers the
  // processor attends a part. Code::corrupt, Code::device, Code::cancelled.
  virtual Status can_attend(const Attending&, uint32_t n, const char** why_not) { return (void)n, *why_not = "the layer is the processor's", Status(); }
  virtual bool attends_beside() const { return false; }
  // The processor's part of a layer, after its queries: as Attention::run() has them.
  using Pages = std::function<Status(uint32_t layer, const float* q, Beside* device)>;
  virtual Status attend(const Attending&, const Pages&, ReadCounts*) { return Status::error(Code::internal, "a stage was asked to attend"); }
  // After can_attend(), where it attends beside: whether it is to be told how many bytes of pages the processor attends a second; and how they share them, in words.
  virtual bool wants_rate() const { return false; }
  virtual Status measure(double processor, const CancelLatch& cancel) { return (void)processor, (void)cancel, Status(); }
  virtual std::string share() const { return {}; }
  struct Attended {
    const float *q, *k, *v, *totals;  // as Projected; [n][heads] as Attention::run() has them
  };
  // After can_attend(): why the processor hands it the pages that were chosen, in place of the device reading them; null: it reads them. `sharing`: after some more
  // calls it will.
  static const char sharing[];
  virtual const char* hands() const { return nullptr; }
  virtual Attended attended(uint32_t layer) const { return (void)layer, Attended{}; }  // after attend()
  virtual void committed(const KvStore&) {}  // the store has what attended() gave
  virtual void trim() {}                     // lets go of what the store has let go of; a step that is not attended calls it

  // A step whose attention is exact, of several tokens. Before begin(). *why_not null: read() can take the place of project() to complete(). Errors as
  // can_attend().
  virtual Status can_read(const Attending&, uint32_t n, const char** why_not) { return (void)n, *why_not = "the layer is the processor's", Status(); }
  struct Read {
    const float *q, *k, *v, *totals;  // as Attended
    const float* a;                   // attention's output as Projected, of the first `outputs` tokens; null where none were asked for
  };
  // Hands each layer over to take(layer, read), in order, while the device goes on with the next ones; what is handed over stays until take() returns.
  // Before the first one comes meanwhile(), when the device is at work.
  using Meanwhile = std::function<Status()>;
  using Take = std::function<Status(uint32_t layer, const Read&)>;
  virtual Status read(const Attending&, uint32_t outputs, const Meanwhile&, const Take&) {
    return (void)outputs, Status::error(Code::internal, "a stage was asked to read");
  }
  // Of tokens [first, n) of the step that has ended; out: [n - first][vocabulary].
  virtual Status logits(uint32_t first, float* out) = 0;

 protected:
  // Keys, values and residuals below it keep their sums and differences finite. What is not would lie in a saved timeline for good, or be lost where
  // a product rounds its inputs and leave nonsense: complete(), or what is called after it, is not_a_number().
  static constexpr float too_large = 1e30f;

 private:
  const uint32_t first_layer_, end_layer_;
};

// Code::corrupt.
Status not_a_number(const std::string& where);

std::unique_ptr<Stage> make_cpu_stage(const Model& model, uint32_t first_layer, const Kernels& kernels, ThreadPool* pool);
// Of the layers that the device has the weights of: of one of Model::device_weights(). The model outlives it. Code::device.
Status make_device_stage(const Model& model, const DeviceWeights& weights, std::unique_ptr<Stage>* out);

}  // namespace kvasir
