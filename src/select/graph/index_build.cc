#include "select/graph/index_build.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

namespace kvasir {

// At 32K tokens a head's graph takes as long as prefill of so many tokens.
constexpr uint32_t head_steps = 400;
constexpr uint32_t query_tokens = 4096;  // measured in select/graph/ood.cc
// Of a key: distances of damaged keys stay finite, for any metric that a file may have.
constexpr float max_key_scale = 1e9f;
// At least so many words per item: its links and their offset.
constexpr uint64_t ood_build_words = 26, hnsw_build_words = 9;

KeyRows::KeyRows(const PageStore& pages, const Kernels& kernels, uint32_t layer, uint32_t kv_head,
                 uint32_t first_token, const CancelLatch& cancel)
    : kernels_(kernels), dim_(pages.shape().page.dim) {
  const PageShape& shape = pages.shape().page;
  const uint32_t page_tokens = shape.page_tokens;
  items_ = pages.pages() * page_tokens - first_token;
  rows_.resize(std::size_t{items_} * dim_);
  scales_.resize(items_);
  squares_.resize(items_);
  for (uint32_t i = 0; i < items_; ++i) {
    if (i % 1024 == 0 && cancel.fired()) return;
    const uint32_t token = first_token + i, t = token % page_tokens;
    const PageRef page = pages.page(layer, kv_head, token / page_tokens);
    int8_t* to = rows_.data() + std::size_t{i} * dim_;
    const int8_t* key = page.data + shape.key_at(t);
    for (uint32_t d = 0; d < dim_; d += 4, key += PageShape::key_stride)
      std::memcpy(to + d, key, 4);
    const float scale = std::bit_cast<float>(uint32_t{page.scales[t]} << 16);
    const bool sound = std::fabs(scale) <= max_key_scale;
    as_stored_ &= sound;
    scales_[i] = sound ? scale : 0;
    squares_[i] = dot(i, i);
  }
}

float KeyRows::dot(uint32_t a, uint32_t b) const {
  const int8_t *x = row(a), *y = row(b);
  int32_t sum = 0;
  for (uint32_t d = 0; d < dim_; ++d) sum += x[d] * y[d];
  return static_cast<float>(sum) * (scales_[a] * scales_[b]);
}

void KeyRows::dots(uint32_t item, std::span<const uint32_t> others, Array<KeyRef>* refs,
                   float* dots) const {
  refs->clear();
  for (const uint32_t other : others) refs->push_back(ref(other));
  kernels_.score_keys({1, dim_, nullptr, row(item), nullptr, &scales_[item]}, refs->data(),
                      static_cast<uint32_t>(others.size()), 4, dots, others.size());
}

void KeyRows::measure_by(std::span<const float> metric, const CancelLatch& cancel) {
  if (metric.empty()) return;
  Array<float> key(dim_);
  std::vector<double> sums(dim_);
  for (uint32_t i = 0; i < items_; ++i) {
    if (i % 1024 == 0 && cancel.fired()) return;
    int8_t* row = rows_.data() + std::size_t{i} * dim_;
    std::fill(sums.begin(), sums.end(), 0.0);
    for (uint32_t d = 0; d < dim_; ++d)
      for (uint32_t j = 0; j < dim_; ++j)
        sums[j] += static_cast<double>(metric[d * dim_ + j]) * row[d];
    for (uint32_t j = 0; j < dim_; ++j)
      key[j] = static_cast<float>(sums[j] * static_cast<double>(scales_[i]));
    kernels_.quantize_queries(key.data(), 1, dim_, row, nullptr, &scales_[i]);
    squares_[i] = dot(i, i);
  }
}

Array<float> query_metric(const QueryRows& queries, const CancelLatch& cancel) {
  const uint32_t n = queries.dim;
  std::vector<double> l(std::size_t{n} * n);
  for (uint32_t r = 0; r < queries.rows; ++r) {
    if (r % 64 == 0 && cancel.fired()) return {};
    const int8_t* q = queries.q + std::size_t{r} * n;
    const double square =
        static_cast<double>(queries.scale[r]) * static_cast<double>(queries.scale[r]);
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t j = 0; j <= i; ++j) l[i * n + j] += square * (q[i] * q[j]);
  }
  double trace = 0;
  for (uint32_t i = 0; i < n; ++i) trace += l[i * n + i];
  if (!(trace > 0)) return {};
  for (uint32_t j = 0; j < n; ++j)  // Cholesky, in place
    for (uint32_t i = j; i < n; ++i) {
      double sum = l[i * n + j] * n / trace + (i == j ? 1 : 0);
      for (uint32_t k = 0; k < j; ++k) sum -= l[i * n + k] * l[j * n + k];
      l[i * n + j] = i == j ? std::sqrt(sum) : sum / l[j * n + j];
    }
  return Array<float>(l.begin(), l.end());
}

IndexQueries::IndexQueries(const StoreShape& shape, uint32_t heads, uint32_t tokens)
    : shape_(shape), group_(heads / shape.kv_heads), tokens_(tokens) {
  const std::size_t rows = std::size_t{shape.layers} * heads * tokens;
  q8_ = make_buffer<int8_t>(rows * shape.page.dim);
  scale_.resize(rows);
  padded_.resize(shape.page.dim);
}

