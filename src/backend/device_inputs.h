// Arguments of a GPU's operations between two attentions, besides matrices. Plain data: kernels
// take it by value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

// Activations in device memory. Operations fill the arrays that are not null: f32 for weights in
// float, the other three for quantised weights, whose cols are a multiple of 32.
struct DeviceActivations {
  uint32_t n = 0, cols = 0;
  float* f32 = nullptr;
  int8_t* q = nullptr;
  float* scale = nullptr;
  int16_t* sums = nullptr;
  // Products of matrices with each input have the bits of those with that input alone. Of at most
  // max_alone inputs.
  bool alone = false;
  // DeviceKernels::halves_bytes() for products with many inputs, which change it; null: they do
  // without.
  std::byte* halves = nullptr;
};
constexpr uint32_t max_alone = 8;

// n inputs from `first` on.
constexpr DeviceActivations part_of(DeviceActivations x, uint32_t first, uint32_t n) {
  const std::size_t at = std::size_t{first} * x.cols;
  x.n = n;
  if (x.f32) x.f32 += at;
  if (x.q) x.q += at, x.scale += at / 32, x.sums += at / 16;
  return x;
}

// Input i of several, as the only one.
constexpr DeviceActivations input_of(DeviceActivations x, uint32_t i) {
  x.alone = false;
  return part_of(x, i, 1);
}

// *first <- min(*first, mark) unless |x| < limit for every x that an operation checks.
struct DeviceCheck {
  float limit;
  uint32_t mark;
  uint32_t* first;  // device
};

// The largest of some numbers, and the first place that has it. no_largest: not all are finite.
struct DeviceLargest {
  float value;
  uint32_t index;
};
constexpr uint32_t no_largest = UINT32_MAX;
// A device finds the largest number of each part of a row: more blocks read a long row sooner.
constexpr uint32_t largest_parts = 16;

// The largest number of a row from those of its parts.
inline DeviceLargest largest_of(const DeviceLargest* parts) {
  DeviceLargest best = parts[0];
  for (uint32_t i = 1; i < largest_parts && best.index != no_largest; ++i)
    if (parts[i].index == no_largest || parts[i].value > best.value) best = parts[i];
  return best;
}

// A norm of each head: Kernels::rms_norm or Kernels::layer_norm.
enum class DeviceHeadNorm : uint8_t { none, rms, layer };

// q, k and v of n tokens, one after the other as a projection writes them, and the operation on
// them: the norm of each head of q and k, Kernels::rope, and the factors of q.
struct DeviceHeads {
  uint32_t n = 0, heads = 0, kv_heads = 0, head_dim = 0;  // kv_heads 0: q alone
  // [n][heads][head_dim], then [n][kv_heads][head_dim] twice; all pointers device
  float* qkv = nullptr;
  DeviceHeadNorm norm = DeviceHeadNorm::none;
  bool norm_after_rope = false;
  bool norm_v = false;                               // v: RMS norm of each head, without weights
  const float *q_norm = nullptr, *k_norm = nullptr;  // weights; null: ones
  uint32_t norm_stride = 0;  // from the weights of a head to those of the next one: 0 or head_dim
  float epsilon = 0;
  uint32_t rotary_dim = 0;  // 0: no RoPE
  bool neox = false;
  const float *cos = nullptr, *sin = nullptr;  // [n][rotary_dim / 2]
  float q_factor = 1;
  const float* q_factors = nullptr;  // [n] more factors of q; null: ones
};

}  // namespace kvasir
