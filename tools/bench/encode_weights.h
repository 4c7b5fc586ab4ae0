// Encodes floats in the block formats of GGUF tensors, for the model writer and for tests. The
// encoders are simple: the block's largest value sets the scale. Converters of real models search
// for better scales. Blocks of the IQ1, IQ2, IQ3 and TQ types get random codes, and a scale that
// gives them the root mean square of the floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gguf/tensor_type.h"

namespace kvasir {

// True for F32 F16 BF16 Q8_0 Q4_0 Q4_K Q6_K IQ4_XS MXFP4 NVFP4 and the types of random codes.
bool can_encode(TensorType type);

// Writes n / block_elements blocks to out. n is a multiple of the type's block; can_encode(type);
// values are finite and less than 60000 in magnitude, so that they fit half precision.
void encode_weights(TensorType type, const float* x, std::size_t n, std::byte* out);

}  // namespace kvasir
