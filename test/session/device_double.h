// GPUs that the processor plays, so that what the library does with them is tested where there are none: device_double.cc has the table that
// kernels/cuda has for real ones. Memory is told apart: work that follows a pointer into another one's memory, or into memory that nobody has shared, fails.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvasir::test {

struct DeviceDouble {
  static constexpr int most = 3;
  std::atomic<int> count{most};            // 0: an error, as where there is no driver
  std::atomic<int> capability[most] = {9, 9, 9};
  std::atomic<uint64_t> free_bytes[most] = {uint64_t{1} << 30, uint64_t{1} << 30, uint64_t{1} << 30};
  std::atomic<uint64_t> most_bytes[most] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};  // more than that is not given
  std::atomic<uint64_t> bytes[most] = {};  // that are taken
  std::atomic<int> lost{-1};               // whose work fails
  std::atomic<int> shared{0};              // pieces of the processor's memory
  std::atomic<uint64_t> opened[most] = {}; // contexts that are open
};
DeviceDouble& device_double();

}  // namespace kvasir::test
