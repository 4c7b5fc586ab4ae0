// Rows of prefill attention as matrices of tensor cores, for any compute capability.
#pragma once

#include "attention_common.h"
#include "tiles.h"

namespace kvasir::cuda {
namespace {

__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Rows of `dim` halves in shared memory, in pieces of 16 bytes: those of eight rows that a matrix
// is loaded from occupy all banks.
template <int dim>
__device__ inline uint32_t piece(uint32_t base, uint32_t row, uint32_t at) {
  return base + row * (dim * 2) + ((at ^ (row & 7)) << 4);
}

// From row `first` on of the `room` rows that a head has.
template <int dim, int rows>
__device__ inline void copy_rows(uint32_t to, const uint16_t* from, uint32_t room, uint32_t first) {
  constexpr uint32_t pieces = dim / 8;
#pragma unroll
  for (uint32_t i = 0; i < rows * pieces / prefill_threads; ++i) {
    const uint32_t at = i * prefill_threads + threadIdx.x, row = at / pieces, own = at % pieces;
    copy_async(piece<dim>(to, row, own), from + prefill_place(room, first + row, own * 8));
  }
}

}  // namespace
}  // namespace kvasir::cuda
