// The names of the operations of DeviceKernels, from which each backend fills the table with its
// functions of the same names.
#pragma once

#include <cstddef>

#include "backend/device.h"

namespace kvasir {

// clang-format off
#define KVASIR_DEVICE_MEMORY(F) \
  F(count) F(error_text) F(is_out_of_memory) F(capability) F(open) F(close) F(describe) \
  F(allocate) F(release) F(allocate_host) F(release_host) F(register_host) F(unregister_host) \
  F(map_host) F(open_stream) F(close_stream) F(wait) F(after) F(upload) F(download) \
  F(begin_graph) F(end_graph) F(run_graph) F(release_graph)

#define KVASIR_DEVICE_PRODUCTS(F) \
  F(matrix_bytes) F(lay_out) F(matmul) F(halves_bytes) F(kept_bytes) F(quantize) F(rms_norm) \
  F(add_rms_norm) F(layer_norm) F(activate) F(multiply_gated) F(scale) F(find_largest) F(rotate) \
  F(prepare_prefill) F(choose_prefill) F(attend_prefill) F(attend_window) F(keep_window) \
  F(find_nearest)

#define KVASIR_DEVICE_RECURRENT(F) \
  F(sigmoid_gate) F(convolve) F(prepare_heads) F(advance_heads) F(gate_heads)

#define KVASIR_DEVICE_EXPERTS(F) \
  F(route) F(group_choices) F(gather_inputs) F(multiply_experts) F(sum_experts)

#define KVASIR_DEVICE_ATTENTION(F) \
  F(begin_attention) F(attend_sinks_and_window) F(score_sketch) F(choose) F(gather_chosen) \
  F(gather_group) F(attend_chosen) F(attend_all) F(finish_attention)
// clang-format on

#define KVASIR_COUNT_ONE(name) +1
static_assert(sizeof(DeviceKernels) == (0 KVASIR_DEVICE_MEMORY(KVASIR_COUNT_ONE)
                                            KVASIR_DEVICE_PRODUCTS(KVASIR_COUNT_ONE)
                                                KVASIR_DEVICE_RECURRENT(KVASIR_COUNT_ONE)
                                                    KVASIR_DEVICE_EXPERTS(KVASIR_COUNT_ONE)
                                                        KVASIR_DEVICE_ATTENTION(KVASIR_COUNT_ONE)) *
                                           sizeof(void*),
              "an operation is missing from the lists above");
#undef KVASIR_COUNT_ONE

}  // namespace kvasir
