// The planner: from the options and the length of the context to the work of each layer, with the
// reason in words.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "select/selector.h"

namespace kvasir {

// How a budget is divided among the layers that select; the mean is the same.
enum class BudgetSchedule : uint32_t {
  uniform = 0,
  linear = 1,  // decreases linearly from layer to layer, from 3/2 of the mean to 1/2
  // Decreases linearly from layer to layer, to 1/20 of the mean in the last one (PyramidKV, arXiv
  // 2406.02069, section 3.2).
  pyramid = 2,
};
const char* name_of(BudgetSchedule schedule);

struct SelectOptions {
  std::string strategy = "auto";
  uint64_t budget_tokens = 0;  // 0: by fraction
  double budget_fraction = 0;  // 0: the strategy's default
  // Layers that attend everything; UINT32_MAX: the strategy's default.
  uint32_t dense_layers = UINT32_MAX;
  bool share_heads = true;
  float alpha = 0;  // 0: the default
  // Of `filter-layers`, ascending; empty: the default layers.
  std::vector<uint32_t> filter_layers;
  FilterWindow filter_window = FilterWindow::last;
  uint32_t unit_tokens = 0;  // selected as one, where the strategy has the option; 0: its default
  // 1 - expected error, where the strategy samples; 0: by the budget.
  float coverage = 0;
  bool certify = false;  // decode steps produce a certificate of the attention they read
  // Of an index: tokens that a search keeps, or clusters that it reads; 0: by the budget.
  uint32_t search_breadth = 0;
  BudgetSchedule schedule = BudgetSchedule::uniform;
  bool head_graphs = false;  // `ood` builds a graph per query head, not per group
};

// Whether decode is also computed exactly and compared: attention/compare.h.
enum class CompareLevel : uint32_t { none = 0, attention = 1, layers = 2 };
// Options of prefill.
struct ReadOptions {
  std::string strategy = "full";
  double budget_fraction = 0;           // of the sealed tokens; 0: the default
  uint64_t exact_tokens = 0;            // at the end of a text, always prefilled exactly
  std::vector<uint32_t> filter_layers;  // as in SelectOptions
};

struct Plan {
  const StrategyInfo* strategy = nullptr;
  std::vector<bool> dense;    // [layers] layers that attend everything
  uint32_t dense_layers = 0;  // their number
  // Per list, besides sinks and window; the mean of the layers where they differ.
  uint64_t budget_tokens = 0;
  std::vector<uint64_t> layer_budgets;  // [layers]; empty: the same for all
  bool share_heads = true;
  float range = std::numeric_limits<float>::infinity();  // SelectorQuery::range
  // [layers] layers that select for those after them; empty for other strategies.
  std::vector<bool> filter;
  FilterWindow filter_window = FilterWindow::last;
  CompareLevel compare = CompareLevel::none;
  uint32_t unit_tokens = 0;    // SelectorQuery::unit_tokens; 0: the strategy's default
  float coverage = 0;          // SelectorQuery::coverage
  bool certify = false;        // ReadCounts::certificate
  bool query_batch = false;    // the tokens of a step select as one (of a question)
  bool by_blocks = false;      // neighbouring queries of a step select as one (sparse prefill)
  uint64_t recent_tokens = 0;  // sealed tokens before the step that sparse prefill always attends
  uint32_t search_breadth = 0;
  BudgetSchedule schedule = BudgetSchedule::uniform;
  const char* why = "";  // constant text

  uint64_t budget(uint32_t layer) const {
    return layer_budgets.empty() ? budget_tokens : layer_budgets[layer];
  }
  bool is_dense(uint32_t layer) const { return dense.empty() || dense[layer]; }
  bool is_filter(uint32_t layer) const { return !filter.empty() && filter[layer]; }
};

// Checks for a model with `layers` layers whose store has bounds per block of block_tokens.
// Code::bad_argument names the option.
Status check_select_options(const SelectOptions& options, uint32_t layers, uint32_t block_tokens);

Status check_read_options(const ReadOptions& options);
// The strategies for prefill, for messages.
std::string read_strategy_names();

// The default number of filter layers: OmniKV's three, fewer in a model of less than 24 layers.
uint32_t default_filter_count(uint32_t layers);

// The plan for `sealed` tokens behind the window. errors: [layers] the distance of each layer's
// attention from the exact one, measured in prefill (ForwardStep::errors), or empty. The dense
// layers are those with the largest errors, or the first ones (as in Quest) without measurements.
// Those of `filter-layers` are the layers up to the first filter layer, the filter layers, and the
// layer after each (OmniKV, ICLR 2025, section 4). Pure: the same input gives the same plan.
Plan make_plan(const SelectOptions& options, uint64_t sealed, uint32_t layers,
               std::span<const float> errors);

// The plan for a step of prefill. strategy null: exact.
Plan make_read_plan(const ReadOptions& options, uint64_t sealed, uint32_t layers);

// The coverage of `bounded` and the alpha of `dipr` where the caller sets none.
extern const float default_coverage, default_alpha;
constexpr double default_read_fraction = 0.1;  // of the sealed tokens
// Whether each layer that selects has a budget of its own, which a schedule can spread.
bool takes_schedule(const StrategyInfo& strategy);
// Code::bad_argument names the first layer that the model does not have, or that is out of order.
Status check_filter_layers(std::span<const uint32_t> filter_layers, uint32_t layers);

}  // namespace kvasir
