// How a long call tells its caller how far it is: at most ten calls a second, plus the first and
// the last. All of it happens on the calling thread.
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

  // False when the callback asked to stop. `done == total` is always reported.
  [[nodiscard]] bool update(uint64_t done, uint64_t total);

 private:
  Report report_;
  uint64_t last_ns_ = 0;
};

}  // namespace kvasir
