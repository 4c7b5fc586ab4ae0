#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "reference.h"

namespace kvasir::reference {
namespace {

constexpr double excluded = -std::numeric_limits<double>::infinity(), min_sum = 6.103515625e-5;

void softmax(std::vector<double>* p) {
  const double top = *std::max_element(p->begin(), p->end());
  double sum = 0;
  for (double& x : *p) sum += x = std::exp(x - top);
  for (double& x : *p) x /= sum;
}

// The sum of the two largest scores.
double best_two(const double* scores, uint32_t n) {
  std::vector<double> sorted(scores, scores + n);
  std::sort(sorted.rbegin(), sorted.rend());
  return n == 1 ? sorted[0] : sorted[0] + sorted[1];
}

void exclude_groups(const DeviceRouting& r, std::vector<double>* scores) {
  const uint32_t size = r.experts / r.groups;
  std::vector<double> sums(r.groups);
  for (uint32_t g = 0; g < r.groups; ++g) sums[g] = best_two(&(*scores)[g * size], size);
  for (uint32_t g = 0; g < r.groups; ++g) {
    uint32_t better = 0;
    for (uint32_t o = 0; o < r.groups; ++o)
      better += sums[o] > sums[g] || (sums[o] == sums[g] && o < g);
    if (better >= r.groups_used) std::fill_n(&(*scores)[g * size], size, excluded);
  }
}

}  // namespace

void route(const DeviceRouting& r, const float* logits, DeviceChoice* out) {
  std::vector<double> p(logits, logits + r.experts);
  if (r.gating == Gating::softmax) softmax(&p);
  if (r.gating == Gating::sigmoid)
    for (double& x : p) x = 1 / (1 + std::exp(-x));
  std::vector<double> scores = p;
  if (r.chooses_by_logits) scores.assign(logits, logits + r.experts);
  if (r.bias)
    for (uint32_t i = 0; i < r.experts; ++i) scores[i] += double{r.bias[i]};
  if (r.groups_used < r.groups) exclude_groups(r, &scores);
  std::vector<double> weights;
  for (uint32_t i = 0; i < r.used; ++i) {
    const auto best = std::max_element(scores.begin(), scores.end()) - scores.begin();
    out[i].expert = static_cast<uint32_t>(best);
    weights.push_back(p[static_cast<std::size_t>(best)]);
    scores[static_cast<std::size_t>(best)] = excluded;
  }
  if (r.gating == Gating::softmax_chosen) softmax(&weights);
  double sum = 0;
  for (const double w : weights) sum += w;
  for (uint32_t i = 0; i < r.used; ++i)
    out[i].weight = static_cast<float>(
        (r.normalise ? weights[i] / std::max(sum, min_sum) : weights[i]) * double{r.scale});
}

}  // namespace kvasir::reference
