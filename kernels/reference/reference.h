// The oracle of the kernel tests: the operations of compute/kernels.h in scalar double precision, as plain as can be.
// Linked into tests and benchmarks only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/kernels.h"

namespace kvasir::reference {

// ---- matmul.cc ------------------------------------------------------------------------------------------------------------

// out[c] = w[row][c], exactly as the format defines it.
void dequantize_row(const WeightView& w, uint32_t row, double* out);

// y[i * y_stride + r] = sum_c w[r][c] * x[i][c]; x is q * scale for quantised weights, f32 for F32, F16 and BF16.
void matmul(const WeightView& w, const Activations& x, double* y, std::size_t y_stride);

// ---- elementwise.cc -------------------------------------------------------------------------------------------------------

void rms_norm(const float* x, const float* weight, float epsilon, uint32_t n, uint32_t cols, double* y);
void rope(double* x, uint32_t n_heads, std::size_t stride, uint32_t rotary_dim, const float* cos, const float* sin, bool neox);
void swiglu(const float* gate, const float* up, std::size_t n, double* y);

// ---- attention.cc ---------------------------------------------------------------------------------------------------------

// ---- store.cc -------------------------------------------------------------------------------------------------------------

}  // namespace kvasir::reference
