// The beginning of a kernel that may be started before the one before it in its stream has ended (programmatic dependent launch): from compute
// capability 9.0 on that hides what a launch takes, and the first reads of weights, which no kernel writes.
#pragma once

#include <cuda_runtime.h>

namespace kvasir::cuda {

// Comes before anything that the kernel before may have written, or may still read, is touched.
__device__ inline void after_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void prefetch([[maybe_unused]] const void* weights) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(weights));
#endif
}

}  // namespace kvasir::cuda
