// A fixed team of threads for the parallel loops of one session. Workers spin briefly between loops, because a decode step has
// dozens of them microseconds apart, then sleep. The destructor joins them all.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "base/status.h"

namespace kvasir {

class ThreadPool {
 public:
  // threads >= 1, the caller's included: ThreadPool of 1 starts none. Code::no_memory or Code::limit when threads cannot start.
  static Status create(uint32_t threads, std::unique_ptr<ThreadPool>* out);
  ~ThreadPool();

  uint32_t threads() const;

  // Calls f(task, worker) for every task in [0, n_tasks), tasks in ascending order as workers get free; worker < threads() names the thread's
  // scratch. Returns when all are done. Not re-entrant; one caller at a time. f must not throw.
  template <class F>
  void run(uint32_t n_tasks, F&& f) {
    run_erased(n_tasks, [](void* context, uint32_t task, uint32_t worker) { (*static_cast<std::remove_reference_t<F>*>(context))(task, worker); },
               const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  using Task = void (*)(void* context, uint32_t task, uint32_t worker);
  void run_erased(uint32_t n_tasks, Task task, void* context);
  struct State;
  explicit ThreadPool(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvasir
