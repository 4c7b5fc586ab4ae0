// The allocator of large arrays: floats, tokens, KV extents. Small objects use operator new. Only
// memory.cc includes mimalloc; a library must not replace the malloc of its host.
//
// A failed allocation throws std::bad_alloc, which src/api turns into KV_NO_MEMORY.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace kvasir {

// Memory of `size` bytes aligned to 64, uninitialised (or zeroed); null where there is none. Size 0
// gives a valid pointer.
[[nodiscard]] void* allocate(std::size_t size) noexcept;
[[nodiscard]] void* allocate_zeroed(std::size_t size) noexcept;
void deallocate(void* p) noexcept;
constexpr std::size_t system_page = 4096;
// allocate() in whole system pages, not shared with other allocations, so that a device can
// register them.
[[nodiscard]] void* allocate_pages(std::size_t size) noexcept;
[[nodiscard]] void* allocate_zeroed_pages(std::size_t size) noexcept;
void deallocate_pages(void* p) noexcept;

// Tests set this to fail chosen allocations: it gets the size and returns true to fail. Normally
// null.
using AllocationFault = bool (*)(std::size_t size);
extern std::atomic<AllocationFault> allocation_fault;

template <class T>
struct Allocator {
  using value_type = T;
  // libc++ would otherwise assign element by element.
  using propagate_on_container_move_assignment = std::true_type;
  Allocator() = default;
  template <class U>
  Allocator(const Allocator<U>&) noexcept {}  // NOLINT: the standard requires it implicit
  T* allocate(std::size_t n) {
    if (n > SIZE_MAX / sizeof(T)) throw std::bad_alloc();
    void* p = kvasir::allocate(n * sizeof(T));
    if (!p) throw std::bad_alloc();
    return static_cast<T*>(p);
  }
  void deallocate(T* p, std::size_t) noexcept { kvasir::deallocate(p); }
  bool operator==(const Allocator&) const { return true; }
};

// A vector whose storage is 64-byte aligned and comes from the library's allocator.
template <class T>
using Array = std::vector<T, Allocator<T>>;

// Makes room for more elements at an amortised cost: reserve() allocates exactly the requested
// size, and so moves all elements each time.
template <class T>
void make_room_for(Array<T>* array, std::size_t more) {
  const std::size_t wanted = array->size() + more,
                    grown = array->capacity() + array->capacity() / 2;
  if (wanted > array->capacity()) array->reserve(wanted > grown ? wanted : grown);
}

struct Deallocate {
  void operator()(void* p) const noexcept { deallocate(p); }
};

// Uninitialised array of a trivial type, for buffers that are written before they are read.
template <class T>
using Buffer = std::unique_ptr<T[], Deallocate>;

template <class T>
Buffer<T> make_buffer(std::size_t n) {
  static_assert(std::is_trivially_destructible_v<T>);
  return Buffer<T>(Allocator<T>().allocate(n));
}

// Whether p is the only reference, so that its owner may write; true for null. Synchronises with
// the other threads that have released copies.
template <class T>
bool is_sole(const std::shared_ptr<T>& p) {
  // use_count() alone does not synchronise with their reads; a change of the count does.
  return p.use_count() < 2 && (std::shared_ptr<T>(p), true);
}

}  // namespace kvasir
