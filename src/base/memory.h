// The allocator of everything large: arrays of floats, tokens, KV extents. Small objects use
// operator new. The only file pair that knows mimalloc; a guest library never replaces the host's
// malloc.
//
// An allocation that fails throws std::bad_alloc, which src/api turns into KV_NO_MEMORY.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace kvasir {

// Memory of `size` bytes aligned to 64, uninitialised (or zeroed); null when there is none. size 0
// gives a valid pointer.
[[nodiscard]] void* allocate(std::size_t size) noexcept;
[[nodiscard]] void* allocate_zeroed(std::size_t size) noexcept;
void deallocate(void* p) noexcept;
// The same in whole pages of the system, so that a device can be given them, and of nothing else.
[[nodiscard]] void* allocate_pages(std::size_t size) noexcept;
[[nodiscard]] void* allocate_zeroed_pages(std::size_t size) noexcept;
void deallocate_pages(void* p) noexcept;

// Tests set this to fail chosen allocations: called with the size, returns true to fail. Null
// normally.
using AllocationFault = bool (*)(std::size_t size);
extern std::atomic<AllocationFault> allocation_fault;

template <class T>
struct Allocator {
  using value_type = T;
  // libc++ otherwise wants to assign one by one
  using propagate_on_container_move_assignment = std::true_type;
  Allocator() = default;
  template <class U>
  Allocator(const Allocator<U>&) noexcept {}  // NOLINT: the standard wants it implicit
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

// Room for so many more, at a cost that does not depend on how many there are: reserve() takes
// exactly what it is asked for, and moves all of them each time.
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

// Whether nobody else has it, who may write to it then; of nothing true. Copies that other threads
// have let go of they no longer read.
template <class T>
bool is_sole(const std::shared_ptr<T>& p) {
  // use_count() alone does not wait for what they read; a count that goes up and down does
  return p.use_count() < 2 && (std::shared_ptr<T>(p), true);
}

}  // namespace kvasir
