// Attention of a step's queries over the store: sinks + pages + window, as partial states that are merged.
//
//   exact:      every query sees every token before it (prefill; decode of dense layers; `full`)
//   selective:  each query sees sinks, window and the pages that the selector chose for it
//   by blocks:  neighbouring queries of a step see what the selector chose for all of them (sparse prefill)
//   together:   so do those of a question, which are few
//
// Work is cut into tasks by head, block of queries and part of the pages. Where to cut the pages depends on sizes alone, never on the number of
// threads; blocks of queries may, as a query's sums do not depend on its neighbours. So results are the same bits on any number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/cancel.h"
#include "base/memory.h"
#include "compute/kernels.h"
#include "compute/thread_pool.h"
#include "model/beside.h"
#include "model/compare.h"
#include "model/config.h"
#include "model/layer_scales.h"
#include "model/trace.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

// What attention read, summed over queries, layers and KV heads since the last reset.
struct ReadCounts {
  uint64_t tokens_read = 0;     // store tokens whose K and V were read (behind the sinks, before the window)
  uint64_t tokens_present = 0;  // and how many there were
  uint64_t pages_touched = 0;   // pages of which at least one token was read
  uint64_t tokens_hot = 0;      // of those read, what a device had from steps before
  uint64_t summary_bytes = 0;   // read to choose
  uint64_t keys_scanned = 0;    // keys whose scores were computed to choose
  uint64_t queries = 0;         // query heads whose pages were sampled,
  double mass = 0;              // and the share of their attention that was read for certain, summed; the rest was estimated from samples
  uint64_t certified = 0;       // query heads with a certificate,
  double certificate = 0, least_certificate = 1;  // and what they have read at least, summed, and the least of them

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
    least_certificate = std::min(least_certificate, o.least_certificate);
    return *this;
  }
};

class Attention {
 public:
  Attention(const HeadShape& config, const PageShape& shape, const Kernels& kernels, ThreadPool* pool);
  ~Attention();

  // From now on scores are cap * tanh(score / cap), in run() exact or selective; 0: as they are. Strategies choose by the scores as they are,
  // which are in the same order, and by totals of these.
  void set_softcap(float cap) { softcap_ = cap; }

  // From now on what the last token of a step attends is added to it, by run() exact or selective with totals and no cap; null: to nothing.
  void set_trace(Trace* trace) { trace_ = trace; }

  // out: [n][heads * head_dim] from q: [n][heads * head_dim] after RoPE; the store holds the step's n tokens of this layer as
  // written, uncommitted rows. Of the tokens before `first` nothing is attended or written. selector null: exact. totals: [n][heads] ln of the sum of
  // e^score that each query attended, or null; exact ones are of the scores as they are also where a cap is set, which is a second pass. When
  // cancelled both are meaningless. Code::corrupt when a page of a mapped file is damaged.
  Status run(uint32_t layer, uint32_t first, uint32_t n, const float* q, const KvStore& store, const Selector* selector, const Plan& plan,
             const StepMemory* memory, const CancelLatch& cancel, float* out, float* totals);

  // The same where a device attends sinks and window, and a part of the pages of one token: the rest, for all tokens, which each choose for themselves. No cap,
  // no trace, no comparison and no certificate.
  Status run_beside(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector* selector, const Plan& plan, const StepMemory* memory,
                    const CancelLatch& cancel, Beside* device);

  // How many bytes of pages a second run_beside() attends of all of them, by the first ones of layers [first, end), verified; 0: there are too few to tell.
  // Code::corrupt.
  Status reading_rate(uint32_t first, uint32_t end, const KvStore& store, const CancelLatch& cancel, double* rate);

  // After run() of a filter layer: the selector chooses for the layers after it.
  void filter(uint32_t layer, uint32_t n, const float* q, const float* totals, const KvStore& store, const RecentQueries* recent,
              const Selector& selector, const Plan& plan, const CancelLatch& cancel, StepMemory* memory) const;

  // After run() of a filter layer of a step that reads by blocks: chooses for its blocks in the layers up to the next one.
  Status filter_blocks(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan,
                       const CancelLatch& cancel);

  // How far the selector's choice would be from the exact output, for `count` tokens evenly spread over the step: the squared norm of the
  // difference and of the exact output (as run() gave it), added to *difference and *norm. Reads are not counted. (By a step's first ones, which have fewer of its
  // own beside, layers that retrieve are told from others less well.)
  Status probe(uint32_t layer, uint32_t n, uint32_t count, const float* q, const KvStore& store, const Selector& selector,
               const Plan& plan, const float* exact, const CancelLatch& cancel, double* difference,
               double* norm);
  // The step's tokens that `count` are taken of.
  static uint32_t probe_span(uint32_t n, uint32_t count) {
    count = std::min(n, count);
    return count * (n / count);
  }

  const ReadCounts& counts() const { return counts_; }
  const Comparison& comparison() const { return comparison_; }  // of the steps whose plan asks for it
  void add_counts(const ReadCounts& counts) { counts_ += counts; }  // of what was attended elsewhere
  void reset_counts() { counts_ = {}, comparison_.reset(); }

