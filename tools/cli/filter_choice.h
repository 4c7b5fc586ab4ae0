// Which layers should choose tokens for the layers after them.
//
// With filter layers f1 < f2 < ... every layer up to f1, each of them, and the layer after each
// attend everything; the layers from there up to the next filter layer read what the one before
// them chose (OmniKV, ICLR 2025). covered[i][j] is the share of layer j's attention that the choice
// of layer i holds, so a choice of filter layers loses the sum of 1 - covered over the layers that
// read another's choice. Sought is the choice that loses least among those with at most so many
// layers that attend everything: with more of them less is lost, but more is read.
#pragma once

#include <cstdint>
#include <vector>

namespace tool {

struct FilterChoice {
  std::vector<uint32_t> filters;  // ascending
  uint32_t dense = 0;             // layers that attend everything
  double lost = 0;                // shares of attention, summed over the other layers
};

// covered: [layers][layers]. Empty filters where no choice has `count` filters and at most
// `max_dense` dense layers.
FilterChoice choose_filters(const std::vector<std::vector<double>>& covered, uint32_t count,
                            uint32_t max_dense);

}  // namespace tool
