// Threads take tasks through one 64-bit ticket per slot: the number of the loop in the upper half,
// the tasks left in the lower. A thread takes a task by a compare-and-swap of the whole ticket. The
// description of a loop changes only while its ticket says that no task is left. So a late thread,
// even one from an earlier loop, cannot take a wrong task, and no loop waits for threads that wake
// up. Each caller has a slot of its own while its loop runs; the workers go through all slots.
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

// How long a thread spins before it sleeps: longer than the serial code between two loops of a
// decode step, too short to matter to a battery.
constexpr std::chrono::microseconds spin_time{50};
// Longer than a GPU takes for its part of a layer: ThreadPool::Awake.
constexpr std::chrono::microseconds long_spin_time{400};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spins until ready(); false when the time runs out.
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
// Loops at once: their tickets and the count of loops fill one cache line.
constexpr std::size_t max_loops = 7;
constexpr uint64_t loop_of(uint64_t ticket) { return ticket >> 32; }
constexpr uint32_t left_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

struct ThreadPool::State {
  // The description of a caller's loop, written before the ticket. A thread that reads the
  // description of another loop fails to take a task.
  struct alignas(cache_line) Slot {
    std::atomic<bool> taken{false};  // by a caller
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<uint32_t> n_tasks{0};

    alignas(cache_line) std::atomic<uint32_t> done{0};  // tasks of the loop
    std::atomic<bool> caller_sleeps{false};
    std::condition_variable wake_caller;
  };

  alignas(cache_line) std::atomic<uint32_t> begun{0};  // loops, in all slots
  std::array<std::atomic<uint64_t>, max_loops> tickets{};
  std::array<Slot, max_loops> slots;
  alignas(cache_line) std::atomic<uint32_t> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable wake_workers;

  bool spins = false;
  std::atomic<uint32_t> awake{0};  // ThreadPool::Awake
  std::chrono::microseconds spin() const {
    if (!spins) return std::chrono::microseconds{0};
    return awake.load(std::memory_order_relaxed) > 0 ? long_spin_time : spin_time;
  }
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

// Takes and runs tasks of a slot's loop until none is left.
void ThreadPool::State::work(std::size_t at, uint32_t worker) {
  std::atomic<uint64_t>& ticket = tickets[at];
  Slot& slot = slots[at];
  uint64_t current = ticket.load(std::memory_order_acquire);
  while (left_of(current) != 0) {
    const uint32_t count = slot.n_tasks.load(std::memory_order_relaxed);
    const Task f = slot.task.load(std::memory_order_relaxed);
    void* const argument = slot.context.load(std::memory_order_relaxed);
    if (!ticket.compare_exchange_weak(current, current - 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire))
      continue;
    f(argument, count - left_of(current), worker);
    // The caller sets caller_sleeps, then reads done; here the order is the reverse. So at least
    // one of the two sees the store of the other.
    if (slot.done.fetch_add(1, std::memory_order_seq_cst) + 1 == count &&
        slot.caller_sleeps.load(std::memory_order_seq_cst)) {
      { const std::lock_guard lock(mutex); }
      slot.wake_caller.notify_one();
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
    if (!spin_until(spin(), [&] { return begun.load(std::memory_order_acquire) != seen; }))
      sleep_after(seen);
  }
}

// Announces a new ticket and wakes sleeping workers. A worker sees the ticket before it sleeps, or
// this function sees the worker.
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
  // With more threads than CPUs, spinning only takes time from the working threads.
  state.spins = threads <= os::cpu_count();
  state.workers.reserve(threads - 1);  // so that they do not move
  const os::SignalsHeld held;
  for (uint32_t number = 1; number < threads; ++number) {
    State::Worker& worker = state.workers.emplace_back(State::Worker{&state, number, {}});
    const auto run = [](void* context) {
      const auto* self = static_cast<const State::Worker*>(context);
      self->state->worker_main(self->number);
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

ThreadPool::Awake::Awake(ThreadPool* pool) : pool_(pool) {
  pool->state_->awake.fetch_add(1, std::memory_order_relaxed);
}
ThreadPool::Awake::~Awake() { pool_->state_->awake.fetch_sub(1, std::memory_order_relaxed); }

uint32_t ThreadPool::threads() const { return static_cast<uint32_t>(state_->workers.size()) + 1; }

void ThreadPool::run_erased(uint32_t n_tasks, Task task, void* context) {
  State& s = *state_;
  const auto is_free = [](State::Slot& slot) {
    return !slot.taken.exchange(true, std::memory_order_acquire);
  };
  const auto found = n_tasks <= 1 || s.workers.empty()
                         ? s.slots.end()
                         : std::find_if(s.slots.begin(), s.slots.end(), is_free);
  if (found == s.slots.end()) {
    for (uint32_t i = 0; i < n_tasks; ++i) task(context, i, 0);
    return;
  }
  State::Slot& slot = *found;
  const auto at = static_cast<std::size_t>(found - s.slots.begin());
  // All tasks of the slot's last loop are done: no thread counts or takes any now.
  slot.done.store(0, std::memory_order_relaxed);
  slot.task.store(task, std::memory_order_relaxed);
  slot.context.store(context, std::memory_order_relaxed);
  slot.n_tasks.store(n_tasks, std::memory_order_relaxed);
  const uint64_t loop = loop_of(s.tickets[at].load(std::memory_order_relaxed)) + 1;
  s.tickets[at].store(loop << 32 | n_tasks, std::memory_order_seq_cst);
  s.announce();
  s.work(at, 0);
  const auto is_done = [&] { return slot.done.load(std::memory_order_seq_cst) == n_tasks; };
  if (!spin_until(s.spin(), is_done)) {
    std::unique_lock lock(s.mutex);
    slot.caller_sleeps.store(true, std::memory_order_seq_cst);
    slot.wake_caller.wait(lock, is_done);
    slot.caller_sleeps.store(false, std::memory_order_relaxed);
  }
  slot.taken.store(false, std::memory_order_release);
}

}  // namespace kvasir
