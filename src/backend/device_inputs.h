// Arguments of a GPU's operations between two attentions, besides matrices. Plain data: kernels
// take it by value.
#pragma once

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
};

// *first <- min(*first, mark) unless |x| < limit for every x that an operation checks.
struct DeviceCheck {
  float limit;
  uint32_t mark;
  uint32_t* first;  // device
};

// q, k and v of n tokens, one after the other as a projection writes them, and the operation on q
// and k: the norm of each head where the architecture has one, then Kernels::rope.
struct DeviceHeads {
  uint32_t n, heads, kv_heads, head_dim;
  // [n][heads][head_dim], then [n][kv_heads][head_dim] twice; all pointers device
  float* qkv;
  const float *q_norm, *k_norm;  // [head_dim]; null: no norm
  float epsilon;
  uint32_t rotary_dim;
  bool neox;
  const float *cos, *sin;  // [n][rotary_dim / 2]
};

}  // namespace kvasir
