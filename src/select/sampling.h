// Threshold sampling of quads, so that the attention of unread quads is estimated without bias
// (Duffield, Lund, Thorup, Learn more, sample less: control of volume and variance in network
// measurement, IEEE Trans. Inf. Theory 51(5), 2005), by the expected shares of attention of the
// quads.
//
//   choice  a quad is read when its share is at least u times the threshold t. u in (0, 1) is a
//           random number that the quad keeps from token to token, its own in each layer and KV
//           head. So a quad with a share of at least t is always read, another with probability
//           share / t
//   weight  a quad that is always read stands for itself. A sample stands for t / share quads like
//           itself: its exponentials count that many times
//
// So the expected sums over the quads read, of weights and of weighted values, equal those over all
// quads, however wrong the shares are; wrong shares cost variance. The cost and the variance of t
// follow from the shares: the expected number of quads is the sum of min(1, share / t), and the
// variance of the sum of the shares is the sum of share * (t - share) over shares below t. A step
// finds its t from one of the two. Among all samplings of so many quads, this one has the least
// variance. Heads that spread their attention need few samples; heads that look for one token need
// few quads.
#pragma once

#include <cstdint>

#include "select/blocks.h"

namespace kvasir {

// The expected number of quads: the fewest, from min_quads on, whose variance is at most
// `variance`; max_quads where no number is enough.
struct SampleSize {
  uint32_t min_quads, max_quads;
  double variance;
};
// From the budget and, where there is one, the coverage: a standard error of 1 - coverage, for a
// quarter of the budget to four times it. Shares are sums over `heads` heads.
SampleSize sample_size(uint64_t budget_tokens, float coverage, uint32_t heads);

// The seed of a layer's KV head and a draw; the number of a quad makes its random number.
constexpr uint32_t sample_seed(uint32_t layer, uint32_t kv_head, uint32_t draw = 0) {
  return (layer << 16 | kv_head) * 0x85ebca6bu + draw * 0xc2b2ae3du;
}

// The threshold for n shares; 0 reads everything.
float sample_threshold(const Kernels& kernels, const float* shares, uint32_t n,
                       const SampleSize& size);

// Call before sample_list(), for a selection that has its lists.
void begin_samples(Selection* out);

// Appends the selected quads to list `list` and its samples. The list's row of the scores,
// [rows][range.stride] with quad i at i, has shares. Uses `chosen` of the scratch.
void sample_list(const SelectorQuery& query, const BlockRange& range, std::size_t list,
                 const SampleSize& size, SelectorScratch* scratch, Selection* out);

}  // namespace kvasir
