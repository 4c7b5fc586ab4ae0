#include "strategies.h"

namespace tool {

std::vector<kv_strategy_information> known_strategies() {
  std::vector<kv_strategy_information> known;
  for (;;) {
    kv_strategy_information info{};
    info.struct_size = sizeof info;
    if (kv_strategy_info(static_cast<uint32_t>(known.size()), &info, nullptr) != KV_OK)
      return known;
    known.push_back(info);
  }
}

static kv_strategy_information about(const std::string& strategy) {
  for (const kv_strategy_information& info : known_strategies())
    if (strategy == info.name) return info;
  return {};
}

void keep_what_it_takes(SessionFlags* flags) {
  const kv_strategy_information info = about(flags->strategy);
  if (info.takes_coverage == 0) flags->coverage = 0;
  if (info.takes_head_graphs == 0) flags->head_graphs = false;
}

bool takes_head_graphs(const std::string& strategy) {
  return about(strategy).takes_head_graphs != 0;
}

std::vector<std::string> strategy_choices(const std::string& first) {
  std::vector<std::string> names = {first};
  for (const kv_strategy_information& strategy : known_strategies())
    names.emplace_back(strategy.name);
  return names;
}

}  // namespace tool
