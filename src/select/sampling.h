// Which blocks of tokens a query reads so that the rest is estimated without bias: priority sampling (Duffield, Lund, Thorup, Priority sampling for
// estimation of arbitrary subset sums, J. ACM 54(6), 2007), by the shares of attention that blocks are expected to have.
//
//   priority   share / u, with a random number u in (0, 1) that a block keeps from token to token, its own in each layer and KV head
//   choice     the blocks of the highest priorities; t is the highest one that is left out, or what a variance asks for (below)
//   weight     a block whose share is at least t is there for certain and stands for itself. Another one is there with probability share / t, a
//              sample, and stands for t / share blocks like itself: its exponentials count so many times
//
// So the expected sums over what is read, of weights and of weighted values, are those over everything, however wrong the shares are; wrong shares cost
// variance. The variance of the sum of the shares themselves is, over blocks whose share is less than t, the sum of share * (t - share): by it
// a step knows how much it has to read. Where it decides, t is the threshold at which the variance is the one that is asked for, which lies between the last
// priority that is read and the first that is not. Heads that spread their attention over everything need few samples, heads that look for one token few blocks.
#pragma once

#include <cstdint>

#include "select/blocks.h"

namespace kvasir {

// How many blocks a list may have: the fewest, from `least` on, whose variance is at most `variance`; `most` where none are.
struct SampleSize {
  uint32_t least, most;
  double variance;
};
// By the budget and, where there is one, the coverage: a standard error of 1 - coverage, for a quarter of the budget to four times it. Shares are of `heads`
// heads, summed.
SampleSize sample_size(uint64_t budget_tokens, float coverage, uint32_t block_tokens, uint32_t heads);

// Of a layer's KV head; the block's number makes it the block's.
constexpr uint32_t sample_seed(uint32_t layer, uint32_t kv_head) { return (layer << 16 | kv_head) * 0x85ebca6bu; }

// Before sample_list(), of a selection that has its lists.
void begin_samples(Selection* out);

// Appends what is chosen to list `list` and its samples. The list's row of the scores, [rows][range.stride] with block b's at b, are shares. Uses `chosen`,
// `priorities` and `bytes` of the scratch.
void sample_list(const SelectorQuery& query, const BlockRange& range, std::size_t list, const SampleSize& size, SelectorScratch* scratch, Selection* out);

}  // namespace kvasir
