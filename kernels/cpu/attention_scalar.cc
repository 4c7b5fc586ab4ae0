// Placeholder of the attention half of the scalar table.
#include "fill.h"

namespace kvasir {

void fill_attention_scalar(Kernels&) {}

}  // namespace kvasir
