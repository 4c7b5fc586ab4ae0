#include "base/memory.h"

#include <mimalloc.h>

#include <cstring>

// Sanitizers check blocks of operator new; mimalloc's would hide errors in the arrays in them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVASIR_WATCHED_BLOCKS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define KVASIR_WATCHED_BLOCKS 1
#endif
#endif

namespace kvasir {

constexpr std::size_t alignment = 64;  // a cache line, and the widest vector register

static std::size_t whole_pages(std::size_t size) noexcept {
  return size > SIZE_MAX - system_page ? SIZE_MAX
                                       : (size + system_page - 1) / system_page * system_page;
}

std::atomic<AllocationFault> allocation_fault{nullptr};

static bool must_fail(std::size_t size) noexcept {
  AllocationFault fault = allocation_fault.load(std::memory_order_relaxed);
  return fault && fault(size);
}

#ifdef KVASIR_WATCHED_BLOCKS

void* allocate(std::size_t size) noexcept {
  return must_fail(size) ? nullptr
                         : ::operator new (size, std::align_val_t{alignment}, std::nothrow);
}

void* allocate_zeroed(std::size_t size) noexcept {
  void* p = allocate(size);
  return p ? std::memset(p, 0, size) : nullptr;
}

void deallocate(void* p) noexcept { ::operator delete (p, std::align_val_t{alignment}); }

void* allocate_pages(std::size_t size) noexcept {
  return must_fail(size) ? nullptr
                         : ::operator new (whole_pages(size ? size : 1),
                                           std::align_val_t{system_page}, std::nothrow);
}

void* allocate_zeroed_pages(std::size_t size) noexcept {
  void* p = allocate_pages(size);
  return p ? std::memset(p, 0, size) : nullptr;
}

void deallocate_pages(void* p) noexcept { ::operator delete (p, std::align_val_t{system_page}); }

#else

void* allocate(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : mi_malloc_aligned(size ? size : 1, alignment);
}

void* allocate_zeroed(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : mi_zalloc_aligned(size ? size : 1, alignment);
}

void deallocate(void* p) noexcept { mi_free(p); }

void* allocate_pages(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : mi_malloc_aligned(whole_pages(size ? size : 1), system_page);
}
void* allocate_zeroed_pages(std::size_t size) noexcept {
  return must_fail(size) ? nullptr : mi_zalloc_aligned(whole_pages(size ? size : 1), system_page);
}

void deallocate_pages(void* p) noexcept { mi_free(p); }

#endif

}  // namespace kvasir
