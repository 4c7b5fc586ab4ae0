// Placeholder of the attention half of the avx512 table.
#include "fill.h"

namespace kvasir {

void fill_attention_avx512(Kernels&) {}

}  // namespace kvasir
