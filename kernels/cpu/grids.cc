#include "grids.h"

#include "../codebooks.h"

namespace kvasir {
namespace {

template <class Word, std::size_t n>
constexpr Grid<Word, n> expand(const char* codes, const int8_t* levels) {
  constexpr std::size_t bits = 16 / sizeof(Word);  // of a number in a codeword
  Grid<Word, n> grid = {};
  for (std::size_t i = 0; i < n; ++i) {
    const uint32_t code = codeword(codes, i);
    for (std::size_t k = 0; k < sizeof(Word); ++k) {
      const auto level = static_cast<Word>(levels[code >> (bits * k) & ((1u << bits) - 1)]);
      grid.words[i] |= level << (8 * k);
    }
  }
  return grid;
}

constexpr int8_t iq1_numbers[] = {7, 15, 23};

}  // namespace

constexpr Grid<uint64_t, 256> iq2_xxs_grid = expand<uint64_t, 256>(iq2_xxs_codes, iq2_levels);
constexpr Grid<uint64_t, 512> iq2_xs_grid = expand<uint64_t, 512>(iq2_xs_codes, iq2_levels);
constexpr Grid<uint64_t, 1024> iq2_s_grid = expand<uint64_t, 1024>(iq2_s_codes, iq2_levels);
constexpr Grid<uint32_t, 256> iq3_xxs_grid = expand<uint32_t, 256>(iq3_xxs_codes, iq3_xxs_levels);
constexpr Grid<uint32_t, 512> iq3_s_grid = expand<uint32_t, 512>(iq3_s_codes, iq3_s_levels);
constexpr Grid<uint64_t, 2048> iq1_grid = expand<uint64_t, 2048>(iq1_codes, iq1_numbers);

}  // namespace kvasir
