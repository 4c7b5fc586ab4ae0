// kv_strategy_*: one table of parameters, and one rule for all of them.
#include "api/strategy.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "api/handles.h"
#include "base/number_text.h"

using namespace kvasir;
using api::Parameter;
using api::Use;

namespace {

constexpr uint32_t any_decode =
                       static_cast<uint32_t>(Use::decode) | static_cast<uint32_t>(Use::cache),
                   only_session = static_cast<uint32_t>(Use::decode),
                   only_prefill = static_cast<uint32_t>(Use::prefill),
                   all_uses = any_decode | only_prefill;
constexpr double max_count = 9007199254740992.0;  // 2^53: every smaller whole number is exact

struct Range {
  uint32_t number;  // kv_param
  const char* name;
  uint32_t uses;
  double min, max;
  bool whole;
  bool above_min, below_max;  // the limits themselves are out of range
  const char* text;           // for messages
};

constexpr double max_u32 = 4294967294.0;
constexpr Range ranges[] = {
    {KV_PARAM_BUDGET_TOKENS, "KV_PARAM_BUDGET_TOKENS", any_decode, 1, max_count, true, false, false,
     "a whole number of at least 1"},
    {KV_PARAM_BUDGET_FRACTION, "KV_PARAM_BUDGET_FRACTION", all_uses, 0, 1, false, true, false,
     "more than 0, up to 1"},
    {KV_PARAM_DENSE_LAYERS, "KV_PARAM_DENSE_LAYERS", any_decode, 0, max_u32, true, false, false,
     "a whole number of at least 0"},
    {KV_PARAM_SHARE_HEADS, "KV_PARAM_SHARE_HEADS", any_decode, 0, 1, true, false, false, "0 or 1"},
    {KV_PARAM_ALPHA, "KV_PARAM_ALPHA", any_decode, 0, 1, false, true, false,
     "more than 0, up to 1"},
    {KV_PARAM_COVERAGE, "KV_PARAM_COVERAGE", any_decode, 0, 1, false, true, true,
     "more than 0 and less than 1"},
    {KV_PARAM_SELECT_TOKENS, "KV_PARAM_SELECT_TOKENS", any_decode, 8, 1024, true, false, false,
     "a multiple of 8, up to 1024"},
    {KV_PARAM_EXACT_TOKENS, "KV_PARAM_EXACT_TOKENS", only_prefill, 0, max_count, true, false, false,
     "a whole number of at least 0"},
    {KV_PARAM_SEARCH_BREADTH, "KV_PARAM_SEARCH_BREADTH", only_session, 1, max_u32, true, false,
     false, "a whole number of at least 1"},
    {KV_PARAM_HEAD_GRAPHS, "KV_PARAM_HEAD_GRAPHS", only_session, 0, 1, true, false, false,
     "0 or 1"},
    {KV_PARAM_BUDGET_SCHEDULE, "KV_PARAM_BUDGET_SCHEDULE", only_session, 0, KV_BUDGET_PYRAMID, true,
     false, false, "KV_BUDGET_UNIFORM, KV_BUDGET_LINEAR or KV_BUDGET_PYRAMID"},
    {KV_PARAM_FILTER_WINDOW, "KV_PARAM_FILTER_WINDOW", only_session, 0, KV_FILTER_UNIFORM, true,
     false, false, "KV_FILTER_LAST, KV_FILTER_EXPONENTIAL or KV_FILTER_UNIFORM"},
};
static_assert(std::size(ranges) == api::parameter_count);

// Baselines to compare with: kvasir_experimental.h.
constexpr std::string_view research[] = {"ivf", "infllm", "snapkv"};

bool has_budget(const StrategyInfo& info) { return info.make && info.budget_fraction > 0; }

// "auto" has the parameters that "bounded" has in decode.
bool has(const StrategyInfo* info, Parameter p) {
  const bool is_auto = !info;
  const StrategyInfo& s = is_auto ? *strategy_info("bounded") : *info;
  const bool filters = s.has(StrategyInfo::filters);
  switch (p) {
    case Parameter::budget_tokens:
    case Parameter::budget_fraction:
      return has_budget(s);
    case Parameter::dense_layers:
      return s.make && !filters;
    case Parameter::share_heads:
      return has_budget(s) && !filters;
    case Parameter::alpha:
      return s.has(StrategyInfo::takes_alpha);
    case Parameter::coverage:
      return s.has(StrategyInfo::takes_coverage);
    case Parameter::select_tokens:
      return s.has(StrategyInfo::takes_unit);
    case Parameter::exact_tokens:
      return !is_auto && s.has(StrategyInfo::reads_blocks);
    case Parameter::search_breadth:
      return s.index.has_value();
    case Parameter::head_graphs:
      return s.index == IndexKind::ood;
    case Parameter::budget_schedule:
      return takes_schedule(s);
    case Parameter::filter_window:
      return filters;
    case Parameter::count:
      break;
  }
  return false;
}

const char* strategy_name(const kv_strategy& strategy) {
  return strategy.info ? strategy.info->name.data() : "auto";
}

bool fits(const Range& range, Use use) { return range.uses & static_cast<uint32_t>(use); }

// Names of the parameters that the strategy has for these uses.
std::string names_of_parameters(const StrategyInfo* info, uint32_t uses) {
  std::string names;
  for (std::size_t i = 0; i < std::size(ranges); ++i)
    if ((ranges[i].uses & uses) && has(info, static_cast<Parameter>(i)))
      names += (names.empty() ? "" : ", ") + std::string(ranges[i].name);
  return names.empty() ? "none" : names;
}

Status find(const kv_strategy& strategy, uint32_t number, Parameter* out) {
  const auto* range = std::find_if(std::begin(ranges), std::end(ranges),
                                   [&](const Range& r) { return r.number == number; });
  if (range == std::end(ranges))
    return Status::error(Code::bad_argument, "parameter %u is unknown: strategy '%s' has %s",
                         number, strategy_name(strategy),
                         names_of_parameters(strategy.info, all_uses).c_str());
  *out = static_cast<Parameter>(range - std::begin(ranges));
  if (has(strategy.info, *out)) return {};
  return Status::error(Code::bad_argument, "strategy '%s' has no parameter %s: it has %s",
                       strategy_name(strategy), range->name,
                       names_of_parameters(strategy.info, all_uses).c_str());
}

Status check(const kv_strategy& strategy, Parameter p, double value) {
  const Range& r = ranges[static_cast<std::size_t>(p)];
  const double rounded = static_cast<double>(static_cast<float>(value));  // as it is used
  const bool in = value >= r.min && value <= r.max && !(r.above_min && rounded <= r.min) &&
                  !(r.below_max && rounded >= r.max) && !(r.whole && value != std::floor(value)) &&
                  !(p == Parameter::select_tokens && std::fmod(value, 8) != 0);
  if (in) return {};
  return Status::error(Code::bad_argument, "%s of strategy '%s' is %s: use %s", r.name,
                       strategy_name(strategy), number_text(value).c_str(), r.text);
}

std::optional<double>& value_of(kv_strategy& strategy, Parameter p) {
  return strategy.values[static_cast<std::size_t>(p)];
}
const std::optional<double>& value_of(const kv_strategy& strategy, Parameter p) {
  return strategy.values[static_cast<std::size_t>(p)];
}

// 0 where the default depends on the model or on another parameter.
double default_of(const kv_strategy& strategy, Parameter p) {
  const StrategyInfo& info = strategy.info ? *strategy.info : *strategy_info("bounded");
  const bool own_budget = !value_of(strategy, Parameter::budget_tokens) &&
                          !value_of(strategy, Parameter::budget_fraction);
  switch (p) {
    case Parameter::budget_fraction:
      return value_of(strategy, Parameter::budget_tokens) ? 0 : info.budget_fraction;
    case Parameter::dense_layers:
      return info.dense_layers;
    case Parameter::share_heads:
      return 1;
    case Parameter::alpha:
      return std::round(static_cast<double>(default_alpha) * 1e6) / 1e6;
    case Parameter::coverage:
      return own_budget ? std::round(static_cast<double>(default_coverage) * 1e6) / 1e6 : 0;
    default:
      return 0;
  }
}

// Refuses the parameters that were set and do not fit the use.
Status check_use(const kv_strategy& strategy, Use use, const char* use_name) {
  for (std::size_t i = 0; i < std::size(ranges); ++i)
    if (strategy.values[i] && !fits(ranges[i], use))
      return Status::error(Code::bad_argument,
                           "strategy '%s' has %s set, which %s does not have: it has %s",
                           strategy_name(strategy), ranges[i].name, use_name,
                           names_of_parameters(strategy.info, static_cast<uint32_t>(use)).c_str());
  return {};
}

bool for_prefill(const StrategyInfo& info) {
  return !info.make || info.has(StrategyInfo::reads_blocks);
}
bool for_cache(const StrategyInfo& info) {
  return !info.index && !info.has(StrategyInfo::chooses_once);
}

Status no_strategy() { return Status::error(Code::bad_argument, "strategy is NULL"); }

}  // namespace

