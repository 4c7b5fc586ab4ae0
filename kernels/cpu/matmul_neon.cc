// Matrix products and elementwise operations with NEON and its dot product of signed bytes.
#include "elementwise-inl.h"
#include "matmul_neon-inl.h"
#include "recurrent-inl.h"

namespace kvasir {

void fill_matmul_neon(Kernels& k) {
  fill_elementwise(k);
  fill_matmul<Neon>(k);
  fill_recurrent<Neon>(k);
}

}  // namespace kvasir
