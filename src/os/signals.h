// A guest's threads do not run its host's signal handlers.
#pragma once

#include <cstddef>

namespace kvasir::os {

// While it is there, the calling thread holds signals back; threads that it starts meanwhile do so
// for good. What is sent to the process then goes to threads of the host, which may be waiting for
// it. Faults and profiling concern the thread itself and are let through.
class SignalsHeld {
 public:
  SignalsHeld();
  ~SignalsHeld();
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  alignas(std::max_align_t) unsigned char before_[128];  // the system's set of signals
};

}  // namespace kvasir::os
