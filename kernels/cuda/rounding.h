// Checks and rounds the inputs of products.
#pragma once

#include "backend/device_inputs.h"
#include "dependent.h"

namespace kvasir::cuda {

// Called by all lanes of a warp.
__device__ inline void report(bool bad, const DeviceCheck& check) {
  if (__any_sync(~0u, bad) && threadIdx.x % 32 == 0) atomicMin(check.first, check.mark);
}

// Rounds numbers [at, at + each) of out's with the arithmetic of Kernels::quantize. Called by all
// lanes of a warp, whose numbers are contiguous from a multiple of 32 on; inside: whether this lane
// has any.
template <int each>
__device__ inline void round_inputs(const float (&v)[each], std::size_t at, bool inside,
                                    const DeviceActivations& out) {
  float amax = 0;
  for (const float x : v) amax = fmaxf(amax, fabsf(x));
  for (int step = 16 / each; step > 0; step /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  const bool none = !(amax > 0x1p-100f);
  const float factor = none ? 0.0f : 127.0f / amax;
  int sum = 0;
  signed char value[each];
  for (int i = 0; i < each; ++i) {
    // -127 for a NaN.
    const int rounded = __float2int_rn(fminf(fmaxf(v[i] * factor, -127.0f), 127.0f));
    value[i] = static_cast<signed char>(rounded);
    sum += rounded;
  }
  for (int step = 8 / each; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (!inside) return;
  if constexpr (each == 4)
    *reinterpret_cast<char4*>(out.q + at) = make_char4(value[0], value[1], value[2], value[3]);
  else
    for (int i = 0; i < each; ++i) out.q[at + i] = value[i];
  if (at % 16 == 0) out.sums[at / 16] = static_cast<int16_t>(sum);
  if (at % 32 == 0) out.scale[at / 32] = none ? 0.0f : amax / 127.0f;
}

}  // namespace kvasir::cuda
