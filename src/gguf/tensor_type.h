// Number formats of GGUF tensors: the ids that files use, their names, and the size of their
// blocks.
#pragma once

#include <cstdint>

namespace kvasir {

// Values are GGML's type ids in files.
enum class TensorType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq2_xxs = 16,
  iq2_xs = 17,
  iq3_xxs = 18,
  iq1_s = 19,
  iq4_nl = 20,
  iq3_s = 21,
  iq2_s = 22,
  iq4_xs = 23,
  iq1_m = 29,
  bf16 = 30,
  tq1_0 = 34,
  tq2_0 = 35,
  mxfp4 = 39,
  nvfp4 = 40,
};

struct TensorTypeInfo {
  const char* name;         // "Q4_K"; gguf.cc names unknown types of a file
  uint32_t block_elements;  // 1, 32, 64 or 256
  uint32_t block_bytes;
};

// Null for an id that the library cannot compute with.
const TensorTypeInfo* tensor_type_info(TensorType type);

// "Q8_1" and so on for known ids that the library cannot compute with, for messages. Null for
// others: the caller writes "type 99".
const char* tensor_type_name(uint32_t id);

}  // namespace kvasir
