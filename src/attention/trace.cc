#include "attention/trace.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/checked.h"

namespace kvasir {

// Measured with the bundled model over seven parts of a novel of 2,500 to 15,900 tokens. Each has
// 11 or 12 facts, spread from the first words to the last. Questions for them were answered with
// `full`, `bounded`, `quest` and `flat`. All 304 right answers had the fact in the first passage.
// Its largest block had 64% of the sum of squared shares on average, and at least 38%. Of plain
// shares it had 16%, little more than the text right before the question. Of cubed shares it had
// 77%.

// Attention sinks: heads without a match attend the first four tokens of a text, whatever they are
// ("Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453, section 3.1). They
// do not count.
constexpr uint64_t sink_tokens = 4;

// Omits tokens with less than e^-8, 0.03%, of the base. Their squared shares are negligible. Most
// tokens are omitted, which saves exponentials.
constexpr float min_exponent = -8;

// Smallest sum of a block in a passage, relative to the largest block.
constexpr double min_part = 0.05;

constexpr uint32_t blocks_together = 1024;  // blocks that one task sums

Trace::Trace(uint32_t heads, uint32_t block_tokens, uint64_t document, uint64_t begin)
    : heads_(heads), block_tokens_(block_tokens), document_(document), begin_(begin),
      blocks_(static_cast<uint32_t>(ceil_div(document, block_tokens))), bases_(heads),
      weights_(std::size_t{heads} * blocks_), step_(blocks_), sums_(blocks_) {}

void Trace::begin_step() { std::fill(step_.begin(), step_.end(), 0.0); }

void Trace::begin_layer() {
  std::fill(bases_.begin(), bases_.end(), 0.0f);
  std::fill(weights_.begin(), weights_.end(), 0.0f);
}

void Trace::add(uint32_t head, uint64_t first, std::span<const float> scores, float base) {
  float* const weights = weights_.data() + std::size_t{head} * blocks_;
  const uint64_t end = std::min<uint64_t>(document_, first + scores.size());
  for (uint64_t t = std::max({first, sink_tokens, begin_}); t < end; ++t) {
    const float exponent = scores[t - first] - base;
    if (exponent > min_exponent) weights[t / block_tokens_] += std::exp(exponent);
  }
}

void Trace::end_layer(const float* totals, ThreadPool* pool) {
  pool->run(static_cast<uint32_t>(ceil_div(blocks_, blocks_together)), [&](uint32_t task,
                                                                           uint32_t) {
    const uint32_t first = task * blocks_together, end = std::min(blocks_, first + blocks_together);
    for (uint32_t h = 0; h < heads_; ++h) {
      const double scale =
          std::exp(static_cast<double>(bases_[h]) - static_cast<double>(totals[h]));
      const float* weights = weights_.data() + std::size_t{h} * blocks_;
      for (uint32_t b = first; b < end; ++b) {
        const double share = static_cast<double>(weights[b]) * scale;
        if (share > 0) step_[b] += share * share;
      }
    }
  });
}

void Trace::commit() {
  for (uint32_t b = 0; b < blocks_; ++b) sums_[b] += step_[b];
  ++steps_;
}

void Trace::take(const Trace& other, uint64_t from, uint64_t to, uint64_t tokens) {
  for (uint64_t t = 0; t < tokens; t += block_tokens_) {
    const uint64_t at = (to + t) / block_tokens_, of = (from + t) / block_tokens_;
    if (at < blocks_ && of < other.blocks_) sums_[at] += other.sums_[of];
  }
}

double Trace::sum() const { return std::accumulate(sums_.begin(), sums_.end(), 0.0); }

double Trace::largest() const {
  return blocks_ > 0 ? *std::max_element(sums_.begin(), sums_.end()) : 0;
}

std::vector<Trace::Passage> Trace::passages(Scale of) const {
  std::vector<Passage> out;
  const double all = of.sum, least = of.largest * min_part;
  for (uint32_t b = 0; b < blocks_; ++b) {
    if (sums_[b] == 0 || sums_[b] < least) continue;
    const uint64_t first = std::max(uint64_t{b} * block_tokens_, begin_),
                   end = std::min((uint64_t{b} + 1) * block_tokens_, document_);
    if (out.empty() || out.back().first + out.back().tokens != first) out.push_back({first, 0, 0});
    out.back().tokens += end - first;
    out.back().share += sums_[b] / all;
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const Passage& a, const Passage& b) { return a.share > b.share; });
  out.resize(std::min(out.size(), max_passages));
  return out;
}

}  // namespace kvasir
