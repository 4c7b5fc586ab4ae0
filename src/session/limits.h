// Options that sessions and external stores have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/status.h"
#include "os/os.h"

namespace kvasir {

// Replaces 0 by the defaults. Code::bad_argument names an option out of range.
inline Status resolve_threads_and_window(uint32_t* threads, uint32_t* window) {
  constexpr uint32_t max_threads = 256, max_window = 1 << 20;
  if (*threads > max_threads)
    return Status::error(Code::bad_argument, "threads is %u: use up to %u", *threads, max_threads);
  if (*threads == 0) *threads = std::min(os::cpu_count(), max_threads);
  if (*window == 0) *window = 64;
  if (*window > max_window)
    return Status::error(Code::bad_argument, "window_tokens is %u: use up to %u", *window,
                         max_window);
  return {};
}

}  // namespace kvasir
