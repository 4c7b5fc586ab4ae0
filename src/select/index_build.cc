#include "select/index_build.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

namespace kvasir {

constexpr uint32_t head_steps = 400;     // at 32K tokens a head's graph takes as long as reading so many of them again
constexpr uint32_t query_tokens = 2048;  // of the newest: measured in select/ood.cc

KeyRows::KeyRows(const PageStore& pages, const Kernels& kernels, uint32_t layer, uint32_t kv_head, uint32_t first_token)
    : kernels_(kernels), dim_(pages.shape().page.dim) {
  const uint32_t page_tokens = pages.shape().page.page_tokens;
  items_ = pages.pages() * page_tokens - first_token;
  rows_.resize(std::size_t{items_} * dim_);
  scales_.resize(items_);
  squares_.resize(items_);
  for (uint32_t i = 0; i < items_; ++i) {
    const uint32_t token = first_token + i, t = token % page_tokens;
    const PageRef page = pages.page(layer, kv_head, token / page_tokens);
    int8_t* to = rows_.data() + std::size_t{i} * dim_;
    for (uint32_t d = 0; d < dim_; d += 4) std::memcpy(to + d, page.data + std::size_t{d} * page_tokens + t * 4, 4);
    scales_[i] = std::bit_cast<float>(uint32_t{page.scales[t]} << 16);
    squares_[i] = dot(i, i);
  }
}

float KeyRows::dot(uint32_t a, uint32_t b) const {
  const int8_t *x = row(a), *y = row(b);
  int32_t sum = 0;
  for (uint32_t d = 0; d < dim_; ++d) sum += x[d] * y[d];
  return static_cast<float>(sum) * (scales_[a] * scales_[b]);
}

void KeyRows::dots(uint32_t item, std::span<const uint32_t> others, Array<KeyRef>* refs, float* dots) const {
  refs->clear();
  for (const uint32_t other : others) refs->push_back(ref(other));
  kernels_.score_keys({1, dim_, nullptr, row(item), nullptr, &scales_[item]}, refs->data(), static_cast<uint32_t>(others.size()), 4, dots,
                      others.size());
}

IndexQueries::IndexQueries(const StoreShape& shape, uint32_t heads, uint32_t tokens)
    : shape_(shape), group_(heads / shape.kv_heads), tokens_(tokens) {
  const std::size_t rows = std::size_t{shape.layers} * heads * tokens;
  q8_.resize(rows * shape.page.dim);
  scale_.resize(rows);
  padded_.resize(std::size_t{group_} * shape.page.dim);
}

void IndexQueries::write(const Kernels& kernels, uint32_t layer, uint32_t first, uint32_t n, const float* q) {
  const uint32_t dim = shape_.page.dim, head_dim = shape_.page.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t h = 0; h < shape_.kv_heads; ++h, q += std::size_t{group_} * head_dim) {
      for (uint32_t r = 0; r < group_; ++r)
        for (uint32_t d = 0; d < head_dim; ++d) padded_[r * dim + d] = q[r * head_dim + d] * scale;
      const std::size_t at = ((std::size_t{layer} * shape_.kv_heads + h) * tokens_ + first + i) * group_;
      kernels.quantize_queries(padded_.data(), group_, dim, q8_.data() + at * dim, nullptr, scale_.data() + at);
    }
}

QueryRows IndexQueries::rows_of(uint32_t layer, uint32_t kv_head, uint32_t first, uint32_t n) const {
  const std::size_t at = (std::size_t{layer} * shape_.kv_heads + kv_head) * rows() + first;
  return {n, shape_.page.dim, nullptr, q8_.data() + at * shape_.page.dim, nullptr, scale_.data() + at};
}

uint64_t index_steps(const StoreShape& shape) { return uint64_t{shape.heads_total()} * head_steps; }

uint32_t wanted_queries(IndexKind kind) { return kind == IndexKind::ood ? query_tokens : 0; }

Status build_index(IndexKind kind, const PageStore& pages, const IndexQueries& queries, const Kernels& kernels, ThreadPool* pool,
                   const Cancel* cancel, Progress* progress, std::shared_ptr<TokenIndex>* out) {
  const StoreShape& shape = pages.shape();
  const uint32_t heads = shape.heads_total(), first = shape.page.page_tokens;
  const CancelLatch latch(cancel);
  std::vector<TokenIndex::Words> words(heads);
  std::atomic<bool> intact{true};
  const uint64_t read = queries.tokens(), total = read + index_steps(shape);
  if (!progress->update(read, total)) return Status::error(Code::cancelled, "stopped by the progress callback; no index was made");
  for (uint32_t begin = 0; begin < heads; begin += pool->threads()) {
    pool->run(std::min(pool->threads(), heads - begin), [&](uint32_t task, uint32_t) {
      const uint32_t at = begin + task, layer = at / shape.kv_heads, head = at % shape.kv_heads;
      for (uint32_t p = 0; p < pages.pages(); ++p)
        if (latch.fired() || !pages.intact_page(layer, head, p)) {
          if (!latch.fired()) intact = false;
          return;
        }
      const IndexInput input{kernels, pages, layer, head, first, queries, latch};
      switch (kind) {
        case IndexKind::hnsw: words[at] = build_hnsw(input); break;
        case IndexKind::ood: words[at] = build_ood(input); break;
        case IndexKind::ivf: words[at] = build_ivf(input); break;
      }
    });
    if (latch.fired()) return Status::error(Code::cancelled, "cancelled; no index was made");
    if (!intact) return pages.damaged();
    const uint32_t done = std::min(heads, begin + pool->threads());
    if (!progress->update(read + uint64_t{done} * head_steps, total) && done < heads) return Status::error(Code::cancelled, "stopped by the progress callback; no index was made");
  }
  *out = TokenIndex::make(kind, shape, first, pages.pages() * shape.page.page_tokens, std::move(words));
  if (!*out) return Status::error(Code::internal, "an index was made that names what is not there");
  return {};
}

}  // namespace kvasir
