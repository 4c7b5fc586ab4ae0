// The elementwise operations, by their names in launch.cc.
#include <cmath>

#include "dependent.h"
#include "layout.h"

namespace kvasir::cuda {
namespace {

constexpr unsigned threads = elementwise_threads;

// Sum over a block; all threads get it.
__device__ float block_sum(float x) {
  __shared__ float parts[32];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0;
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

}  // namespace

extern "C" {

__global__ void rms_norm(const float* x, const float* weight, float epsilon, uint32_t cols, float* y) {
  after_previous();
  x += std::size_t{blockIdx.x} * cols;
  y += std::size_t{blockIdx.x} * cols;
  float sum = 0;
#pragma unroll 4
  for (uint32_t c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c] * x[c];
  const float factor = 1.0f / sqrtf(block_sum(sum) / static_cast<float>(cols) + epsilon);
#pragma unroll 4
  for (uint32_t c = threadIdx.x; c < cols; c += blockDim.x) y[c] = x[c] * factor * weight[c];
}

// A warp a block of 32 inputs, in the arithmetic of Kernels::quantize.
__global__ void quantize(const float* x, std::size_t blocks, int8_t* q, float* scale, int16_t* sums) {
  after_previous();
  const std::size_t block = (std::size_t{blockIdx.x} * threads + threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  if (block >= blocks) return;
  const float v = x[block * 32 + lane];
  float amax = fabsf(v);
  for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  const bool none = !(amax > 0x1p-100f);
  const float shifted = fminf(fmaxf(v * (none ? 0.0f : 127.0f / amax), -127.0f), 127.0f);  // of a not-a-number: -127
  int value = __float2int_rn(shifted);
  q[block * 32 + lane] = static_cast<int8_t>(value);
  for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  if (lane % 16 == 0) sums[block * 2 + lane / 16] = static_cast<int16_t>(value);
  if (lane == 0) scale[block] = none ? 0.0f : amax / 127.0f;
}

__global__ void rope(float* x, std::size_t pairs, uint32_t heads, uint32_t head_dim, uint32_t half, const float* cos, const float* sin,
                     bool neox) {
  after_previous();
  const std::size_t at = std::size_t{blockIdx.x} * threads + threadIdx.x;
  if (at >= pairs) return;
  const auto i = static_cast<uint32_t>(at % half);
  const std::size_t head = at / half, token = head / heads;
  float* row = x + head * head_dim;
  float* a = row + (neox ? i : 2 * i);
  float* b = neox ? row + half + i : a + 1;
  const float c = cos[token * half + i], s = sin[token * half + i], va = *a, vb = *b;
  *a = va * c - vb * s;
  *b = va * s + vb * c;
}

__global__ void swiglu(float* gate, const float* up, std::size_t n) {
  after_previous();
  const std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x;
  if (i < n) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

__global__ void add(float* x, const float* y, std::size_t n) {
  after_previous();
  const std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x;
  if (i < n) x[i] += y[i];
}

__global__ void check(const float* x, std::size_t n, float limit, uint32_t mark, uint32_t* first) {
  after_previous();
  bool bad = false;
  for (std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x; i < n; i += std::size_t{gridDim.x} * threads) bad |= !(fabsf(x[i]) < limit);
  if (__any_sync(~0u, bad) && threadIdx.x % 32 == 0) atomicMin(first, mark);
}

}  // extern "C"
}  // namespace kvasir::cuda
