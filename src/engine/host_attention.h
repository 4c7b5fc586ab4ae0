// The CPU's part of a step's attention: keys and values go to the store, queries attend over it,
// and strategies learn from both. All executors use it; a session has one.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/attention.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/step.h"
#include "model/model.h"

namespace kvasir {

class HostAttention {
 public:
  HostAttention(const Model& model, ThreadPool* pool);

  // Makes room for the step's rows, and for the pages that it seals. reserve_pages() works once a
  // step: a GPU that prefills calls it while it is at work. Code::corrupt; throws std::bad_alloc.
  enum class GpuWork { none, decode, prefill };  // what a GPU may attend in the step
  Status begin(const StepContext& step, GpuWork gpu);
  Status reserve_pages(const StepContext& step);
  // Makes a part of the room for the next step's pages, while a GPU computes this one.
  void reserve_ahead(const StepContext& step);
  // Touches the memory of the next layer's pages of a span, so that the system clears it by then.
  void touch_ahead(const StepContext& step, uint32_t layer);
  // In place of begin() and reserve_pages(), of a layer's chunk in a span.
  Status begin_chunk(const StepContext& step, uint32_t layer);

  // Layers whose attention the CPU computes. q, k, v: [tokens][heads or kv_heads][head_dim] after
  // RoPE; a layer that attends the keys and values of another one has no k and v. write() comes
  // first. out: [tokens][heads][head_dim]; tokens before first_needed() get 0.
  void write(const StepContext& step, uint32_t layer, const LayerRows& rows);
  Status attend(const StepContext& step, uint32_t layer, const float* q, float* out);
  // Whether the step ends with the scores of this layer (DocumentScores::ends_step). attend() then
  // computes nothing else of it.
  bool ends_after(const ForwardStep& step, uint32_t layer) const;
  // The first token whose attention and feed-forward anything needs.
  uint32_t first_needed(const ForwardStep& step, uint32_t layer) const;

  // The CPU's part of a layer that a GPU attends with it; of an open step, of one token at q.
  Status attend_with_gpu(const StepContext& step, uint32_t layer, const float* q, HybridGpu* gpu);
  // Bytes of pages a second that the CPU attends in layers [first, end); 0: too few to tell.
  Status page_rate(const StepContext& step, uint32_t first, uint32_t end, double* rate);

  // Layers that a GPU attended. keep(): of a decode step, on one worker of the pool.
  // take(): of a prefill step; rows.attended has the outputs of probed() tokens, rows.q the queries
  // of the last queries_wanted() tokens, and rows.probed_q those of the first probed_rows().
  // Without rows.probed_q, rows.q has both.
  void keep(const StepContext& step, uint32_t layer, const LayerRows& rows);
  Status take(const StepContext& step, uint32_t layer, const LayerRows& rows);
  // Of the queries that a step has written and not committed.
  KeySketch::QueryMoment next_moments(const ForwardStep& step) const;
  static uint32_t queries_wanted(const StepContext& step);
  static uint32_t probed_rows(const ForwardStep& step);
  // Tokens of a step whose outputs are in rows.attended: every `stride`th one, from the first on.
  struct Probed {
    uint32_t count = 0, stride = 0;
  };
  static Probed probed(const ForwardStep& step);
  void count_prefill(const StepContext& step, uint32_t layers);  // that a GPU attended

  Attention& attention() { return attention_; }

 private:
  Status probe(const StepContext& step, uint32_t layer, const float* q,
               const Attention::ProbedOutputs& exact);
  Status check_documents(std::span<const AttentionRequest> documents, uint32_t layer, uint32_t end,
                         const CancelLatch& cancel) const;
  Status attend_documents(const StepContext& step, const LayerConfig& layer,
                          const AttentionRequest& own, float* out);
  Status score_tokens(std::span<const AttentionRequest> documents, DocumentScores* scores);
  Status score_documents(const StepContext& step, const LayerConfig& layer,
                         const AttentionRequest& own);
  std::vector<AttentionRequest> document_requests(const StepContext& step, const LayerConfig& layer,
                                                  const AttentionRequest& own) const;
  void merge_document(uint32_t token, const float* part, const float* part_lse, float* out);
  Status attend_together(std::span<const AttentionRequest> documents, const AttentionRequest& own,
                         float* out);
  Status end_documents(const StepContext& c, const AttentionRequest& own);
  QueryTurn turn_of(const StepContext& step, const LayerConfig& layer, std::size_t document) const;
  Status attend_window(const StepContext& step, uint32_t layer, const float* q, float* out);
  const float* sink_logits(uint32_t layer) const;
  void make_lse_room(uint32_t tokens);

  const Model& model_;
  const ModelConfig& config_;
  ThreadPool* pool_;
  Attention attention_;               // of the layers whose queries see every token
  std::optional<Attention> windows_;  // of the others
  Buffer<float> lse_;                 // [tokens][heads]
  std::size_t lse_room_ = 0;          // floats
  // Of one document, or of all that are attended at once: output, [tokens][heads][head_dim], and
  // lse, [tokens][heads].
  Array<float> part_, part_lse_;
  Array<float> shifts_;     // [documents][heads] of the last token, of traces
  bool has_pages_ = false;  // reserve_pages() was called in this step
};

}  // namespace kvasir
