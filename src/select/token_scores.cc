#include "select/token_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvasir {

const QueryRows& TokenQueries::set(const float* q, uint32_t group) {
  const uint32_t dim = shape_.dim, head_dim = shape_.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  f32_.assign(std::size_t{group} * dim, 0.0f);
  q8_.resize(f32_.size());
  scale_.resize(group);
  for (uint32_t r = 0; r < group; ++r)
    for (uint32_t d = 0; d < head_dim; ++d) f32_[r * dim + d] = q[r * head_dim + d] * scale;
  kernels_.quantize_queries(f32_.data(), group, dim, q8_.data(), nullptr, scale_.data());
  rows_ = {group, dim, f32_.data(), q8_.data(), nullptr, scale_.data(), shape_.latent};
  return rows_;
}

void best_shares(const FilterStep& step, const FilterQuery& query, uint64_t begin, uint64_t end,
                 float* best) {
  const Kernels& kernels = step.kernels;
  const PageShape& shape = step.pages.shape().page;
  const uint32_t kv_heads = step.pages.shape().kv_heads, group = step.heads / kv_heads,
                 page_tokens = shape.page_tokens;
  std::fill_n(best, end - begin, -std::numeric_limits<float>::infinity());
  TokenQueries queries(kernels, shape);
  const std::size_t stride = shape.extent_tokens();
  Array<float> scores(group * stride);
  Array<std::byte> scratch(kernels.attend_scratch(group, shape.dim));
  PageRef refs[extent_pages];
  for (uint32_t h = 0; h < kv_heads; ++h) {
    const QueryRows& rows = queries.set(query.q + std::size_t{h} * group * shape.head_dim, group);
    for (uint64_t at = begin; at < end; at += stride) {
      const auto n = static_cast<uint32_t>(std::min<uint64_t>(stride, end - at)),
                 first = static_cast<uint32_t>(at / page_tokens);
      for (uint32_t p = 0; p < n / page_tokens; ++p)
        refs[p] = step.pages.page(step.layer, h, first + p);
      kernels.score_tokens(rows, refs, n / page_tokens, scores.data(), stride, scratch.data());
      for (uint32_t r = 0; r < group; ++r)
        for (uint32_t t = 0; t < n; ++t)
          best[at - begin + t] =
              std::max(best[at - begin + t], scores[r * stride + t] - query.lse[h * group + r]);
    }
  }
}

}  // namespace kvasir
