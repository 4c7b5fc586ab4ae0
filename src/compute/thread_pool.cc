// Tasks are handed out through one 64-bit ticket: the loop's number in the upper half, how many tasks are left in the lower. A thread takes a
// task by compare-and-swap of the whole ticket. The loop's description changes only while the ticket says that nothing is left,
// so one that comes late, even from an earlier loop, cannot take a wrong task, and no loop waits for threads that are waking up.
#include "compute/thread_pool.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "os/os.h"
#include "os/signals.h"

namespace kvasir {
namespace {

// How long a thread looks for work before it sleeps: longer than the serial code between two loops of a decode step, shorter
// than anybody notices on a battery.
constexpr std::chrono::microseconds spin_time{50};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Waits until `ready()`; false when it did not come true within the time.
template <class Ready>
bool spin_until(std::chrono::microseconds time, Ready ready) {
  if (ready()) return true;
  if (time.count() == 0) return false;
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < 16; ++i) {
      pause();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

constexpr std::size_t cache_line = 64;
constexpr uint64_t loop_of(uint64_t ticket) { return ticket >> 32; }
constexpr uint32_t left_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

struct ThreadPool::State {
  // The current loop. Written before its ticket is; a thread that reads another loop's fails to take a task.
  std::atomic<Task> task{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<uint32_t> n_tasks{0};

  alignas(cache_line) std::atomic<uint64_t> ticket{0};
  alignas(cache_line) std::atomic<uint32_t> done{0};  // tasks of the current loop
  alignas(cache_line) std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake_workers, wake_caller;

  std::chrono::microseconds spin{0};
  std::vector<std::thread> workers;

  // Takes and runs tasks of the current loop until none is left. Returns the loop's number.
  uint64_t work(uint32_t worker);
  void sleep_after(uint64_t loop);
  void worker_main(uint32_t worker);
  void begin_loop(uint32_t tasks);
};

uint64_t ThreadPool::State::work(uint32_t worker) {
  uint64_t current = ticket.load(std::memory_order_acquire);
  while (left_of(current) != 0) {
    const uint32_t count = n_tasks.load(std::memory_order_relaxed);
    const Task f = task.load(std::memory_order_relaxed);
    void* const argument = context.load(std::memory_order_relaxed);
    if (!ticket.compare_exchange_weak(current, current - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    f(argument, count - left_of(current), worker);
    // The caller sets caller_sleeps, then reads done; here the other way round: one of the two sees the other.
    if (done.fetch_add(1, std::memory_order_seq_cst) + 1 == count && caller_sleeps.load(std::memory_order_seq_cst)) {
      { const std::lock_guard lock(mutex); }
      wake_caller.notify_one();
    }
    current = ticket.load(std::memory_order_acquire);
  }
  return loop_of(current);
}

// Sleeps until there is another loop than `loop`.
void ThreadPool::State::sleep_after(uint64_t loop) {
  std::unique_lock lock(mutex);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (loop_of(ticket.load(std::memory_order_seq_cst)) == loop) wake_workers.wait(lock);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void ThreadPool::State::worker_main(uint32_t worker) {
  os::name_this_thread("kvasir");
  for (;;) {
    const uint64_t loop = work(worker);
    if (stop.load(std::memory_order_acquire)) return;  // set before the ticket of the last, empty loop
    if (!spin_until(spin, [&] { return loop_of(ticket.load(std::memory_order_acquire)) != loop; })) sleep_after(loop);
  }
}

// Shows the ticket of a new loop to all workers and wakes those that sleep: they see it before they sleep, or this sees them.
void ThreadPool::State::begin_loop(uint32_t tasks) {
  const uint64_t loop = loop_of(ticket.load(std::memory_order_relaxed)) + 1;
  ticket.store(loop << 32 | tasks, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  { const std::lock_guard lock(mutex); }
  wake_workers.notify_all();
}

ThreadPool::ThreadPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

Status ThreadPool::create(uint32_t threads, std::unique_ptr<ThreadPool>* out) {
  if (threads == 0) return Status::error(Code::bad_argument, "a thread pool needs at least one thread");
  auto pool = std::unique_ptr<ThreadPool>(new ThreadPool(std::make_unique<State>()));
  State& state = *pool->state_;
  // Spinning only steals time from the working threads where there are more threads than processors.
  if (threads <= os::processor_count()) state.spin = spin_time;
  state.workers.reserve(threads - 1);
  const os::SignalsHeld held;
  for (uint32_t worker = 1; worker < threads; ++worker) {
    try {
      state.workers.emplace_back([&state, worker] { state.worker_main(worker); });
    } catch (const std::system_error& e) {
      const int error = e.code().value();
      return Status::error(error == ENOMEM ? Code::no_memory : Code::limit, "cannot start thread %u of %u: nothing was changed",
                           worker + 1, threads)
          .with_errno(error);
    }
  }
  *out = std::move(pool);
  return {};
}

ThreadPool::~ThreadPool() {
  State& s = *state_;
  s.stop.store(true, std::memory_order_release);
  s.begin_loop(0);
  for (std::thread& worker : s.workers) worker.join();
}

uint32_t ThreadPool::threads() const { return static_cast<uint32_t>(state_->workers.size()) + 1; }

void ThreadPool::run_erased(uint32_t n_tasks, Task task, void* context) {
  State& s = *state_;
  if (n_tasks <= 1 || s.workers.empty()) {
    for (uint32_t i = 0; i < n_tasks; ++i) task(context, i, 0);
    return;
  }
  // The last loop's tasks are all done, so nobody counts or takes any now.
  s.done.store(0, std::memory_order_relaxed);
  s.task.store(task, std::memory_order_relaxed);
  s.context.store(context, std::memory_order_relaxed);
  s.n_tasks.store(n_tasks, std::memory_order_relaxed);
  s.begin_loop(n_tasks);
  s.work(0);
  const auto is_done = [&] { return s.done.load(std::memory_order_seq_cst) == n_tasks; };
  if (spin_until(s.spin, is_done)) return;
  std::unique_lock lock(s.mutex);
  s.caller_sleeps.store(true, std::memory_order_seq_cst);
  s.wake_caller.wait(lock, is_done);
  s.caller_sleeps.store(false, std::memory_order_relaxed);
}

}  // namespace kvasir
