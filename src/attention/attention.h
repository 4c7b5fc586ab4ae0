// Attention of a step's queries over the store. Computes sinks, pages and window as partials and
// merges them.
//
//   exact:      each query attends every token before it (prefill; decode of dense layers; `full`)
//   selective:  each query attends sinks, window and the pages that the selector chose for it
//   by blocks:  neighbouring queries share one selection (sparse prefill)
//   batch:      the few queries of a question share one selection
//
// A task is a head, a block of queries and a part of the pages. The parts of pages depend on sizes
// alone, never on the number of threads. Blocks of queries may depend on that number, because a
// query's sums do not depend on the other queries. So results are bit-identical for any number of
// threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/compare.h"
#include "attention/hybrid_gpu.h"
#include "attention/layer_scales.h"
#include "attention/request.h"
#include "attention/trace.h"
#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "model/config.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

// Reads of attention, summed over queries, layers and KV heads since the last reset.
struct ReadCounts {
  // tokens between sinks and window whose K and V were read
  uint64_t tokens_read = 0;
  uint64_t tokens_present = 0;  // the same sum for full attention
  uint64_t pages_touched = 0;   // pages of which at least one token was read
  uint64_t tokens_hot = 0;      // tokens read from hot quads in GPU memory
  uint64_t summary_bytes = 0;   // of summaries that selection read
  uint64_t keys_scanned = 0;    // keys that selection scored
  uint64_t queries = 0;         // query heads with sampled pages
  // sum over `queries`: share of attention that was read; samples estimate the rest
  double mass = 0;
  uint64_t certified = 0;  // query heads with a certificate
  // over `certified`, lower bounds of the attention that was read: sum and minimum
  double certificate = 0, min_certificate = 1;

  ReadCounts& operator+=(const ReadCounts& o) {
    tokens_read += o.tokens_read;
    tokens_present += o.tokens_present;
    pages_touched += o.pages_touched;
    tokens_hot += o.tokens_hot;
    summary_bytes += o.summary_bytes;
    keys_scanned += o.keys_scanned;
    queries += o.queries;
    mass += o.mass;
    certified += o.certified;
    certificate += o.certificate;
    min_certificate = std::min(min_certificate, o.min_certificate);
    return *this;
  }
};

class Attention {
 public:
  Attention(const HeadShape& config, const PageShape& shape, const Kernels& kernels,
            ThreadPool* pool);
  ~Attention();

  // Makes later scores of exact and selective run() cap * tanh(score / cap); 0: no cap. Strategies
  // select by the uncapped scores, which have the same order, and by their lse.
  void set_softcap(float cap) { softcap_ = cap; }

  // Records in `trace` the attention of the last token of each later step. Applies to exact and
  // selective run() with lse and without a cap. Null: no trace.
  void set_trace(Trace* trace) { trace_ = trace; }

  // out: [tokens][heads][head_dim]. lse: [tokens][heads] natural logarithm of the sum of e^score
  // that each query attended, or null. The lse of exact attention ignores the cap; this takes a
  // second pass. Tokens before req.first are neither attended nor written. After a cancel both
  // arrays are undefined. Code::corrupt (a damaged page of a mapped file).
  Status run(const AttentionRequest& req, float* out, float* lse);

  // Computes the CPU's part of co-execution (hybrid_gpu.h). Each token has its own selection. Does
  // not support cap, trace, comparison and certificate.
  Status run_with_gpu(const AttentionRequest& req, HybridGpu* gpu);

  // Measures the rate of run_with_gpu() in bytes of pages per second, over the first pages of these
  // layers; 0: there are too few pages. Code::corrupt.
  Status page_rate(uint32_t first_layer, uint32_t end_layer, AttentionRequest req, double* rate);

  // After run() of a filter layer: selects for the layers after it.
  void filter(const AttentionRequest& req, const float* lse, const RecentQueries* recent,
              StepMemory* memory) const;

  // After run() of a filter layer in a step by blocks: selects for the step's blocks in the layers
  // up to the next filter layer.
  Status filter_blocks(const AttentionRequest& req);

  // Compares selective attention with the exact output of run(), for `count` tokens evenly spread
  // over the step. Adds the squared norms of the difference and of the exact output. Does not count
  // reads. The first tokens of a step alone would separate retrieval layers from others less well,
  // because they attend fewer of the step's own tokens.
  Status probe(const AttentionRequest& req, uint32_t count, const float* exact, double* difference,
               double* norm);
  // Number of first tokens of the step over which the `count` tokens are spread.
  static uint32_t probe_span(uint32_t n, uint32_t count) {
    count = std::min(n, count);
    return count * (n / count);
  }

  const ReadCounts& counts() const { return counts_; }
  const Comparison& comparison() const { return comparison_; }      // of steps whose plan compares
  void add_counts(const ReadCounts& counts) { counts_ += counts; }  // of a GPU's attention
  void reset_counts() { counts_ = {}, comparison_.reset(); }

 private:
  struct Worker;  // scratch of one thread
  // Tokens of the step that attend sinks and window: first + i * stride for i < count.
  struct NearRows {
    uint32_t head, first, count, stride = 1;
  };
  // Full-precision keys and values, [count][dim]. limits: [rows] number of first keys that each
  // query row attends, or null: all.
  struct RowsOfKeys {
    const float *k, *v;
    uint32_t count;
    const uint32_t* limits = nullptr;
  };
  SelectorQuery query_of(const AttentionRequest& req, uint32_t head, const QueryRows& rows,
                         uint64_t budget) const;

