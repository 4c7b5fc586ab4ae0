// The codebooks of GGUF's IQ formats on the device, for the arrangement of weights in planes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../codebooks.h"

namespace kvasir::cuda {

// A codeword is eight numbers of 2 bits, or four of 4 bits: indices of the format's levels.
template <std::size_t n>
struct Codes {
  uint16_t words[n];
};

template <std::size_t n>
constexpr Codes<n> codes_of(const char* book) {
  Codes<n> codes = {};
  for (std::size_t i = 0; i < n; ++i) codes.words[i] = static_cast<uint16_t>(codeword(book, i));
  return codes;
}

static __device__ const Codes<256> iq2_xxs_device = codes_of<256>(iq2_xxs_codes);
static __device__ const Codes<512> iq2_xs_device = codes_of<512>(iq2_xs_codes);
static __device__ const Codes<1024> iq2_s_device = codes_of<1024>(iq2_s_codes);
static __device__ const Codes<256> iq3_xxs_device = codes_of<256>(iq3_xxs_codes);
static __device__ const Codes<512> iq3_s_device = codes_of<512>(iq3_s_codes);
static __device__ const Codes<2048> iq1_device = codes_of<2048>(iq1_codes);

}  // namespace kvasir::cuda
