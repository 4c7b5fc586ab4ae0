// Tiles of rows in shared memory: asynchronous copies to them, and loads of matrices for tensor
// cores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvasir::cuda {

template <uint32_t x>
struct Constant {
  static constexpr uint32_t value = x;
};

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
// The same, or zeros.
__device__ inline void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0));
}
__device__ inline void copy_word_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0));
}
__device__ inline void copy_words_async(uint32_t to, const void* from) {  // two
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}
__device__ inline void copies_given() { asm volatile("cp.async.commit_group;"); }
__device__ inline void copies_done() { asm volatile("cp.async.wait_group 0;"); }

__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

}  // namespace kvasir::cuda
