// Eigenvectors of a symmetric matrix.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/kernels.h"

namespace kvasir {

// The m leading eigenvectors, largest eigenvalue first, of a symmetric matrix a [n][n] of finite
// numbers, which is overwritten. Householder's tridiagonal form and implicit QL steps (Golub and
// Van Loan, Matrix Computations, sections 8.3.1 and 8.3.3). The vectors are orthonormal for any
// eigenvalues. vectors: [n][m], as columns; values: [m]. Throws std::bad_alloc.
void leading_eigenvectors(const Kernels& kernels, std::vector<float>* a, uint32_t n, uint32_t m,
                          std::vector<float>* vectors, std::vector<double>* values);

}  // namespace kvasir
