// Numbers that a hostile file gives in place of an honest one, by the width of the field that holds it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hostile {

// The honest number's neighbours, the first one that is not plausible, and those at which arithmetic wraps; each once, none of them
// the honest one.
inline std::vector<uint64_t> lies(uint64_t honest, uint64_t plausible, uint32_t bytes) {
  const uint64_t largest = bytes >= 8 ? UINT64_MAX : (uint64_t{1} << 8 * bytes) - 1;
  std::vector<uint64_t> all = {0, 1, honest - 1, honest + 1, plausible, plausible + 1, plausible * 2, uint64_t{1} << 31, (uint64_t{1} << 32) - 1,
                               uint64_t{1} << 32, uint64_t{1} << 40, uint64_t{1} << 62, uint64_t{1} << 63, UINT64_MAX - 65535, UINT64_MAX, largest};
  for (uint64_t& value : all) value &= largest;
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  all.erase(std::remove(all.begin(), all.end(), honest), all.end());
  return all;
}

}  // namespace hostile
