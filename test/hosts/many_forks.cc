// A host that forks a session many times: each fork adds a sequence, but no thread. All forks
// answer as the session does, alone and several at once.
#include <dirent.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "host.h"

namespace {

int count_threads() {
  DIR* const tasks = opendir("/proc/self/task");
  host::require(tasks != nullptr, "/proc/self/task");
  int count = 0;
  while (const dirent* entry = readdir(tasks)) count += entry->d_name[0] != '.';
  closedir(tasks);
  return count;
}

// Before the library has any: ThreadSanitizer adds one of its own to the first of a process.
int count_own_threads() {
  std::thread([] {}).join();
  return count_threads();
}

// The kernel lists a thread for a moment after it was joined.
bool at_most_remain(int threads) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (count_threads() <= threads) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const auto n = static_cast<std::size_t>(host::times(argc, argv, 1000));
  constexpr std::size_t callers = 12;
  const int own = count_own_threads();
  kv_model* const model = host::open_model();
  kv_session_options o = host::session_options();
  o.threads = 4;
  kv_session* const session = host::open_session(model, o);
  host::read(session, 300);
  const std::string expected = host::ask(session, "a question", 3);
  const int before = count_threads();
  std::vector<kv_session*> forks(n);
  kv_error error{};
  for (std::size_t i = 0; i < n; ++i)
    host::require_ok(kv_session_fork(i % 2 ? forks[i / 2] : session, &forks[i], &error), error,
                     "kv_session_fork");
  std::printf("%d threads with one session, %d with %zu forks\n", before, count_threads(), n);
  host::require(count_threads() == before, "forks bring no threads");
  std::atomic<std::size_t> next{0}, wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < callers; ++t)
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < n; i = next++)
        wrong += host::ask(forks[i], "a question", 3) != expected;
    });
  const int most = count_threads();
  for (std::thread& thread : threads) thread.join();
  host::require(most <= before + static_cast<int>(callers), "forks that answer bring no threads");
  host::require(wrong == 0, "every fork answers as the session does");
  kv_session_close(session);  // the first that is closed, and the team stays
  for (std::size_t i = 0; i < n; ++i) {
    if (i == n / 2)
      host::require(host::ask(forks[n - 1], "a question", 3) == expected,
                    "a fork outlives its session");
    kv_session_close(forks[i]);
  }
  kv_close(model);
  host::require(at_most_remain(own), "with the last fork the team ends");
  return 0;
}
