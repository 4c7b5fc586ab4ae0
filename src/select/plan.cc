#include "select/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/number_text.h"
#include "base/quoted.h"

namespace kvasir {

// With fewer sealed tokens, full attention costs less than a quarter of a decode step of the
// smallest model we know, and selection saves nothing.
constexpr uint64_t short_context = 4096;  // sealed tokens
// A standard error of 4% of a head's attention.
const float default_coverage = 0.96f;
const float default_alpha = 0.012f;  // beta = 50 for head_dim 128 (select/dipr.cc)
constexpr uint32_t max_unit = 1024;  // tokens; the least budget is two units
// Sealed tokens below which sparse prefill would leave out next to nothing.
constexpr uint64_t sparse_context = 4096;
constexpr uint64_t read_floor = 2048;  // the least, tokens
constexpr uint64_t read_recent = 512;
// bounds of a layer's budget, relative to the mean
constexpr double min_share = 0.25, max_share = 4;

const char* name_of(BudgetSchedule schedule) {
  constexpr const char* names[] = {"uniform", "linear", "pyramid"};
  return names[static_cast<uint32_t>(schedule)];
}

bool takes_schedule(const StrategyInfo& strategy) {
  return strategy.make && strategy.budget_fraction > 0 &&
         !strategy.has(StrategyInfo::spreads_budget) && !strategy.has(StrategyInfo::filters);
}

Status check_filter_layers(std::span<const uint32_t> filter_layers, uint32_t layers) {
  for (std::size_t i = 0; i < filter_layers.size(); ++i) {
    const uint32_t layer = filter_layers[i];
    if (layer >= layers)
      return Status::error(Code::bad_argument,
                           "filter_layers has %u: the model's layers are 0 to %u", layer,
                           layers - 1);
    if (i > 0 && layer <= filter_layers[i - 1])
      return Status::error(Code::bad_argument,
                           "filter_layers has %u after %u: name them in ascending order", layer,
                           filter_layers[i - 1]);
  }
  return {};
}

Status check_select_options(const SelectOptions& options, uint32_t layers, uint32_t block_tokens) {
  if (options.strategy != "auto" && !strategy_info(options.strategy))
    return Status::error(Code::bad_argument, "strategy '%s' is not known: use %s",
                         Quoted(options.strategy).text(), strategy_names().c_str());
  if (!(options.budget_fraction >= 0 && options.budget_fraction <= 1))
    return Status::error(Code::bad_argument, "budget_fraction is %s: use 0 to 1",
                         number_text(options.budget_fraction).c_str());
  if (!(options.alpha >= 0 && options.alpha <= 1))
    return Status::error(Code::bad_argument, "alpha is %s: use 0 to 1",
                         number_text(options.alpha).c_str());
  if (options.budget_tokens && options.budget_fraction > 0)
    return Status::error(Code::bad_argument,
                         "budget_tokens and budget_fraction are both set: use one");
  if (const uint32_t n = options.unit_tokens; n != 0) {
    const StrategyInfo* strategy = strategy_info(options.strategy);
    if (!strategy || !strategy->has(StrategyInfo::takes_unit))
      return Status::error(Code::bad_argument,
                           "select_tokens is %u: strategy '%s' has units of its own", n,
                           Quoted(options.strategy).text());
    if (n % block_tokens || n > max_unit)
      return Status::error(Code::bad_argument,
                           "select_tokens is %u: use a multiple of %u, up to %u", n, block_tokens,
                           max_unit);
  }
  if (!(options.coverage >= 0 && options.coverage < 1))
    return Status::error(Code::bad_argument, "coverage is %s: use 0, or more and less than 1",
                         number_text(options.coverage).c_str());
  if (options.coverage > 0 && options.strategy != "auto" &&
      !strategy_info(options.strategy)->has(StrategyInfo::takes_coverage))
    return Status::error(Code::bad_argument, "coverage is %s: strategy '%s' does not sample",
                         number_text(options.coverage).c_str(), Quoted(options.strategy).text());
  if (const StrategyInfo* info = strategy_info(options.strategy);
      options.schedule != BudgetSchedule::uniform && !(info && takes_schedule(*info)))
    return Status::error(
        Code::bad_argument,
        "budget_schedule is '%s': strategy '%s' has no budget, or divides it itself",
        name_of(options.schedule), Quoted(options.strategy).text());
  if (options.head_graphs &&
      (options.strategy == "auto" || strategy_info(options.strategy)->index != IndexKind::ood))
    return Status::error(Code::bad_argument,
                         "head_graphs is set: strategy '%s' builds no graph from queries",
                         Quoted(options.strategy).text());
  return check_filter_layers(options.filter_layers, layers);
}

// Divides the budget in proportion to the layers' errors, a quarter to four times the mean each;
// the sum is unchanged.
static void spread_budget(std::span<const float> errors, uint64_t sealed, Plan* plan) {
  if (errors.size() != plan->dense.size()) return;
  std::vector<double> share(errors.size());
  double sum = 0, mean = 0;
  for (float e : errors) mean += static_cast<double>(e) / static_cast<double>(errors.size());
  if (!(mean > 0)) return;
  for (std::size_t l = 0; l < share.size(); ++l) {
    share[l] = plan->dense[l]
                   ? 0
                   : std::clamp(static_cast<double>(errors[l]) / mean, min_share, max_share);
    sum += share[l];
  }
  const double total = static_cast<double>(plan->budget_tokens) *
                       static_cast<double>(share.size() - plan->dense_layers);
  plan->layer_budgets.resize(share.size());
  for (std::size_t l = 0; l < share.size(); ++l)
    plan->layer_budgets[l] =
        sum > 0 ? std::min(sealed, static_cast<uint64_t>(std::ceil(total * share[l] / sum))) : 0;
}

// Decreases the budget linearly from 2 - last of the mean in the first layer that selects to `last`
// of it in the last one. The rounding error of a layer goes to the next.
static void schedule_budget(double last, uint64_t sealed, Plan* plan) {
  const auto layers = static_cast<uint32_t>(plan->dense.size()),
             choosing = layers - plan->dense_layers;
  plan->layer_budgets.assign(layers, 0);
  double sum = 0;
  uint64_t given = 0;
  for (uint32_t l = 0, i = 0; l < layers; ++l) {
    if (plan->dense[l]) continue;
    const double part = choosing > 1 ? static_cast<double>(i) / (choosing - 1) : 0.5;
    sum += static_cast<double>(plan->budget_tokens) * (2 - last - (2 - 2 * last) * part);
    const auto whole = static_cast<uint64_t>(std::llround(sum));
    plan->layer_budgets[l] = std::min(sealed, std::max<uint64_t>(whole - given, 1));
    given = whole;
    ++i;
  }
}

uint32_t default_filter_count(uint32_t layers) { return std::clamp(layers / 8, 1u, 3u); }

// The first one early, as in the paper (2 of 32), the others evenly after it.
static std::vector<uint32_t> default_filter_layers(uint32_t layers) {
  const uint32_t count = default_filter_count(layers),
                 first = std::min(layers - 1, std::max(1u, layers / 16));
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(first + i * (layers - first) / count);
  return out;
}

static void plan_filters(const std::vector<uint32_t>& named, uint32_t layers, Plan* plan) {
  const bool given = !named.empty();
  const std::vector<uint32_t> filters = given ? named : default_filter_layers(layers);
  plan->filter.assign(layers, false);
  plan->dense.assign(layers, false);
  for (uint32_t l : filters) {
    plan->filter[l] = plan->dense[l] = true;
    if (l + 1 < layers) plan->dense[l + 1] = true;
  }
  std::fill_n(plan->dense.begin(), filters.front(), true);
  plan->dense_layers =
      static_cast<uint32_t>(std::count(plan->dense.begin(), plan->dense.end(), true));
  if (!given) plan->why = "requested; without named filter layers they are spread evenly";
}

Plan make_plan(const SelectOptions& options, uint64_t sealed, uint32_t layers,
               std::span<const float> errors) {
  Plan plan;
  plan.share_heads = options.share_heads;
  plan.search_breadth = options.search_breadth;
  plan.why = "requested";
  if (options.strategy != "auto") {
    plan.strategy = strategy_info(options.strategy);
  } else if (sealed <= short_context) {
    plan.strategy = strategy_info("full");
    plan.why = "the context is short: full attention costs less than selection";
  } else {
    plan.strategy = strategy_info("bounded");
    plan.why = "the context is long: a sketch of the keys selects the tokens";
  }
  if (plan.strategy->has(StrategyInfo::takes_alpha))
    plan.range = -std::log(options.alpha > 0 ? options.alpha : default_alpha);
  const bool own_budget = options.budget_fraction == 0 && options.budget_tokens == 0;
  if (plan.strategy->has(StrategyInfo::takes_coverage))
    plan.coverage = options.coverage > 0 ? options.coverage : own_budget ? default_coverage : 0;
  plan.certify = options.certify;
  plan.unit_tokens = plan.strategy->has(StrategyInfo::takes_unit) ? options.unit_tokens : 0;
  const bool default_fraction = options.budget_fraction == 0;
  const double fraction =
      default_fraction ? plan.strategy->budget_fraction : options.budget_fraction;
  plan.budget_tokens =
      options.budget_tokens
          ? options.budget_tokens
          : std::max(static_cast<uint64_t>(std::ceil(fraction * static_cast<double>(sealed))),
                     default_fraction ? plan.strategy->budget_floor : 1);
  if (plan.strategy->has(StrategyInfo::filters)) {
    plan.filter_window = options.filter_window;
    plan_filters(options.filter_layers, layers, &plan);
    return plan;
  }
  const bool by_strategy = options.dense_layers == UINT32_MAX || !plan.strategy->make;
  plan.dense_layers =
      std::min(by_strategy ? plan.strategy->dense_layers : options.dense_layers, layers);
  std::vector<uint32_t> order(layers);
  std::iota(order.begin(), order.end(), 0u);
  if (errors.size() == layers)
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return errors[a] > errors[b]; });
  plan.dense.assign(layers, false);
  for (uint32_t i = 0; i < plan.dense_layers; ++i) plan.dense[order[i]] = true;
  plan.schedule = options.schedule;
  if (plan.schedule != BudgetSchedule::uniform)
    schedule_budget(plan.schedule == BudgetSchedule::linear ? 0.5 : 0.05, sealed, &plan);
  if (plan.strategy->has(StrategyInfo::spreads_budget)) spread_budget(errors, sealed, &plan);
  return plan;
}

