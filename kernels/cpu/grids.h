// The codebooks of GGUF's IQ formats for the CPU's kernels: a codeword is a word, with a byte per
// number. The numbers of IQ1 are 8 g + 15 for g of -1, 0 and 1.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

template <class Word, std::size_t n>
struct Grid {
  Word words[n];
};

extern const Grid<uint64_t, 256> iq2_xxs_grid;
extern const Grid<uint64_t, 512> iq2_xs_grid;
extern const Grid<uint64_t, 1024> iq2_s_grid;
extern const Grid<uint32_t, 256> iq3_xxs_grid;
extern const Grid<uint32_t, 512> iq3_s_grid;
extern const Grid<uint64_t, 2048> iq1_grid;

}  // namespace kvasir
