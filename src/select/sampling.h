// Threshold sampling of quads by their estimated shares of attention. It estimates the attention of
// unread quads without bias (Duffield, Lund, Thorup, Learn more, sample less: control of volume and
// variance in network measurement, IEEE Trans. Inf. Theory 51(5), 2005).
//
//   choice  A quad is read if its share is at least u * t, with the threshold t. u in (0, 1) is a
//           random number per quad, layer and KV head, the same for every token. So a quad with a
//           share of at least t is always read, another with probability share / t.
//   weight  A quad that is always read has weight 1. A sample has weight t / share: its
//           exponentials are multiplied by it.
//
// So the expected sums over the read quads, of weights and of weighted values, equal those over all
// quads. This holds for any shares; inaccurate shares only raise the variance. The expected number
// of quads is the sum of min(1, share / t). The variance of the sum of the shares is the sum of
// share * (t - share) over shares below t. A step determines t from one of the two. Among all
// samplings with the same number of quads, this one has the least variance. Heads with spread
// attention need few samples. Heads that attend one token need few quads.
#pragma once

#include <cstdint>

#include "select/blocks.h"

namespace kvasir {

// The expected number of quads: the smallest from min_quads on with a variance of at most
// `variance`, but no more than max_quads.
struct SampleSize {
  uint32_t min_quads, max_quads;
  double variance;
};
// Computes the size from the budget. With a coverage the target is a standard error of 1 -
// coverage, within a quarter of the budget to four times it. Shares are sums over `heads` heads.
SampleSize sample_size(uint64_t budget_tokens, float coverage, uint32_t heads);

// Seed of the random numbers of a layer, KV head and draw. Seed and quad number determine u.
constexpr uint32_t sample_seed(uint32_t layer, uint32_t kv_head, uint32_t draw = 0) {
  return (layer << 16 | kv_head) * 0x85ebca6bu + draw * 0xc2b2ae3du;
}

// The threshold for n shares; 0 reads everything.
float sample_threshold(const Kernels& kernels, const float* shares, uint32_t n,
                       const SampleSize& size);

// Prepares a selection for sample_list(). It must have its lists.
void begin_samples(Selection* out);

// Appends the selected quads to list `list` and its samples. The list's row of scratch->scores,
// [rows][range.stride] with quad i at i, must have shares. Overwrites scratch->chosen.
void sample_list(const SelectorQuery& query, const BlockRange& range, std::size_t list,
                 const SampleSize& size, SelectorScratch* scratch, Selection* out);

}  // namespace kvasir
