// Progress reports of a long call: at most ten per second, plus the first and the last. Reports are
// made on the calling thread.
#pragma once

#include <cstdint>
#include <functional>

namespace kvasir {

class Progress {
 public:
  // report(done, total) returns non-zero to stop the work. An empty function reports nothing.
  using Report = std::function<int(uint64_t done, uint64_t total)>;

  Progress() = default;
  explicit Progress(Report report) : report_(std::move(report)) {}

  // False when the callback returned non-zero. `done == total` is always reported.
  [[nodiscard]] bool update(uint64_t done, uint64_t total);

 private:
  Report report_;
  uint64_t last_ns_ = 0;
};

}  // namespace kvasir
