// Compares a strategy's attention with exact attention over the whole store. For measurement: it
// costs what full attention costs.
//
// For every query head of a decoded token, where there is something to choose:
//   mass    the share of the exact softmax that was read: by sinks, window and the tokens chosen
//   error   |output - exact output| / |exact output| of the head, L2, with all that the strategy
//           adds for what it did not read
//   recall  the share of the 100 tokens with the largest exact scores that were read
// Where each query head searches an index, also for its own search alone: the keys that it scans,
// and the share of those 100 among them. Exact attention uses the store's int8 keys and values
// behind the sinks, and sinks and window in full precision. Layers that attend everything are
// compared too.
//
// CompareLevel::layers also measures, at the newest token of each step, how similar the layers are.
// A layer's set is the tokens behind the sinks that any of its query heads attends most, as
// `filter-layers` chooses them (OmniKV, ICLR 2025). covered[i][j] is the share of layer j's
// attention, the mean of its heads, in sinks, window and the set of layer i.
//
// A layer is begin(), compare() for each KV head and token of the step, end(), which sums in one
// order: the same numbers for any number of threads.
#pragma once

#include <cstdint>

#include "base/cancel.h"
#include "base/memory.h"
#include "select/plan.h"
#include "select/selector.h"
#include "store/kv_store.h"

namespace kvasir {

constexpr uint32_t compared_best = 100;     // tokens of recall
constexpr double similar_set_share = 0.05;  // of the tokens, that a layer's set has

// Sums over query heads and tokens.
struct Compared {
  uint64_t queries = 0;
  double mass = 0, min_mass = 1;
  double error = 0, largest_error = 0;
  double recall = 0, min_recall = 1;
  double tokens = 0;      // read, besides sinks and window
  uint64_t searches = 0;  // queries that searched an index:
  // what their own searches scanned, and the recall of that
  double search_keys = 0, search_recall = 0;
  // queries whose strategy estimated the part of its mass that is no sample,
  uint64_t estimates = 0;
  double mass_estimated = 0, estimate_error = 0;  // the estimates, and how far they were from it
  // queries with a certificate of what they have read at least,
  uint64_t certified = 0;
  // and by how much the worst of them was above the truth; below 0: none was
  double certificate = 0, certificate_excess = -1;

  Compared& operator+=(const Compared& o);
};

class Comparison {
 public:
  // Of one thread.
  struct Scratch {
    Array<float> near;    // o [rows][dim], m [rows], l [rows]: attention to sinks and window
    Array<float> scores;  // [rows][tokens]
    Array<float> exact;   // [rows][head_dim]
    // [rows] shares of attention that the strategy thinks it read but for samples; empty: it does
    // not say
    Array<double> estimated;
    Array<double> certified;  // [rows] of which it is certain; empty: no certificate was asked for
    Array<uint32_t> best;
    Array<uint8_t> read;  // [tokens]
    Array<std::byte> bytes;

    // Before anything of the store is attended.
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
    const float* out;                     // [rows][head_dim] what the strategy's attention gave
    const CancelLatch* cancel = nullptr;  // once it has fired, what is added is meaningless
    bool cancelled() const { return cancel && cancel->fired(); }
  };

  Comparison(uint32_t layers, uint32_t kv_heads) : layers_(layers), kv_heads_(kv_heads) {}

  void begin(CompareLevel level, const PageStore& pages, uint32_t first_page, uint32_t tokens);
  // From any thread. False: a page of a mapped file is damaged.
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
  void keep_shares(const Case& one, const Scratch& scratch, uint32_t row, double largest,
                   double total, double near);
  void end_layer_set(const Kernels& kernels, uint32_t layer);
  void add_covered();

  uint32_t layers_, kv_heads_;
  Array<Compared> sums_;   // [layers][kv_heads], from the first begin() on
  Array<Compared> step_;   // [tokens of the step][kv_heads]
  Array<double> covered_;  // [layers][layers]
  uint64_t covered_steps_ = 0;

  // The newest token of the step that runs.
  bool layers_too_ = false;
  uint32_t tokens_ = 0;  // of the step
  uint32_t n_ = 0;       // tokens behind the sinks
  // [kv_heads][n] the largest share of any query head, the sum of the heads' shares
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
