// How fast pages in host memory are attended, by it and by a device: what decides who attends how
// much of them.
#pragma once

#include <cmath>
#include <cstdint>

namespace kvasir {

// Bytes of keys and values a second, as measured; 0: unknown.
struct PageRates {
  double processor = 0, device = 0;

  bool known() const { return processor > 0 && device > 0; }
  // Of what is attended, how many sixteenths the device reads, so that both are done at the same
  // time.
  uint32_t sixteenths() const {
    return known() ? static_cast<uint32_t>(std::lround(16 * device / (processor + device))) : 0;
  }
};

}  // namespace kvasir
