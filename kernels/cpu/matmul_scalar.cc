// Placeholder of the matmul half of the scalar table.
#include "fill.h"

namespace kvasir {

void fill_matmul_scalar(Kernels&) {}

}  // namespace kvasir
