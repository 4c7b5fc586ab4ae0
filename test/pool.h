// Thread pools that the cases of a program share.
#pragma once

#include <doctest/doctest.h>

#include <array>
#include <memory>

#include "backend/thread_pool.h"

namespace kvasir::test {

inline ThreadPool& pool(uint32_t threads = 2) {
  static std::array<std::unique_ptr<ThreadPool>, 9> pools;
  auto& made = pools.at(threads);
  if (!made) REQUIRE(ThreadPool::create(threads, &made).ok());
  return *made;
}

}  // namespace kvasir::test
