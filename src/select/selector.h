// The selector: which sealed pages a query reads. One file a strategy behind this interface.
//
// A strategy is chosen by a name that files and users keep. For a decoded token, layer and KV head
// it turns the queries of the head's group into lists of pages (or parts of pages, by blocks);
// sinks and window are always attended and are not its business. Selectors hold no state and may be
// used from several threads, each with its own SelectorScratch. What a strategy carries from one
// layer to later ones lies in a StepMemory, which the session owns.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/kernels.h"
#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/memory.h"
#include "select/recent_queries.h"
#include "store/key_sketch.h"
#include "store/page_store.h"
#include "store/representatives.h"
#include "store/token_index.h"

namespace kvasir {

// Of one strategy and session; the strategy alone knows what is in it.
class StepMemory {
 public:
  virtual ~StepMemory() = default;
};

// How a filter layer weighs the queries before the newest one (OmniKV).
enum class FilterWindow : uint32_t { last = 0, exponential = 1, uniform = 2 };

struct SelectorQuery {
  const Kernels& kernels;
  const PageStore& pages;
  const KeySketch& sketch;  // built where the strategy wants it
  uint32_t layer, kv_head;
  QueryRows rows;          // the query heads of the group; `split` is filled
  const float* near_m;     // [rows] attention to sinks and window, which is done: the largest score
  const float* near_l;     // [rows] and the sum of exponentials relative to it
  uint32_t first_page;     // selection begins here: the pages before it are sinks
  uint64_t budget_tokens;  // to choose, for each list
  bool share;              // one list for the group, or one a query head
  // below the largest score, of the scores that count; where the strategy asks for it
  float range = std::numeric_limits<float>::infinity();
  uint32_t token = 0;                  // of the step
  const StepMemory* memory = nullptr;  // the selector's own
  // that are chosen together, where the strategy asks for it: a multiple of block_tokens; 0: the
  // strategy's own
  uint32_t unit_tokens = 0;
  const Representatives* representatives = nullptr;  // known where the strategy wants them
  // 1 - the error that may be expected, where the strategy takes it, for a quarter of the budget to
  // four times it; 0: the budget
  float coverage = 0;
  const TokenIndexes* indexes = nullptr;  // of the store; where the strategy wants one
  uint32_t breadth = 0;                   // of a search of an index, as SelectOptions has it
  uint32_t first_row = 0;                 // of `rows`, among those of the scan
  // where the strategy samples: queries of another draw have other random numbers
  uint32_t draw = 0;
  // Where a scan begins, which goes round and finds the same from anywhere. What a mapped file has
  // is verified, and given to the process by the system, where it is first read: threads that begin
  // apart do that each for some of it, others all of them for all.
  uint32_t first_extent = 0;
  // of select_together(); once it has fired, what is chosen is meaningless
  const CancelLatch* cancel = nullptr;
};

struct Selection {
  // lists[0] for all rows when shared, else one a row. Pages ascending; where they are is left
  // open, PageStore::fetch() tells.
  std::vector<Array<PageRef>> lists;
  std::vector<Array<uint32_t>> page_numbers;  // of the same entries
  // Where `sampled`: besides, for each list, a sample of what is not in it, a quad an entry, whose
  // bias says how much each stands for. Quads ascending.
  std::vector<Array<PageRef>> samples;
  std::vector<Array<uint32_t>> sample_numbers;  // their pages
  uint64_t tokens = 0;                          // chosen and sampled, summed over lists
  uint64_t summary_bytes = 0;                   // read to choose
  // keys of the store whose scores were computed to choose; of summaries: none
  uint64_t keys_scanned = 0;
  // of a search that each query head makes, [rows] the tokens that each alone would have scanned;
  // else empty
  std::vector<Array<uint32_t>> found;
  bool intact = true;  // false: a summary of a mapped file is damaged
  bool sampled = false;
};

// Of a search for single tokens.
struct SearchScratch {
  uint32_t search = 0;     // this one's number
  Array<uint32_t> met;     // [items] the search that last met it
  Array<uint32_t> places;  // [items] where it is among `tokens`, where this search met it
  Array<uint32_t> tokens;  // that were met, in order
  Array<uint32_t> visits;  // [tokens] of the rows that have met it: the last one's number + 1
  Array<float> scores;     // [tokens][rows]
  using Scored = std::pair<float, uint32_t>;
  Array<Scored> open, best;  // heaps of scores with places
  Array<uint32_t> fresh;     // places whose scores are not known yet,
  Array<KeyRef> keys;        // and their keys
  Array<uint32_t> met_now;   // places that a row met at its last step
};

// What scan() read.
struct Scanned {
  uint64_t summary_bytes = 0;
  bool intact = true;  // these as Selection has them; where false, there is nothing to choose by
  uint64_t keys_scanned = 0;
};

struct SelectorScratch {
  Array<float> scores;              // [rows][blocks or quads]
  Array<float> sums;                // [blocks or quads] of rows that choose together
  Array<float> query, query_scale;  // [rows][sketch_dim], [rows]
  Array<int8_t> query8;             // [rows][sketch_dim]
  Array<uint32_t> chosen;
  Array<std::byte> bytes;
  SearchScratch search;
};

// A filter layer of a step, when the attention of all its heads is done. It was exact: its sealed
// pages have been verified.
struct FilterStep {
  const Kernels& kernels;
  const PageStore& pages;
  ThreadPool* pool;
  const CancelLatch& cancel;
  uint32_t layer;
  uint32_t tokens, heads;
  uint64_t first_token;         // position of the step's first
  const float* q;               // [tokens][heads * head_dim] after RoPE
  const float* totals;          // [tokens][heads] as RecentQueries::totals
  const RecentQueries* recent;  // of the tokens before the step; null where none are kept
  uint32_t first_page;          // as in SelectorQuery
  uint64_t budget_tokens;       // to choose, for each token of the step
  FilterWindow window;
};

// The end of what was read, for a strategy that chooses once by it.
struct Observation {
  const Kernels& kernels;
  const PageStore& pages;
  ThreadPool* pool;
  const CancelLatch& cancel;
  const RecentQueries& queries;  // of the newest tokens that were read
  uint32_t heads;
  uint32_t first_page, end_page;  // the pages that may be chosen from; later ones are read
  // [layers] tokens to choose, for each list; 0: the layer does not choose
  std::span<const uint64_t> budgets;
  bool share;  // as in SelectorQuery
};

class Selector {
 public:
  virtual ~Selector() = default;
  virtual std::unique_ptr<StepMemory> make_memory() const { return nullptr; }
  // Chooses in a filter layer for the layers after it. On one thread, which may use the pool. When
  // cancelled, what is chosen is meaningless. Throws std::bad_alloc.
  virtual void filter(const FilterStep&, StepMemory*) const {}
  // Chooses for all layers, until something is read again. On one thread, which may use the pool.
  // False: a page of a mapped file is damaged. When cancelled, what is chosen is meaningless.
  // Throws std::bad_alloc.
  virtual bool observe(const Observation&, StepMemory*) const { return true; }
  // Reads what choosing has to read from end to end, once for the queries of several tokens:
  // query.rows are the rows of all, and near_m, near_l theirs. What is found lies in the scratch
  // for choose().
  virtual Scanned scan(const SelectorQuery&, SelectorScratch* scratch) const {
    return scratch->scores.clear(), Scanned();
  }
  // The choice of one token, whose rows begin at query.first_row of the scan's.
  virtual void choose(const SelectorQuery& query, SelectorScratch* scratch,
                      Selection* out) const = 0;
  // Both, of one token.
  void select(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const {
    const Scanned scanned = scan(query, scratch);
    if (scanned.intact) choose(query, scratch, out);
    out->intact = out->intact && scanned.intact;
    out->summary_bytes += scanned.summary_bytes;
    out->keys_scanned += scanned.keys_scanned;
  }
  // One list for the rows of many tokens (StrategyInfo::reads_blocks), by the sum of their shares
  // of attention. The scores of so many rows are there at a time.
  void select_together(const SelectorQuery& query, uint32_t rows, SelectorScratch* scratch,
                       Selection* out) const;
  // The same in parts: the sums of some rows, [blocks or quads], and the choice by the sums of all,
  // of which query.rows.rows says how many they are.
  Scanned sum_shares(const SelectorQuery& query, SelectorScratch* scratch,
                     Array<float>* sums) const;
  void choose_by_sums(const SelectorQuery& query, const Array<float>& sums,
                      SelectorScratch* scratch, Selection* out) const;

 protected:
  // Makes shares of what scan() found and sums them into the first row of scratch->scores; chooses
  // by such a sum over all rows.
  virtual void sum(const SelectorQuery&, SelectorScratch*) const {}
  virtual void choose_together(const SelectorQuery&, SelectorScratch*, Selection*) const {}
};

// What a strategy asks of the engine when the caller did not say.
struct StrategyInfo {
  std::string_view name;
  uint32_t dense_layers;                      // UINT32_MAX: all of them
  double budget_fraction;                     // of the sealed tokens
  uint64_t budget_floor;                      // tokens, where the fraction is the default one
  std::unique_ptr<const Selector> (*make)();  // null where every layer is dense
  uint32_t traits = 0;                        // of the following, or-ed

