// The beginning of a kernel that may be started before the one before it in its stream has ended
// (programmatic dependent launch): from compute capability 9.0 on that hides what a launch takes,
// and the first reads of weights, which no kernel writes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvasir::cuda {

// Comes before anything that the kernel before may have written, or may still read, is touched.
__device__ inline void after_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// In a kernel of little work, before after_previous(): where there is room the next one may begin
// even before the one before this one has ended, and bring its weights near meanwhile. It waits for
// this one's end, thus for both.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void prefetch([[maybe_unused]] const void* weights) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(weights));
#endif
}

// By one thread, all of it: multiples of 16.
__device__ inline void prefetch_range([[maybe_unused]] const void* weights,
                                      [[maybe_unused]] uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(weights)),
      "r"(bytes));
#endif
}

}  // namespace kvasir::cuda