void IndexQueries::write(const Kernels& kernels, uint32_t layer, uint32_t first, uint32_t n,
                         const float* q) {
  const uint32_t dim = shape_.page.dim, head_dim = shape_.page.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (uint32_t i = 0; i < n; ++i)
    for (uint32_t h = 0; h < shape_.kv_heads * group_; ++h, q += head_dim) {
      for (uint32_t d = 0; d < head_dim; ++d) padded_[d] = q[d] * scale;
      const std::size_t at =
          (std::size_t{layer} * shape_.kv_heads * group_ + h) * tokens_ + first + i;
      kernels.quantize_queries(padded_.data(), 1, dim, q8_.get() + at * dim, nullptr,
                               scale_.data() + at);
    }
}

QueryRows IndexQueries::rows_of(uint32_t layer, uint32_t kv_head, uint32_t first,
                                uint32_t n) const {
  const std::size_t at = (std::size_t{layer} * shape_.kv_heads + kv_head) * rows() + first;
  return {n,       shape_.page.dim,    nullptr,           q8_.get() + at * shape_.page.dim,
          nullptr, scale_.data() + at, shape_.page.latent};
}

uint64_t index_steps(const StoreShape& shape) { return uint64_t{shape.heads_total()} * head_steps; }

uint32_t wanted_queries(IndexKind kind) { return kind == IndexKind::ood ? query_tokens : 0; }

uint64_t index_bytes(IndexKind kind, const StoreShape& shape, uint32_t graphs, uint64_t tokens) {
  const uint64_t centroids =
      static_cast<uint64_t>(std::sqrt(static_cast<double>(tokens))) * shape.page.dim;
  const uint64_t words = kind == IndexKind::ood    ? ood_build_words * tokens
                         : kind == IndexKind::hnsw ? hnsw_build_words * tokens
                                                   : tokens + centroids;
  return words * sizeof(uint32_t) * shape.heads_total() * graphs;
}

bool takes_insertions(IndexKind kind) { return kind == IndexKind::ood; }

namespace {

bool head_is_intact(const PageStore& pages, uint32_t layer, uint32_t head,
                    const CancelLatch& latch) {
  for (uint32_t p = 0; p < pages.pages(); ++p)
    if (!latch.fired() && !pages.intact_page(layer, head, p)) return false;
  return true;
}

TokenIndex::Words build_head(IndexKind kind, const IndexInput& input) {
  switch (kind) {
    case IndexKind::hnsw:
      return build_hnsw(input);
    case IndexKind::ood:
      return build_ood(input);
    case IndexKind::ivf:
      break;
  }
  return build_ivf(input);
}

NearestBy who_did(const IndexOrder& order, std::span<const std::unique_ptr<DeviceSearch>> searches,
                  uint32_t heads) {
  NearestBy by;
  if (order.kind != IndexKind::ood || order.known.index) return by;
  uint32_t found = 0;
  for (const auto& search : searches) {
    found += search->found();
    if (search->found() > 0) by.names += (by.names.empty() ? "" : ",") + search->name();
    if (by.because.empty()) by.because = search->fallback();
  }
  if (found < heads) by.names += by.names.empty() ? "cpu" : ",cpu";
  return by;
}

}  // namespace

Status build_index(const IndexOrder& order, const Kernels& kernels, ThreadPool* pool,
                   const Cancel* cancel, Progress* progress, std::shared_ptr<TokenIndex>* out) {
  const PageStore& pages = order.pages;
  const StoreShape& shape = pages.shape();
  const TokenIndexes::Entry& known = order.known;
  const uint32_t graphs = order.graphs, heads = shape.heads_total() * graphs;
  const uint32_t first = known.index ? known.index->first_token() : shape.page.page_tokens,
                 tokens = pages.pages() * shape.page.page_tokens;
  const CancelLatch latch(cancel);
  std::vector<TokenIndex::Words> words(heads);
  std::atomic<bool> intact{true};
  std::vector<std::unique_ptr<DeviceSearch>> searches;
  for (const auto& device : order.devices)
    searches.push_back(std::make_unique<DeviceSearch>(device));
  const uint64_t read = order.queries.tokens(), steps = index_steps(shape);
  for (uint32_t begin = 0;; begin += pool->threads()) {
    if (latch.fired()) return Status::error(Code::cancelled, "cancelled; no index was made");
    if (!intact) return pages.damaged();
    for (const auto& search : searches) RETURN_IF_ERROR(search->status());
    const bool stopped =
        !progress->update(read + std::min(begin, heads) * steps / heads, read + steps);
    if (begin >= heads) break;
    if (stopped)
      return Status::error(Code::cancelled, "stopped by the progress callback; no index was made");
    pool->run(std::min(pool->threads(), heads - begin), [&](uint32_t task, uint32_t) {
      const uint32_t at = begin + task, graph = at % graphs, layer = at / graphs / shape.kv_heads,
                     head = at / graphs % shape.kv_heads;
      if (!head_is_intact(pages, layer, head, latch)) {
        intact = false;
        return;
      }
      const uint32_t queries = order.queries.rows() / graphs;
      words[at] = build_head(
          order.kind,
          {kernels, pages, layer, head, first, order.queries, graph * queries, queries,
           known.index ? &known.index->heads(layer, head)[graph] : nullptr, known.valid - first,
           latch, searches.empty() ? nullptr : searches[at % searches.size()].get()});
    });
  }
  if (order.nearest_by) *order.nearest_by = who_did(order, searches, heads);
  const uint32_t built = known.index ? std::min(known.index->built(), known.valid) : tokens;
  *out =
      TokenIndex::make(order.kind, shape, {first, tokens, built, graphs}, std::move(words), &latch);
  if (latch.fired()) {
    out->reset();
    return Status::error(Code::cancelled, "cancelled; no index was made");
  }
  if (!*out)
    return Status::error(Code::internal,
                         "an index was made that names an item that does not exist");
  return {};
}

}  // namespace kvasir
