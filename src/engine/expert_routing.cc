#include "engine/expert_routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvasir {
namespace {

constexpr float excluded = -std::numeric_limits<float>::infinity();
// The least sum that weights are divided by: half precision's smallest normal number, as where
// models were trained.
constexpr float min_sum = 6.103515625e-5f;

// The index of the largest score; the first of equals.
uint32_t best_of(const float* scores, uint32_t n) {
  return static_cast<uint32_t>(std::max_element(scores, scores + n) - scores);
}

// p[i] = e^p[i] / sum of e^p
template <class Value>
void softmax(uint32_t n, Value&& p) {
  float top = p(0), sum = 0;
  for (uint32_t i = 1; i < n; ++i) top = std::max(top, p(i));
  for (uint32_t i = 0; i < n; ++i) sum += p(i) = std::exp(p(i) - top);
  for (uint32_t i = 0; i < n; ++i) p(i) /= sum;
}

// The sum of the two largest scores.
float best_two(const float* scores, uint32_t n) {
  const uint32_t first = best_of(scores, n);
  float second = excluded;
  for (uint32_t i = 0; i < n; ++i)
    if (i != first) second = std::max(second, scores[i]);
  return n == 1 ? scores[0] : scores[first] + second;
}

// Excludes the experts of all groups but the best ones. sums: scratch, [groups].
void exclude_groups(const ExpertConfig& c, float* scores, float* sums) {
  const uint32_t size = c.count / c.groups;
  for (uint32_t g = 0; g < c.groups; ++g) sums[g] = best_two(scores + g * size, size);
  for (uint32_t g = 0; g < c.groups; ++g) {
    uint32_t better = 0;
    for (uint32_t other = 0; other < c.groups; ++other)
      better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    if (better >= c.groups_used) std::fill_n(scores + g * size, size, excluded);
  }
}

}  // namespace

void choose_experts(const ExpertConfig& c, const float* bias, float* logits, float* scores,
                    ExpertChoice* out) {
  float* const p = logits;
  std::copy_n(logits, c.count, scores);
  if (c.gating == Gating::softmax) softmax(c.count, [&](uint32_t i) -> float& { return p[i]; });
  if (c.gating == Gating::sigmoid)
    for (uint32_t i = 0; i < c.count; ++i) p[i] = 1 / (1 + std::exp(-p[i]));
  if (!c.chooses_by_logits) std::copy_n(p, c.count, scores);
  if (bias)
    for (uint32_t i = 0; i < c.count; ++i) scores[i] += bias[i];
  if (c.groups_used < c.groups) exclude_groups(c, scores, scores + c.count);

  for (uint32_t r = 0; r < c.used; ++r) {
    const uint32_t best = best_of(scores, c.count);
    out[r] = {best, p[best]};
    scores[best] = excluded;
  }
  if (c.gating == Gating::softmax_chosen)
    softmax(c.used, [&](uint32_t r) -> float& { return out[r].weight; });
  if (c.normalise) {
    float sum = 0;
    for (uint32_t r = 0; r < c.used; ++r) sum += out[r].weight;
    for (uint32_t r = 0; r < c.used; ++r) out[r].weight /= std::max(sum, min_sum);
  }
  for (uint32_t r = 0; r < c.used; ++r) out[r].weight *= c.scale;
}

}  // namespace kvasir
