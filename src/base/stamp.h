// Numbers that identify a content: the owner of a copy compares stamps to see whether the original
// has changed.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvasir {

// Unique in this process; not 0.
inline uint64_t new_stamp() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace kvasir
