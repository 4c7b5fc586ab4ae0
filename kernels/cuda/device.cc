// The table of the CUDA backend, and its memory and streams. This file is compiled by the host's compiler.
#include <cstring>
#include <new>

#include "stream.h"

namespace kvasir {
namespace {

int count(int* devices) { return cudaGetDeviceCount(devices); }

int describe(int device, DeviceInfo* out) {
  (void)cudaGetLastError();
  cudaDeviceProp p;
  if (const int error = cudaGetDeviceProperties(&p, device)) return error;
  if (const int error = cudaSetDevice(device)) return error;
  std::size_t unused, all;
  if (const int error = cudaMemGetInfo(&unused, &all)) return error;
  static_assert(sizeof p.name > sizeof out->name);
  std::memcpy(out->name, p.name, sizeof out->name - 1);
  out->name[sizeof out->name - 1] = 0;
  out->bytes = all;
  out->free_bytes = unused;
  out->multiprocessors = static_cast<uint32_t>(p.multiProcessorCount);
  out->major = p.major;
  out->minor = p.minor;
  return 0;
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
bool is_out_of_memory(int error) { return error == cudaErrorMemoryAllocation; }

// A refused allocation leaves its error behind, which the next launch would be taken to have.
int forgotten(int error) { return error ? (void)cudaGetLastError(), error : 0; }

int allocate(int device, std::size_t size, void** out) {
  if (const int error = cudaSetDevice(device)) return error;
  return forgotten(cudaMalloc(out, size ? size : 1));
}

int release(int device, void* memory) {
  if (const int error = cudaSetDevice(device)) return error;
  return cudaFree(memory);
}

int allocate_host(int device, std::size_t size, void** out) {
  if (const int error = cudaSetDevice(device)) return error;
  return forgotten(cudaHostAlloc(out, size ? size : 1, cudaHostAllocPortable));
}

int release_host(int device, void* memory) {
  if (const int error = cudaSetDevice(device)) return error;
  return cudaFreeHost(memory);
}

int open_stream(int device, DeviceStream** out) {
  if (const int error = cudaSetDevice(device)) return error;
  cudaStream_t stream;
  if (const int error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return error;
  *out = new (std::nothrow) DeviceStream{device, stream};
  if (*out) return 0;
  cudaStreamDestroy(stream);
  return cudaErrorMemoryAllocation;
}

int close_stream(DeviceStream* s) {
  const int error = cuda::begin(s), waited = cudaStreamSynchronize(s->stream), closed = cudaStreamDestroy(s->stream);
  delete s;
  return error ? error : waited ? waited : closed;
}

int wait(DeviceStream* s) {
  if (const int error = cuda::begin(s)) return error;
  return cudaStreamSynchronize(s->stream);
}

int copy(DeviceStream* s, void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  if (const int error = cuda::begin(s)) return error;
  return cudaMemcpyAsync(to, from, size, kind, s->stream);
}
int upload(DeviceStream* s, void* to, const void* from, std::size_t size) { return copy(s, to, from, size, cudaMemcpyHostToDevice); }
int download(DeviceStream* s, void* to, const void* from, std::size_t size) { return copy(s, to, from, size, cudaMemcpyDeviceToHost); }

cudaGraphExec_t executable(const DeviceGraph* graph) { return reinterpret_cast<cudaGraphExec_t>(const_cast<DeviceGraph*>(graph)); }

int begin_graph(DeviceStream* s) {
  if (const int error = cuda::begin(s)) return error;
  return cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal);
}

int end_graph(DeviceStream* s, DeviceGraph** out) {
  *out = nullptr;
  cudaGraph_t graph = nullptr;
  if (const int error = cudaStreamEndCapture(s->stream, &graph)) return error;
  cudaGraphExec_t exec = nullptr;
  const int error = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  *out = reinterpret_cast<DeviceGraph*>(exec);
  return is_out_of_memory(error) ? 0 : error;
}

int run_graph(DeviceStream* s, const DeviceGraph* graph) {
  if (const int error = cuda::begin(s)) return error;
  return cudaGraphLaunch(executable(graph), s->stream);
}

int release_graph(DeviceGraph* graph) { return cudaGraphExecDestroy(executable(graph)); }

DeviceKernels make_table() {
  DeviceKernels k{};
  k.count = count;
  k.describe = describe;
  k.error_text = error_text;
  k.is_out_of_memory = is_out_of_memory;
  k.allocate = allocate;
  k.release = release;
  k.allocate_host = allocate_host;
  k.release_host = release_host;
  k.open_stream = open_stream;
  k.close_stream = close_stream;
  k.wait = wait;
  k.begin_graph = begin_graph;
  k.end_graph = end_graph;
  k.run_graph = run_graph;
  k.release_graph = release_graph;
  k.upload = upload;
  k.download = download;
  cuda::fill_matmul(&k);
  cuda::fill_elementwise(&k);
  return k;
}

}  // namespace

const DeviceKernels* cuda_kernels() {
  static const DeviceKernels table = make_table();
  return &table;
}

}  // namespace kvasir
