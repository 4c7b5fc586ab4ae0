// Programmatic dependent launch: a kernel may start before the previous one in its stream has
// ended. From compute capability 9.0 on that hides the launch time and the first reads of weights,
// which no kernel writes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvasir::cuda {

// Call before any access to memory that an earlier kernel may have written or may still read: any
// since the stream's last copy, for those that call let_next_begin() may all be at work.
__device__ inline void after_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Call in a kernel of little work, before after_previous(). Where there is room, the next kernel
// may start before the previous one has ended, and prefetch its weights. It waits for the end of
// this one, and so for both.
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

// Prefetches by one thread; addresses and sizes are multiples of 16.
__device__ inline void prefetch_range([[maybe_unused]] const void* weights,
                                      [[maybe_unused]] uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(weights)),
      "r"(bytes));
#endif
}

}  // namespace kvasir::cuda
