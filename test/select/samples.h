// A store of random keys and values with two KV heads of three query heads each, and queries to it.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "pool.h"
#include "select/selector.h"

namespace kvasir::test {

constexpr uint32_t sample_layers = 2, sample_kv_heads = 2, sample_group = 3,
                   sample_heads = sample_kv_heads * sample_group;

inline StoreShape sample_shape(uint32_t head_dim) {
  return {sample_layers, sample_kv_heads, PageShape::of(head_dim)};
}

inline void seal_pages(PageStore* store, uint32_t count, uint32_t seed) {
  const PageShape& page = store->shape().page;
  const uint32_t first = store->pages();
  REQUIRE(store->reserve(first + count).ok());
  Array<float> k(page.page_tokens * page.dim), v(k.size());
  for (uint32_t l = 0; l < sample_layers; ++l)
    for (uint32_t h = 0; h < sample_kv_heads; ++h)
      for (uint32_t p = first; p < first + count; ++p) {
        std::mt19937 random(seed * 7919 + p * 31 + l * 5 + h);
        std::normal_distribution<float> normal;
        for (uint32_t i = 0; i < k.size(); ++i) {
          const bool padding = i % page.dim >= page.head_dim;
          k[i] = padding ? 0 : normal(random);
          v[i] = padding ? 0 : normal(random);
        }
        store->seal(cpu_kernels(), l, h, p, k.data(), v.data());
      }
  store->commit(first + count);
}

inline std::vector<float> normals(std::size_t n, uint32_t seed, float mean = 0,
                                  float deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

// q . k / sqrt(head_dim) of every sealed token for one query head, the query rounded to int8 as
// attention rounds it. q: [heads][head_dim].
inline std::vector<double> plain_scores(const PageStore& store, uint32_t layer, uint32_t head,
                                        const float* q) {
  const PageShape& page = store.shape().page;
  std::vector<double> query(page.head_dim);
  double largest = 0;
  for (uint32_t d = 0; d < page.head_dim; ++d) {
    query[d] = static_cast<double>(q[head * page.head_dim + d]) /
               std::sqrt(static_cast<double>(page.head_dim));
    largest = std::max(largest, std::fabs(query[d]));
  }
  for (double& x : query) x = std::nearbyint(x * 127 / largest) * largest / 127;
  std::vector<double> out;
  Array<float> k(page.page_tokens * page.dim), v(k.size());
  for (uint32_t p = 0; p < store.pages(); ++p) {
    const PageRef ref = store.page(layer, head / sample_group, p);
    cpu_kernels().unseal_page(page, ref.data, ref.scales, k.data(), v.data());
    for (uint32_t t = 0; t < page.page_tokens; ++t) {
      double sum = 0;
      for (uint32_t d = 0; d < page.head_dim; ++d)
        sum += query[d] * static_cast<double>(k[t * page.dim + d]);
      out.push_back(sum);
    }
  }
  return out;
}

// The tokens of a selection's list, ascending.
inline std::vector<uint32_t> tokens_of(const Selection& s, std::size_t list, uint32_t page_tokens) {
  std::vector<uint32_t> out;
  for (std::size_t i = 0; i < s.page_numbers[list].size(); ++i)
    for (uint32_t t = 0; t < page_tokens; ++t)
      if (s.lists[list][i].tokens >> t & 1)
        out.push_back(s.page_numbers[list][i] * page_tokens + t);
  return out;
}

// Whether `chosen` are k of the largest of scores[first ..], up to rounding at the border.
inline bool are_best(const std::vector<uint32_t>& chosen, const std::vector<double>& scores,
                     uint32_t first, std::size_t k, double rounding) {
  std::vector<double> all(scores.begin() + first, scores.end());
  k = std::min(k, all.size());
  if (chosen.size() != k) return false;
  if (k == 0) return true;
  std::sort(all.begin(), all.end(), std::greater<>());
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i] < first || (i > 0 && chosen[i] <= chosen[i - 1])) return false;
    if (scores[chosen[i]] < all[k - 1] - rounding * (1e-30 + std::fabs(all[k - 1]))) return false;
  }
  return true;
}

}  // namespace kvasir::test
