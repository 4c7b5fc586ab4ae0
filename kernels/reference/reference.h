// The oracle of the kernel tests: the operations of backend/kernels.h in plain scalar double
// precision. Linked only into tests and benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/device_experts.h"
#include "backend/device_window.h"
#include "backend/kernels.h"

namespace kvasir::reference {

// ---- matmul.cc

// out[c] = w[row][c], exactly as the format defines it.
void dequantize_row(const WeightView& w, uint32_t row, double* out);

// y[i * y_stride + r] = sum_c w[r][c] * x[i][c]; x is q * scale for quantised weights, f32 for F32,
// F16 and BF16.
void matmul(const WeightView& w, const Activations& x, double* y, std::size_t y_stride);

// ---- elementwise.cc

void rms_norm(const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols,
              double* y);
void rope(double* x, uint32_t n_heads, std::size_t stride, uint32_t rotary_dim, const float* cos,
          const float* sin, bool neox);
void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, uint32_t n,
                uint32_t cols, double* y);
void activate(Activation f, const float* gate, const float* up, std::size_t n, double* y);

// ---- experts.cc

// As choose_experts() of engine/expert_routing.h. logits: [experts] of one token; out: [used].
void route(const DeviceRouting& routing, const float* logits, DeviceChoice* out);

// ---- recurrent.cc

void sigmoid_gate(const float* x, const float* gate, std::size_t n, double* y);
void convolve(const Convolution& c, double* y);  // y: [n][channels]
// state: [keys][values] after the step; out: as the step has it.
void advance_state(const StateStep& s, double* state, double* out);

// ---- attention.cc

double from_bf16(uint16_t x);
// One number of a page; scales: bf16 [2][page_tokens].
double page_key(const int8_t* data, const uint16_t* scales, uint32_t dim, uint32_t token,
                uint32_t channel);
double page_value(const int8_t* data, const uint16_t* scales, uint32_t dim, uint32_t token,
                  uint32_t channel);

// From an empty state: o [rows][dim], m [rows], l [rows]. Scores from the quantised queries,
// weights exact.
void attend_pages(const QueryRows& q, const PageRef* pages, uint32_t n_pages, double* o, double* m,
                  double* l);
void score_tokens(const QueryRows& q, const PageRef* pages, uint32_t n_pages, double* scores,
                  std::size_t stride);
void attend_rows(const QueryRows& q, const float* k, const float* v, uint32_t n,
                 const uint32_t* limit, double* o, double* m, double* l);

// Attention of n tokens from `position` on, each through its window. q, k, v: as DeviceKernels has
// them; ring: the tokens before.
void attend_window(const DeviceWindow& w, uint64_t position, const float* q, const float* k,
                   const float* v, const float* ring, double* out);

// ---- store.cc

// One number of an extent's summaries. channel < dim: the block's maximum; dim .. 2 * dim - 1: its
// minimum.
double block_bound(const PageShape& shape, const int8_t* bounds, uint32_t block, uint32_t channel);

void multiply(const float* a, std::size_t row, std::size_t step, uint32_t rows, const float* b,
              std::size_t b_stride, uint32_t cols, uint32_t n, double* out, std::size_t out_stride);
void score_bounds(const PageShape& shape, const QueryRows& q, const int8_t* bounds, double* scores,
                  std::size_t stride);
// One number of an extent's sketch.
double sketch_value(const PageShape& shape, const int8_t* sketch, uint32_t quad, uint32_t token,
                    uint32_t channel);
void score_sketch(const PageShape& shape, uint32_t rows, const int8_t* q, const float* q_scale,
                  const int8_t* sketch, double* scores, std::size_t stride);
void attention_shares(const float* scores, uint32_t n, float m, float l, double* shares);
// The random number of a sample, in (0, 1).
double sample_random(uint32_t number, uint32_t seed);
uint32_t top_k(const float* scores, uint32_t n, uint32_t k, uint32_t* out);

}  // namespace kvasir::reference
