// A host's signals and the pool's threads.
#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "backend/thread_pool.h"

using namespace kvasir;

namespace {

volatile sig_atomic_t handled = 0;

}  // namespace

TEST_CASE(
    "a signal to the process is never handled by a worker, asleep or at work: a host's thread that "
    "holds it back finds it waiting") {
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(4, &pool).ok());
  struct sigaction action = {}, before = {};
  action.sa_handler = [](int) { handled = handled + 1; };
  REQUIRE(sigaction(SIGUSR1, &action, &before) == 0);
  sigset_t held, mask;
  sigemptyset(&held);
  sigaddset(&held, SIGUSR1);
  REQUIRE(pthread_sigmask(SIG_BLOCK, &held, &mask) == 0);
  CHECK(sigismember(&mask, SIGUSR1) == 0);  // making a pool leaves the caller's mask as it was
  kill(getpid(), SIGUSR1);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  pool->run(64,
            [](uint32_t, uint32_t) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  CHECK(handled == 0);
  sigset_t waiting;
  sigpending(&waiting);
  CHECK(sigismember(&waiting, SIGUSR1) == 1);
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
  CHECK(handled == 1);
  sigaction(SIGUSR1, &before, nullptr);
}
