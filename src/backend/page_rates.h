// The rates at which the CPU and a device attend pages in host memory. They decide which part of
// the pages each of them attends.
#pragma once

#include <cmath>
#include <cstdint>

namespace kvasir {

// Measured bytes of keys and values per second; 0: unknown.
struct PageRates {
  double cpu = 0, device = 0;

  bool known() const { return cpu > 0 && device > 0; }
  // Sixteenths of the pages that the device attends, so that both finish at the same time.
  uint32_t sixteenths() const {
    return known() ? static_cast<uint32_t>(std::lround(16 * device / (cpu + device))) : 0;
  }
};

}  // namespace kvasir
