#include "failing_allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

#include "base/memory.h"
#include "fault_count.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<long> allocations_seen{0};
std::atomic<std::size_t> largest_asked{0};
long first_failing = 0;
bool only_once = true;

bool must_fail(std::size_t size) {
  if (!counting.load(std::memory_order_acquire)) return false;
  for (std::size_t before = largest_asked;
       size > before && !largest_asked.compare_exchange_weak(before, size);) {
  }
  const long now = allocations_seen.fetch_add(1);
  return only_once ? now == first_failing : now >= first_failing;
}

bool fault(std::size_t size) { return must_fail(size); }

void* allocate_counted(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : std::malloc(size ? size : 1);
}

void* allocate_or_throw(std::size_t size) {
  if (void* p = allocate_counted(size)) return p;
  throw std::bad_alloc();
}

}  // namespace

FailingAllocations::FailingAllocations(long first, bool once) {
  first_failing = first;
  only_once = once;
  allocations_seen = 0;
  largest_asked = 0;
  kvasir::allocation_fault = fault;
  counting = true;
}

FailingAllocations::~FailingAllocations() {
  counting = false;
  kvasir::allocation_fault = nullptr;
  if (reached())
    count_faults(only_once ? "allocation fails, once" : "allocation fails, and all after it");
}

bool FailingAllocations::reached() const { return allocations_seen > first_failing; }
std::size_t FailingAllocations::largest() const { return largest_asked; }

void* operator new(std::size_t size) { return allocate_or_throw(size); }
void* operator new[](std::size_t size) { return allocate_or_throw(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allocate_counted(size);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return allocate_counted(size);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
