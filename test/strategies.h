// Strategies by name and parameters, made once and kept to the end of the program.
#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kvasir.h"

namespace strategies {

struct Destroy {
  void operator()(kv_strategy* s) const { kv_strategy_destroy(s); }
};
using Owned = std::unique_ptr<kv_strategy, Destroy>;

using Parameter = std::pair<uint32_t, double>;  // kv_param, value
// Every parameter must fit; or those that do not fit are left out.
enum class Fit { all, some };

inline const kv_strategy* make(const std::string& name, const std::vector<Parameter>& parameters,
                               Fit fit, const std::vector<uint32_t>& layers = {}) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, std::vector<Parameter>, Fit, std::vector<uint32_t>>,
                  Owned>
      made;
  const std::lock_guard lock(mutex);
  Owned& kept = made[{name, parameters, fit, layers}];
  if (kept) return kept.get();
  kv_error error{};
  const auto must = [&](kv_status status) {
    if (status != KV_OK) throw std::runtime_error(error.message);
  };
  kv_strategy* s = nullptr;
  must(kv_strategy_create(name.c_str(), &s, &error));
  Owned owner(s);
  for (const auto& [parameter, value] : parameters) {
    double standard = 0;
    if (fit == Fit::some && kv_strategy_get(s, parameter, &standard, nullptr) != KV_OK) continue;
    must(kv_strategy_set(s, parameter, value, &error));
  }
  if (!layers.empty()) must(kv_strategy_set_layers(s, layers.data(), layers.size(), &error));
  kept = std::move(owner);
  return kept.get();
}

inline const kv_strategy* strategy(const std::string& name,
                                   std::initializer_list<Parameter> parameters = {}) {
  return make(name, parameters, Fit::all);
}

// "filter-layers" with these layers.
inline const kv_strategy* filter_layers(std::initializer_list<uint32_t> layers,
                                        std::initializer_list<Parameter> parameters = {}) {
  return make("filter-layers", parameters, Fit::all, layers);
}

// A budget of `tokens` and selection in every layer, where the strategy has these parameters.
inline const kv_strategy* budgeted(const std::string& name, double tokens) {
  return make(name, {{KV_PARAM_BUDGET_TOKENS, tokens}, {KV_PARAM_DENSE_LAYERS, 0}}, Fit::some);
}

// The same, with further parameters where the strategy has them.
inline const kv_strategy* budgeted(const std::string& name, double tokens,
                                   std::initializer_list<Parameter> more) {
  std::vector<Parameter> all{{KV_PARAM_BUDGET_TOKENS, tokens}, {KV_PARAM_DENSE_LAYERS, 0}};
  all.insert(all.end(), more);
  return make(name, all, Fit::some);
}

}  // namespace strategies
