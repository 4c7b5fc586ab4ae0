// Attention and store kernels for AVX-512 with VNNI.
#include "attention_avx512-inl.h"
#include "attention_fill-inl.h"

namespace kvasir {

void fill_attention_avx512(Kernels& k) { fill_attention<Avx512>(k); }

}  // namespace kvasir
