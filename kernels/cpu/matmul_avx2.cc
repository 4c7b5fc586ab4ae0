// Placeholder of the matmul half of the avx2 table.
#include "fill.h"

namespace kvasir {

void fill_matmul_avx2(Kernels&) {}

}  // namespace kvasir
