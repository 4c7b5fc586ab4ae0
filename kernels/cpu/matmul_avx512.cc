// Placeholder of the matmul half of the avx512 table.
#include "fill.h"

namespace kvasir {

void fill_matmul_avx512(Kernels&) {}

}  // namespace kvasir
