#include "select/token_scores.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace kvasir {

constexpr uint32_t most_page_tokens = 64;

const QueryRows& TokenQueries::set(const float* q, uint32_t group) {
  const uint32_t dim = shape_.dim, head_dim = shape_.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  f32_.assign(std::size_t{group} * dim, 0.0f);
  q8_.resize(f32_.size());
  scale_.resize(group);
  for (uint32_t r = 0; r < group; ++r)
    for (uint32_t d = 0; d < head_dim; ++d) f32_[r * dim + d] = q[r * head_dim + d] * scale;
  kernels_.quantize_queries(f32_.data(), group, dim, q8_.data(), nullptr, scale_.data());
  rows_ = {group, dim, f32_.data(), q8_.data(), nullptr, scale_.data()};
  return rows_;
}

void score_tokens(const PageShape& shape, const QueryRows& q, const PageRef& page, float* scores, std::size_t stride) {
  const uint32_t tokens = shape.page_tokens;
  for (uint32_t r = 0; r < q.rows; ++r) {
    int32_t sums[most_page_tokens] = {};
    for (uint32_t i = 0; i < shape.dim / 4; ++i) {
      const int8_t* k = page.data + std::size_t{i} * tokens * 4;
      const int8_t* x = q.q + std::size_t{r} * shape.dim + i * 4;
      for (uint32_t t = 0; t < tokens; ++t) sums[t] += k[4 * t] * x[0] + k[4 * t + 1] * x[1] + k[4 * t + 2] * x[2] + k[4 * t + 3] * x[3];
    }
    for (uint32_t t = 0; t < tokens; ++t) {
      const auto scale = std::bit_cast<float>(uint32_t{page.scales[t]} << 16);
      scores[r * stride + t] = static_cast<float>(sums[t]) * (scale * q.scale[r]);
    }
  }
}

void best_shares(const Kernels& kernels, const PageStore& pages, uint32_t layer, uint32_t heads, const float* q, const float* totals,
                 uint64_t begin, uint64_t end, float* best) {
  const PageShape& shape = pages.shape().page;
  const uint32_t kv_heads = pages.shape().kv_heads, group = heads / kv_heads, page_tokens = shape.page_tokens;
  std::fill_n(best, end - begin, -std::numeric_limits<float>::infinity());
  TokenQueries queries(kernels, shape);
  Array<float> scores(std::size_t{group} * page_tokens);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    const QueryRows& rows = queries.set(q + std::size_t{h} * group * shape.head_dim, group);
    for (uint64_t at = begin; at < end; at += page_tokens) {
      score_tokens(shape, rows, pages.page(layer, h, static_cast<uint32_t>(at / page_tokens)), scores.data(), page_tokens);
      for (uint32_t r = 0; r < group; ++r)
        for (uint32_t t = 0; t < page_tokens; ++t)
          best[at - begin + t] = std::max(best[at - begin + t], scores[r * page_tokens + t] - totals[h * group + r]);
    }
  }
}

}  // namespace kvasir
