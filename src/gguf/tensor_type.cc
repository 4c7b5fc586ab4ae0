// The table of GGML's tensor formats: every id in use, and the block sizes of those that the
// library computes with.
#include "gguf/tensor_type.h"

#include <cstddef>
#include <iterator>

namespace kvasir {
namespace {

// Indexed by the id in the file. block_elements is 0 for types known by name only.
constexpr TensorTypeInfo kTypes[] = {
    {"F32", 1, 4},         // 0
    {"F16", 1, 2},         // 1
    {"Q4_0", 32, 18},      // 2: f16 scale, 32 x 4 bits
    {"Q4_1", 32, 20},      // 3: f16 scale and minimum, 32 x 4 bits
    {"Q4_2", 0, 0},        // 4
    {"Q4_3", 0, 0},        // 5
    {"Q5_0", 32, 22},      // 6: f16 scale, 32 high bits, 32 x 4 bits
    {"Q5_1", 32, 24},      // 7: f16 scale and minimum, 32 high bits, 32 x 4 bits
    {"Q8_0", 32, 34},      // 8: f16 scale, 32 x 8 bits
    {"Q8_1", 0, 0},        // 9
    {"Q2_K", 256, 84},     // 10
    {"Q3_K", 256, 110},    // 11
    {"Q4_K", 256, 144},    // 12
    {"Q5_K", 256, 176},    // 13
    {"Q6_K", 256, 210},    // 14
    {"Q8_K", 0, 0},        // 15
    {"IQ2_XXS", 256, 66},  // 16: IQ1, IQ2 and IQ3 are indices of a codebook
    {"IQ2_XS", 256, 74},   // 17
    {"IQ3_XXS", 256, 98},  // 18
    {"IQ1_S", 256, 50},    // 19
    {"IQ4_NL", 32, 18},    // 20: f16 scale, 32 x 4 bits into a table of 16 values
    {"IQ3_S", 256, 110},   // 21
    {"IQ2_S", 256, 82},    // 22
    {"IQ4_XS", 256, 136},  // 23: as IQ4_NL, a 6-bit scale per 32
    {"I8", 0, 0},          // 24
    {"I16", 0, 0},         // 25
    {"I32", 0, 0},         // 26
    {"I64", 0, 0},         // 27
    {"F64", 0, 0},         // 28
    {"IQ1_M", 256, 56},    // 29
    {"BF16", 1, 2},        // 30
    {"Q4_0_4_4", 0, 0},    // 31
    {"Q4_0_4_8", 0, 0},    // 32
    {"Q4_0_8_8", 0, 0},    // 33
    {"TQ1_0", 256, 54},    // 34: ternary, five in a byte
    {"TQ2_0", 256, 66},    // 35: ternary, four in a byte
    {"IQ4_NL_4_4", 0, 0},  // 36
    {"IQ4_NL_4_8", 0, 0},  // 37
    {"IQ4_NL_8_8", 0, 0},  // 38
    {"MXFP4", 32, 17},     // 39: 8-bit exponent, 32 x 4-bit floats
    {"NVFP4", 64, 36},     // 40: 8-bit float scale per 16, 64 x 4-bit floats
    {"Q1_0", 0, 0},        // 41
    {"Q2_0", 0, 0},        // 42
};

}  // namespace

const TensorTypeInfo* tensor_type_info(TensorType type) {
  const auto id = static_cast<std::size_t>(type);
  if (id >= std::size(kTypes) || kTypes[id].block_elements == 0) return nullptr;
  return &kTypes[id];
}

const char* tensor_type_name(uint32_t id) {
  return id < std::size(kTypes) ? kTypes[id].name : nullptr;
}

}  // namespace kvasir
