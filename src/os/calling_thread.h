// State of the host's thread that must not affect the library: the floating-point environment and
// cancellation.
#pragma once

#include <cfenv>
#include <cstdint>

namespace kvasir::os {

// Sets the library's floating-point environment on the calling thread: rounding to nearest,
// subnormal numbers kept, no exception traps. So results do not depend on the host, and no
// operation raises SIGFPE.
void use_own_float_environment();

// Scope in which subnormal numbers count as zero, where the CPU has such a mode. Many of them make
// a computation several times as slow. Within the library's floating-point environment.
class SubnormalsAsZero {
 public:
  SubnormalsAsZero();
  ~SubnormalsAsZero();
  SubnormalsAsZero(const SubnormalsAsZero&) = delete;
  SubnormalsAsZero& operator=(const SubnormalsAsZero&) = delete;

 private:
  uint64_t before_ = 0;
};

// Scope of the library's work on the calling thread: the library's floating-point environment, and
// no cancellation. pthread_cancel takes effect at the next cancellation point after it. Windows has
// no cancellation.
class CallingThread {
 public:
  CallingThread() { enter(); }
  // If the host uses asynchronous cancellation and requested it meanwhile, the thread ends here, by
  // unwinding.
  ~CallingThread() noexcept(false) { leave(); }
  CallingThread(const CallingThread&) = delete;
  CallingThread& operator=(const CallingThread&) = delete;

  // Between the two the thread has the host's state; changes by the host are kept.
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
