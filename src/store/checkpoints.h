// Which checkpoints of a sequence are kept. A checkpoint is a position at which layers with a
// sliding window, or recurrent layers, go on after a rewind: everything else of the past is
// dropped there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvasir {

// How many checkpoints there may be before the end of the sequence: one at the end has what the end
// has. And which one is dropped last: the first at `stays` or behind it. There the document ends,
// to which a sequence goes back after each answer.
struct CheckpointLimits {
  static constexpr uint64_t none = UINT64_MAX;
  uint32_t most = 1;
  uint64_t stays = none;
  uint64_t end = 0;  // where the sequence will end, if it is known to become longer
};

// Index of the checkpoint to drop of `count` at ascending positions at(i). It is the one whose
// neighbours are nearest in proportion to their distance from `end`, so those near the end are
// closer together. After all others go, in this order, the last one before nine tenths of the end,
// the last one, and that of `stays`.
template <class At>
std::size_t least_useful_checkpoint(std::size_t count, uint64_t end, uint64_t stays, At&& at) {
  constexpr double later = 1.5;  // than all proportions
  std::size_t worst = count - 1, before_tenth = count;
  for (std::size_t i = 0; i < count && at(i) <= end - end / 10; ++i) before_tenth = i;
  double least = 2;
  bool has_stayed = false;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const uint64_t before = i == 0 ? 0 : at(i - 1);
    if (!has_stayed && at(i) >= stays) {
      has_stayed = true;
      continue;
    }
    double gap = static_cast<double>(at(i + 1) - before) / static_cast<double>(end - before);
    if (i == before_tenth) gap = later;
    if (gap < least) least = gap, worst = i;
  }
  return worst;
}

// Drops checkpoints beyond the limit. now: tokens of the sequence.
template <class Checkpoint, class At>
void thin_out(const CheckpointLimits& limits, uint64_t now, At&& at,
              std::vector<Checkpoint>* checkpoints) {
  const uint64_t end = std::max(now, limits.end);
  const auto count_before_end = [&] {
    const std::size_t all = checkpoints->size();
    const bool at_end = all > 0 && limits.most > 0 && at(checkpoints->back()) == end;
    return all - at_end;
  };
  while (count_before_end() > limits.most) {
    const std::size_t worst =
        least_useful_checkpoint(checkpoints->size(), end, limits.stays,
                                [&](std::size_t i) { return at((*checkpoints)[i]); });
    checkpoints->erase(checkpoints->begin() + static_cast<std::ptrdiff_t>(worst));
  }
}

// Whether a new checkpoint at `position`, behind the ascending ones of `kept`, is still there when
// all up to limits.end has been read, with one more every `interval` tokens.
inline bool outlives(const CheckpointLimits& limits, std::vector<uint64_t> kept, uint64_t position,
                     uint64_t interval) {
  for (uint64_t at = position;; at += interval) {
    kept.push_back(at);
    thin_out(
        limits, at, [](uint64_t x) { return x; }, &kept);
    if (!std::binary_search(kept.begin(), kept.end(), position)) return false;
    if (limits.end - at < interval) return true;
  }
}

}  // namespace kvasir
