// The library's strategies, made from the command line's flags.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "handles.h"

namespace tool {

constexpr const char* filter_strategy = "filter-layers";

std::vector<kv_strategy_info> known_strategies();
// `first`, then the names of all strategies.
std::vector<std::string> strategy_choices(const std::string& first);

// Throw Failure(exit_usage) where the strategy lacks a parameter that the flags set.
Strategy decode_strategy(const SessionFlags& flags);
Strategy prefill_strategy(const SessionFlags& flags);  // null: exact

// Replaces the session's decode strategy.
void set_strategy(kv_session* session, const SessionFlags& flags);

// Flags for one of several measured strategies: without the parameters that it lacks.
SessionFlags flags_for(SessionFlags flags, const std::string& strategy);
// Throws Failure(exit_usage) for a parameter that all of the strategies lack.
void expect_parameters_used(const SessionFlags& flags, const std::vector<std::string>& strategies);

}  // namespace tool
