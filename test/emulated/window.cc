// Attention of layers whose queries see a window, by the reference.
#include <algorithm>
#include <vector>

#include "reference/reference.h"
#include "state.h"

namespace kvasir::emulated {

int attend_window(DeviceStream* s, const DeviceWindow& with, const float* q, const float* k,
                  const float* v, float* out) {
  return enqueue(s, [w = with, q, k, v, out] {
    std::vector<double> made(std::size_t{w.n} * w.heads * w.head_dim);
    reference::attend_window(w, *w.position, q, k, v, w.ring, made.data());
    std::transform(made.begin(), made.end(), out, [](double x) { return static_cast<float>(x); });
    return 0;
  });
}

int keep_window(DeviceStream* s, const DeviceWindow& with, const float* k, const float* v) {
  return enqueue(s, [w = with, k, v] {
    for (uint32_t t = w.n - std::min(w.n, w.room); t < w.n; ++t)
      for (uint32_t head = 0; head < w.kv_heads; ++head) {
        const std::size_t from = (std::size_t{t} * w.kv_heads + head) * w.head_dim,
                          row = (*w.position + t) % w.room;
        float* to = w.ring + (std::size_t{head} * 2 * w.room + row) * w.head_dim;
        std::copy_n(k + from, w.head_dim, to);
        std::copy_n(v + from, w.head_dim, to + std::size_t{w.room} * w.head_dim);
      }
    return 0;
  });
}

}  // namespace kvasir::emulated
