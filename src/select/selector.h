// Selectors: which sealed pages a query attends. One file per strategy implements this interface.
//
// A strategy has a name that files and users keep. For a decoded token, layer and KV head it turns
// the queries of the head's group into lists of pages, or parts of pages. Sinks and window are
// always attended and never selected. Selectors have no state and may be used by several threads,
// each with its own SelectorScratch. State that a strategy carries from one layer to later ones is
// in a StepMemory, which the session owns.
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

// Private to one strategy; one per session.
class StepMemory {
 public:
  virtual ~StepMemory() = default;
};

// The weights of the queries before the newest one in a filter layer (OmniKV).
enum class FilterWindow : uint32_t { last = 0, exponential = 1, uniform = 2 };

struct SelectorQuery {
  const Kernels& kernels;
  const PageStore& pages;
  const KeySketch& sketch;  // built, where the strategy has needs_sketch
  uint32_t layer, kv_head;
  QueryRows rows;       // the query heads of the group; `split` is filled
  const float* near_m;  // [rows] largest score of attention to sinks and window, already computed
  const float* near_l;  // [rows] sum of exponentials relative to it
  uint32_t first_page;  // the first page that may be selected; those before it are sinks
  uint64_t budget_tokens;  // tokens to select, per list
  bool share;              // one list for the group; otherwise one per query head
  // Distance from the largest score up to which tokens are selected; for strategies with
  // takes_alpha.
  float range = std::numeric_limits<float>::infinity();
  uint32_t token = 0;                  // index in the step
  const StepMemory* memory = nullptr;  // of this selector
  // Tokens selected as one, for strategies with takes_unit: a multiple of block_tokens; 0: the
  // strategy's default.
  uint32_t unit_tokens = 0;
  // known, where the strategy has needs_representatives
  const Representatives* representatives = nullptr;
  // 1 - expected error, for strategies with takes_coverage, within a quarter of the budget to four
  // times it; 0: by the budget.
  float coverage = 0;
  const TokenIndexes* indexes = nullptr;  // of the store; for strategies with an index
  uint32_t breadth = 0;                   // SelectOptions::search_breadth
  uint32_t first_row = 0;                 // of `rows` among those of the scan
  // For strategies that sample: queries of another draw have other random numbers.
  uint32_t draw = 0;
  // The extent at which a scan begins; it wraps around and has the same result from any extent.
  // Blocks of a mapped file are verified, and paged in, at their first use. Threads that begin at
  // different extents share that work.
  uint32_t first_extent = 0;
  // Of select_for_rows(); once it has fired, the selection is meaningless.
  const CancelLatch* cancel = nullptr;
};

struct Selection {
  // lists[0] for all rows when shared, else one per row. Pages ascending; addresses are filled in
  // by PageStore::fetch().
  std::vector<Array<PageRef>> lists;
  std::vector<Array<uint32_t>> page_numbers;  // of the same entries
  // With `sampled`: for each list a sample of the tokens that are not in it, a quad per entry,
  // whose bias says how many quads it stands for. Quads ascending.
  std::vector<Array<PageRef>> samples;
  std::vector<Array<uint32_t>> sample_numbers;  // their pages
  uint64_t tokens = 0;                          // selected and sampled, summed over lists
  uint64_t summary_bytes = 0;                   // summaries read by the selection
  // Keys of the store scored by the selection; summaries do not count.
  uint64_t keys_scanned = 0;
  // For a search per query head: [rows] the tokens that each alone would have scanned; else empty.
  std::vector<Array<uint32_t>> found;
  bool intact = true;  // false: a summary of a mapped file is damaged
  bool sampled = false;
};

