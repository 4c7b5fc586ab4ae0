// Padded head dimensions for which GPUs have kernels of exact prefill.
#pragma once

#include <cstdint>

namespace kvasir {

constexpr uint32_t prefill_dims[] = {64, 128, 256};

}  // namespace kvasir
