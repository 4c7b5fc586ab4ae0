// The floating-point environment: uses the registers where they are known, because <cfenv> need not
// reset the treatment of subnormal numbers.
#include "os/calling_thread.h"

namespace kvasir::os {

#if defined(__x86_64__)

void use_own_float_environment() {
  constexpr uint32_t mxcsr = 0x1f80;   // all exceptions masked, to nearest, neither FTZ nor DAZ
  constexpr uint16_t control = 0x37f;  // likewise, with the full precision of long double
  __asm__ volatile("ldmxcsr %0\n\tfnclex\n\tfldcw %1" : : "m"(mxcsr), "m"(control) : "memory");
}

static void set_mxcsr(uint64_t before) {
  const auto mxcsr = static_cast<uint32_t>(before);
  __asm__ volatile("ldmxcsr %0" : : "m"(mxcsr) : "memory");
}

SubnormalsAsZero::SubnormalsAsZero() {
  constexpr uint32_t flushed = 0x8040;  // FTZ, DAZ
  uint32_t mxcsr;
  __asm__ volatile("stmxcsr %0" : "=m"(mxcsr) : : "memory");
  before_ = mxcsr;
  set_mxcsr(before_ | flushed);
}

SubnormalsAsZero::~SubnormalsAsZero() { set_mxcsr(before_); }

CallingThread::FloatEnvironment CallingThread::save_float_environment() {
  FloatEnvironment host;
  __asm__ volatile("fnstenv %0\n\tstmxcsr %1" : "=m"(host.x87), "=m"(host.mxcsr) : : "memory");
  return host;
}

// Restores the flags too: flags raised by the library's work would trap in the host's next
// operation.
void CallingThread::restore_float_environment(const FloatEnvironment& host) {
  __asm__ volatile("fldenv %0\n\tldmxcsr %1" : : "m"(host.x87), "m"(host.mxcsr) : "memory");
}

#elif defined(__aarch64__)

void use_own_float_environment() {
  __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %0" : : "r"(uint64_t{0}) : "memory");
}

SubnormalsAsZero::SubnormalsAsZero() {
  constexpr uint64_t flushed = uint64_t{1} << 24;  // FZ
  __asm__ volatile("mrs %0, fpcr" : "=r"(before_) : : "memory");
  __asm__ volatile("msr fpcr, %0" : : "r"(before_ | flushed) : "memory");
}

SubnormalsAsZero::~SubnormalsAsZero() {
  __asm__ volatile("msr fpcr, %0" : : "r"(before_) : "memory");
}

CallingThread::FloatEnvironment CallingThread::save_float_environment() {
  FloatEnvironment host;
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr"
                   : "=r"(host.control), "=r"(host.status)
                   :
                   : "memory");
  return host;
}

void CallingThread::restore_float_environment(const FloatEnvironment& host) {
  __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1"
                   :
                   : "r"(host.control), "r"(host.status)
                   : "memory");
}

#else

void use_own_float_environment() { (void)std::fesetenv(FE_DFL_ENV); }

SubnormalsAsZero::SubnormalsAsZero() = default;

SubnormalsAsZero::~SubnormalsAsZero() = default;

CallingThread::FloatEnvironment CallingThread::save_float_environment() {
  FloatEnvironment host;
  (void)std::fegetenv(&host);
  return host;
}

void CallingThread::restore_float_environment(const FloatEnvironment& host) {
  (void)std::fesetenv(&host);
}

#endif

}  // namespace kvasir::os
