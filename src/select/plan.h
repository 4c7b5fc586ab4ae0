// The planner: from what the caller asked and how long the context is to what each layer does, with the reason in words.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "select/selector.h"

namespace kvasir {

struct SelectOptions {
  std::string strategy = "auto";
  uint64_t budget_tokens = 0;      // 0: by fraction
  double budget_fraction = 0;      // 0: the strategy's default
  uint32_t dense_layers = UINT32_MAX;  // UINT32_MAX: the strategy's default
  bool share_heads = true;
};

struct Plan {
  const StrategyInfo* strategy = nullptr;
  uint32_t dense_layers = 0;   // layers [0, dense_layers) attend everything
  uint64_t budget_tokens = 0;  // a list, besides sinks and window
  bool share_heads = true;
  const char* why = "";        // constant text
};

// Code::bad_argument names the option.
Status check_select_options(const SelectOptions& options);

// For `sealed` tokens behind the window. Pure: the same input gives the same plan.
Plan make_plan(const SelectOptions& options, uint64_t sealed, uint32_t layers);

}  // namespace kvasir
