// The operations on recurrent layers: which kernel runs, on how many blocks.
#include "launch_recurrent.h"

#include "launch.h"

namespace kvasir::cuda {

int sigmoid_gate(DeviceStream* s, const float* x, const float* gate, const DeviceCheck& check,
                 const DeviceActivations& out) {
  const std::size_t n = std::size_t{out.n} * out.cols;
  return launch(s, "sigmoid_gate", Grid{blocks_for(n, elementwise_threads)}, elementwise_threads, x,
                gate, check, out);
}

int convolve(DeviceStream* s, const DeviceConvolution& c) {
  static_assert(max_alone <= convolve_tokens);  // a thread has all states
  return launch(s, "recurrent_convolve",
                Grid{blocks_for(c.channels, convolve_threads), blocks_for(c.n, convolve_tokens)},
                convolve_threads, c);
}

// A warp a head of q, k, or one for all rates of a token.
int prepare_heads(DeviceStream* s, const DeviceHeadStates& h) {
  const std::size_t rows = std::size_t{h.n} * (1 + (h.delta ? 2 * h.key_heads : 0));
  return launch(s, "recurrent_prepare", Grid{blocks_for(rows, recurrent_threads / 32)},
                recurrent_threads, h);
}

int advance_heads(DeviceStream* s, const DeviceHeadStates& h) {
  if (h.keys > max_device_keys) return CUDA_ERROR_INVALID_VALUE;
  const char* name = h.keys <= max_device_keys / 4   ? "recurrent_advance_8"
                     : h.keys <= max_device_keys / 2 ? "recurrent_advance_16"
                                                     : "recurrent_advance_32";
  return launch(s, name, Grid{state_panels(h.values), h.heads}, recurrent_threads, h);
}

int gate_heads(DeviceStream* s, const DeviceGatedNorm& g, const DeviceCheck& check) {
  return launch(s, "recurrent_gate", Grid{g.rows}, recurrent_threads, g, check);
}

}  // namespace kvasir::cuda
