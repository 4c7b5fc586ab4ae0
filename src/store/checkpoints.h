// Which checkpoints of a sequence are kept. A checkpoint is a position at which layers with a
// sliding window, or recurrent layers, go on after a rewind: everything else of the past is
// dropped there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir {

// Index of the checkpoint to drop of `count` at ascending positions at(i). It is the one whose
// neighbours are nearest in proportion to their distance from `end`, so those near the end are
// closer together. The last one stays, but where it is alone.
template <class At>
std::size_t least_useful_checkpoint(std::size_t count, uint64_t end, At&& at) {
  std::size_t worst = 0;
  double least = 2;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const uint64_t before = i == 0 ? 0 : at(i - 1);
    const double gap = static_cast<double>(at(i + 1) - before) / static_cast<double>(end - before);
    if (gap < least) least = gap, worst = i;
  }
  return worst;
}

}  // namespace kvasir
