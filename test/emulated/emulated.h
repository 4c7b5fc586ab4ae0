// GPUs emulated by the CPU: they replace kernels/cuda in tests on machines without GPUs. They are
// as lazy and as strict as a device may be:
//  - Work is done when it is waited for and not before.
//  - Only a device accesses its memory. It reads only host memory that was registered, at device
//    addresses of its own.
//  - Vector loads of kernels must be aligned (alignment.h).
//  - Any call can be made to fail.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "base/cancel.h"

namespace kvasir::emulated {

// errors of the table
constexpr int no_devices = 1, out_of_memory = 2, refused = 3, lost = 700, misaligned = 716;

// What tests change and look at. Arrays: by the device's number.
struct Machine {
  static constexpr int most = 3;
  std::atomic<int> count{most};  // 0: an error, as where there is no driver
  std::atomic<int> capability[most] = {9, 9, 9};
  // when nothing is taken
  std::atomic<uint64_t> free_bytes[most] = {uint64_t{1} << 30, uint64_t{1} << 30,
                                            uint64_t{1} << 30};
  // more than that is not given
  std::atomic<uint64_t> max_bytes[most] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
  std::atomic<uint64_t> bytes[most] = {};                 // that are taken
  std::atomic<uint64_t> opened[most] = {};                // contexts that are open
  std::atomic<int> shared{0};                             // pieces of host memory
  std::atomic<uint64_t> registration_bytes{UINT64_MAX};   // of devices that are opened from now on
  std::atomic<int> refuses_sharing{0};                    // by this error, all of it
  std::atomic<uint64_t> block_bytes{uint64_t{32} << 20};  // so too
  std::atomic<uint32_t> multiprocessors{2};
  // bytes that came to a device by streams that compute, which wait for them,
  std::atomic<uint64_t> uploaded[most] = {};
  std::atomic<uint64_t> uploaded_beside[most] = {};  // and by others
  // products of several inputs end in other bits than those of one, as those of GPUs may
  std::atomic<int> several_differ{0};
  std::atomic<int> has_halves{0};           // matrices stay where the executor keeps halves
  std::atomic<uint64_t> kept_reads{0};      // of matrices that have stayed
  std::atomic<const char*> misaligned{""};  // what began elsewhere than a kernel reads it, last
  // the device that is lost at its next call, and stays lost until it is opened again
  std::atomic<int> lost{-1};

  // allocations, streams, graphs, contexts and shared memory, of all devices
  std::atomic<uint64_t> held{0};
  std::atomic<uint64_t> graphs{0};  // that were made
  // waits for a stream that had work; allocations, of host memory too; what a program enqueues: an
  // operation, a copy or a graph
  std::atomic<uint64_t> waits{0}, allocations{0}, enqueued{0};
  std::atomic<uint64_t> calls{0};     // of the table, those that may fail
  std::atomic<uint64_t> fails_at{0};  // the call with this number fails,
  // with this error; `lost`: and so do all after it of that device; 0: not at all,
  std::atomic<int> fails_with{0};
  std::atomic<Cancel*> fires{nullptr};  // but then this is fired
};
Machine& machine();

// A test makes calls fail, of as many as it counted: about `places` of them, this many calls apart.
// KVASIR_FAULT_STEP in the environment is the most calls between two: suite `long` sets it.
inline uint64_t fault_step(uint64_t calls, uint64_t places) {
  const char* const most = std::getenv("KVASIR_FAULT_STEP");
  const uint64_t step = std::max<uint64_t>(1, calls / places);
  return most ? std::clamp<uint64_t>(std::strtoull(most, nullptr, 10), 1, step) : step;
}

// Sets a number of the machine's for as long as a test takes.
template <class T>
class Changed {
 public:
  template <class V>
  Changed(std::atomic<T>& what, V to) : what_(what), before_(what.exchange(static_cast<T>(to))) {}
  ~Changed() { what_ = before_; }
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;

 private:
  std::atomic<T>& what_;
  const T before_;
};

}  // namespace kvasir::emulated
