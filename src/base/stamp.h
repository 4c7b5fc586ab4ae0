// Numbers that tell one content from another: who has made a copy knows by them whether it is still
// what the original is.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvasir {

// Never given before in this process; not 0.
inline uint64_t new_stamp() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace kvasir
