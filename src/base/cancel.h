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

// One look at a token that stays true: work that was skipped because of it must not be mistaken for done when the token is reset meanwhile.
class CancelLatch {
 public:
  explicit CancelLatch(const Cancel* cancel) : cancel_(cancel) {}
  bool fired() const noexcept {
    if (!cancel_) return false;
    if (cancel_->fired()) seen_.store(true, std::memory_order_relaxed);
    return seen_.load(std::memory_order_relaxed);
  }

 private:
  const Cancel* cancel_;
  mutable std::atomic<bool> seen_{false};
};

inline bool is_cancelled(const Cancel* cancel) noexcept { return cancel && cancel->fired(); }

}  // namespace kvasir
