// Matrix products and elementwise operations with AVX-512 and its byte dot product (VNNI).
#include "elementwise-inl.h"
#include "matmul_avx512-inl.h"
#include "recurrent-inl.h"

namespace kvasir {

void fill_matmul_avx512(Kernels& k) {
  fill_elementwise(k);
  fill_matmul<Avx512>(k);
  fill_recurrent<Avx512>(k);
}

}  // namespace kvasir
