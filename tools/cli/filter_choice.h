// The choice of filter layers (OmniKV, ICLR 2025).
//
// With filter layers f1 < f2 < ..., full attention is used by every layer up to f1, by each filter
// layer, and by the layer after each. The layers from there up to the next filter layer read the
// tokens that the filter layer before them selected. covered[i][j] is the share of layer j's
// attention in the tokens that layer i selects. So a choice loses the sum of 1 - covered over the
// layers that read another layer's tokens. More layers with full attention lose less, but read
// more. choose_filters() finds the choice with the smallest loss among those with a limited number.
#pragma once

#include <cstdint>
#include <vector>

namespace tool {

struct FilterChoice {
  std::vector<uint32_t> filters;  // ascending
  uint32_t dense = 0;             // layers with full attention
  double lost = 0;                // sum of shares of attention over the other layers
};

// covered: [layers][layers]. Without filters where no choice has `count` of them and at most
// `max_dense` dense layers.
FilterChoice choose_filters(const std::vector<std::vector<double>>& covered, uint32_t count,
                            uint32_t max_dense);

}  // namespace tool
