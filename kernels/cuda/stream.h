// What the files of this folder share: the stream, and the form of a function of the table.
#pragma once

#include <cuda_runtime_api.h>

#include "compute/device.h"

struct kvasir::DeviceStream {
  int device;
  cudaStream_t stream;
};

namespace kvasir::cuda {

// Threads of a process have a current device each: whoever gives work says which.
// An error that the thread was told before is not taken for one of what comes now; a device that has failed says so again.
inline int begin(DeviceStream* s) {
  (void)cudaGetLastError();
  return cudaSetDevice(s->device);
}
// After kernels were launched: whether they could be.
inline int launched() { return cudaPeekAtLastError(); }

inline unsigned blocks_for(std::size_t n, unsigned each) { return static_cast<unsigned>((n + each - 1) / each); }

void fill_matmul(DeviceKernels* table);
void fill_elementwise(DeviceKernels* table);

}  // namespace kvasir::cuda
