// What operations on a GPU read and write between two attentions, beside matrices. Plain data: the
// kernels take it by value.
#pragma once

#include <cstdint>

namespace kvasir {

// As Activations; all device. What makes them fills the arrays that are there: f32 for weights of
// floats, the others together for quantised ones, whose cols are a multiple of 32.
struct DeviceActivations {
  uint32_t n = 0, cols = 0;
  float* f32 = nullptr;
  int8_t* q = nullptr;
  float* scale = nullptr;
  int16_t* sums = nullptr;
};

// *first <- min(*first, mark) unless every |x| < limit, of the numbers that an operation names.
struct DeviceCheck {
  float limit;
  uint32_t mark;
  uint32_t* first;  // device
};

// q, k and v of n tokens as a projection leaves them, one behind the other, and what is done to q
// and k: the norm of each head where the architecture has one, then RoPE as Kernels::rope.
struct DeviceHeads {
  uint32_t n, heads, kv_heads, head_dim;
  // [n][heads][head_dim], [n][kv_heads][head_dim] twice; all pointers device
  float* qkv;
  const float *q_norm, *k_norm;  // [head_dim]; null: none
  float epsilon;
  uint32_t rotary_dim;
  bool neox;
  const float *cos, *sin;  // [n][rotary_dim / 2]
};

}  // namespace kvasir
