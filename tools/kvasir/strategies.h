// The strategies that the library has.
#pragma once

#include <string>
#include <vector>

#include "kvasir.h"

namespace tool {

std::vector<kv_strategy_information> known_strategies();
std::string strategy_names();  // "full, window, ..."

}  // namespace tool
