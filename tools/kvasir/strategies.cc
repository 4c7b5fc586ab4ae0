#include "strategies.h"

#include <algorithm>

namespace tool {

std::vector<kv_strategy_information> known_strategies() {
  std::vector<kv_strategy_information> known;
  for (;;) {
    kv_strategy_information info{};
    info.struct_size = sizeof info;
    if (kv_strategy_info(static_cast<uint32_t>(known.size()), &info, nullptr) != KV_OK) return known;
    known.push_back(info);
  }
}

bool takes_coverage(const std::string& strategy) {
  const auto known = known_strategies();
  return std::any_of(known.begin(), known.end(), [&](const auto& info) { return strategy == info.name && info.takes_coverage != 0; });
}

std::string strategy_names() {
  std::string names;
  for (const kv_strategy_information& strategy : known_strategies()) names.append(names.empty() ? "" : ", ").append(strategy.name);
  return names;
}

}  // namespace tool