  static constexpr uint32_t wants_sketch = 1;  // SelectorQuery::sketch
  // over the layers, by how badly chosen pages serve each
  static constexpr uint32_t spreads_budget = 2;
  static constexpr uint32_t samples = 4;      // Selection::samples
  static constexpr uint32_t takes_alpha = 8;  // SelectorQuery::range
  // some layers choose for those after them: Plan::filter
  static constexpr uint32_t filters = 16;
  static constexpr uint32_t takes_unit = 32;  // SelectorQuery::unit_tokens
  // by observe(), when something has been read; questions are read exactly
  static constexpr uint32_t chooses_once = 64;
  static constexpr uint32_t wants_representatives = 128;  // SelectorQuery::representatives
  static constexpr uint32_t takes_coverage = 512;         // SelectorQuery::coverage
  static constexpr uint32_t reads_keys = 1024;   // of more pages than it chooses, where they lie
  static constexpr uint32_t reads_blocks = 256;  // documents may be read by it: Plan::by_blocks
  // a GPU has it too: offload/gpu_selective_attention.h
  static constexpr uint32_t on_device = 4096;
  // the tokens of a question may choose together: Plan::together
  static constexpr uint32_t asks_together = 8192;
  // SelectorQuery::near_m and near_l; null for others
  static constexpr uint32_t compares_near = 16384;
  // by Selector::scan(), once for the queries of several tokens
  static constexpr uint32_t scans = 2048;
  std::optional<IndexKind> index = {};  // that it searches
  bool has(uint32_t trait) const { return (traits & trait) != 0; }
};

// All of them.
std::span<const StrategyInfo> all_strategies();
// Their names with "auto", for people: "auto, full, ... or bounded".
std::string strategy_names();
// Null when there is no such strategy.
const StrategyInfo* strategy_info(std::string_view name);
// Whether the strategy of that name has a trait. "auto" has none of those that cost something
// before it is planned.
bool strategy_wants(std::string_view name, uint32_t trait);

std::unique_ptr<const Selector> make_window_selector();
std::unique_ptr<const Selector> make_quest_selector();
std::unique_ptr<const Selector> make_flat_selector();
std::unique_ptr<const Selector> make_dipr_selector();
std::unique_ptr<const Selector> make_bounded_selector();
std::unique_ptr<const Selector> make_filter_layers_selector();
std::unique_ptr<const Selector> make_infllm_selector();
std::unique_ptr<const Selector> make_snapkv_selector();
std::unique_ptr<const Selector> make_hnsw_selector();
std::unique_ptr<const Selector> make_ood_selector();
std::unique_ptr<const Selector> make_dipr_graph_selector();
std::unique_ptr<const Selector> make_ivf_selector();

}  // namespace kvasir
