// NVIDIA's driver, loaded when the first GPU is opened: the library does not link with CUDA. And
// common types of this folder: the context of a device with its kernels, and streams.
//
// The host of this library may use the same GPUs. So the context is the primary one of the process,
// as in CUDA's runtime, and a thread gets its own current context back when a call returns.
#pragma once

#include <cuda.h>

#include <functional>
#include <map>
#include <string>

#include "backend/device.h"

namespace kvasir::cuda {

// clang-format off
#define KVASIR_DRIVER_FUNCTIONS(F) \
  F(cuInit) F(cuDriverGetVersion) F(cuGetErrorString) F(cuDeviceGetCount) F(cuDeviceGet) \
  F(cuDeviceGetName) F(cuDeviceGetAttribute) F(cuDevicePrimaryCtxRetain) \
  F(cuDevicePrimaryCtxRelease) F(cuCtxPushCurrent) F(cuCtxPopCurrent) F(cuMemGetInfo) \
  F(cuMemAlloc) F(cuMemFree) F(cuMemHostAlloc) F(cuMemFreeHost) F(cuMemHostRegister) \
  F(cuMemHostUnregister) F(cuMemHostGetDevicePointer) F(cuStreamCreate) F(cuStreamDestroy) \
  F(cuStreamSynchronize) F(cuMemcpyHtoDAsync) F(cuMemcpyDtoHAsync) F(cuMemcpyDtoDAsync) \
  F(cuStreamBeginCapture) F(cuStreamEndCapture) F(cuGraphInstantiate) F(cuGraphLaunch) \
  F(cuGraphDestroy) F(cuGraphExecDestroy) F(cuModuleLoadData) F(cuModuleUnload) \
  F(cuModuleGetFunction) F(cuFuncSetAttribute) F(cuLaunchKernelEx) F(cuEventCreate) \
  F(cuEventDestroy) F(cuEventRecord) F(cuStreamWaitEvent)
// clang-format on

// By the names that the driver exports: the header's macros add versions.
struct Driver {
#define KVASIR_DECLARE(f) decltype(&::f) f = nullptr;
  KVASIR_DRIVER_FUNCTIONS(KVASIR_DECLARE)
#undef KVASIR_DECLARE
};

// Loaded by count(), which is called first.
const Driver& driver();

constexpr int no_driver = -1, old_driver = -2;  // errors besides those of the driver

// The .cu files. The last, *_wide, are of compute capability 9.0: other devices have no modules
// of them.
// clang-format off
#define KVASIR_KERNEL_MODULES(F) \
  F(elementwise) F(matmul) F(attention) F(select) F(prefill_attention) F(prefill_tiles) F(knn) \
  F(matmul_few) F(experts) F(matmul_experts) F(window_attention) F(recurrent) F(matmul_many) \
  F(matmul_wide) F(prefill_wide)
// clang-format on
#define KVASIR_MODULE(name) name,
enum class KernelModule : unsigned { KVASIR_KERNEL_MODULES(KVASIR_MODULE) };
#undef KVASIR_MODULE
constexpr unsigned kernel_modules = static_cast<unsigned>(KernelModule::prefill_wide) + 1;
constexpr unsigned common_modules = static_cast<unsigned>(KernelModule::matmul_wide);

}  // namespace kvasir::cuda

namespace kvasir {

struct DeviceContext {
  CUdevice device = 0;
  CUcontext context = nullptr;
  int major = 0, minor = 0;  // compute capability
  uint32_t multiprocessors = 0;
  // Bytes of shared memory of a multiprocessor, and the most that a block may use.
  uint32_t shared_bytes = 0, block_shared_bytes = 0;
  CUmodule modules[cuda::kernel_modules] = {};
  std::map<std::string, CUfunction, std::less<>> kernels;  // all kernels, by name
};

struct DeviceStream {
  DeviceContext* context;
  CUstream stream;
  CUevent reached;  // event that other streams wait for: after()
};

namespace cuda {

// Makes the context the current one of the thread, until the end of the scope.
class Current {
 public:
  explicit Current(const DeviceContext* c) : error_(driver().cuCtxPushCurrent(c->context)) {}
  ~Current() {
    CUcontext popped;
    if (!error_) (void)driver().cuCtxPopCurrent(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  int error() const { return error_; }

 private:
  const int error_;
};

int find_kernels(DeviceContext* context);  // after its modules are loaded; throws std::bad_alloc
void fill_operations(DeviceKernels* table);

}  // namespace cuda
}  // namespace kvasir