  // cap, here and below: of set_softcap().
  Status exact(const AttentionRequest& req, float cap, float* out, float* lse);
  // For the `count` tokens req.first + i * stride; out: [count][heads][head_dim].
  Status selective(const AttentionRequest& req, uint32_t count, uint32_t stride, float* out,
                   float* lse);
  Status by_blocks(const AttentionRequest& req, float* out, float* lse);
  Status attend_query_batch(const AttentionRequest& req, float* out, float* lse);

  void attend_sinks_and_window(const AttentionRequest& req, const NearRows& near,
                               const QueryRows& rows, float cap, const AttentionState& state,
                               Worker* w) const;
  void attend_rows(const AttentionRequest& req, uint32_t head, const QueryRows& rows,
                   const RowsOfKeys& keys, float cap, const AttentionState& state, Worker* w) const;
  void attend_pages(const AttentionRequest& req, uint32_t head, const QueryRows& rows,
                    std::span<const PageRef> pages, float cap, const AttentionState& state,
                    Worker* w) const;
  Status fetch_choice(const AttentionRequest& req, uint32_t head, std::size_t i,
                      PageStore::Hold* hold, Worker* w) const;
  Status attend_choice(const AttentionRequest& req, uint32_t head, const QueryRows& rows,
                       const AttentionState& state, bool traced, Worker* w) const;
  bool certify(const AttentionRequest& req, uint32_t head, const QueryRows& rows, std::size_t list,
               const AttentionState& state, Worker* w) const;
  // After exact(): adds to the comparison that exact attention equals itself.
  Status compare_exact(const AttentionRequest& req, const float* out);

  void choose_for_block(const AttentionRequest& req, const NearRows& block, uint64_t budget,
                        Worker* w) const;

  struct Question;
  Status choose_for_batch(const Question& batch);
  Status attend_for_batch(const Question& batch, float* out, float* lse);
  // State i: [kv_heads] near parts, then the parts of pages.
  AttentionState question_state(std::size_t i, uint32_t rows);

  // A part of co-execution: `rows` query rows of a head, from row `row` of token `first` on.
  struct HybridPart {
    uint32_t head, first, row, rows;
    uint32_t choice, list, begin, end;  // page numbers in a list of block_choices_, or in all pages
    bool is_of_rows(const HybridPart& o) const {
      return head == o.head && first == o.first && row == o.row;
    }
  };
  Status choose_hybrid(const AttentionRequest& req, const HybridGpu::Lists& lists, HybridGpu* gpu);
  Status share_chosen(const AttentionRequest& req, HybridGpu* gpu);
  Status share_all(const AttentionRequest& req, HybridGpu* gpu);
  void share_among_tasks(uint32_t n, uint32_t pages);
  Status attend_pages_of(const AttentionRequest& req, const HybridPart& part, const QueryRows& rows,
                         const AttentionState& state, Worker* w) const;
  bool split_for_gpu(const AttentionRequest& req, uint32_t head, uint32_t sixteenths,
                     const HybridGpu::Lists& lists, Selection* choice, Worker* w) const;
  Status attend_parts(const AttentionRequest& req, bool chosen);
  void merge_parts(uint32_t n, HybridGpu* gpu);
  Status attend_chosen(const AttentionRequest& req, const HybridPart& part, const QueryRows& rows,
                       const AttentionState (&states)[2], Worker* w) const;
  AttentionState hybrid_state(std::size_t i, uint32_t which, uint32_t rows);

  void trace_near(const AttentionRequest& req, uint32_t head, const QueryRows& rows, uint32_t token,
                  const float* bases, Worker* w) const;
  void trace_page(uint32_t head, uint32_t row, const QueryRows& rows, PageRef page, uint32_t number,
                  const float* bases, Worker* w) const;
  void trace_exact(const AttentionRequest& req, const float* lse);
  QueryRows gather(Worker* worker, const float* q, uint32_t first, uint32_t count, uint32_t stride,
                   uint32_t kv_head, bool split) const;
  void write_out(const AttentionState& state, uint32_t first, uint32_t count, uint32_t kv_head,
                 float* out, float* lse) const;

  const HeadShape config_;
  float softcap_ = 0;
  Trace* trace_ = nullptr;
  const PageShape shape_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  const uint32_t block_rows_;  // query rows of a block: its tokens times the heads of a group
  std::vector<Worker> workers_;
  std::vector<Array<PageRef>> page_lists_;  // [kv_heads] all sealed pages but that of the sinks
  Array<float> partials_;                   // states of a block's parts
  // Selections: [blocks of the step] of the last filter layer, one list each; or [kv_heads] of a
  // query batch; or [kv_heads][tokens] of co-execution.
  std::vector<Selection> block_choices_;
  std::vector<Array<float>>
      question_sums_;  // [parts of the batch][kv_heads] summed shares of quads
  struct QuestionPart {
    uint32_t head, begin, end;  // page numbers in the head's selection
  };
  std::vector<QuestionPart> question_parts_;
  LayerScales question_scales_;
  std::vector<HybridPart> hybrid_parts_;  // parts of the same rows are adjacent
  Array<float> probed_;                   // [count][heads * head_dim] output of a probe
  ReadCounts counts_;
  Comparison comparison_;
};

}  // namespace kvasir
