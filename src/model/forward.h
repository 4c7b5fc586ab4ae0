// The forward pass: tokens in, logits out, keys and values into the store. One object a session: it owns the workspace.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "compute/thread_pool.h"
#include "model/attention.h"
#include "model/model.h"
#include "model/stage.h"
#include "select/index_build.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

struct ForwardStep {
  std::span<const Token> tokens;      // 1 .. the chunk size that the caller chose
  const Selector* selector = nullptr; // null: every layer is exact
  Plan plan;                          // dense layers and budget, where there is a selector
  StepMemory* memory = nullptr;       // the selector's own, where it has one
  RecentQueries* queries = nullptr;   // where set, the step's newest queries are added to it
  IndexQueries* asked = nullptr;      // where set, the step's queries are written to it, from this token on
  uint32_t asked_at = 0;
  Trace* trace = nullptr;             // where set, what the last token attends is added to it
  enum class Logits { none, last, all } want = Logits::none;
  float* logits = nullptr;            // [vocabulary] or [tokens][vocabulary]
  const Cancel* cancel = nullptr;

  // Where set, probe_tokens of an exact step's tokens also go through this selector, and errors[layer] receives how far its
  // attention output is from the exact one, relative L2. What is computed does not change.
  const Selector* probe = nullptr;
  uint32_t probe_tokens = 0;
  float* errors = nullptr;  // [layers]
};

class Forward {
 public:
  // Code::device.
  static Status create(std::shared_ptr<const Model> model, ThreadPool* pool, std::unique_ptr<Forward>* out);

  // Runs the tokens at the end of the store and commits them. On any failure the store is as before.
  // Code::cancelled, Code::corrupt (damaged page; weights that make numbers that are none), Code::device, Code::no_memory (of the device); throws
  // std::bad_alloc.
  Status run(const ForwardStep& step, KvStore* store);

  // Makes now what devices need to attend answers by the step's plan, which run() does little by little. Code::cancelled, by the progress callback too, and
  // errors as run().
  Status prepare(const ForwardStep& step, const KvStore& store, Progress* progress);

  Attention& attention() { return attention_; }
  // Whether a device, in the order of Model::device_weights(), attended the last step of its layers, or would after prepare(): null, or why the processor.
  const char* left_to_processor(std::size_t device) const { return left_to_processor_[device]; }
  // And where it did, why the processor handed it the pages that were chosen; null: it read them itself.
  const char* handed(std::size_t device) const { return handed_[device]; }
  // Where the processor did, whether a device attended a part of its layers all the same, and which, in words; empty: it did not.
  const std::string& beside(std::size_t device) const { return beside_[device]; }

 private:
  Forward(std::shared_ptr<const Model> model, ThreadPool* pool);
  void resize(uint32_t n);
  uint32_t first_wanted(const ForwardStep& step, uint32_t layer) const;
  Status can_attend(const Stage::Attending& of, uint32_t n, Stage* stage, const char** why_not);
  void note_device(std::size_t at, const char* why_not, bool attends);
  Status attend_pages(const ForwardStep& step, uint32_t layer, const float* q, const CancelLatch& cancel, const KvStore& store, Beside* device);
  Status attend(const ForwardStep& step, uint32_t layer, uint32_t first, const Stage::Projected& of, const CancelLatch& cancel, KvStore* store);
  struct Entering {
    const float *q, *k, *v;  // as Stage::Projected
  };
  void enter(uint32_t layer, uint32_t n, const Entering& of, KvStore* store);
  void enter_alone(uint32_t layer, uint32_t n, const Entering& of, KvStore* store);
  void keep(const ForwardStep& step, uint32_t layer, const Stage::Attended& of, KvStore* store);
  Status read(const ForwardStep& step, const Stage::Attending& of, const CancelLatch& cancel, Stage* stage, KvStore* store,
              const std::function<Status()>& meanwhile);
  Status probe(const ForwardStep& step, uint32_t layer, const float* q, const float* exact, const CancelLatch& cancel,
               const KvStore& store);
  Status write_logits(const ForwardStep& step, uint32_t n, const CancelLatch& cancel);

  std::shared_ptr<const Model> model_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  Attention attention_;
  std::vector<std::unique_ptr<Stage>> stages_;  // every layer is in one, in order

  uint32_t capacity_ = 0;          // tokens the workspace holds; not cleared, which would take long where it is large
  std::vector<const char*> left_to_processor_, handed_;  // [devices]: theirs are the first stages
  std::vector<std::string> beside_;  // [devices]
  Buffer<float> x_;                 // [n][width] residual stream, between stages
  Buffer<float> totals_;            // [n][heads] as RecentQueries::totals
  Buffer<float> cos_, sin_;         // [n][rope dim / 2]
};

}  // namespace kvasir
