// A flag that stops a long call. Firing is one lock-free store: any thread and any signal handler
// may do it.
#pragma once

#include <atomic>
#include <cstddef>

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

// The state of a token that stays fired: work skipped because of it must not count as done when the
// token is reset meanwhile.
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

// For loops of many tiny steps: tests the token once per `between` steps.
class CancelPoll {
 public:
  explicit CancelPoll(const Cancel* cancel) : cancel_(cancel) {}
  // Call after `steps` more steps; true: stop. Stays true.
  bool stop(std::size_t steps = 1) noexcept {
    steps_ += steps;
    if (steps_ < between) return stopped_;
    steps_ = 0;
    return stopped_ = stopped_ || is_cancelled(cancel_);
  }
  bool stopped() const noexcept { return stopped_; }  // the last result of stop()

 private:
  static constexpr std::size_t between = 1 << 10;  // steps of a few nanoseconds: a few microseconds
  const Cancel* cancel_;
  std::size_t steps_ = between;  // the first step tests
  bool stopped_ = false;
};

}  // namespace kvasir
