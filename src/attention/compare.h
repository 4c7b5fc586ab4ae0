// Compares a strategy's attention with exact attention over the whole store. It is a measurement
// with the cost of full attention.
//
// For every query head of a decoded token, if there are pages to select from:
//   mass    the share of the exact softmax that was read: sinks, window and selected tokens
//   error   |output - exact output| / |exact output| of the head, L2; the output includes the
//           strategy's estimate for unread tokens
//   recall  the part of the 100 tokens with the largest exact scores that was read
// If each query head searches an index, also for its own search alone: the keys that it scans, and
// the part of those 100 among them. Exact attention uses the store's int8 keys and values after the
// sinks, and sinks and window in full precision. Dense layers are compared too.
//
// CompareLevel::layers also measures the similarity of the layers, at the newest token of each
// step. A layer's set has the tokens after the sinks that any of its query heads attends most, as
// selected by `filter-layers` (OmniKV, ICLR 2025). covered[i][j] is the share of layer j's
// attention, as mean of its heads, in sinks, window and the set of layer i.
//
// A layer is begin(), compare() for each KV head and token of the step, end(). end() sums in a
// fixed order, so results are the same for any number of threads.
#pragma once

#include <cstdint>

#include "base/cancel.h"
#include "base/memory.h"
#include "select/plan.h"
#include "select/selector.h"
#include "store/kv_store.h"

namespace kvasir {

constexpr uint32_t compared_best = 100;     // tokens of recall
constexpr double similar_set_share = 0.05;  // size of a layer's set, as a part of the tokens

// Sums over query heads and tokens.
struct Compared {
  uint64_t queries = 0;
  double mass = 0, min_mass = 1;
  double error = 0, largest_error = 0;
  double recall = 0, min_recall = 1;
  double tokens = 0;      // read, besides sinks and window
  uint64_t searches = 0;  // queries that searched an index
  // over `searches`: keys that a query's own search scanned, and their recall
  double search_keys = 0, search_recall = 0;
  // queries whose strategy estimated the mass that was read and not sampled
  uint64_t estimates = 0;
  double mass_estimated = 0, estimate_error = 0;  // over `estimates`: estimate, absolute error
  uint64_t certified = 0;                         // queries with a certificate
  // over `certified`: certificates; their largest excess over the true mass, below 0: none exceeds
  double certificate = 0, certificate_excess = -1;

  Compared& operator+=(const Compared& o);
};

class Comparison {
 public:
  // Scratch of one thread.
  struct Scratch {
    Array<float> near;    // o [rows][dim], m [rows], l [rows]: attention to sinks and window
    Array<float> scores;  // [rows][tokens]
    Array<float> exact;   // [rows][head_dim]
    // [rows] the strategy's estimates of the mass that was read and not sampled; empty: none
    Array<double> estimated;
    Array<double> certified;  // [rows] certificates; empty: not requested
    Array<uint32_t> best;
    Array<uint8_t> read;  // [tokens]
    Array<std::byte> bytes;

    // Copies the state of sinks and window, before pages are attended.
    void keep_near(const AttentionState& state, uint32_t rows, uint32_t dim);
  };
  struct Case {
    const Kernels& kernels;
    const PageStore& pages;
    uint32_t layer, kv_head;
    uint32_t first_page;  // as in SelectorQuery
    uint32_t token;       // of the step
    QueryRows rows;
    const Selection* chosen;              // null: everything was read
    const float* out;                     // [rows][head_dim] output of the strategy's attention
    const CancelLatch* cancel = nullptr;  // after it has fired, added numbers are undefined
    const float* value_centre = nullptr;  // [head_dim] what the pages' values lack, or null
    bool cancelled() const { return cancel && cancel->fired(); }
  };

  Comparison(uint32_t layers, uint32_t kv_heads) : layers_(layers), kv_heads_(kv_heads) {}

  void begin(CompareLevel level, const PageStore& pages, uint32_t first_page, uint32_t tokens);
  // Compares one KV head and token. Any thread. Returns false if a page of a mapped file is
  // damaged.
  bool compare(const Case& one, Scratch* scratch);
  void end(const Kernels& kernels, uint32_t layer);
  void reset();

  uint32_t layers() const { return layers_; }
  uint32_t kv_heads() const { return kv_heads_; }
  Compared of(uint32_t layer, uint32_t kv_head) const {
    return sums_.empty() ? Compared{} : sums_[layer * kv_heads_ + kv_head];
  }
  uint64_t covered_steps() const { return covered_steps_; }
  double covered(uint32_t i, uint32_t j) const {
    return covered_[i * layers_ + j] / static_cast<double>(covered_steps_);
  }

 private:
  // Sums of a row: exponentials of its scores relative to the largest.
  struct RowSums {
    double largest;
    double near = 0;     // of sinks and window
    double total = 0;    // of all tokens
    double read = 0;     // of tokens that were read
    double certain = 0;  // the same without samples
  };
  RowSums sum_row(const Scratch& scratch, uint32_t row, double near_m, double near_l) const;
  Compared compare_row(const Case& one, uint32_t row, const RowSums& sums, Scratch* scratch) const;
  void keep_shares(const Case& one, const Scratch& scratch, uint32_t row, const RowSums& sums);
  void end_layer_set(const Kernels& kernels, uint32_t layer);
  void add_covered();

  uint32_t layers_, kv_heads_;
  Array<Compared> sums_;   // [layers][kv_heads], from the first begin() on
  Array<Compared> step_;   // [tokens of the step][kv_heads]
  Array<double> covered_;  // [layers][layers]
  uint64_t covered_steps_ = 0;

  // Of the newest token of the running step.
  bool layers_too_ = false;
  uint32_t tokens_ = 0;  // of the step
  uint32_t n_ = 0;       // tokens behind the sinks
  // [kv_heads][n] the largest share of any query head; the sum of the query heads' shares
  Array<float> best_, shares_;
  Array<double> near_heads_;  // [kv_heads] shares of sinks and window, summed over query heads
  uint32_t group_ = 1;
  Array<float> means_;    // [layers][n] the mean share of the layer's query heads
  Array<double> near_;    // [layers]
  Array<uint32_t> sets_;  // [layers][set_size_]
  uint32_t set_size_ = 0;
  Array<std::byte> bytes_;
};

}  // namespace kvasir
