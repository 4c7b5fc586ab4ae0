// Long arrays, copied, cleared or looked at by several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "backend/thread_pool.h"
#include "base/checked.h"

namespace kvasir {

// f(first, size) for the bytes of so many, at most `piece` at a time, by the pool's threads where
// there are any. One thread alone copies a few GB a second, and fewer where the system clears each
// page of memory that is touched first.
template <class F>
void parallel_chunks(std::size_t bytes, ThreadPool* pool, F&& f,
                     std::size_t piece = std::size_t{1} << 20) {
  run_tasks(pool, static_cast<uint32_t>(ceil_div(bytes, piece)), [&](uint32_t task, uint32_t) {
    f(task * piece, std::min(piece, bytes - task * piece));
  });
}

// to <- from, n elements.
template <class T>
void parallel_copy(const T* from, std::size_t n, T* to, ThreadPool* pool) {
  parallel_chunks(n * sizeof(T), pool, [&](std::size_t at, std::size_t size) {
    std::memcpy(reinterpret_cast<std::byte*>(to) + at,
                reinterpret_cast<const std::byte*>(from) + at, size);
  });
}

}  // namespace kvasir
