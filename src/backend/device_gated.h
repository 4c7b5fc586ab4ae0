// DeviceKernels::multiply_gated() by two other operations.
#pragma once

#include <algorithm>
#include <span>

#include "backend/device.h"

namespace kvasir {

// Parts of nearly one size, so that each runs as the whole would. Outputs may overwrite inputs: the
// last part comes first where outputs are wider.
template <class Matmul, class Activate>
int gate_by_parts(DeviceStream* s, std::span<const DeviceProduct> products, uint32_t room,
                  const DeviceActivations& x, Activation f, const DeviceCheck& check,
                  const DeviceActivations& out, Matmul&& matmul, Activate&& activate) {
  const uint32_t parts = (x.n + room - 1) / room, each = (x.n + parts - 1) / parts;
  for (uint32_t i = 0; i < parts; ++i) {
    const uint32_t first = (out.cols < x.cols ? i : parts - 1 - i) * each,
                   n = std::min(each, x.n - first);
    const DeviceActivations to = part_of(out, first, n);
    DeviceProduct given[2];
    for (std::size_t p = 0; p < products.size(); ++p) {
      given[p] = products[p];
      if (given[p].y == out.f32) given[p].y = to.f32;
    }
    int error = matmul(s, std::span<const DeviceProduct>(given, products.size()),
                       part_of(x, first, n), false);
    if (!error)
      error = activate(s, f, given[0].y, products.size() > 1 ? given[1].y : nullptr, check, to);
    if (error) return error;
  }
  return 0;
}

}  // namespace kvasir