namespace kvasir::api {

Status decode_options(const kv_strategy* strategy, Use use, SelectOptions* out) {
  *out = {};
  if (!strategy) return {};
  RETURN_IF_ERROR(check_use(*strategy, use, use == Use::cache ? "a kv_cache" : "decode"));
  const auto value = [&](Parameter p, double otherwise) {
    return value_of(*strategy, p).value_or(otherwise);
  };
  out->strategy = strategy_name(*strategy);
  out->budget_tokens = static_cast<uint64_t>(value(Parameter::budget_tokens, 0));
  out->budget_fraction = value(Parameter::budget_fraction, 0);
  out->dense_layers = static_cast<uint32_t>(value(Parameter::dense_layers, UINT32_MAX));
  out->share_heads = value(Parameter::share_heads, 1) != 0;
  out->alpha = static_cast<float>(value(Parameter::alpha, 0));
  out->coverage = static_cast<float>(value(Parameter::coverage, 0));
  out->unit_tokens = static_cast<uint32_t>(value(Parameter::select_tokens, 0));
  out->search_breadth = static_cast<uint32_t>(value(Parameter::search_breadth, 0));
  out->head_graphs = value(Parameter::head_graphs, 0) != 0;
  out->schedule =
      static_cast<BudgetSchedule>(static_cast<uint32_t>(value(Parameter::budget_schedule, 0)));
  out->filter_window =
      static_cast<FilterWindow>(static_cast<uint32_t>(value(Parameter::filter_window, 0)));
  out->filter_layers = strategy->layers;
  return {};
}

Status prefill_options(const kv_strategy* strategy, ReadOptions* out) {
  *out = {};
  if (!strategy) return {};
  if (!strategy->info || !for_prefill(*strategy->info))
    return Status::error(Code::bad_argument, "prefill is strategy '%s': use one of %s",
                         strategy_name(*strategy), read_strategy_names().c_str());
  RETURN_IF_ERROR(check_use(*strategy, Use::prefill, "prefill"));
  out->strategy = strategy_name(*strategy);
  out->budget_fraction = value_of(*strategy, Parameter::budget_fraction).value_or(0);
  out->exact_tokens =
      static_cast<uint64_t>(value_of(*strategy, Parameter::exact_tokens).value_or(0));
  out->filter_layers = strategy->layers;
  return {};
}

}  // namespace kvasir::api

