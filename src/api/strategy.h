// Strategies of the public interface: which parameters each has, and what they set in a session.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "kvasir.h"
#include "kvasir_experimental.h"
#include "select/plan.h"
#include "select/selector.h"

namespace kvasir::api {

// What a strategy is for. A parameter has a bit for each use that it fits.
enum class Use : uint32_t { decode = 1, cache = 2, prefill = 4 };

// In the order of their numbers.
enum class Parameter : uint32_t {
  budget_tokens,
  budget_fraction,
  dense_layers,
  share_heads,
  alpha,
  coverage,
  select_tokens,
  exact_tokens,
  search_breadth,
  head_graphs,
  budget_schedule,
  filter_window,
  count
};
constexpr std::size_t parameter_count = static_cast<std::size_t>(Parameter::count);

}  // namespace kvasir::api

struct kv_strategy {
  const kvasir::StrategyInfo* info = nullptr;                       // null: "auto"
  std::optional<double> values[kvasir::api::parameter_count] = {};  // nothing: the default
  std::vector<uint32_t> layers;                                     // of "filter-layers"
};

namespace kvasir::api {

// Code::bad_argument where the strategy, or one of its parameters, does not fit the use. Null: the
// default. Whether the model has the layers is checked where the options are used.
Status decode_options(const kv_strategy* strategy, Use use, SelectOptions* out);
Status prefill_options(const kv_strategy* strategy, ReadOptions* out);

}  // namespace kvasir::api