static bool reads_by_blocks(const StrategyInfo& info) {
  return info.has(StrategyInfo::reads_blocks);
}

std::string read_strategy_names() {
  std::string names = "full";
  for (const StrategyInfo& info : all_strategies())
    if (reads_by_blocks(info)) names += ", " + std::string(info.name);
  return names;
}

Status check_read_options(const ReadOptions& options) {
  const StrategyInfo* info = strategy_info(options.strategy);
  if (options.strategy != "full" && !(info && reads_by_blocks(*info)))
    return Status::error(Code::bad_argument, "prefill is strategy '%s': use one of %s",
                         Quoted(options.strategy).text(), read_strategy_names().c_str());
  if (!(options.budget_fraction >= 0 && options.budget_fraction <= 1))
    return Status::error(Code::bad_argument, "budget_fraction of prefill is %s: use 0 to 1",
                         number_text(options.budget_fraction).c_str());
  return {};
}

Plan make_read_plan(const ReadOptions& options, uint64_t sealed, uint32_t layers) {
  Plan plan;
  if (options.strategy == "full" || sealed < sparse_context) return plan;
  plan.strategy = strategy_info(options.strategy);
  plan.by_blocks = true;
  plan.recent_tokens = read_recent;
  const double fraction =
      options.budget_fraction > 0 ? options.budget_fraction : default_read_fraction;
  plan.budget_tokens =
      std::max(static_cast<uint64_t>(std::ceil(fraction * static_cast<double>(sealed))),
               std::min(sealed, read_floor));
  plan.dense.assign(layers, false);
  if (plan.strategy->has(StrategyInfo::filters)) plan_filters(options.filter_layers, layers, &plan);
  return plan;
}

}  // namespace kvasir
