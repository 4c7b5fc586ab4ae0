// The strategies that the library has.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "kvasir.h"

namespace tool {

std::vector<kv_strategy_information> known_strategies();
// Takes back the flags that are not for flags->strategy: where several are measured, each is with
// what is for it.
void keep_what_it_takes(SessionFlags* flags);
bool takes_head_graphs(const std::string& strategy);
// that name, and those of all strategies
std::vector<std::string> strategy_choices(const std::string& first);

}  // namespace tool
