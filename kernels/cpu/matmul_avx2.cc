// Matrix products and elementwise operations with AVX2, FMA and F16C.
#include "elementwise-inl.h"
#include "matmul_avx2-inl.h"
#include "recurrent-inl.h"

namespace kvasir {

void fill_matmul_avx2(Kernels& k) {
  fill_elementwise(k);
  fill_matmul<Avx2>(k);
  fill_recurrent<Avx2>(k);
}

}  // namespace kvasir
