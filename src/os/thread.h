// A thread of the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"

namespace kvasir::os {

// Joined by the destructor. Its stack size does not depend on the host's limits: the deepest work
// takes a sixteenth of it; the rest is for the system and the host's thread-local variables.
class Thread {
 public:
  static constexpr std::size_t stack_bytes = std::size_t{1} << 20;

  // run(context) must not throw. Code::no_memory, Code::limit with the errno.
  static Status start(void (*run)(void* context), void* context, Thread* out);

  Thread() = default;
  Thread(Thread&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Thread& operator=(Thread&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Thread();

 private:
  uintptr_t handle_ = 0;  // of the system; 0: none
};

}  // namespace kvasir::os
