#include "select/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"

namespace kvasir {
namespace {

constexpr int max_newton_steps = 24;  // of Newton's method; a handful is usual
// relative precision of a threshold; an inexact one adds no bias
constexpr double near_enough = 1 + 1e-3;

}  // namespace

SampleSize sample_size(uint64_t budget_tokens, float coverage, uint32_t heads) {
  constexpr uint64_t max_tokens = uint64_t{1} << 40;
  const auto quads = [&](uint64_t tokens) {
    return static_cast<uint32_t>(
        std::min<uint64_t>(ceil_div(tokens, quad_tokens), UINT32_MAX / 64));
  };
  budget_tokens = std::min(budget_tokens, max_tokens);
  if (coverage == 0) return {quads(budget_tokens), quads(budget_tokens), 0};
  const double error = (1 - static_cast<double>(coverage)) * heads;
  return {quads(budget_tokens / 4), quads(budget_tokens * 4), error * error};
}

float sample_threshold(const Kernels& kernels, const float* shares, uint32_t n,
                       const SampleSize& size) {
  if (n <= size.min_quads) return 0;
  // quads without a share are not read
  constexpr double lowest = std::numeric_limits<float>::min();
  const auto sums_at = [&](double t) {
    return kernels.sum_shares(shares, n, static_cast<float>(t));
  };
  const ShareSums all = sums_at(std::numeric_limits<float>::max());
  if (!(all.below > 0) || size.max_quads == 0) return std::numeric_limits<float>::max();
  // The variance is convex and piecewise linear in t. From the right, each tangent meets the target
  // closer to the solution.
  double t = (size.variance + all.squares) / all.below;
  ShareSums at = sums_at(t);
  const auto expected = [&] { return at.at_least + (t > 0 ? at.below / t : 0); };
  // A lower threshold reads more.
  for (int i = 0; i < max_newton_steps && at.below > 0 && expected() <= size.max_quads; ++i) {
    const double next = (size.variance + at.squares) / at.below;
    const bool last = next * near_enough >= t;
    t = next;
    if (last) break;
    at = sums_at(t);
  }
  const double found = expected();
  if (found >= size.min_quads && found <= size.max_quads)
    return static_cast<float>(std::max(t, lowest));
  // The number of quads is concave in 1 / t; its target is found in the same way.
  const double count = found > size.max_quads ? size.max_quads : size.min_quads;
  t = all.below / count;
  for (int i = 0; i < max_newton_steps; ++i) {
    at = sums_at(t);
    if (!(at.below > 0) || at.at_least >= count) break;
    const double next = at.below / (count - at.at_least);
    const bool last = next * near_enough >= t;
    t = next;
    if (last) break;
  }
  return static_cast<float>(std::max(t, lowest));
}

void begin_samples(Selection* out) {
  out->samples.resize(out->lists.size());
  out->sample_numbers.resize(out->lists.size());
  for (std::size_t i = 0; i < out->lists.size(); ++i)
    out->samples[i].clear(), out->sample_numbers[i].clear();
  out->sampled = true;
}

void sample_list(const SelectorQuery& query, const BlockRange& range, std::size_t list,
                 const SampleSize& size, SelectorScratch* scratch, Selection* out) {
  const uint32_t n = range.end - range.first, page_quads = query.pages.shape().page.page_quads();
  const float* shares = scratch->scores.data() + (range.row + list) * range.stride + range.first;
  const float t = sample_threshold(query.kernels, shares, n, size);
  scratch->chosen.resize(n);
  const uint32_t found = query.kernels.sample(shares, n, range.first,
                                              sample_seed(query.layer, query.kv_head, query.draw),
                                              t, scratch->chosen.data());
  for (uint32_t i = 0; i < found; ++i) {
    const uint32_t quad = scratch->chosen[i] + range.first, number = quad / page_quads;
    const uint64_t tokens = uint64_t{(1 << quad_tokens) - 1} << quad % page_quads * quad_tokens;
    const float share = shares[scratch->chosen[i]];
    if (share < t) {
      out->samples[list].push_back({nullptr, nullptr, tokens, std::log(t / share)});
      out->sample_numbers[list].push_back(number);
    } else if (out->page_numbers[list].empty() || out->page_numbers[list].back() != number) {
      out->lists[list].push_back({nullptr, nullptr, tokens});
      out->page_numbers[list].push_back(number);
    } else {
      out->lists[list].back().tokens |= tokens;
    }
  }
  out->tokens += uint64_t{found} * quad_tokens;
}

}  // namespace kvasir
