#include "base/progress.h"

#include <chrono>

namespace kvasir {

constexpr uint64_t report_interval_ns = 100'000'000;

static uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

bool Progress::update(uint64_t done, uint64_t total) {
  if (!report_) return true;
  const uint64_t now = now_ns();
  if (last_ns_ != 0 && done != total && now - last_ns_ < report_interval_ns) return true;
  last_ns_ = now;
  return report_(done, total) == 0;
}

}  // namespace kvasir
