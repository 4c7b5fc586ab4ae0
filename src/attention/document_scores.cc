// Scores of documents for a question: which of their blocks have a key that a query looks for.
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/worker.h"
#include "base/checked.h"

namespace kvasir {

// Of scores without NaN. Four at a time, because compilers take one after the other.
static float largest_of(const float* scores, uint32_t n) {
  typedef float Four __attribute__((vector_size(16)));
  float most = -std::numeric_limits<float>::infinity();
  uint32_t i = 0;
  if (n >= 4) {
    Four m;
    std::memcpy(&m, scores, sizeof m);
    for (i = 4; i + 4 <= n; i += 4) {
      Four x;
      std::memcpy(&x, scores + i, sizeof x);
      m = x > m ? x : m;
    }
    for (uint32_t j = 0; j < 4; ++j) most = std::max(most, m[j]);
  }
  for (; i < n; ++i) most = std::max(most, scores[i]);
  return most;
}

// Raises blocks to the estimates of the pages behind the sinks. False: damaged.
bool Attention::estimate_pages(const HeadQueries& queries, const BlockRows& out, Worker* w) const {
  const PageStore& pages = queries.req.store.pages();
  const Scanned scanned = queries.req.selector->scan(query_of(queries, 0), &w->selector);
  w->counts += scanned;
  if (!scanned.intact) return false;
  const uint32_t quads = shape_.page_quads();
  const std::size_t stride = pages.extents() * shape_.extent_quads();
  for (uint32_t r = 0; r < queries.rows.rows; ++r) {
    const float* scores = w->selector.scores.data() + r * stride;
    for (uint32_t p = 1, end; p < pages.pages(); p = end) {  // the pages of a block
      end = std::min(pages.pages(), (p / out.block_pages + 1) * out.block_pages);
      out.raise(r, p, largest_of(scores + p * quads, (end - p) * quads));
    }
  }
  return true;
}

// As estimate_pages(), exactly.
bool Attention::score_pages(const HeadQueries& queries, const BlockRows& out, Worker* w) const {
  const PageStore& pages = queries.req.store.pages();
  const uint32_t tokens = shape_.page_tokens, rows = queries.rows.rows;
  w->traced.resize(std::size_t{rows} * tokens);
  for (uint32_t p = 1; p < pages.pages() && !queries.req.cancel.fired(); ++p) {
    PageRef page = pages.page(queries.req.layer, queries.head, p);
    if (!pages.intact_page(queries.req.layer, queries.head, p)) return false;
    page.bias = 0;
    kernels_.score_tokens(queries.rows, &page, 1, w->traced.data(), tokens, w->scratch.data());
    for (uint32_t r = 0; r < rows; ++r) {
      const float* scores = w->traced.data() + std::size_t{r} * tokens;
      out.raise(r, p, largest_of(scores, tokens));
    }
  }
  return true;
}

Status Attention::score_blocks(std::span<const AttentionRequest> documents,
                               std::span<float* const> scores) {
  if (documents.empty()) return {};
  const uint32_t heads = config_.kv_heads, group = config_.group(),
                 block_tokens = std::max(1u, scanned_rows / group),
                 tokens = documents[0].tokens - documents[0].first,
                 parts = heads * static_cast<uint32_t>(ceil_div(tokens, block_tokens));
  for (Worker& w : workers_) w.counts = {};
  FirstFailure failure;
  pool_->run(static_cast<uint32_t>(documents.size()) * parts, [&](uint32_t task, uint32_t worker) {
    const AttentionRequest& req = documents[task / parts];
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const PageStore& pages = req.store.pages();
    const uint32_t h = task % heads, before = task % parts / heads * block_tokens;
    const HeadTokens own{h, req.first + before, std::min(block_tokens, tokens - before)};
    const HeadQueries queries = gather(req, own, true, &w).uncapped();
    const uint32_t rows = queries.rows.rows, blocks = score_block_count(req.store);
    const BlockRows out{
        scores[task / parts] + (std::size_t{before} * config_.heads + h * group) * blocks, blocks,
        score_block_tokens / shape_.page_tokens, config_.heads, group};
    const AttentionState near = empty_state(w.state.data(), rows, shape_.dim);
    attend_sinks_and_window(queries, own, near, &w);
    for (uint32_t r = 0; r < rows; ++r) {
      std::fill_n(out.row(r), blocks, -std::numeric_limits<float>::infinity());
      *out.row(r) = near.m[r];
    }
    const bool estimated = req.selector && req.store.sketch().built();
    if (pages.pages() > 1 &&
        !(estimated ? estimate_pages(queries, out, &w) : score_pages(queries, out, &w)))
      return failure.note(pages.damaged());
    for (uint32_t r = 0; r < rows; ++r) {
      const float centre = centre_score(req, h, row_of(queries.rows, r));
      for (uint32_t b = 0; b < blocks; ++b) out.row(r)[b] += centre;
    }
  });
  for (const Worker& w : workers_) counts_ += w.counts;
  return std::move(failure).take();
}

}  // namespace kvasir