 private:
  struct Worker;  // scratch of one thread
  // cap: as set_softcap() has it, here and below.
  Status exact(uint32_t layer, uint32_t first, uint32_t n, const float* q, const KvStore& store, float cap, const CancelLatch& cancel, float* out,
               float* totals);
  // For `count` tokens, from `first` on in strides.
  void attend_near(uint32_t layer, uint32_t head, uint32_t first, uint32_t count, uint32_t stride, const QueryRows& rows, const KvStore& store, float cap,
                   const CancelLatch& cancel, const AttentionState& state, Worker* worker) const;
  Status by_blocks(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan,
                   const CancelLatch& cancel, float* out, float* totals);
  void choose_for_block(uint32_t layer, uint32_t head, uint32_t first, uint32_t count, const float* q, const KvStore& store, const Selector& selector,
                        uint64_t budget, const CancelLatch& cancel, Worker* worker) const;
  struct Question;
  Status together(uint32_t layer, uint32_t first, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan,
                  const CancelLatch& cancel, float* out, float* totals);
  Status choose_for_question(const Question& of);
  Status read_for_question(const Question& of, float* out, float* totals);
  // Some of what is attended beside a device: by `rows` query rows of a head, from a row of the token `first` on.
  struct BesidePart {
    uint32_t head, first, row, rows;
    uint32_t choice, list, begin, end;  // of block_choices_: pages by number; or of all
    bool is_of_rows(const BesidePart& o) const { return head == o.head && first == o.first && row == o.row; }
  };
  Status choose_beside(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan, const StepMemory* memory,
                       const CancelLatch& cancel, const Beside::Lists& lists, Beside* device);
  Status share_chosen(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan, const StepMemory* memory,
                      const CancelLatch& cancel, Beside* device);
  Status share_all(uint32_t layer, uint32_t n, const KvStore& store, const CancelLatch& cancel, Beside* device);
  void share_among_tasks(uint32_t n, uint32_t pages);
  Status attend_pages_of(const BesidePart& part, uint32_t layer, const QueryRows& rows, const KvStore& store, const AttentionState& state, const CancelLatch& cancel,
                         Worker* worker) const;
  bool give_end(uint32_t layer, uint32_t head, const KvStore& store, uint32_t sixteenths, const Beside::Lists& lists, Selection* choice, Worker* worker) const;
  Status attend_parts(uint32_t layer, const float* q, const KvStore& store, bool chosen, const CancelLatch& cancel);
  void merge_parts(uint32_t n, Beside* device);
  Status attend_chosen(const BesidePart& part, uint32_t layer, const QueryRows& rows, const KvStore& store, const AttentionState (&states)[2],
                       const CancelLatch& cancel, Worker* worker) const;
  AttentionState beside_state(std::size_t i, uint32_t which, uint32_t rows);
  AttentionState question_state(std::size_t i, uint32_t rows);  // of near, [kv_heads], and of what the parts read
  // For `count` tokens, from `first` on in strides; out: [count][heads * head_dim].
  Status selective(uint32_t layer, uint32_t first, uint32_t count, uint32_t stride, const float* q, const KvStore& store, const Selector& selector,
                   const Plan& plan, const StepMemory* memory, const CancelLatch& cancel, float* out, float* totals);
  // After exact(): what it gave against itself, as Comparison has it.
  Status compare_exact(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const CancelLatch& cancel, const float* out);
  Status fetch_choice(uint32_t layer, uint32_t head, std::size_t i, const KvStore& store, PageStore::Hold* hold, Worker* w) const;
  Status attend_choice(uint32_t layer, uint32_t head, const QueryRows& rows, const AttentionState& state, const KvStore& store,
                       const Plan& plan, bool traced, const CancelLatch& cancel, Worker* worker) const;
  bool certify(uint32_t layer, uint32_t head, const QueryRows& rows, const KvStore& store, std::size_t list, const AttentionState& state,
               Worker* worker) const;
  void attend_rows(uint32_t layer, uint32_t head, const QueryRows& rows, const float* k, const float* v, uint32_t n, const uint32_t* limit,
                   const KvStore& store, float cap, const CancelLatch& cancel, const AttentionState& state, Worker* worker) const;
  void attend_pages(uint32_t layer, uint32_t head, const QueryRows& rows, const PageRef* pages, uint32_t n, const KvStore& store, float cap,
                    const CancelLatch& cancel, const AttentionState& state, Worker* worker) const;
  void trace_near(uint32_t layer, uint32_t head, const QueryRows& rows, uint32_t token, const KvStore& store, const float* bases, Worker* worker) const;
  void trace_page(uint32_t head, uint32_t row, const QueryRows& rows, PageRef page, uint32_t number, const float* bases, Worker* worker) const;
  void trace_exact(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const float* totals, const CancelLatch& cancel);
  QueryRows gather(Worker* worker, const float* q, uint32_t first, uint32_t count, uint32_t stride, uint32_t kv_head, bool split) const;
  void write_out(const AttentionState& state, uint32_t first, uint32_t count, uint32_t kv_head, float* out, float* totals) const;

  const HeadShape config_;
  float softcap_ = 0;
  Trace* trace_ = nullptr;
  const PageShape shape_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  const uint32_t block_rows_;   // query rows of a block: tokens of the block times heads of the group
  std::vector<Worker> workers_;
  std::vector<Array<PageRef>> page_lists_;  // [kv_heads] all sealed pages but the sinks'
  Array<float> partials_;                   // states of a block's parts
  std::vector<Selection> block_choices_;    // [blocks of the step] what the last filter layer chose, one list each; or [kv_heads] what a question chose, or [n] beside
  std::vector<Array<float>> question_sums_; // [parts of the question][kv_heads] summed shares of the quads
  struct QuestionPart {
    uint32_t head, begin, end;              // pages of the head's choice
  };
  std::vector<QuestionPart> question_parts_;
  LayerScales question_scales_;
  std::vector<BesidePart> beside_parts_;    // those of the same rows one behind the other
  Array<float> probed_;                     // [count][heads * head_dim] output of a probe
  ReadCounts counts_;
  Comparison comparison_;
};

}  // namespace kvasir
