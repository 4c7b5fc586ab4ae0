// Long arrays, copied, cleared or scanned by several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/thread_pool.h"
#include "base/checked.h"

namespace kvasir {

// Calls f(first, size) for all of `bytes` bytes, at most `piece` at a time, on the threads of the
// pool; null: on the caller. One thread alone copies a few GB/s, and fewer where the system clears
// pages at their first use.
template <class F>
void parallel_chunks(std::size_t bytes, ThreadPool* pool, F&& f,
                     std::size_t piece = std::size_t{1} << 20) {
  run_tasks(pool, static_cast<uint32_t>(ceil_div(bytes, piece)), [&](uint32_t task, uint32_t) {
    f(task * piece, std::min(piece, bytes - task * piece));
  });
}

// Copies n elements.
template <class T>
void parallel_copy(const T* from, std::size_t n, T* to, ThreadPool* pool) {
  parallel_chunks(n * sizeof(T), pool, [&](std::size_t at, std::size_t size) {
    std::memcpy(reinterpret_cast<std::byte*>(to) + at,
                reinterpret_cast<const std::byte*>(from) + at, size);
  });
}

}  // namespace kvasir
