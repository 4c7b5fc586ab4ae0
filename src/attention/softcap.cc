// Attention with capped scores, cap * tanh(score / cap), as in Gemma 2 (arXiv 2408.00118, section
// 2). Kernels have no cap. A kernel computes the scores of pages, bit-identical to those that
// strategies select by. The rest is portable code.
//
// Keys are stored minus the mean key of their head, which shifts all scores of a query by the same
// number. Softmax ignores this shift, but tanh does not. So the shift is added before the cap.
//
// Cancel is tested per row of tokens and per page of rows, about every millisecond. Results after a
// cancel are undefined.
#include <cmath>

#include "attention/worker.h"

namespace kvasir {

namespace {

// Score of a token: cap * tanh((s + shift) / cap) + bias.
struct Softcap {
  float cap, shift, bias;
  float operator()(float s) const { return cap * std::tanh((s + shift) / cap) + bias; }
};
struct ValueRows {
  const float* v;  // [n][dim]
  uint32_t n, dim;
};

// Adds tokens to one row's state. s: [n] uncapped scores, overwritten.
void add_tokens(const Softcap& capped, float* s, const ValueRows& values,
                const AttentionState& state) {
  const uint32_t n = values.n, dim = values.dim;
  float m = *state.m;
  for (uint32_t t = 0; t < n; ++t) {
    if (s[t] == -std::numeric_limits<float>::infinity()) continue;
    s[t] = capped(s[t]);
    m = std::max(m, s[t]);
  }
  if (m == -std::numeric_limits<float>::infinity()) return;
  const float before = std::exp(*state.m - m);
  *state.m = m;
  *state.l *= before;
  for (uint32_t d = 0; d < dim; ++d) state.o[d] *= before;
  for (uint32_t t = 0; t < n; ++t) {
    const float weight = std::exp(s[t] - m);
    *state.l += weight;
    for (uint32_t d = 0; d < dim; ++d) state.o[d] += weight * values.v[std::size_t{t} * dim + d];
  }
}

}  // namespace

float centre_score(const AttentionRequest& req, uint32_t head, const QueryRows& row) {
  const KvStore& store = req.store;
  if (store.centre().empty()) return 0;
  const float* centre =
      store.centre().data() + (std::size_t{req.layer} * store.shape().kv_heads + head) * row.dim;
  return dot(row.f32, centre, row.dim);
}

float dot(const float* a, const float* b, uint32_t n) {
  constexpr uint32_t lanes = 8;
  double sums[lanes] = {}, sum = 0;
  uint32_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (uint32_t j = 0; j < lanes; ++j)
      sums[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  for (; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  for (double part : sums) sum += part;
  return static_cast<float>(sum);
}

void Attention::attend_rows(const HeadQueries& queries, const RowsOfKeys& keys,
                            const AttentionState& state, Worker* w) const {
  const AttentionRequest& req = queries.req;
  const QueryRows& rows = queries.rows;
  if (queries.cap == 0)
    return kernels_.attend_rows(rows, keys.k, keys.v, keys.count, keys.limits, state,
                                w->scratch.data());
  constexpr uint32_t tile = 64;  // tokens per call of add_tokens()
  const uint32_t dim = rows.dim;
  float s[tile];
  for (uint32_t r = 0; r < rows.rows && !req.cancel.fired(); ++r) {
    const float* q = rows.f32 + std::size_t{r} * dim;
    const float shift = centre_score(req, queries.head, row_of(rows, r));
    const uint32_t seen = keys.limits ? std::min(keys.count, keys.limits[r]) : keys.count;
    for (uint32_t at = 0; at < seen; at += tile) {
      const uint32_t count = std::min(tile, seen - at);
      for (uint32_t t = 0; t < count; ++t) {
        const float* key = keys.k + (std::size_t{at} + t) * dim;
        float sum = 0;
        for (uint32_t d = 0; d < dim; ++d) sum += q[d] * key[d];
        s[t] = sum;
      }
      add_tokens({queries.cap, shift, 0}, s, {keys.v + std::size_t{at} * dim, count, dim},
                 row_of(state, r, dim));
    }
  }
}

void Attention::attend_pages(const HeadQueries& queries, std::span<const PageRef> pages,
                             const AttentionState& state, Worker* w) const {
  const AttentionRequest& req = queries.req;
  const QueryRows& rows = queries.rows;
  if (queries.cap == 0)
    return kernels_.attend_pages(rows, pages.data(), static_cast<uint32_t>(pages.size()), state,
                                 w->scratch.data());
  const uint32_t dim = rows.dim, tokens = shape_.page_tokens;
  // rounded up, so that k and v are aligned
  const std::size_t scores = round_up(std::size_t{block_rows_} * tokens, 16);
  w->capped.resize(scores + 2 * std::size_t{tokens} * dim);
  float* const s = w->capped.data();
  float* const k = s + scores;
  float* const v = k + std::size_t{tokens} * dim;
  w->shifts.resize(block_rows_);
  for (uint32_t r = 0; r < rows.rows; ++r)
    w->shifts[r] = centre_score(req, queries.head, row_of(rows, r));
  for (std::size_t p = 0; p < pages.size() && !req.cancel.fired(); ++p) {
    PageRef page = pages[p];
    page.bias = 0;
    kernels_.score_tokens(rows, &page, 1, s, tokens, w->scratch.data());
    kernels_.unseal_page(shape_, pages[p].data, pages[p].scales, k, v);
    for (uint32_t r = 0; r < rows.rows; ++r)
      add_tokens({queries.cap, w->shifts[r], pages[p].bias}, s + std::size_t{r} * tokens,
                 {v, tokens, dim}, row_of(state, r, dim));
  }
}

}  // namespace kvasir
