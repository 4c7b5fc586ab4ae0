// Sizes of the tasks that the threads of the CPU share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backend/thread_pool.h"
#include "base/cancel.h"
#include "base/checked.h"

namespace kvasir {

constexpr uint32_t tasks_per_thread = 4;  // of a loop: threads that start late still find work
constexpr uint32_t rows_per_task = 16;    // of loops over tokens or inputs with little work each
// Between two looks at the cancel token: a task multiplies at most so much (or the rows that are
// computed together), which takes 0.2 ms with AVX-512, 0.6 ms with AVX2 and 20 ms in scalar code,
// measured on Zen 5 with Q4_0. Products by tiles have up to tile_pass_rows rows of all inputs,
// which take a few milliseconds.
constexpr uint64_t task_products = uint64_t{1} << 25;

// f(first, count, worker) over blocks of rows [begin, end), in parallel, until `cancel` has fired.
template <class F>
void for_blocks(ThreadPool* pool, const CancelLatch& cancel, uint32_t begin, uint32_t end, F&& f) {
  const auto tasks = static_cast<uint32_t>(ceil_div(end - begin, rows_per_task));
  pool->run(tasks, [&](uint32_t task, uint32_t worker) {
    if (cancel.fired()) return;
    const uint32_t first = begin + task * rows_per_task;
    f(std::size_t{first}, std::min(rows_per_task, end - first), worker);
  });
}

// f(row) over rows [begin, end), likewise.
template <class F>
void for_rows(ThreadPool* pool, const CancelLatch& cancel, uint32_t begin, uint32_t end, F&& f) {
  for_blocks(pool, cancel, begin, end, [&](std::size_t first, uint32_t count, uint32_t) {
    for (std::size_t row = first; row < first + count; ++row) f(row);
  });
}

}  // namespace kvasir
