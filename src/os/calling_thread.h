// What a host has set for its own thread and what must not change the library's work:
// floating-point environment and cancellation.
#pragma once

#include <cfenv>
#include <cstdint>

namespace kvasir::os {

// The library's own floating-point environment on the calling thread: rounding to nearest,
// subnormal numbers as they are, no exception traps. Results then depend on no host, and no
// operation raises SIGFPE.
void use_own_float_environment();

// While it lives, the calling thread works for the library: in the library's own floating-point
// environment, and not to be cancelled. pthread_cancel then takes effect at the thread's next
// cancellation point after it. Windows has no cancellation.
class CallingThread {
 public:
  CallingThread() { enter(); }
  // Where the host has asynchronous cancellation and asked for it meanwhile, the thread ends here,
  // by unwinding.
  ~CallingThread() noexcept(false) { leave(); }
  CallingThread(const CallingThread&) = delete;
  CallingThread& operator=(const CallingThread&) = delete;

  // Between the two the thread is the host's as before; what the host then changes is kept for it.
  void leave();
  void enter();

 private:
#if defined(__x86_64__)
  struct FloatEnvironment {
    uint32_t x87[7];  // as fnstenv writes it
    uint32_t mxcsr;
  };
#elif defined(__aarch64__)
  struct FloatEnvironment {
    uint64_t control, status;
  };
#else
  using FloatEnvironment = std::fenv_t;
#endif
  static FloatEnvironment save_float_environment();
  static void restore_float_environment(const FloatEnvironment& host);

  FloatEnvironment host_floats_;
  int host_cancellation_ = 0;  // pthread_setcancelstate's
};

}  // namespace kvasir::os
