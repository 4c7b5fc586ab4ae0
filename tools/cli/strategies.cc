#include "strategies.h"

#include <algorithm>
#include <charconv>

#include "argument_values.h"
#include "failure.h"
#include "kvasir_experimental.h"

namespace tool {
namespace {

struct Parameter {
  const char* option;
  uint32_t param;
  double value;
  void (*unset)(SessionFlags*);
};

// The decode parameters that the flags set, without the filter layers.
std::vector<Parameter> parameters_of(const SessionFlags& flags) {
  std::vector<Parameter> set;
  const auto add_if = [&](bool given, const char* option, uint32_t param, double value,
                          void (*unset)(SessionFlags*)) {
    if (given) set.push_back({option, param, value, unset});
  };
  add_if(flags.budget.tokens > 0, "--budget", KV_PARAM_BUDGET_TOKENS,
         static_cast<double>(flags.budget.tokens), [](SessionFlags* f) { f->budget = {}; });
  add_if(flags.budget.fraction > 0, "--budget", KV_PARAM_BUDGET_FRACTION, flags.budget.fraction,
         [](SessionFlags* f) { f->budget = {}; });
  add_if(flags.dense_layers.has_value(), "--dense-layers", KV_PARAM_DENSE_LAYERS,
         flags.dense_layers.value_or(0), [](SessionFlags* f) { f->dense_layers.reset(); });
  add_if(flags.separate_heads, "--separate-heads", KV_PARAM_SHARE_HEADS, 0,
         [](SessionFlags* f) { f->separate_heads = false; });
  add_if(flags.coverage > 0, "--coverage", KV_PARAM_COVERAGE, flags.coverage,
         [](SessionFlags* f) { f->coverage = 0; });
  add_if(flags.select_tokens > 0, "--select-tokens", KV_PARAM_SELECT_TOKENS, flags.select_tokens,
         [](SessionFlags* f) { f->select_tokens = 0; });
  add_if(flags.search_breadth > 0, "--search-breadth", KV_PARAM_SEARCH_BREADTH,
         flags.search_breadth, [](SessionFlags* f) { f->search_breadth = 0; });
  add_if(flags.head_graphs, "--head-graphs", KV_PARAM_HEAD_GRAPHS, 1,
         [](SessionFlags* f) { f->head_graphs = false; });
  add_if(flags.schedule != KV_BUDGET_UNIFORM, "--budget-schedule", KV_PARAM_BUDGET_SCHEDULE,
         flags.schedule, [](SessionFlags* f) { f->schedule = KV_BUDGET_UNIFORM; });
  add_if(flags.filter_window != KV_FILTER_LAST, "--filter-window", KV_PARAM_FILTER_WINDOW,
         flags.filter_window, [](SessionFlags* f) { f->filter_window = KV_FILTER_LAST; });
  return set;
}

Strategy create(const std::string& name) {
  kv_strategy* strategy = nullptr;
  kv_error error{};
  check(kv_strategy_create(name.c_str(), &strategy, &error), error);
  return Strategy(strategy);
}

bool has(const kv_strategy* strategy, uint32_t param) {
  double value = 0;
  return kv_strategy_get(strategy, param, &value, nullptr) == KV_OK;
}

void set(kv_strategy* strategy, uint32_t param, double value) {
  kv_error error{};
  check(kv_strategy_set(strategy, param, value, &error), error);
}

void set_layers(kv_strategy* strategy, const std::string& list) {
  if (list.empty()) return;
  std::vector<uint32_t> layers;
  for (const std::string& part : parts_of(list)) layers.push_back(number<uint32_t>(part, 0, 1023));
  kv_error error{};
  check(kv_strategy_set_layers(strategy, layers.data(), layers.size(), &error), error);
}

[[noreturn]] void refuse(const char* option, const std::string& strategies) {
  throw Failure(exit_usage, std::string(option) + " is not a parameter of " + strategies);
}

std::string name_of(const SessionFlags& flags) {
  return flags.strategy.empty() ? "auto" : flags.strategy;
}

}  // namespace

std::vector<kv_strategy_info> known_strategies() {
  std::vector<kv_strategy_info> known;
  for (;;) {
    kv_strategy_info info = initialised<kv_strategy_info>();
    if (kv_strategy_list(static_cast<uint32_t>(known.size()), &info, nullptr) != KV_OK)
      return known;
    known.push_back(info);
  }
}

std::vector<std::string> strategy_choices(const std::string& first) {
  std::vector<std::string> names = {first};
  for (const kv_strategy_info& strategy : known_strategies()) names.emplace_back(strategy.name);
  return names;
}

Strategy decode_strategy(const SessionFlags& flags) {
  const std::string name = name_of(flags);
  Strategy strategy = create(name);
  for (const Parameter& parameter : parameters_of(flags)) {
    if (!has(strategy.get(), parameter.param))
      refuse(parameter.option, "the strategy '" + name + "'");
    set(strategy.get(), parameter.param, parameter.value);
  }
  if (name == filter_strategy) {
    set_layers(strategy.get(), flags.filter_layers);
  } else if (!flags.filter_layers.empty() && flags.prefill != filter_strategy) {
    refuse("--filter-layers", "the strategy '" + name + "'");
  }
  return strategy;
}

Strategy prefill_strategy(const SessionFlags& flags) {
  if (flags.prefill.empty()) {
    if (flags.prefill_budget > 0) throw Failure(exit_usage, "--prefill-budget needs --prefill");
    if (flags.prefill_exact > 0) throw Failure(exit_usage, "--prefill-exact needs --prefill");
    return nullptr;
  }
  Strategy strategy = create(flags.prefill);
  if (flags.prefill_budget > 0) set(strategy.get(), KV_PARAM_BUDGET_FRACTION, flags.prefill_budget);
  if (flags.prefill_exact > 0)
    set(strategy.get(), KV_PARAM_EXACT_TOKENS, static_cast<double>(flags.prefill_exact));
  if (flags.prefill == filter_strategy) set_layers(strategy.get(), flags.filter_layers);
  return strategy;
}

void set_strategy(kv_session* session, const SessionFlags& flags) {
  const Strategy strategy = decode_strategy(flags);
  kv_error error{};
  check(kv_session_set_strategy(session, strategy.get(), &error), error);
}

SessionFlags flags_for(SessionFlags flags, const std::string& strategy) {
  flags.strategy = strategy;
  const Strategy created = create(strategy);
  for (const Parameter& parameter : parameters_of(flags))
    if (!has(created.get(), parameter.param)) parameter.unset(&flags);
  if (strategy != filter_strategy && flags.prefill != filter_strategy) flags.filter_layers.clear();
  return flags;
}

void expect_parameters_used(const SessionFlags& flags, const std::vector<std::string>& strategies) {
  std::vector<Strategy> created;
  created.reserve(strategies.size());
  for (const std::string& name : strategies) created.push_back(create(name));
  for (const Parameter& parameter : parameters_of(flags))
    if (std::none_of(created.begin(), created.end(),
                     [&](const Strategy& s) { return has(s.get(), parameter.param); }))
      refuse(parameter.option, "any of these strategies");
  if (!flags.filter_layers.empty() && flags.prefill != filter_strategy &&
      std::find(strategies.begin(), strategies.end(), filter_strategy) == strategies.end())
    refuse("--filter-layers", "any of these strategies");
}

}  // namespace tool