// Scratch memory of a search for single tokens.
struct SearchScratch {
  uint32_t search = 0;     // number of the current search
  Array<uint32_t> met;     // [items] the last search that met it
  Array<uint32_t> places;  // [items] index in `tokens`, for items that this search met
  Array<uint32_t> tokens;  // met tokens, in order
  Array<uint32_t> visits;  // [tokens] 1 + the last row that met it
  Array<float> scores;     // [tokens][rows]
  using Scored = std::pair<float, uint32_t>;
  Array<Scored> open, best;  // heaps of scores with indices
  Array<uint32_t> fresh;     // indices without scores,
  Array<KeyRef> keys;        // and their keys
  Array<uint32_t> met_now;   // indices that a row met in its last step
};

// The result of scan().
struct Scanned {
  uint64_t summary_bytes = 0;
  bool intact = true;  // as in Selection; false: the scores are not valid
  uint64_t keys_scanned = 0;
};

// Scores of blocks of 16 quads, of each row of a query.
struct BlockScores {
  float* scores;  // [rows][stride]
  std::size_t stride;
};

struct SelectorScratch {
  Array<float> scores;              // [rows][blocks or quads]
  Array<float> sums;                // [blocks or quads] of rows that share a list
  Array<float> query, query_scale;  // [rows][sketch_dim], [rows]
  Array<int8_t> query8;             // [rows][sketch_dim]
  Array<uint32_t> chosen;
  Array<std::byte> bytes;
  SearchScratch search;
};

// A filter layer of a step, after the attention of all its heads. That attention was exact, so the
// layer's sealed pages are verified.
struct FilterStep {
  const Kernels& kernels;
  const PageStore& pages;
  ThreadPool* pool;
  const CancelLatch& cancel;
  uint32_t layer;
  uint32_t tokens, heads;
  uint64_t first_token;         // position of the first token of the step
  const float* q;               // [tokens][heads * head_dim] after RoPE
  const float* lse;             // [tokens][heads] as RecentQueries::lse
  const RecentQueries* recent;  // of the tokens before the step; null: not kept
  uint32_t first_page;          // as in SelectorQuery
  uint64_t budget_tokens;       // tokens to select, per token of the step
  FilterWindow window;
};

// The end of a prefill, for a strategy that selects once.
struct Observation {
  const Kernels& kernels;
  const PageStore& pages;
  ThreadPool* pool;
  const CancelLatch& cancel;
  const RecentQueries& queries;  // of the newest tokens
  uint32_t heads;
  uint32_t first_page, end_page;  // the pages to select from; later ones are attended
  // [layers] tokens to select, per list; 0: the layer does not select.
  std::span<const uint64_t> budgets;
  bool share;  // as in SelectorQuery
};

class Selector {
 public:
  virtual ~Selector() = default;
  virtual std::unique_ptr<StepMemory> make_memory() const { return nullptr; }
  // Selects in a filter layer for the layers after it. Called on one thread, which may use the
  // pool. When cancelled, the selection is meaningless. Throws std::bad_alloc.
  virtual void filter(const FilterStep&, StepMemory*) const {}
  // Selects for all layers, until the next prefill. Called on one thread, which may use the pool.
  // False: a page of a mapped file is damaged. When cancelled, the selection is meaningless. Throws
  // std::bad_alloc.
  virtual bool observe(const Observation&, StepMemory*) const { return true; }
  // Scans the summaries or keys once for the queries of several tokens: query.rows has the rows of
  // all, near_m and near_l theirs. The scratch keeps the result for choose().
  virtual Scanned scan(const SelectorQuery&, SelectorScratch* scratch) const {
    return scratch->scores.clear(), Scanned();
  }
  // Raises scores of blocks to the best estimate of a key in each, from query.first_page on;
  // `bounded` alone has estimates.
  virtual Scanned raise_blocks(const SelectorQuery&, const BlockScores&, SelectorScratch*) const {
    return {};
  }
  // Selects for one token, whose rows begin at query.first_row of the scan's.
  virtual void choose(const SelectorQuery& query, SelectorScratch* scratch,
                      Selection* out) const = 0;
  // scan() and choose() for one token.
  void select(const SelectorQuery& query, SelectorScratch* scratch, Selection* out) const {
    const Scanned scanned = scan(query, scratch);
    if (scanned.intact) choose(query, scratch, out);
    out->intact = out->intact && scanned.intact;
    out->summary_bytes += scanned.summary_bytes;
    out->keys_scanned += scanned.keys_scanned;
  }
  // One list for the rows of many tokens (StrategyInfo::reads_blocks), by the sum of their shares
  // of attention. `rows` rows are scored at a time.
  void select_for_rows(const SelectorQuery& query, uint32_t rows, SelectorScratch* scratch,
                       Selection* out) const;
  // select_for_rows() in parts: the sums of some rows, [blocks or quads], and the selection by the
  // sums of all query.rows.rows rows.
  Scanned sum_shares(const SelectorQuery& query, SelectorScratch* scratch,
                     Array<float>* sums) const;
  void choose_by_sums(const SelectorQuery& query, const Array<float>& sums,
                      SelectorScratch* scratch, Selection* out) const;

