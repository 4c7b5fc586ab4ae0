#include "driver.h"

#include <dlfcn.h>

#include <new>

#include "backend/device_operations.h"

// The kernels of the .cu files, for all architectures: embed.S.
#define KVASIR_IMAGE(name) extern "C" const unsigned char kvasir_cuda_##name[];
KVASIR_KERNEL_MODULES(KVASIR_IMAGE)
#undef KVASIR_IMAGE

namespace kvasir {
namespace cuda {
namespace {

constexpr int oldest_driver = 12000;

struct Loaded {
  Driver functions;
  int error = 0;
};

// Never unloaded: the driver does not support it.
Loaded load() {
  Loaded out;
  out.error = no_driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return out;
  Driver& d = out.functions;
#define KVASIR_NAME_OF(f) #f
#define KVASIR_FIND(f)                                                             \
  if (!(d.f = reinterpret_cast<decltype(d.f)>(dlsym(library, KVASIR_NAME_OF(f))))) \
    return out.error = old_driver, out;
  KVASIR_DRIVER_FUNCTIONS(KVASIR_FIND)
#undef KVASIR_FIND
#undef KVASIR_NAME_OF
  int version = 0;
  out.error = d.cuInit(0);
  if (!out.error) out.error = d.cuDriverGetVersion(&version);
  if (!out.error && version < oldest_driver) out.error = old_driver;
  return out;
}

const Loaded& loaded() {
  static const Loaded result = load();
  return result;
}

}  // namespace

const Driver& driver() { return loaded().functions; }

namespace {

int count(int* devices) {
  *devices = 0;
  return loaded().error ? loaded().error : driver().cuDeviceGetCount(devices);
}

const char* error_text(int error) {
  const char* text = nullptr;
  if (error == no_driver) return "no NVIDIA driver is installed (libcuda.so.1)";
  if (error == old_driver) return "the NVIDIA driver is older than CUDA 12";
  if (driver().cuGetErrorString(static_cast<CUresult>(error), &text) || !text)
    return "unknown error";
  return text;
}

bool is_out_of_memory(int error) { return error == CUDA_ERROR_OUT_OF_MEMORY; }

int close(DeviceContext* c) {
  {
    const Current current(c);
    for (CUmodule module : c->modules)
      if (module) (void)driver().cuModuleUnload(module);
  }
  const int error = driver().cuDevicePrimaryCtxRelease(c->device);
  delete c;
  return error;
}

int load_kernels(DeviceContext* c) {
  const Current current(c);
  if (current.error()) return current.error();
#define KVASIR_IMAGE(name) kvasir_cuda_##name,
  const void* const images[] = {KVASIR_KERNEL_MODULES(KVASIR_IMAGE)};
#undef KVASIR_IMAGE
  const bool has_all = c->major == 9 && c->minor == 0;
  for (unsigned i = 0; i < (has_all ? kernel_modules : common_modules); ++i)
    if (const int error = driver().cuModuleLoadData(&c->modules[i], images[i])) return error;
  try {
    return find_kernels(c);
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

int attribute(CUdevice device, CUdevice_attribute attribute_id, int* error) {
  int value = 0;
  if (!*error) *error = driver().cuDeviceGetAttribute(&value, attribute_id, device);
  return value;
}

int open(int index, DeviceContext** out) {
  auto* c = new (std::nothrow) DeviceContext;
  if (!c) return CUDA_ERROR_OUT_OF_MEMORY;
  int error = driver().cuDeviceGet(&c->device, index);
  c->major = attribute(c->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &error);
  c->minor = attribute(c->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &error);
  c->multiprocessors =
      static_cast<uint32_t>(attribute(c->device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &error));
  c->shared_bytes = static_cast<uint32_t>(
      attribute(c->device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &error));
  c->block_shared_bytes = static_cast<uint32_t>(
      attribute(c->device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &error));
  if (!error) error = driver().cuDevicePrimaryCtxRetain(&c->context, c->device);
  if (error) return delete c, error;
  error = load_kernels(c);
  if (error) return (void)close(c), error;
  *out = c;
  return 0;
}

int capability(int index, int* major, int* minor) {
  CUdevice device = 0;
  int error = driver().cuDeviceGet(&device, index);
  *major = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &error);
  *minor = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &error);
  return error;
}

int describe(DeviceContext* c, DeviceInfo* out) {
  const Current current(c);
  int error = current.error();
  if (!error) error = driver().cuDeviceGetName(out->name, sizeof out->name, c->device);
  out->multiprocessors = c->multiprocessors;
  std::size_t unused = 0, all = 0;
  if (!error) error = driver().cuMemGetInfo(&unused, &all);
  out->bytes = all;
  out->free_bytes = unused;
  out->block_bytes = uint64_t{32} << 20;
  out->registration_bytes = uint64_t{256} << 20;  // an H200's driver pins 8 GB in 0.29 to 0.42 s
  return error;
}

CUdeviceptr address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

int allocate(DeviceContext* c, std::size_t size, void** out) {
  const Current current(c);
  if (current.error()) return current.error();
  CUdeviceptr memory = 0;
  if (const int error = driver().cuMemAlloc(&memory, size ? size : 1)) return error;
  *out = reinterpret_cast<void*>(memory);
  return 0;
}

int release(DeviceContext* c, void* memory) {
  const Current current(c);
  return current.error() ? current.error() : driver().cuMemFree(address(memory));
}

int allocate_host(DeviceContext* c, std::size_t size, void** out) {
  const Current current(c);
  return current.error() ? current.error()
                         : driver().cuMemHostAlloc(out, size ? size : 1, CU_MEMHOSTALLOC_PORTABLE);
}

int release_host(DeviceContext* c, void* memory) {
  const Current current(c);
  return current.error() ? current.error() : driver().cuMemFreeHost(memory);
}

int map_host(DeviceContext* c, const void* memory, uint64_t* out) {
  const Current current(c);
  CUdeviceptr seen = 0;
  const int error = current.error()
                        ? current.error()
                        : driver().cuMemHostGetDevicePointer(&seen, const_cast<void*>(memory), 0);
  *out = seen;
  return error;
}

// Read-only memory, such as a file mapping, is registered as read-only where the device supports
// it.
int register_host(DeviceContext* c, const void* memory, std::size_t size, bool written,
                  uint64_t* out) {
  const Current current(c);
  if (current.error()) return current.error();
  void* const at = const_cast<void*>(memory);
  constexpr unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  int error = written ? CUDA_ERROR_NOT_SUPPORTED
                      : driver().cuMemHostRegister(at, size, flags | CU_MEMHOSTREGISTER_READ_ONLY);
  if (error) error = driver().cuMemHostRegister(at, size, flags);
  if (error) return error;
  if ((error = map_host(c, memory, out))) (void)driver().cuMemHostUnregister(at);
  return error;
}

int unregister_host(DeviceContext* c, const void* memory) {
  const Current current(c);
  return current.error() ? current.error()
                         : driver().cuMemHostUnregister(const_cast<void*>(memory));
}

int open_stream(DeviceContext* c, DeviceStream** out) {
  const Current current(c);
  if (current.error()) return current.error();
  auto* s = new (std::nothrow) DeviceStream{c, nullptr, nullptr};
  if (!s) return CUDA_ERROR_OUT_OF_MEMORY;
  if (const int error = driver().cuStreamCreate(&s->stream, CU_STREAM_NON_BLOCKING))
    return delete s, error;
  if (const int error = driver().cuEventCreate(&s->reached, CU_EVENT_DISABLE_TIMING))
    return (void)driver().cuStreamDestroy(s->stream), delete s, error;
  *out = s;
  return 0;
}

int wait(DeviceStream* s) {
  const Current current(s->context);
  return current.error() ? current.error() : driver().cuStreamSynchronize(s->stream);
}

int close_stream(DeviceStream* s) {
  const int waited = wait(s);
  const Current current(s->context);
  if (!current.error()) (void)driver().cuEventDestroy(s->reached);
  const int closed = current.error() ? current.error() : driver().cuStreamDestroy(s->stream);
  delete s;
  return waited ? waited : closed;
}

int after(DeviceStream* s, DeviceStream* other) {
  const Current current(s->context);
  if (current.error()) return current.error();
  const int error = driver().cuEventRecord(other->reached, other->stream);
  return error ? error : driver().cuStreamWaitEvent(s->stream, other->reached, 0);
}

int upload(DeviceStream* s, void* to, const void* from, std::size_t size) {
  const Current current(s->context);
  return current.error() ? current.error()
                         : driver().cuMemcpyHtoDAsync(address(to), from, size, s->stream);
}

int download(DeviceStream* s, void* to, const void* from, std::size_t size) {
  const Current current(s->context);
  return current.error() ? current.error()
                         : driver().cuMemcpyDtoHAsync(to, address(from), size, s->stream);
}

int begin_graph(DeviceStream* s) {
  const Current current(s->context);
  return current.error()
             ? current.error()
             : driver().cuStreamBeginCapture(s->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

CUgraphExec executable(const DeviceGraph* graph) {
  return reinterpret_cast<CUgraphExec>(const_cast<DeviceGraph*>(graph));
}

int end_graph(DeviceStream* s, DeviceGraph** out) {
  *out = nullptr;
  const Current current(s->context);
  CUgraph graph = nullptr;
  if (current.error()) return current.error();
  if (const int error = driver().cuStreamEndCapture(s->stream, &graph)) return error;
  CUgraphExec exec = nullptr;
  const int error = driver().cuGraphInstantiate(&exec, graph, 0);
  (void)driver().cuGraphDestroy(graph);
  *out = reinterpret_cast<DeviceGraph*>(exec);
  return is_out_of_memory(error) ? 0 : error;
}

int run_graph(DeviceStream* s, const DeviceGraph* graph) {
  const Current current(s->context);
  return current.error() ? current.error() : driver().cuGraphLaunch(executable(graph), s->stream);
}

int release_graph(DeviceStream* s, DeviceGraph* graph) {
  const Current current(s->context);
  return current.error() ? current.error() : driver().cuGraphExecDestroy(executable(graph));
}

DeviceKernels make_table() {
  DeviceKernels k{};
#define KVASIR_FILL(name) k.name = name;
  KVASIR_DEVICE_MEMORY(KVASIR_FILL)
#undef KVASIR_FILL
  fill_operations(&k);
  return k;
}

}  // namespace
}  // namespace cuda

const DeviceKernels* cuda_kernels() {
  static const DeviceKernels table = cuda::make_table();
  return &table;
}

}  // namespace kvasir
