// The attention half of the avx2 table.
#include "fill.h"

namespace kvasir {

void fill_attention_avx2(Kernels& k) { fill_attention_scalar(k); }

}  // namespace kvasir
