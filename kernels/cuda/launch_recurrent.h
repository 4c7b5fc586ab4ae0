// The operations on recurrent layers, as DeviceKernels has them.
#pragma once

#include "backend/device.h"

namespace kvasir::cuda {

int sigmoid_gate(DeviceStream* s, const float* x, const float* gate, const DeviceCheck& check,
                 const DeviceActivations& out);
int convolve(DeviceStream* s, const DeviceConvolution& c);
int prepare_heads(DeviceStream* s, const DeviceHeadStates& h);
int advance_heads(DeviceStream* s, const DeviceHeadStates& h);
int gate_heads(DeviceStream* s, const DeviceGatedNorm& g, const DeviceCheck& check);

}  // namespace kvasir::cuda