 protected:
  // Converts the scores of scan() to shares and sums them into the first row of scratch->scores;
  // selects by such a sum over all rows.
  virtual void sum(const SelectorQuery&, SelectorScratch*) const {}
  virtual void choose_together(const SelectorQuery&, SelectorScratch*, Selection*) const {}
};

// Defaults and traits of a strategy.
struct StrategyInfo {
  std::string_view name;
  uint32_t dense_layers;                      // UINT32_MAX: all of them
  double budget_fraction;                     // of the sealed tokens
  uint64_t budget_floor;                      // tokens, with the default fraction
  std::unique_ptr<const Selector> (*make)();  // null where every layer is dense
  uint32_t traits = 0;                        // a combination of the following

  static constexpr uint32_t needs_sketch = 1;  // SelectorQuery::sketch
  // Layers with larger measured errors get larger budgets.
  static constexpr uint32_t spreads_budget = 2;
  static constexpr uint32_t samples = 4;      // Selection::samples
  static constexpr uint32_t takes_alpha = 8;  // SelectorQuery::range
  // Some layers select for those after them: Plan::filter.
  static constexpr uint32_t filters = 16;
  static constexpr uint32_t takes_unit = 32;  // SelectorQuery::unit_tokens
  // By observe(), after a prefill; questions are prefilled exactly.
  static constexpr uint32_t chooses_once = 64;
  static constexpr uint32_t needs_representatives = 128;  // SelectorQuery::representatives
  static constexpr uint32_t takes_coverage = 512;         // SelectorQuery::coverage
  // scores keys of more pages than it selects, in place
  static constexpr uint32_t reads_keys = 1024;
  static constexpr uint32_t reads_blocks = 256;  // usable for sparse prefill: Plan::by_blocks
  // A GPU samples tiles in its place in sparse prefill: offload/gpu_prefill_attention.h.
  static constexpr uint32_t samples_tiles = 32768;
  // A GPU implements it too: offload/gpu_selective_attention.h.
  static constexpr uint32_t on_device = 4096;
  // The tokens of a question may select as one: Plan::query_batch.
  static constexpr uint32_t batches_queries = 8192;
  // Uses SelectorQuery::near_m and near_l; null for others.
  static constexpr uint32_t compares_near = 16384;
  // Uses Selector::scan(), once for the queries of several tokens.
  static constexpr uint32_t scans = 2048;
  std::optional<IndexKind> index = {};  // the index that it searches
  bool has(uint32_t trait) const { return (traits & trait) != 0; }
};

// All strategies.
std::span<const StrategyInfo> all_strategies();
// Their names with "auto", for messages: "auto, full, ... or bounded".
std::string strategy_names();
// Null for an unknown name.
const StrategyInfo* strategy_info(std::string_view name);
// Whether the strategy of that name has a trait. "auto" has no trait that costs time before it is
// planned.
bool strategy_needs(std::string_view name, uint32_t trait);

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
