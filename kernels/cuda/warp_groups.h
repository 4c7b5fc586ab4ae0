// Warp groups of compute capability 9.0: barriers in shared memory, bulk copies that they count,
// and products of halves or bytes by the four warps of a group.
//
// Matrices lie in shared memory as tiles of 64 columns, whose rows of 128 bytes are swizzled: the
// 16 bytes p of row r are at p ^ (r & 7), so that eight rows occupy all banks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvasir::cuda {
namespace {

__device__ inline void begin_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void wait_for(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}
__device__ inline void copy_tile(uint32_t to, const uint8_t* from, uint32_t bytes,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Rows of 128 bytes, swizzled, eight of them 1,024 bytes from the next eight.
__device__ inline uint64_t descriptor_of(uint32_t address) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// The same for b of a . b, whose rows are summed over; the next 64 columns begin `tile` bytes on.
__device__ inline uint64_t descriptor_of_rows(uint32_t address, uint32_t tile) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{tile >> 4} << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

#define KVASIR_FOUR(kind, d, i) kind(d[i]), kind(d[(i) + 1]), kind(d[(i) + 2]), kind(d[(i) + 3])
#define KVASIR_SIXTEEN(kind, d, i)                                                       \
  KVASIR_FOUR(kind, d, i), KVASIR_FOUR(kind, d, (i) + 4), KVASIR_FOUR(kind, d, (i) + 8), \
      KVASIR_FOUR(kind, d, (i) + 12)

// d = a . b^T, or d += where `add`: 64 rows, 64 columns, over 16 numbers.
__device__ inline void multiply_halves(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : KVASIR_SIXTEEN("+f", d, 0), KVASIR_SIXTEEN("+f", d, 16)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// d = a . b^T, or d += where `add`: 64 rows, 128 columns, over 16 numbers.
__device__ inline void multiply_halves(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : KVASIR_SIXTEEN("+f", d, 0), KVASIR_SIXTEEN("+f", d, 16), KVASIR_SIXTEEN("+f", d, 32),
        KVASIR_SIXTEEN("+f", d, 48)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// The same of signed bytes, over 32 of them; a is in registers.
__device__ inline void multiply_bytes(int (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, p;\n}"
      : KVASIR_SIXTEEN("+r", d, 0), KVASIR_SIXTEEN("+r", d, 16), KVASIR_SIXTEEN("+r", d, 32),
        KVASIR_SIXTEEN("+r", d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// d += a . b: 64 rows, 64 columns, over 16 rows of b; a is in registers.
__device__ inline void multiply_halves(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
      : KVASIR_SIXTEEN("+f", d, 0), KVASIR_SIXTEEN("+f", d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d += a . b: 64 rows, 128 columns, over 16 rows of b; a is in registers.
__device__ inline void multiply_halves(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
      : KVASIR_SIXTEEN("+f", d, 0), KVASIR_SIXTEEN("+f", d, 16), KVASIR_SIXTEEN("+f", d, 32),
        KVASIR_SIXTEEN("+f", d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d += a . b: 64 rows, 256 columns, over 16 rows of b; a is in registers.
__device__ inline void multiply_halves(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
      "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"
      : KVASIR_SIXTEEN("+f", d, 0), KVASIR_SIXTEEN("+f", d, 16), KVASIR_SIXTEEN("+f", d, 32),
        KVASIR_SIXTEEN("+f", d, 48), KVASIR_SIXTEEN("+f", d, 64), KVASIR_SIXTEEN("+f", d, 80),
        KVASIR_SIXTEEN("+f", d, 96), KVASIR_SIXTEEN("+f", d, 112)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_given() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `left` groups are under way.
template <int left>
__device__ inline void products_done() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

#undef KVASIR_SIXTEEN
#undef KVASIR_FOUR

}  // namespace
}  // namespace kvasir::cuda
