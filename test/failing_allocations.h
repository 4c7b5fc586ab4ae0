// Makes the Nth allocation fail: of operator new, which failing_allocations.cc replaces for its
// program, and of the library's own allocator. A program's tests link that file when they want it.
#pragma once

#include <cstddef>

class FailingAllocations {
 public:
  // While this object lives, allocation number `first` (from 0) fails; with `once` false, all that
  // follow too.
  explicit FailingAllocations(long first, bool once);
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  bool reached() const;         // whether allocation number `first` was asked for
  std::size_t largest() const;  // bytes of one that was asked for so far
};
