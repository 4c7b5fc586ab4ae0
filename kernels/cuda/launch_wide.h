// Products with many inputs in halves: which devices have them, and how they run.
#pragma once

#include <span>

#include "backend/device.h"

namespace kvasir::cuda {

// DeviceKernels::halves_bytes
std::size_t halves_bytes(DeviceContext* context, uint32_t n, uint32_t cols);
// DeviceKernels::kept_bytes
std::size_t kept_bytes(DeviceContext* context, const DeviceMatrix& w);
// Whether these products, of one quantised type, run so: x.halves is there, and the tiles occupy
// the device.
bool is_wide(const DeviceContext& context, std::span<const DeviceProduct> products,
             const DeviceActivations& x);
int multiply_wide(DeviceStream* stream, std::span<const DeviceProduct> products,
                  const DeviceActivations& x, bool add);
// The same of DeviceKernels::multiply_gated(), without floats in between.
bool is_wide_gated(const DeviceContext& context, std::span<const DeviceProduct> products,
                   const DeviceActivations& x, Activation f, const DeviceActivations& out);
int multiply_wide_gated(DeviceStream* stream, std::span<const DeviceProduct> products,
                        const DeviceActivations& x, Activation f, const DeviceCheck& check,
                        const DeviceActivations& out);

}  // namespace kvasir::cuda
