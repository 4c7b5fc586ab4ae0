// The elementwise operations.
#include <cmath>

#include "stream.h"

namespace kvasir::cuda {
namespace {

constexpr unsigned threads = 256;

// Sum over a block of `threads` threads; all get it.
__device__ float block_sum(float x) {
  __shared__ float parts[threads / 32];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < threads / 32 ? parts[threadIdx.x % 32] : 0;
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__global__ void rms_norm_kernel(const float* x, const float* weight, float epsilon, uint32_t cols, float* y) {
  x += std::size_t{blockIdx.x} * cols;
  y += std::size_t{blockIdx.x} * cols;
  float sum = 0;
  for (uint32_t c = threadIdx.x; c < cols; c += threads) sum += x[c] * x[c];
  const float factor = 1.0f / sqrtf(block_sum(sum) / static_cast<float>(cols) + epsilon);
  for (uint32_t c = threadIdx.x; c < cols; c += threads) y[c] = x[c] * factor * weight[c];
}

int rms_norm(DeviceStream* s, const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols, float* y) {
  if (const int error = begin(s)) return error;
  rms_norm_kernel<<<n, threads, 0, s->stream>>>(x, weight, epsilon, cols, y);
  return launched();
}

// A warp a block of 32 inputs, in the arithmetic of Kernels::quantize.
__global__ void quantize_kernel(const float* x, std::size_t blocks, int8_t* q, float* scale, int16_t* sums) {
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

int quantize(DeviceStream* s, const DeviceActivations& x) {
  if (const int error = begin(s)) return error;
  const std::size_t blocks = std::size_t{x.n} * x.cols / 32;
  quantize_kernel<<<blocks_for(blocks, threads / 32), threads, 0, s->stream>>>(x.f32, blocks, x.q, x.scale, x.sums);
  return launched();
}

__global__ void rope_kernel(float* x, std::size_t pairs, uint32_t heads, uint32_t head_dim, uint32_t half, const float* cos, const float* sin,
                            bool neox) {
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

int rope(DeviceStream* s, float* x, uint32_t n, uint32_t heads, uint32_t head_dim, uint32_t rotary_dim, const float* cos, const float* sin,
         bool neox) {
  if (const int error = begin(s)) return error;
  const std::size_t pairs = std::size_t{n} * heads * (rotary_dim / 2);
  if (pairs) rope_kernel<<<blocks_for(pairs, threads), threads, 0, s->stream>>>(x, pairs, heads, head_dim, rotary_dim / 2, cos, sin, neox);
  return launched();
}

__global__ void swiglu_kernel(float* gate, const float* up, std::size_t n) {
  const std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x;
  if (i < n) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

int swiglu(DeviceStream* s, float* gate, const float* up, std::size_t n) {
  if (const int error = begin(s)) return error;
  swiglu_kernel<<<blocks_for(n, threads), threads, 0, s->stream>>>(gate, up, n);
  return launched();
}

__global__ void add_kernel(float* x, const float* y, std::size_t n) {
  const std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x;
  if (i < n) x[i] += y[i];
}

int add(DeviceStream* s, float* x, const float* y, std::size_t n) {
  if (const int error = begin(s)) return error;
  add_kernel<<<blocks_for(n, threads), threads, 0, s->stream>>>(x, y, n);
  return launched();
}

__global__ void check_kernel(const float* x, std::size_t n, float limit, uint32_t mark, uint32_t* first) {
  bool bad = false;
  for (std::size_t i = std::size_t{blockIdx.x} * threads + threadIdx.x; i < n; i += std::size_t{gridDim.x} * threads) bad |= !(fabsf(x[i]) < limit);
  if (__any_sync(~0u, bad) && threadIdx.x % 32 == 0) atomicMin(first, mark);
}

int check(DeviceStream* s, const float* x, std::size_t n, float limit, uint32_t mark, uint32_t* first) {
  if (const int error = begin(s)) return error;
  const unsigned blocks = blocks_for(n, threads);
  check_kernel<<<blocks < 512 ? blocks : 512, threads, 0, s->stream>>>(x, n, limit, mark, first);
  return launched();
}

}  // namespace

void fill_elementwise(DeviceKernels* k) {
  k->quantize = quantize;
  k->rms_norm = rms_norm;
  k->rope = rope;
  k->swiglu = swiglu;
  k->add = add;
  k->check = check;
}

}  // namespace kvasir::cuda
