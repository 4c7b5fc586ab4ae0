// The operations on experts, as DeviceKernels has them.
#pragma once

#include <span>

#include "backend/device.h"

namespace kvasir::cuda {

int route(DeviceStream* s, const DeviceRouting& routing, const float* logits,
          const DeviceCheck& check, const DeviceExpertRows& rows);
int group_choices(DeviceStream* s, const DeviceExpertRows& rows);
int gather_inputs(DeviceStream* s, const DeviceExpertRows& rows, const DeviceActivations& x,
                  bool weighs, const DeviceActivations& out);
int multiply_experts(DeviceStream* s, std::span<const DeviceExpertProduct> products,
                     const DeviceExpertRows& rows, const DeviceActivations& x);
int sum_experts(DeviceStream* s, const DeviceExpertRows& rows, const DeviceExpertSum& sum,
                const DeviceActivations& out);

}  // namespace kvasir::cuda
