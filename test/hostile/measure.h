// What a call on a hostile file may cost: 64 MB of memory and 100 ms of CPU time, whatever the file claims.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <string>
#include <utility>

#include "base/memory.h"

namespace hostile {

constexpr uint64_t max_bytes = uint64_t{64} << 20;
constexpr double max_cpu_ms = 100;

// Sanitizers take memory and time of their own: there a case shows that nothing is touched that should not be.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_measured = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
constexpr bool is_measured = false;
#else
constexpr bool is_measured = true;
#endif
#else
constexpr bool is_measured = true;
#endif

struct Cost {
  uint64_t peak_bytes = 0;          // resident memory at its peak, less what there was before; 0 where the system does not say
  uint64_t largest_allocation = 0;  // that the library's allocator was asked for
  double cpu_ms = 0;                // of all threads; 0 where the system does not say
};

inline std::atomic<std::size_t> largest_asked{0};

inline bool note_allocation(std::size_t size) {
  for (std::size_t before = largest_asked; size > before && !largest_asked.compare_exchange_weak(before, size);) {}
  return false;
}

// "VmRSS" or "VmHWM" of this process, in bytes; 0 where there is no /proc.
inline uint64_t memory_now(const char* key) {
  std::ifstream status("/proc/self/status");
  const std::string wanted = std::string(key) + ":";
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(wanted)) return std::stoull(line.substr(wanted.size())) * 1024;
  return 0;
}

// Makes VmHWM count from now on.
inline bool reset_peak() {
  std::ofstream refs("/proc/self/clear_refs");
  return static_cast<bool>(refs << "5" << std::flush);
}

inline double cpu_ms_now() {
#ifdef _WIN32
  return 0;  // clock() is wall time there
#else
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) / 1e6;
#endif
}

template <class F>
Cost measure(F&& call) {
  largest_asked = 0;
  const bool resets = reset_peak();
  const uint64_t before = resets ? memory_now("VmRSS") : 0;
  kvasir::allocation_fault = note_allocation;
  const double begin = cpu_ms_now();
  std::forward<F>(call)();
  Cost cost;
  cost.cpu_ms = cpu_ms_now() - begin;
  kvasir::allocation_fault = nullptr;
  cost.largest_allocation = largest_asked;
  const uint64_t peak = resets ? memory_now("VmHWM") : 0;
  cost.peak_bytes = peak > before ? peak - before : 0;
  return cost;
}

// Whether a refusal was cheap enough. A call that took too long is tried again: another process may have evicted what it reads.
inline bool is_cheap(const Cost& cost) {
  return !is_measured || (cost.peak_bytes < max_bytes && cost.largest_allocation < max_bytes && cost.cpu_ms < max_cpu_ms);
}

inline std::string to_text(const Cost& cost) {
  return std::to_string(cost.peak_bytes >> 10) + " KiB at its peak, " + std::to_string(cost.largest_allocation >> 10) +
         " KiB asked for at once, " + std::to_string(cost.cpu_ms) + " ms of CPU time";
}

}  // namespace hostile