extern "C" {

kv_status kv_strategy_create(const char* name, kv_strategy** out, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!name) return Status::error(Code::bad_argument, "name is NULL");
    if (!out) return Status::error(Code::bad_argument, "out is NULL");
    const StrategyInfo* info = strategy_info(name);
    if (!info && std::string_view(name) != "auto")
      return Status::error(Code::bad_argument, "strategy '%s' is unknown: use %s",
                           Quoted(name).text(), strategy_names().c_str());
    auto strategy = std::make_unique<kv_strategy>();
    strategy->info = info;
    *out = strategy.release();
    return {};
  });
}

void kv_strategy_destroy(kv_strategy* strategy) { delete strategy; }

kv_status kv_strategy_set(kv_strategy* strategy, uint32_t param, double value, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!strategy) return no_strategy();
    Parameter p{};
    RETURN_IF_ERROR(find(*strategy, param, &p));
    RETURN_IF_ERROR(check(*strategy, p, value));
    if (p == Parameter::budget_tokens) value_of(*strategy, Parameter::budget_fraction).reset();
    if (p == Parameter::budget_fraction) value_of(*strategy, Parameter::budget_tokens).reset();
    value_of(*strategy, p) = value;
    return {};
  });
}

kv_status kv_strategy_get(const kv_strategy* strategy, uint32_t param, double* value,
                          kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!strategy) return no_strategy();
    if (!value) return Status::error(Code::bad_argument, "value is NULL");
    Parameter p{};
    RETURN_IF_ERROR(find(*strategy, param, &p));
    *value = value_of(*strategy, p).value_or(default_of(*strategy, p));
    return {};
  });
}

kv_status kv_strategy_set_layers(kv_strategy* strategy, const uint32_t* layers, size_t count,
                                 kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    if (!strategy) return no_strategy();
    if (!layers && count)
      return Status::error(Code::bad_argument, "layers is NULL and count is %zu", count);
    if (!strategy->info || !strategy->info->has(StrategyInfo::filters))
      return Status::error(Code::bad_argument,
                           "strategy '%s' has no layers to set: only 'filter-layers' has",
                           strategy_name(*strategy));
    for (std::size_t i = 1; i < count; ++i)
      if (layers[i] <= layers[i - 1])
        return Status::error(Code::bad_argument, "layers has %u after %u: use ascending order",
                             layers[i], layers[i - 1]);
    strategy->layers.assign(layers, layers + count);
    return {};
  });
}

kv_status kv_strategy_list(uint32_t index, kv_strategy_info* info, kv_error* error) {
  return api::guarded(error, [&]() -> Status {
    const std::span<const StrategyInfo> all = all_strategies();
    RETURN_IF_ERROR(api::check_result(info, "info"));
    if (index >= all.size())
      return Status::error(Code::not_found, "there is no strategy %u: there are %zu", index,
                           all.size());
    const StrategyInfo& strategy = all[index];
    const bool is_research =
        std::find(std::begin(research), std::end(research), strategy.name) != std::end(research);
    kv_strategy_info i{};
    i.flags = (for_prefill(strategy) ? KV_STRATEGY_PREFILL : 0) |
              (for_cache(strategy) ? KV_STRATEGY_CACHE : 0) |
              (strategy.index ? KV_STRATEGY_INDEX : 0) |
              (is_research ? KV_STRATEGY_EXPERIMENTAL : 0);
    i.budget_floor = has_budget(strategy) ? strategy.budget_floor : 0;
    api::copy_text(i.name, strategy.name);
    return api::write_result(i, info, "info");
  });
}

}  // extern "C"
