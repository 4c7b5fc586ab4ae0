// The first failure among the tasks of a parallel loop.
#pragma once

#include <mutex>
#include <utility>

#include "base/status.h"

namespace kvasir {

class FirstFailure {
 public:
  void note(Status s) {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = std::move(s);
  }
  Status take() && { return std::move(failure_); }

 private:
  std::mutex mutex_;
  Status failure_;
};

}  // namespace kvasir
