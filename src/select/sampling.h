// Which quads of tokens a query reads so that the rest is estimated without bias: threshold
// sampling (Duffield, Lund, Thorup, Learn more, sample less: control of volume and variance in
// network measurement, IEEE Trans. Inf. Theory 51(5), 2005), by the shares of attention that quads
// are expected to have.
//
//   choice  a quad is read when its share is at least u times the threshold t, with a random number
//           u in (0, 1) that the quad keeps from token to token, its own in each layer and KV head:
//           for certain when its share is at least t, else with probability share / t
//   weight  one that is there for certain stands for itself. Another one, a sample, stands for t /
//           share quads like itself: its exponentials count so many times
//
// So the expected sums over what is read, of weights and of weighted values, are those over
// everything, however wrong the shares are; wrong shares cost variance. What t costs and leaves
// follows from the shares alone: the number of quads that are read is expected to be the sum of
// min(1, share / t), the variance of the sum of the shares themselves is the sum of share * (t -
// share) over those below t. By the one or the other a step finds its t. Of all ways to sample that
// read so many quads this one has the least variance. Heads that spread their attention over
// everything need few samples, heads that look for one token few quads.
#pragma once

#include <cstdint>

#include "select/blocks.h"

namespace kvasir {

// How many quads are read, in the mean: the fewest, from `least` on, whose variance is at most
// `variance`; `most` where none are.
struct SampleSize {
  uint32_t least, most;
  double variance;
};
// By the budget and, where there is one, the coverage: a standard error of 1 - coverage, for a
// quarter of the budget to four times it. Shares are of `heads` heads, summed.
SampleSize sample_size(uint64_t budget_tokens, float coverage, uint32_t heads);

// Of a layer's KV head, and of a draw; the quad's number makes it the quad's.
constexpr uint32_t sample_seed(uint32_t layer, uint32_t kv_head, uint32_t draw = 0) {
  return (layer << 16 | kv_head) * 0x85ebca6bu + draw * 0xc2b2ae3du;
}

// The threshold for n shares; 0 reads everything.
float sample_threshold(const Kernels& kernels, const float* shares, uint32_t n,
                       const SampleSize& size);

// Before sample_list(), of a selection that has its lists.
void begin_samples(Selection* out);

// Appends what is chosen to list `list` and its samples. The list's row of the scores,
// [rows][range.stride] with quad i's at i, are shares. Uses `chosen` of the scratch.
void sample_list(const SelectorQuery& query, const BlockRange& range, std::size_t list,
                 const SampleSize& size, SelectorScratch* scratch, Selection* out);

}  // namespace kvasir
