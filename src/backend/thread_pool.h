// A fixed set of threads for the parallel loops of a session and its forks. Workers spin briefly
// between loops, because a decode step has dozens of loops microseconds apart; then they sleep. The
// destructor joins them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "base/status.h"

namespace kvasir {

class ThreadPool {
 public:
  // threads >= 1, including the caller: a pool of 1 starts none. Code::no_memory or Code::limit
  // when a thread cannot start.
  static Status create(uint32_t threads, std::unique_ptr<ThreadPool>* out);
  ~ThreadPool();

  uint32_t threads() const;

  // Calls f(task, worker) for every task in [0, n_tasks), in ascending order as workers become
  // free. worker < threads() is the index of the thread's scratch memory, which belongs to the
  // caller. Returns when all tasks are done. Several threads may call at once: the workers serve
  // all of them, and a caller beyond the limit runs its tasks itself. A task must not call run(). f
  // may throw std::bad_alloc and nothing else: the other tasks still run, then run() throws it.
  template <class F>
  void run(uint32_t n_tasks, F&& f) {
    struct Call {
      std::remove_reference_t<F>& f;
      std::atomic<bool> out_of_memory{false};
    } call{f};
    run_erased(
        n_tasks,
        [](void* context, uint32_t task, uint32_t worker) {
          auto& c = *static_cast<Call*>(context);
          try {
            c.f(task, worker);
          } catch (const std::bad_alloc&) {
            c.out_of_memory.store(true, std::memory_order_relaxed);
          }
        },
        &call);
    if (call.out_of_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  // While one exists, threads spin longer: for a step whose loops follow a GPU layer by layer.
  // Several may exist at once, in any thread.
  class Awake {
   public:
    explicit Awake(ThreadPool* pool);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool* const pool_;
  };

 private:
  using Task = void (*)(void* context, uint32_t task, uint32_t worker);
  void run_erased(uint32_t n_tasks, Task task, void* context);
  struct State;
  explicit ThreadPool(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// ThreadPool::run(); without a pool the caller runs all tasks.
template <class F>
void run_tasks(ThreadPool* pool, uint32_t n_tasks, F&& f) {
  if (pool) return pool->run(n_tasks, f);
  for (uint32_t task = 0; task < n_tasks; ++task) f(task, 0u);
}

}  // namespace kvasir
