// Tasks are handed out through one 64-bit ticket of a loop's place: the loop's number in the upper
// half, how many tasks are left in the lower. A thread takes a task by compare-and-swap of the
// whole ticket. The loop's description changes only while the ticket says that nothing is left, so
// one that comes late, even from an earlier loop, cannot take a wrong task, and no loop waits for
// threads that are waking up. Each caller has a place of its own while its loop runs; the workers
// go through all places.
#include "backend/thread_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "os/calling_thread.h"
#include "os/os.h"
#include "os/signals.h"
#include "os/thread.h"

namespace kvasir {
namespace {

// How long a thread looks for work before it sleeps: longer than the serial code between two loops
// of a decode step, shorter than anybody notices on a battery.
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
// at once; their tickets and the count of loops are one cache line
constexpr std::size_t max_loops = 7;
constexpr uint64_t loop_of(uint64_t ticket) { return ticket >> 32; }
constexpr uint32_t left_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

struct ThreadPool::State {
  // Where a caller's loop is described. Written before its ticket is; a thread that reads another
  // loop's fails to take a task.
  struct alignas(cache_line) Place {
    std::atomic<bool> taken{false};  // by a caller
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<uint32_t> n_tasks{0};

    alignas(cache_line) std::atomic<uint32_t> done{0};  // tasks of its loop
    std::atomic<bool> caller_sleeps{false};
    std::condition_variable wake_caller;
  };

  alignas(cache_line) std::atomic<uint32_t> begun{0};  // loops, of all places
  std::array<std::atomic<uint64_t>, max_loops> tickets{};
  std::array<Place, max_loops> places;
  alignas(cache_line) std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake_workers;

  std::chrono::microseconds spin{0};
  struct Worker {
    State* state;
    uint32_t number;
    os::Thread thread;
  };
  std::vector<Worker> workers;

  void work(std::size_t at, uint32_t worker);
  void sleep_after(uint32_t seen);
  void worker_main(uint32_t worker);
  void announce();
};

// Takes and runs tasks of the loop of a place until none is left.
void ThreadPool::State::work(std::size_t at, uint32_t worker) {
  std::atomic<uint64_t>& ticket = tickets[at];
  Place& place = places[at];
  uint64_t current = ticket.load(std::memory_order_acquire);
  while (left_of(current) != 0) {
    const uint32_t count = place.n_tasks.load(std::memory_order_relaxed);
    const Task f = place.task.load(std::memory_order_relaxed);
    void* const argument = place.context.load(std::memory_order_relaxed);
    if (!ticket.compare_exchange_weak(current, current - 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire))
      continue;
    f(argument, count - left_of(current), worker);
    // The caller sets caller_sleeps, then reads done; here the other way round: one of the two sees
    // the other.
    if (place.done.fetch_add(1, std::memory_order_seq_cst) + 1 == count &&
        place.caller_sleeps.load(std::memory_order_seq_cst)) {
      { const std::lock_guard lock(mutex); }
      place.wake_caller.notify_one();
    }
    current = ticket.load(std::memory_order_acquire);
  }
}

// Sleeps until more loops have begun than `seen`.
void ThreadPool::State::sleep_after(uint32_t seen) {
  std::unique_lock lock(mutex);
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (begun.load(std::memory_order_seq_cst) == seen) wake_workers.wait(lock);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void ThreadPool::State::worker_main(uint32_t worker) {
  os::use_own_float_environment();
  os::name_this_thread("kvasir");
  for (;;) {
    const uint32_t seen = begun.load(std::memory_order_acquire);
    if (stop.load(std::memory_order_acquire)) return;
    for (std::size_t at = 0; at < max_loops; ++at) work(at, worker);
    if (!spin_until(spin, [&] { return begun.load(std::memory_order_acquire) != seen; }))
      sleep_after(seen);
  }
}

// Shows all workers that a ticket is new and wakes those that sleep: they see it before they sleep,
// or this sees them.
void ThreadPool::State::announce() {
  begun.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  { const std::lock_guard lock(mutex); }
  wake_workers.notify_all();
}

ThreadPool::ThreadPool(std::unique_ptr<State> state) : state_(std::move(state)) {}

Status ThreadPool::create(uint32_t threads, std::unique_ptr<ThreadPool>* out) {
  if (threads == 0)
    return Status::error(Code::bad_argument, "a thread pool needs at least one thread");
  auto pool = std::unique_ptr<ThreadPool>(new ThreadPool(std::make_unique<State>()));
  State& state = *pool->state_;
  // Spinning only steals time from the working threads where there are more threads than
  // processors.
  if (threads <= os::processor_count()) state.spin = spin_time;
  state.workers.reserve(threads - 1);  // they stay where they are
  const os::SignalsHeld held;
  for (uint32_t number = 1; number < threads; ++number) {
    State::Worker& worker = state.workers.emplace_back(State::Worker{&state, number, {}});
    const auto run = [](void* context) {
      const auto* its = static_cast<const State::Worker*>(context);
      its->state->worker_main(its->number);
    };
    if (Status s = os::Thread::start(run, &worker, &worker.thread); !s.ok())
      return Status::error(s.code(), "cannot start thread %u of %u: nothing was changed",
                           number + 1, threads)
          .with_errno(s.sys_errno());
  }
  *out = std::move(pool);
  return {};
}

ThreadPool::~ThreadPool() {
  State& s = *state_;
  s.stop.store(true, std::memory_order_release);
  s.announce();
  s.workers.clear();  // joins them
}

uint32_t ThreadPool::threads() const { return static_cast<uint32_t>(state_->workers.size()) + 1; }

void ThreadPool::run_erased(uint32_t n_tasks, Task task, void* context) {
  State& s = *state_;
  const auto is_free = [](State::Place& place) {
    return !place.taken.exchange(true, std::memory_order_acquire);
  };
  const auto found = n_tasks <= 1 || s.workers.empty()
                         ? s.places.end()
                         : std::find_if(s.places.begin(), s.places.end(), is_free);
  if (found == s.places.end()) {
    for (uint32_t i = 0; i < n_tasks; ++i) task(context, i, 0);
    return;
  }
  State::Place& place = *found;
  const auto at = static_cast<std::size_t>(found - s.places.begin());
  // The tasks of the last loop here are all done, so nobody counts or takes any now.
  place.done.store(0, std::memory_order_relaxed);
  place.task.store(task, std::memory_order_relaxed);
  place.context.store(context, std::memory_order_relaxed);
  place.n_tasks.store(n_tasks, std::memory_order_relaxed);
  const uint64_t loop = loop_of(s.tickets[at].load(std::memory_order_relaxed)) + 1;
  s.tickets[at].store(loop << 32 | n_tasks, std::memory_order_seq_cst);
  s.announce();
  s.work(at, 0);
  const auto is_done = [&] { return place.done.load(std::memory_order_seq_cst) == n_tasks; };
  if (!spin_until(s.spin, is_done)) {
    std::unique_lock lock(s.mutex);
    place.caller_sleeps.store(true, std::memory_order_seq_cst);
    place.wake_caller.wait(lock, is_done);
    place.caller_sleeps.store(false, std::memory_order_relaxed);
  }
  place.taken.store(false, std::memory_order_release);
}

}  // namespace kvasir
