// The attention half of the avx512 table.
#include "fill.h"

namespace kvasir {

void fill_attention_avx512(Kernels& k) { fill_attention_scalar(k); }

}  // namespace kvasir
