#include "select/sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/checked.h"

namespace kvasir {
namespace {

// The sums of shares and of their squares, in a fixed order that compilers make vectors of.
struct Sums {
  double shares = 0, squares = 0;

  void add(const float* x, uint32_t n) {
    constexpr uint32_t lanes = 8;
    double one[lanes] = {}, two[lanes] = {};
    for (uint32_t i = 0; i + lanes <= n; i += lanes)
      for (uint32_t lane = 0; lane < lanes; ++lane) {
        const auto share = static_cast<double>(x[i + lane]);
        one[lane] += share;
        two[lane] += share * share;
      }
    for (uint32_t i = n / lanes * lanes; i < n; ++i) shares += static_cast<double>(x[i]), squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    for (uint32_t lane = 0; lane < lanes; ++lane) shares += one[lane], squares += two[lane];
  }
};

}  // namespace

SampleSize sample_size(uint64_t budget_tokens, float coverage, uint32_t block_tokens, uint32_t heads) {
  const auto blocks = [&](uint64_t tokens) { return static_cast<uint32_t>(std::min<uint64_t>(ceil_div(tokens, block_tokens), UINT32_MAX / 64)); };
  if (coverage == 0) return {blocks(budget_tokens), blocks(budget_tokens), 0};
  const double error = (1 - static_cast<double>(coverage)) * heads;
  return {blocks(budget_tokens / 4), blocks(budget_tokens * 4), error * error};
}

void begin_samples(Selection* out) {
  out->samples.resize(out->lists.size());
  out->sample_numbers.resize(out->lists.size());
  for (std::size_t i = 0; i < out->lists.size(); ++i) out->samples[i].clear(), out->sample_numbers[i].clear();
  out->sampled = true;
}

void sample_list(const SelectorQuery& query, const BlockRange& range, std::size_t list, const SampleSize& size, SelectorScratch* scratch, Selection* out) {
  const uint32_t n = range.end - range.first, most = std::min(n, size.most), least = std::min(most, size.least);
  const float* shares = scratch->scores.data() + (range.row + list) * range.stride + range.first;
  scratch->chosen.resize(n);
  scratch->bytes.resize(std::size_t{n} * 4);
  scratch->priorities.resize(std::size_t{2} * n);
  float* priorities = scratch->priorities.data();
  query.kernels.sample_priorities(shares, n, range.first, sample_seed(query.layer, query.kv_head), priorities);
  // One more than may be chosen: the first that is left out.
  uint32_t* chosen = scratch->chosen.data();
  const uint32_t found = query.kernels.top_k(priorities, n, most + 1, chosen, scratch->bytes.data());
  float* ranked = priorities + n;
  // What is no number, of a damaged file, would not be in any order: it comes last.
  for (uint32_t i = 0; i < found; ++i) ranked[i] = priorities[chosen[i]] > 0 ? priorities[chosen[i]] : 0;
  Sums all;
  all.add(shares, n);
  // Whose share is at least t has no lower a priority, so it is among those that were found.
  const auto below = [&](float t) {
    Sums rest = all;
    for (uint32_t i = 0; i < found; ++i) {
      const auto share = static_cast<double>(shares[chosen[i]]);
      if (shares[chosen[i]] >= t) rest.shares -= share, rest.squares -= share * share;
    }
    return rest;
  };
  const auto is_enough = [&](float t) {
    const Sums rest = below(t);
    return static_cast<double>(t) * rest.shares - rest.squares <= size.variance;
  };
  // The priority that so many others are above.
  uint32_t begin = 0, end = found;  // ranked: what is before `begin` is no smaller, what is at `end` or behind it no larger than what is between
  const auto after = [&](uint32_t count) {
    std::nth_element(ranked + begin, ranked + count, ranked + end, std::greater<>());
    return ranked[count];
  };
  uint32_t low = std::min(least, found), high = std::min(most, found);
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (is_enough(after(middle)))
      high = middle, end = middle + 1;
    else
      low = begin = middle + 1;
  }
  float t = low < found ? after(low) : 0;
  if (low > least && low < std::min(most, found)) {
    const float next = t, last = std::nextafter(*std::min_element(ranked, ranked + low), 0.0f);
    for (int i = 0; i < 6; ++i) {  // Newton's steps, of a function that is convex and made of straight pieces
      const Sums rest = below(t);
      if (!(rest.shares > 0)) break;
      t = std::clamp(static_cast<float>((size.variance + rest.squares) / rest.shares), next, last);
    }
  }

  const PageShape& page = query.pages.shape().page;
  for (uint32_t i = 0; i < found; ++i) {
    const float share = shares[chosen[i]];
    if (!(priorities[chosen[i]] > t || least == n)) continue;  // without a share only where everything is wanted
    const uint32_t block = chosen[i] + range.first, number = block / page.page_blocks();
    const uint64_t tokens = ~uint64_t{0} >> (64 - page.block_tokens) << block % page.page_blocks() * page.block_tokens;
    out->tokens += page.block_tokens;
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
}

}  // namespace kvasir
