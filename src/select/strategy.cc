// The table of strategies. Names are persisted and never change.
#include <algorithm>
#include <iterator>

#include "select/selector.h"

namespace kvasir {

constexpr StrategyInfo strategies[] = {
    {"full", UINT32_MAX, 1.0, 0, nullptr},
    {"window", 0, 0.0, 0, make_window_selector, StrategyInfo::reads_blocks},
    // Two dense layers, and 2048 tokens of 32K and more: Quest, arXiv 2406.10774, section 4.1. The
    // floor keeps short documents exact enough.
    {"quest", 2, 0.02, 512, make_quest_selector,
     StrategyInfo::takes_unit | StrategyInfo::reads_blocks | StrategyInfo::scans |
         StrategyInfo::compares_near},
    {"flat", 0, 0.02, 512, make_flat_selector,
     StrategyInfo::reads_blocks | StrategyInfo::reads_keys | StrategyInfo::compares_near},
    {"dipr", 0, 0.1, 1024, make_dipr_selector,
     StrategyInfo::takes_alpha | StrategyInfo::reads_keys | StrategyInfo::compares_near},
    // With its coverage it reads 1.8% of 128K tokens of a book for questions, between a quarter of
    // this budget and four times it (make_plan()).
    {"bounded", 0, 0.01, 512, make_bounded_selector,
     StrategyInfo::needs_sketch | StrategyInfo::spreads_budget | StrategyInfo::samples |
         StrategyInfo::takes_coverage | StrategyInfo::scans | StrategyInfo::reads_blocks |
         StrategyInfo::batches_queries | StrategyInfo::on_device | StrategyInfo::compares_near |
         StrategyInfo::samples_tiles},
    {"hnsw", 0, 0.02, 512, make_hnsw_selector,
     StrategyInfo::reads_keys | StrategyInfo::compares_near, IndexKind::hnsw},
    {"ood", 0, 0.02, 512, make_ood_selector, StrategyInfo::reads_keys | StrategyInfo::compares_near,
     IndexKind::ood},
    {"dipr-graph", 0, 0.1, 1024, make_dipr_graph_selector,
     StrategyInfo::takes_alpha | StrategyInfo::reads_keys | StrategyInfo::compares_near,
     IndexKind::ood},
    {"ivf", 0, 0.02, 512, make_ivf_selector, StrategyInfo::reads_keys | StrategyInfo::compares_near,
     IndexKind::ivf},
    // The fraction of the authors' example configuration. Its dense layers follow from its filter
    // layers.
    {"filter-layers", 0, 0.067, 512, make_filter_layers_selector,
     StrategyInfo::filters | StrategyInfo::reads_blocks},
    {"infllm", 0, 0.05, 1024, make_infllm_selector, StrategyInfo::needs_representatives},
    {"snapkv", 0, 0.05, 1024, make_snapkv_selector, StrategyInfo::chooses_once},
};

std::span<const StrategyInfo> all_strategies() { return strategies; }

std::string strategy_names() {
  std::string names = "auto";
  for (const StrategyInfo& info : strategies) {
    names += &info == std::end(strategies) - 1 ? " or " : ", ";
    names += info.name;
  }
  return names;
}

void Selector::select_for_rows(const SelectorQuery& query, uint32_t rows, SelectorScratch* scratch,
                               Selection* out) const {
  Scanned all;
  SelectorQuery part = query;
  for (uint32_t first = 0; first < query.rows.rows; first += rows) {
    if (query.cancel && query.cancel->fired()) return;
    part.rows = row_of(query.rows, first, std::min(rows, query.rows.rows - first));
    part.near_m = query.near_m + first, part.near_l = query.near_l + first;
    const Scanned scanned = scan(part, scratch);
    out->intact = scanned.intact;
    if (!scanned.intact) return;
    all.summary_bytes += scanned.summary_bytes, all.keys_scanned += scanned.keys_scanned;
    sum(part, scratch);
    const float* sums = scratch->scores.data();
    if (first == 0) scratch->sums.assign(sums, sums + scratch->scores.size() / part.rows.rows);
    else query.kernels.add(scratch->sums.data(), sums, scratch->sums.size());
  }
  std::copy(scratch->sums.begin(), scratch->sums.end(), scratch->scores.data());
  choose_together(query, scratch, out);
  out->summary_bytes += all.summary_bytes, out->keys_scanned += all.keys_scanned;
}

Scanned Selector::sum_shares(const SelectorQuery& query, SelectorScratch* scratch,
                             Array<float>* sums) const {
  const Scanned scanned = scan(query, scratch);
  if (!scanned.intact) return scanned;
  sum(query, scratch);
  const auto begin = scratch->scores.begin();
  sums->assign(begin,
               begin + static_cast<std::ptrdiff_t>(scratch->scores.size() / query.rows.rows));
  return scanned;
}

void Selector::choose_by_sums(const SelectorQuery& query, const Array<float>& sums,
                              SelectorScratch* scratch, Selection* out) const {
  // never shrinks: growth clears, and the next scan needs all of it
  scratch->scores.resize(std::max(scratch->scores.size(), sums.size()));
  std::copy(sums.begin(), sums.end(), scratch->scores.begin());
  choose_together(query, scratch, out);
}

const StrategyInfo* strategy_info(std::string_view name) {
  for (const StrategyInfo& info : strategies)
    if (info.name == name) return &info;
  return nullptr;
}

bool strategy_needs(std::string_view name, uint32_t trait) {
  const StrategyInfo* info = strategy_info(name);
  return info && info->has(trait);
}

}  // namespace kvasir
