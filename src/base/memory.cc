#include "base/memory.h"

#include <mimalloc.h>

namespace kvasir {

constexpr std::size_t alignment = 64;  // a cache line, and the widest vector register

std::atomic<AllocationFault> allocation_fault{nullptr};

static bool must_fail(std::size_t size) noexcept {
  AllocationFault fault = allocation_fault.load(std::memory_order_relaxed);
  return fault && fault(size);
}

void* allocate(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : mi_malloc_aligned(size ? size : 1, alignment);
}

void* allocate_zeroed(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : mi_zalloc_aligned(size ? size : 1, alignment);
}

void deallocate(void* p) noexcept { mi_free(p); }

}  // namespace kvasir
