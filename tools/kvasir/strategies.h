// The strategies that the library has.
#pragma once

#include <string>
#include <vector>

#include "kvasir.h"

namespace tool {

std::vector<kv_strategy_information> known_strategies();
// Whether --coverage is for it: among several, others are measured as they are.
bool takes_coverage(const std::string& strategy);
std::string strategy_names();  // "full, window, ..."

}  // namespace tool
