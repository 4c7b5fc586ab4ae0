// Attention and store kernels for AVX2 with FMA.
#include "attention_avx2-inl.h"

namespace kvasir {

void fill_attention_avx2(Kernels& k) { fill_attention<Avx2>(k); }

}  // namespace kvasir
