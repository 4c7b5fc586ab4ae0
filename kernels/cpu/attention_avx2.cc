// Placeholder of the attention half of the avx2 table.
#include "fill.h"

namespace kvasir {

void fill_attention_avx2(Kernels&) {}

}  // namespace kvasir
