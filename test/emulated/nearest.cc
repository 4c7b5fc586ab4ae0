// The search for nearest keys, with the CPU's kernels.
#include <algorithm>

#include "alignment.h"
#include "backend/kernels.h"
#include "base/memory.h"
#include "state.h"

namespace kvasir::emulated {

int find_nearest(DeviceStream* s, const DeviceNearest& n) {
  if (const int error = check_find_nearest(n)) return error;
  return enqueue(s, [n] {
    const Kernels& cpu = cpu_kernels();
    Array<KeyRef> keys;
    Array<float> scores(n.items);
    Array<uint32_t> found(n.k);
    Array<std::byte> scratch(n.items * sizeof(uint32_t));
    for (uint32_t i = 0; i < n.items; ++i)
      keys.push_back({n.keys + std::size_t{i} * n.dim, n.key_scale[i]});
    for (uint32_t r = 0; r < n.rows; ++r) {
      cpu.score_keys(
          {1, n.dim, nullptr, n.queries + std::size_t{r} * n.dim, nullptr, n.query_scale + r},
          keys.data(), n.items, 4, scores.data(), n.items);
      found.resize(
          cpu.top_k(scores.data(), n.items, std::min(n.k, n.items), found.data(), scratch.data()));
      std::sort(found.begin(), found.end(), [&](uint32_t a, uint32_t b) {
        return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
      });
      std::copy(found.begin(), found.end(), n.nearest + std::size_t{r} * n.k);
      // nobody reads what is left there
      std::fill_n(n.group_best + std::size_t{r} * n.groups, n.groups, -1.0f);
    }
    return 0;
  });
}

}  // namespace kvasir::emulated
