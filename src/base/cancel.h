// A flag that stops a long call. Firing is one lock-free store: any thread and any signal handler may do it.
#pragma once

#include <atomic>

namespace kvasir {

class Cancel {
 public:
  void fire() noexcept { fired_.store(true, std::memory_order_relaxed); }
  void reset() noexcept { fired_.store(false, std::memory_order_relaxed); }
  bool fired() const noexcept { return fired_.load(std::memory_order_relaxed); }

 private:
  static_assert(std::atomic<bool>::is_always_lock_free);
  std::atomic<bool> fired_{false};
};

inline bool is_cancelled(const Cancel* cancel) noexcept { return cancel && cancel->fired(); }

}  // namespace kvasir
