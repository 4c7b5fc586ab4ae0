// The attention half of the neon table.
#include "fill.h"

namespace kvasir {

void fill_attention_neon(Kernels& k) { fill_attention_scalar(k); }

}  // namespace kvasir
