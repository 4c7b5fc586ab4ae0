// Builds an index of the sealed keys: one task per layer and KV head, with the same result for any
// number of threads.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/status.h"
#include "select/graph/device_search.h"
#include "store/page_store.h"
#include "store/token_index.h"

namespace kvasir {

// The keys of one head as rows, while its index is built. Pages have them in strips, from which
// pairs of distant keys are slow to gather.
class KeyRows {
 public:
  // Items: the tokens from first_token to the last sealed one. The pages are verified. Meaningless
  // when cancelled. Throws std::bad_alloc.
  KeyRows(const PageStore& pages, const Kernels& kernels, uint32_t layer, uint32_t kv_head,
          uint32_t first_token, const CancelLatch& cancel);

  // Replaces each key by L^T key, with L of query_metric(); does nothing for an empty L.
  void measure_by(std::span<const float> metric, const CancelLatch& cancel);

  uint32_t items() const { return items_; }
  uint32_t dim() const { return dim_; }
  const int8_t* row(uint32_t item) const { return rows_.data() + std::size_t{item} * dim_; }
  float scale(uint32_t item) const { return scales_[item]; }
  KeyView view() const { return {rows_.data(), scales_.data(), items_, as_stored_}; }
  KeyRef ref(uint32_t item) const { return {row(item), scale(item)}; }
  float square(uint32_t item) const { return squares_[item]; }  // its squared length
  float dot(uint32_t a, uint32_t b) const;
  // dots[i] = key of `item` . key of others[i]
  void dots(uint32_t item, std::span<const uint32_t> others, Array<KeyRef>* refs,
            float* dots) const;

 private:
  const Kernels& kernels_;
  uint32_t items_, dim_;
  bool as_stored_ = true;
  Array<int8_t> rows_;
  Array<float> scales_, squares_;
};

// Queries for which an index is built, quantised as in attention: of all layers and heads, for some
// tokens.
class IndexQueries {
 public:
  IndexQueries() = default;
  // Throws std::bad_alloc. 1 byte per element: 4096 bytes per layer and token for 32 heads of 128.
  IndexQueries(const StoreShape& shape, uint32_t heads, uint32_t tokens);

  uint32_t tokens() const { return tokens_; }
  // Writes the queries of tokens first .. first + n - 1: q [n][heads * head_dim] after RoPE.
  void write(const Kernels& kernels, uint32_t layer, uint32_t first, uint32_t n, const float* q);
  uint32_t group() const { return group_; }
  // Of a KV head: the tokens of one query head, then those of the next.
  uint32_t rows() const { return tokens_ * group_; }
  QueryRows rows_of(uint32_t layer, uint32_t kv_head, uint32_t first, uint32_t n) const;

 private:
  StoreShape shape_;
  uint32_t group_ = 0, tokens_ = 0;
  // [layers][kv_heads][group][tokens][dim]. Not cleared: half a gigabyte for an 8B model.
  Buffer<int8_t> q8_;
  Array<float> scale_;   // [layers][kv_heads][group][tokens]
  Array<float> padded_;  // [dim]
};

// A metric of keys for these queries: half by their distance, half by the difference of their
// scores. L [dim][dim], lower triangular, with L L^T = I + C dim / trace C, C the second moment of
// the queries: |L^T (a - b)|^2 = |a - b|^2 + the mean of (q . a - q . b)^2 in units of the queries'
// mean square. Empty when all queries are zeros, and when cancelled.
Array<float> query_metric(const QueryRows& queries, const CancelLatch& cancel);

struct IndexInput {
  const Kernels& kernels;
  const PageStore& pages;
  uint32_t layer, kv_head, first_token;
  const IndexQueries& queries;        // for indexes built from queries
  uint32_t first_query, query_count;  // rows of the KV head
  const TokenIndex::Head* known;      // insert into this graph; null: build one
  uint32_t known_items;               // of its items, the first ones still exist
  const CancelLatch& cancel;
  DeviceSearch* search = nullptr;  // finds nearest keys; null: the CPU does
};

// The words of one head; meaningless when cancelled. Throw std::bad_alloc.
TokenIndex::Words build_hnsw(const IndexInput& input);
TokenIndex::Words build_ood(const IndexInput& input);
TokenIndex::Words build_ivf(const IndexInput& input);

// Tokens of the document whose queries the index is built from; 0: none.
uint32_t wanted_queries(IndexKind kind);

// Progress steps of the build, in addition to one for each token whose queries are computed; they
// take about as long.
uint64_t index_steps(const StoreShape& shape);

// About the bytes of an index of so many tokens, rather fewer.
uint64_t index_bytes(IndexKind kind, const StoreShape& shape, uint32_t graphs, uint64_t tokens);

// The processors that found nearest keys, "cuda:0,cpu", or empty; and why the CPU did, or
// empty: it did not, or there is no device.
struct NearestBy {
  std::string names, because;
};

// The inputs and options of a build.
struct IndexOrder {
  IndexKind kind;
  const PageStore& pages;
  const IndexQueries& queries;  // empty when tokens are inserted
  uint32_t graphs = 1;          // per KV head; the group's query heads when each has its own
  TokenIndexes::Entry known;    // tokens are inserted into this one, which has as many graphs
  // Search for nearest keys; heads are assigned to them in turn.
  std::vector<std::shared_ptr<Device>> devices = {};
  NearestBy* nearest_by = nullptr;  // null: not reported
};

// Builds all heads over all sealed tokens behind the first page. Progress in steps, after those of
// the queries. Code::corrupt (a damaged page of a mapped file), Code::cancelled, Code::device;
// throws std::bad_alloc.
Status build_index(const IndexOrder& order, const Kernels& kernels, ThreadPool* pool,
                   const Cancel* cancel, Progress* progress, std::shared_ptr<TokenIndex>* out);
// Whether tokens can be inserted into an index of this kind; others are rebuilt.
bool takes_insertions(IndexKind kind);

}  // namespace kvasir
