// Attention of a step's queries over the store. Computes sinks, pages and window as partials and
// merges them.
//
//   exact:      each query attends every token before it (prefill; decode of dense layers; `full`)
//   selective:  each query attends sinks, window and the pages that the selector chose for it
//   by blocks:  neighbouring queries share one selection (sparse prefill)
//   batch:      the few queries of a question share one selection
//   windowed:   each query attends the tokens of its window
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
#include "attention/list_parts.h"
#include "attention/request.h"
#include "attention/trace.h"
#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/checked.h"
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
  // Takes out what tokens read that do not stay: all but `kept` of a step of so many.
  void keep(const ReadCounts& before, uint32_t kept, uint32_t tokens) {
    const auto part = [&](uint64_t old, uint64_t* count) {
      *count = old + (*count - old) * kept / tokens;
    };
    part(before.tokens_read, &tokens_read);
    part(before.tokens_present, &tokens_present);
    part(before.pages_touched, &pages_touched);
    part(before.tokens_hot, &tokens_hot);
    part(before.summary_bytes, &summary_bytes);
    part(before.keys_scanned, &keys_scanned);
    part(before.queries, &queries);
    mass = before.mass + (mass - before.mass) * kept / tokens;
  }
  ReadCounts& operator+=(const Scanned& scanned) {
    summary_bytes += scanned.summary_bytes;
    keys_scanned += scanned.keys_scanned;
    return *this;
  }
  ReadCounts& operator+=(const Selection& choice) {  // of one token
    tokens_read += choice.tokens;
    summary_bytes += choice.summary_bytes;
    keys_scanned += choice.keys_scanned;
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

  // run() over several documents, req.is_apart, by all threads at once. out, lse: [documents] those
  // of run(). can_run_together(): each selects, one token or a question's tokens as one, without
  // trace and comparison.
  bool can_run_together(std::span<const AttentionRequest> documents) const;
  Status run_together(std::span<const AttentionRequest> documents, float* out, float* lse);

  // Adds `sign` times the score of each query with its head's centre to lse, [tokens][heads] from
  // req.first on. So lse of stores with different centres can be compared. Does nothing with a cap,
  // whose scores have the centre.
  void add_centre_scores(const AttentionRequest& req, float sign, float* lse) const;
  // Of one token of the step.
  void add_centre_scores(const AttentionRequest& req, uint32_t token, float sign, float* lse) const;

  // The score of the best key of each block of documents, for the same queries, those of the KV
  // heads first_head to end_head - 1: of each document [KV head][tokens from req.first on][query
  // heads of the KV head][score_block_count()]. The window is in block 0. With req.selector,
  // `bounded`'s, the sketch estimates pages, where there is one. Otherwise they are exact, as sinks
  // and window are. req.is_apart. Scores of different documents can be compared. Code::corrupt.
  struct ScoredRows {
    float* scores;
    RowFacts* facts;  // of each row
  };
  Status score_blocks(std::span<const AttentionRequest> documents, uint32_t first_head,
                      uint32_t end_head, std::span<const ScoredRows> out);
  static constexpr uint32_t score_block_tokens = 64;
  static uint32_t score_block_count(const KvStore& store) {
    return static_cast<uint32_t>(
        std::max<uint64_t>(1, ceil_div(store.sealed_tokens(), score_block_tokens)));
  }

  // Attends through req.window, over a store that may have dropped older tokens. Without lse,
  // trace, selection and counts.
  Status run_windowed(const AttentionRequest& req, float* out);

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

  struct ProbedOutputs {
    const float* rows;
    bool packed;  // of the tokens that are probed; false: of all
  };
  // Compares selective attention with the exact output of run(), for `count` tokens evenly spread
  // over the step. Adds the squared norms of the difference and of the exact output. Does not count
  // reads. The first tokens of a step alone would separate retrieval layers from others less well,
  // because they attend fewer of the step's own tokens.
  Status probe(const AttentionRequest& req, uint32_t count, const ProbedOutputs& exact,
               double* difference, double* norm);
  // Number of first tokens of the step over which the `count` tokens are spread.
  static uint32_t probe_span(uint32_t n, uint32_t count) {
    count = std::min(n, count);
    return count * (n / count);
  }

  const ReadCounts& counts() const { return counts_; }
  const Comparison& comparison() const { return comparison_; }      // of steps whose plan compares
  void add_counts(const ReadCounts& counts) { counts_ += counts; }  // of a GPU's attention
  void keep_counts(const ReadCounts& before, uint32_t kept, uint32_t tokens) {
    counts_.keep(before, kept, tokens);
  }
  void reset_counts() { counts_ = {}, comparison_.reset(); }

 private:
  struct Worker;  // scratch of one thread
  // Tokens first + i * stride of the step, i < count, with the query heads of a KV head's group.
  struct HeadTokens {
    uint32_t head, first, count, stride = 1;
  };
  // The query rows of a task, [token][query head of the group], in the arrays of a worker.
  struct HeadQueries {
    const AttentionRequest& req;
    uint32_t head;  // KV head
    QueryRows rows;
    float cap;                // of the scores, as set_softcap(); 0: none
    uint32_t first_head = 0;  // of the group: the query head of the first row

    HeadQueries uncapped() const { return {req, head, rows, 0, first_head}; }
    // The rows of one token, from `row` on.
    HeadQueries of_rows(uint32_t row, uint32_t count) const {
      return {req, head, row_of(rows, row, count), cap, first_head};
    }
    // The only row of one query head, of a token's rows.
    HeadQueries of_head(uint32_t i) const { return {req, head, row_of(rows, i), cap, i}; }
  };
  // Full-precision keys and values, [count][dim]. limits: [rows] number of first keys that each
  // query row attends, or null: all.
  struct RowsOfKeys {
    const float *k, *v;
    uint32_t count;
    const uint32_t* limits = nullptr;
  };

  HeadQueries gather(const AttentionRequest& req, const HeadTokens& tokens, bool split,
                     Worker* w) const;
  SelectorQuery query_of(const HeadQueries& queries, uint64_t budget) const;
  // Index of the first output of a KV head's group in [tokens][heads][head_dim].
  std::size_t out_at(uint32_t token, uint32_t kv_head) const {
    return std::size_t{token} * config_.q_width() +
           std::size_t{kv_head} * config_.group() * config_.head_dim;
  }
  // Writes the rows of neighbouring tokens.
  void write_out(const AttentionRequest& req, const AttentionState& state, const HeadTokens& tokens,
                 float* out, float* lse) const;

  // Slots of partials_, with room for block_rows_ rows each.
  void reserve_partials(std::size_t count);
  AttentionState partial(std::size_t i, uint32_t rows);
  AttentionState empty_partial(std::size_t i, uint32_t rows);
  // Merges the partials i + 1 to i + count - 1 into partial i, in order.
  AttentionState merge_partials(std::size_t i, uint32_t count, uint32_t rows);

  uint32_t pages_of_part(uint32_t pages) const;
  Status exact(const AttentionRequest& req, float cap, float* out, float* lse);
  static uint32_t listed_page(const AttentionRequest& req, uint32_t i);
  Status list_pages(const AttentionRequest& req);
  // For the `count` tokens req.first + i * stride; out: [count][heads][head_dim].
  Status selective(const AttentionRequest& req, uint32_t count, uint32_t stride, float* out,
                   float* lse);
  // Tokens of a head that share a scan.
  struct SelectiveTask {
    const AttentionRequest& req;
    HeadTokens own;
    uint32_t first_extent;  // SelectorQuery::first_extent
    bool traces_last;
    uint32_t out_token;  // of its first token in out and lse
    float *out, *lse;
  };
  Status attend_selected(const SelectiveTask& task, Worker* w) const;
  Status run_tokens(std::span<const AttentionRequest> documents, float* out, float* lse);
  uint32_t scan_blocks(const Plan& plan, uint32_t tokens) const;
  Status by_blocks(const AttentionRequest& req, float* out, float* lse);
  Status attend_query_batch(const AttentionRequest& req, float* out, float* lse);

  void begin_with_sink_logits(const HeadQueries& queries, const AttentionState& state) const;
  void attend_sinks_and_window(const HeadQueries& queries, const HeadTokens& tokens,
                               const AttentionState& state, Worker* w) const;
  // Rows of score_blocks() for the queries of a task.
  struct BlockRows {
    float* scores;
    uint32_t blocks, block_pages;
    float* row(uint32_t r) const { return scores + std::size_t{r} * blocks; }
  };
  uint32_t score_groups(std::span<const AttentionRequest> documents, uint32_t heads) const;
  void score_near(const HeadQueries& queries, const BlockRows& out, Worker* w) const;
  bool estimate_pages(const HeadQueries& queries, const BlockRows& out, Worker* w) const;
  bool score_pages(const HeadQueries& queries, const BlockRows& out, Worker* w) const;
  void attend_rows(const HeadQueries& queries, const RowsOfKeys& keys, const AttentionState& state,
                   Worker* w) const;
  void attend_pages(const HeadQueries& queries, std::span<const PageRef> pages,
                    const AttentionState& state, Worker* w) const;
  // list: of the worker's selection, here and below.
  Status fetch_choice(const AttentionRequest& req, uint32_t head, std::size_t list,
                      PageStore::Hold* hold, Worker* w) const;
  Status attend_choice(const HeadQueries& queries, const AttentionState& state, bool traced,
                       Worker* w) const;
  bool certify(const HeadQueries& queries, std::size_t list, const AttentionState& state,
               Worker* w) const;
  // After exact(): adds to the comparison that exact attention equals itself.
  Status compare_exact(const AttentionRequest& req, const float* out);
  // Compares a token's output in one KV head, [group][head_dim].
  bool compare(const HeadQueries& queries, uint32_t token, const Selection* choice,
               const float* out, Worker* w);

  struct WindowBlock;
  Status list_window_pages(const AttentionRequest& req, uint64_t oldest, uint32_t first_page);
  void attend_window_pages(const WindowBlock& block, uint32_t first_page, Worker* w) const;
  void attend_window_rows(const WindowBlock& block, Worker* w) const;

  void choose_for_block(const AttentionRequest& req, const HeadTokens& block, uint64_t budget,
                        Worker* w) const;

  struct QueryBatch;
  // Partials: [kv_heads] of sinks and window, then those of the parts.
  struct BatchPart {
    uint32_t head;
    ListPart pages;
  };
  Status choose_for_batch(const QueryBatch& batch);
  Status sum_batch_shares(const QueryBatch& batch);
  Status sum_task_shares(const QueryBatch& batch, uint32_t task, const AttentionState& near,
                         Array<float>* sums, Worker* w) const;
  void choose_by_batch(const QueryBatch& batch, uint32_t head, const Array<float>& sums,
                       Selection* choice, Worker* w) const;
  void attend_batch_near(const QueryBatch& batch, const HeadTokens& tokens,
                         const AttentionState& near, Worker* w) const;
  QueryRows selecting_rows(const QueryBatch& batch, uint32_t task, const AttentionState& near,
                           Worker* w) const;
  Status attend_for_batch(const QueryBatch& batch, float* out, float* lse);
  Status attend_batch_part(const QueryBatch& batch, const BatchPart& part, const Selection& choice,
                           const AttentionState& state, Worker* w) const;
  Status run_batch_head(const QueryBatch& batch, uint32_t head, const AttentionState (&states)[2],
                        Worker* w) const;
  Status run_batches(std::span<const AttentionRequest> documents, float* out, float* lse);

  // A part of co-execution: `rows` query rows of a head, from row `row` of token `first` on.
  struct HybridPart {
    uint32_t head, first, row, rows;
    uint32_t choice;  // of block_choices_
    ListPart pages;   // of that selection, or of all pages
    bool has_rows_of(const HybridPart& o) const {
      return head == o.head && first == o.first && row == o.row;
    }
  };
  // What the GPU attends of a step of one token.
  struct GpuShare {
    HybridGpu::Lists lists;
    uint32_t sixteenths;
  };
  Status choose_hybrid(const AttentionRequest& req, const GpuShare& share, HybridGpu* gpu);
  Status share_chosen(const AttentionRequest& req, HybridGpu* gpu);
  Status share_all(const AttentionRequest& req, HybridGpu* gpu);
  void share_among_tasks(uint32_t n, uint32_t pages);
  bool split_for_gpu(const AttentionRequest& req, uint32_t head, const GpuShare& share,
                     Selection* choice, Worker* w) const;
  Status attend_parts(const AttentionRequest& req, bool chosen);
  Status attend_all(const HeadQueries& queries, const ListPart& pages, const AttentionState& state,
                    Worker* w) const;
  Status attend_chosen(const HeadQueries& queries, const HybridPart& part,
                       const AttentionState (&states)[2], Worker* w) const;
  void merge_parts(uint32_t n, HybridGpu* gpu);

  // bases: [rows] of Trace::set_base(), here and below.
  void trace_near(const HeadQueries& queries, uint32_t token, const float* bases, Worker* w) const;
  void trace_page(const HeadQueries& queries, PageRef page, uint32_t number, const float* bases,
                  Worker* w) const;
  void trace_exact(const AttentionRequest& req, const float* lse);

  const HeadShape config_;
  float softcap_ = 0;
  Trace* trace_ = nullptr;
  const PageShape shape_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  const uint32_t block_rows_;  // query rows of a block: its tokens times the heads of a group
  std::vector<Worker> workers_;
  std::vector<Array<PageRef>> page_lists_;  // [kv_heads] sealed pages but the first, hidden ones
  Array<float> partials_;                   // of the parts of a block
  // Selections: [blocks of the step] of the last filter layer, one list each; or [kv_heads] of a
  // query batch; or [kv_heads][tokens] of co-execution.
  std::vector<Selection> block_choices_;
  std::vector<Array<float>> batch_sums_;  // [tasks of a batch][kv_heads] summed shares of quads
  std::vector<BatchPart> batch_parts_;
  LayerScales batch_scales_;
  std::vector<HybridPart> hybrid_parts_;  // parts of the same rows are adjacent
  Array<float> probed_;                   // [count][heads * head_dim] output of a probe
  ReadCounts counts_;
  Comparison comparison_;
};

}  // namespace kvasir
