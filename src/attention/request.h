// Input of the attention of a step's queries in one layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "attention/trace.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "select/plan.h"
#include "store/kv_store.h"

namespace kvasir {

// The tokens that queries of a layer see: the newest ones, or those since the last multiple.
struct AttentionWindow {
  uint64_t tokens = 0;  // of the window; 0: all
  bool chunked = false;
  uint64_t first_seen(uint64_t position) const {
    return chunked ? position - position % tokens : position - std::min(position, tokens - 1);
  }
};

// Pages after the first one.
struct PageRange {
  uint32_t first = 0, end = 0;
  uint32_t count() const { return end - first; }
};

// RoPE angles by which queries are turned before they meet the keys of a store.
struct QueryTurn {
  const float *cos = nullptr, *sin = nullptr;  // [dim / 2]; null: queries stay as they are
  uint32_t first = 0, dim = 0;                 // the numbers of a query that have RoPE
  bool neox = false;                           // Kernels::rope
};

struct AttentionRequest {
  uint32_t layer = 0;
  uint32_t first = 0;        // first token of the step whose attention is computed
  uint32_t tokens = 0;       // of the step
  const float* q = nullptr;  // [tokens][heads][head_dim] after RoPE
  QueryTurn turn = {};
  const KvStore& store;                // has the step's rows of this layer, uncommitted
  const Selector* selector = nullptr;  // null: every token is attended
  const Plan& plan;
  const StepMemory* memory = nullptr;  // of the selector, or null
  // [heads] a learned score of each query head that has no value, or null: it joins the softmax.
  const float* sink_logits = nullptr;
  AttentionWindow window;  // of run_windowed()
  // The store is a document's that was prefilled apart: it lacks the step's rows. The output is
  // merged with others: lse is of the scores that were attended, with the cap if there is one.
  bool is_apart = false;
  uint32_t skipped = 0;  // of such a store: first tokens, of its first page, not attended
  PageRange hidden;      // of such a store: not attended either; a by_blocks plan has none
  // A partial result: the caller merges documents and ends the trace's layer.
  bool is_part = false;
  const CancelLatch& cancel;  // after it has fired, results are undefined
};

// A document that was prefilled apart, as a step attends it. Keys stay as they were saved. A query
// meets them as if the document were right before what follows it: RoPE is relative, so the query
// is turned by the tokens between.
struct AttendedDocument {
  const KvStore* store = nullptr;
  uint64_t tokens_before = 0;          // from the document's first token to the sequence's first
  uint32_t skipped = 0;                // AttentionRequest::skipped
  PageRange hidden = {};               // AttentionRequest::hidden
  const Plan* plan = nullptr;          // of this store
  const Selector* selector = nullptr;  // null: every token is attended
  Trace* trace = nullptr;              // where set, receives what the step's last token attends
};

// Of the scores of a query in the blocks of a document.
struct RowFacts {
  float best = 0, variance = 0;  // of those that are finite
};

// Scores of documents for the queries of a step, in some layers.
struct DocumentScores {
  // At once, of one KV head: a long question has them in parts.
  std::size_t max_floats = std::size_t{16} << 20;
  // Of several KV heads at once: most are still in a cache when they are taken.
  static constexpr std::size_t max_joint_floats = std::size_t{4} << 20;

  // Without plan and trace. A selector estimates scores; without one they are exact.
  std::vector<AttendedDocument> documents;
  std::vector<uint32_t> left;  // of them, ascending: those that are scored
  std::vector<bool> layers;    // [layers] which are scored
  uint32_t first = 0;          // token of the step from which on they are scored
  // Of some tokens and KV heads of a layer: of each document that is left [rows][blocks], as
  // Attention::score_blocks().
  Buffer<float> scores;
  std::size_t floats = 0;           // of scores
  std::vector<float*> of_document;  // [left] in scores
  Array<RowFacts> facts;            // [left][rows]
  const RowFacts* facts_of(std::size_t i, std::size_t rows) const {
    return facts.data() + i * rows;
  }
  // Is called for each such group of tokens and KV heads of each scored layer.
  std::function<void(std::size_t rows)> take;
  // Is called after each scored layer, or null. May leave fewer documents for those that follow.
  std::function<void()> end_layer;
  // Nothing else is wanted: the step ends after the last scored layer and appends nothing.
  bool ends_step = false;
};

// Rows of a step's tokens in one layer, after RoPE.
struct LayerRows {
  // [tokens][heads or kv_heads][head_dim]; v null: values are the first numbers of the keys
  const float *q, *k, *v;
  uint32_t first_query = 0;         // the token that q begins with; k, v and lse begin with token 0
  const float* probed_q = nullptr;  // queries of the first tokens, where q begins later
  const float* lse = nullptr;       // [tokens][heads] log-sum-exp of the scores; null: unknown
  // [..][heads][head_dim] output of attention; null: not requested
  const float* attended = nullptr;
};

}  // namespace kvasir
