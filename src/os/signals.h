// Keeps the library's threads from running the host's signal handlers.
#pragma once

#include <cstddef>

namespace kvasir::os {

// While it exists, the calling thread blocks signals, and threads that it starts block them
// permanently. Signals to the process then go to threads of the host, which may wait for them.
// Faults and profiling signals belong to the thread itself and are not blocked.
class SignalsHeld {
 public:
  SignalsHeld();
  ~SignalsHeld();
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  alignas(std::max_align_t) unsigned char before_[128];  // sigset_t
};

}  // namespace kvasir::os
