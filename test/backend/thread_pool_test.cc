// The thread pool: every task once, no wake-up lost, nothing left behind. Also meant to run under
// ThreadSanitizer.
#include "backend/thread_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "backend/parallel_chunks.h"

using namespace kvasir;

namespace {

std::unique_ptr<ThreadPool> make(uint32_t threads) {
  std::unique_ptr<ThreadPool> pool;
  REQUIRE(ThreadPool::create(threads, &pool).ok());
  REQUIRE(pool->threads() == threads);
  return pool;
}

}  // namespace

TEST_CASE("threads that are kept awake run loops of several callers, and sleep again") {
  constexpr uint32_t loops = 200, tasks = 9;
  const auto pool = make(2);
  std::atomic<uint32_t> done{0};
  const auto call = [&] {
    for (uint32_t i = 0; i < loops; ++i) {
      const ThreadPool::Awake awake(pool.get());
      pool->run(tasks, [&](uint32_t, uint32_t) { ++done; });
      if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(i * 3));
    }
  };
  std::thread other(call);
  call();
  other.join();
  CHECK(done == 2 * loops * tasks);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  pool->run(tasks, [&](uint32_t, uint32_t) { ++done; });
  CHECK(done == (2 * loops + 1) * tasks);
}

TEST_CASE("every task runs exactly once and is seen by the caller") {
  for (uint32_t threads : {1u, 2u, 3u, 8u}) {
    const auto pool = make(threads);
    for (uint32_t n : {0u, 1u, 2u, 3u, 7u, 1000u}) {
      std::vector<int> count(n);  // plain: the pool alone orders the accesses
      pool->run(n, [&](uint32_t task, uint32_t worker) {
        CHECK(worker < threads);
        ++count[task];
      });
      for (int each : count) REQUIRE(each == 1);
    }
  }
}

TEST_CASE("loops that follow each other at once never mix their tasks") {
  const auto pool = make(3);
  uint64_t total = 0, expected = 0;
  for (uint32_t loop = 0; loop < 20000; ++loop) {
    const uint32_t n = 2 + loop % 5;
    uint32_t out[6] = {};
    pool->run(n, [&, loop](uint32_t task, uint32_t) { out[task] = loop + task; });
    for (uint32_t i = 0; i < n; ++i) total += out[i], expected += loop + i;
  }
  CHECK(total == expected);
}

TEST_CASE("workers that sleep wake up, and a caller that sleeps is woken") {
  const auto pool = make(2);
  for (int i = 0; i < 40; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(i % 4 * 60));
    std::atomic<uint32_t> done{0};
    pool->run(2, [&](uint32_t, uint32_t) {
      std::this_thread::sleep_for(std::chrono::microseconds(i % 3 * 200));
      ++done;
    });
    REQUIRE(done == 2);
  }
}

TEST_CASE("one worker's tasks never overlap, so its scratch is its own") {
  constexpr uint32_t threads = 4;
  const auto pool = make(threads);
  // plain: ThreadSanitizer reports two threads on one worker's number
  uint64_t scratch[threads][16] = {};
  for (int loop = 0; loop < 500; ++loop) {
    pool->run(16, [&](uint32_t, uint32_t worker) { ++scratch[worker][0]; });
  }
  uint64_t total = 0;
  for (auto& each : scratch) total += each[0];
  CHECK(total == 500 * 16);
}

TEST_CASE(
    "callers at the same time, more than there are places for, each get all of their own tasks "
    "done") {
  const auto pool = make(3);
  std::vector<std::thread> callers;
  std::atomic<uint32_t> wrong{0};
  for (uint32_t caller = 0; caller < 12; ++caller)
    callers.emplace_back([&, caller] {
      for (uint32_t loop = 0; loop < 400; ++loop) {
        const uint32_t n = 2 + (caller + loop) % 5;
        uint32_t out[6] = {};          // plain: the pool alone orders the accesses
        uint32_t scratch[3][16] = {};  // likewise; a caller's own
        pool->run(n, [&](uint32_t task, uint32_t worker) {
          out[task] = caller * 1000 + loop + task;
          ++scratch[worker][0];
        });
        uint32_t total = 0;
        for (auto& each : scratch) total += each[0];
        wrong += total != n;
        for (uint32_t i = 0; i < n; ++i) wrong += out[i] != caller * 1000 + loop + i;
      }
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

TEST_CASE("a caller does not wait for another's long task") {
  const auto pool = make(2);
  std::atomic<int> begun{0};
  std::atomic<bool> end{false};
  std::thread other([&] {
    pool->run(2, [&](uint32_t, uint32_t) {
      ++begun;
      while (!end) std::this_thread::yield();
    });
  });
  while (begun < 2) std::this_thread::yield();  // it has the worker too
  std::atomic<int> done{0};
  pool->run(8, [&](uint32_t, uint32_t) { ++done; });
  CHECK(done == 8);
  end = true;
  other.join();
}

TEST_CASE(
    "tasks compute in the library's floating-point environment, whatever it was where the pool was "
    "made") {
  std::fesetround(FE_UPWARD);
  const auto pool = make(4);
  std::atomic<uint32_t> begun{0};
  std::atomic<int> other{0};
  pool->run(4, [&](uint32_t, uint32_t worker) {
    ++begun;
    while (begun < 4) std::this_thread::yield();  // so that every thread has one
    if (worker != 0) other += std::fegetround() != FE_TONEAREST;
  });
  std::fesetround(FE_TONEAREST);
  CHECK(other == 0);
}

TEST_CASE("a pool that was never used, or is still spinning or asleep, ends at once") {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) {
    const auto pool = make(3);
    if (i % 3 == 1) pool->run(3, [](uint32_t, uint32_t) {});
    if (i % 3 == 2) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("a pool of no threads is refused") {
  std::unique_ptr<ThreadPool> pool;
  CHECK(ThreadPool::create(0, &pool).code() == Code::bad_argument);
  CHECK(!pool);
}

TEST_CASE("pieces are all of an array, by a pool and without") {
  const auto pool = make(3);
  std::vector<float> values((std::size_t{5} << 18) + 7, 1.0f);  // more than five pieces
  for (ThreadPool* by : {pool.get(), static_cast<ThreadPool*>(nullptr)}) {
    std::atomic<std::size_t> bytes{0};
    parallel_chunks(values.size() * sizeof(float), by,
                    [&](std::size_t, std::size_t size) { bytes += size; });
    CHECK(bytes == values.size() * sizeof(float));
    std::vector<float> copy(values.size());
    parallel_copy(values.data(), values.size(), copy.data(), by);
    CHECK(copy == values);
  }
}
