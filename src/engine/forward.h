// The forward pass: tokens in, logits out, keys and values into the store. A session has one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/thread_pool.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "engine/execution_plan.h"
#include "engine/host_attention.h"
#include "engine/layer_executor.h"
#include "engine/layer_inputs.h"
#include "engine/step.h"
#include "model/model.h"

namespace kvasir {

struct SpanSize;

class Forward {
 public:
  // For a sequence of at most `context` tokens. Code::device.
  static Status create(std::shared_ptr<const Model> model, uint64_t context, ThreadPool* pool,
                       std::unique_ptr<Forward>* out);

  // Runs the tokens at the end of the stores and commits them. After any failure the stores are as
  // before. Code::cancelled; Code::corrupt (a damaged page; weights that make NaN or infinity);
  // Code::device; Code::no_memory (of the device). Throws std::bad_alloc.
  Status run(const ForwardStep& step, const StepStores& stores);
  // [vocabulary] Writes the logits of the last step, which found ForwardStep::best, if they are
  // still where it left them.
  bool last_logits(std::span<float> out);

  // How many tokens that follow the stores may be one span (ForwardStep::chunk) of chunks of this
  // size. 0: each chunk is to be a step of its own. step: what is asked for besides.
  uint64_t span_tokens(const ForwardStep& step, const StepStores& stores, uint32_t chunk) const;
  // Tokens of a span, in place of a choice; 0: chosen. Only tests and measurements have a use.
  void force_spans(uint64_t tokens) { forced_span_ = tokens; }
  // Releases what spans and long texts have taken. The next one takes it again.
  void end_text();
  // Why the last span_tokens() was 0, where spans would serve.
  Fallback span_fallback() const { return span_fallback_; }
  // After run() has returned Code::no_memory for a span: whether steps can do without.
  bool refuse_spans();

  // Makes now what GPUs need to attend by the step's plan, which run() does some at a time.
  // Code::cancelled, also by the progress callback, and errors as run().
  Status prepare(const ForwardStep& step, KvStore* store, Progress* progress);

  Attention& attention() { return host_.attention(); }
  // Graphs that GPUs have recorded so far. A step that records takes longer than the next ones.
  uint64_t recordings() const {
    uint64_t sum = 0;
    for (const auto& executor : executors_) sum += executor->recordings();
    return sum;
  }
  // Of the last step, or of prepare(): a run an executor, those of GPUs first.
  const ExecutionPlan& plan() const { return last_is_span_ ? span_plan_ : plan_; }

 private:
  struct Span;
  Forward(std::shared_ptr<const Model> model, uint64_t context, ThreadPool* pool);
  void resize(uint32_t n);
  LayerExecutor::Request request_of(const StepContext& c) const;
  Status make_plan(const StepContext& c);
  Status check_files(const ForwardStep& step, const StepStores& stores) const;
  void make_turns(const StepContext& c);
  // Whether ForwardStep::inputs are those of DeviceWeights::inputs(): [tokens][its columns].
  bool has_device_inputs() const {
    const std::vector<DeviceWeights>& gpus = model_->device_weights();
    return !gpus.empty() && gpus[0].inputs().w.data;
  }
  void embed(const StepContext& c, uint64_t position, float* cos, float* sin);
  struct Inputs {
    float *x, *cos, *sin;
  };
  void embed_tokens(const StepContext& c, std::span<const Token> tokens, uint64_t position,
                    const Inputs& to);
  void take_inputs(StepContext* c);
  void embed_ahead(const StepContext& c, LayerExecutor* executor);
  Status write_logits(const StepContext& c, LayerExecutor* executor);
  bool finish_logits(const float* from, std::span<float> row) const;
  void commit(const StepContext& c, uint32_t kept);

  void end_spans();
  Status run_span(const ForwardStep& step, const StepStores& stores);
  Status try_span(const ForwardStep& step, const StepStores& stores);
  Status open_spans();
  LayerExecutor* span_executor(std::size_t i) const;
  LayerExecutor::Request span_request(const StepContext& c) const;
  Status begin_span(Span* span);
  void make_span_memory(Span* span);
  void embed_chunk(Span* span, std::size_t i);
  void release_spans();
  Status run_layers(Span* span);
  void abandon_span() noexcept;
  ExecutionPlan& plan_of_spans();
  Status run_layer(Span* span, std::size_t executor, uint32_t layer);
  void add_to_sketch(Span* span, uint32_t layer, std::size_t chunk);
  uint32_t layer_to_read_ahead(const ForwardStep& step, uint32_t layer) const;
  Status run_chunk(Span* span, std::size_t executor, uint32_t layer, std::size_t chunk);
  Status write_span_logits(const StepContext& c, LayerExecutor* executor);
  Status pass_hidden(const Span& span);
  void write_norm(const Norm& norm, const float* x, float* out) const;
  Status commit_span(Span* span, const StepStores& stores);
  SpanSize span_size(const ForwardStep& step, const StepStores& stores) const;
  bool prefers_spans(const SpanSize& size) const;
  Fallback why_no_span(const StepStores& stores) const;

  std::shared_ptr<const Model> model_;
  const std::vector<Rope>& ropes_;  // of the model
  ThreadPool* pool_;
  HostAttention host_;
  bool has_host_states_ = false;                           // the CPU computes recurrent layers
  std::vector<std::unique_ptr<LayerExecutor>> executors_;  // every layer is in one, in order
  ExecutionPlan plan_;                                     // [executors]

  uint32_t capacity_ = 0;    // tokens that the workspace holds
  Buffer<float> x_;          // [n][width] residual stream, between executors
  Buffer<float> cos_, sin_;  // [RoPE sets][n][rope dim / 2]
  Array<float> turns_;       // StepContext::turns
  LayerInputs layer_inputs_;
  // What a step begins with, made while a GPU computes the one before, which may still read its
  // own: [n][width], then the angles.
  struct Ahead {
    PinnedBuffer<float> memory;
    std::size_t floats = 0;  // of memory
    uint64_t position = 0;
    Array<Token> tokens;  // none: nothing is made
  } ahead_[2];
  uint32_t ahead_turn_ = 0;  // the last one that was made
  uint64_t forced_span_ = 0;
  bool refuses_spans_ = false;
  mutable Fallback span_fallback_ = Fallback::none;  // of the last span_tokens()
  // Of spans on GPUs: a run each, in order. Only while spans follow one another: others need the
  // memory.
  std::vector<std::unique_ptr<LayerExecutor>> span_executors_;
  ExecutionPlan span_plan_;
  bool last_is_span_ = false;  // the last step, on GPUs
  PinnedBuffer<float> span_memory_;
  std::size_t span_memory_floats_ = 0;
};

}  // namespace kvasir
