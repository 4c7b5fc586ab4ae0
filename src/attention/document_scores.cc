// Scores of documents for a question: which of their blocks have a key that a query looks for.
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/worker.h"
#include "backend/query_groups.h"
#include "base/checked.h"

namespace kvasir {
namespace {

constexpr uint32_t exact_blocks = 4;  // per kernel call
constexpr uint32_t near_tokens = 64;  // likewise

typedef float Four __attribute__((vector_size(16)));

Four larger_of(Four a, Four b) { return a > b ? a : b; }

// Raises out[i] to the largest of `run` scores, a multiple of 16, and the last one to that of the
// rest. Explicit vectors, because compilers take one score after the other.
void raise_runs(const float* scores, uint32_t n, uint32_t run, float* out) {
  for (; n >= run; n -= run, ++out) {
    Four m[4], x[4];
    std::memcpy(m, scores, sizeof m);
    for (uint32_t i = 16; i < run; i += 16) {
      std::memcpy(x, scores + i, sizeof x);
      for (uint32_t j = 0; j < 4; ++j) m[j] = larger_of(m[j], x[j]);
    }
    const Four all = larger_of(larger_of(m[0], m[1]), larger_of(m[2], m[3]));
    *out = std::max({*out, all[0], all[1], all[2], all[3]});
    scores += run;
  }
  for (uint32_t i = 0; i < n; ++i) *out = std::max(*out, scores[i]);
}

}  // namespace

// Raises the blocks of row r from `page` on to n scores, page by page, `run` of a block.
void Attention::BlockRows::raise(uint32_t r, uint32_t page, const float* scores, uint32_t n,
                                 uint32_t run) const {
  float* const out = row(r);
  const uint32_t block = page / block_pages, at = page % block_pages * (run / block_pages),
                 first = at > 0 ? std::min(n, run - at) : 0;
  for (uint32_t i = 0; i < first; ++i) out[block] = std::max(out[block], scores[i]);
  raise_runs(scores + first, n - first, run, out + block + (first > 0));
}

// Raises block 0 to the scores of sinks and window. Their values are not read.
void Attention::score_near(const HeadQueries& queries, const BlockRows& out, Worker* w) const {
  const AttentionRequest& req = queries.req;
  const KvStore& store = req.store;
  const uint32_t rows = queries.rows.rows, dim = shape_.dim, columns = std::max(rows, 16u);
  float* const transposed = w->state.data();  // [dim][columns]
  for (uint32_t r = 0; r < columns; ++r)
    for (uint32_t d = 0; d < dim; ++d)
      transposed[std::size_t{d} * columns + r] =
          r < rows ? queries.rows.f32[std::size_t{r} * dim + d] : 0;
  w->traced.resize(std::max(w->traced.size(), std::size_t{near_tokens} * columns));
  w->read_m.assign(columns, -std::numeric_limits<float>::infinity());
  const auto score = [&](const KvStore::Rows& keys, uint32_t first, uint32_t end) {
    for (uint32_t n; first < end && !req.cancel.fired(); first += n) {
      n = std::min(near_tokens, end - first);
      float* const scores = w->traced.data();  // [n][columns]
      kernels_.multiply(keys.k + std::size_t{first} * dim, dim, 1, n, transposed, columns, columns,
                        dim, scores, columns);
      for (uint32_t t = 0; t < n; ++t)
        for (uint32_t r = 0; r < columns; ++r) {
          const float s = scores[std::size_t{t} * columns + r];
          w->read_m[r] = s > w->read_m[r] ? s : w->read_m[r];
        }
    }
  };
  const bool sealed = store.pages().pages() > 0;
  if (sealed) score(store.sinks(req.layer, queries.head), req.skipped, store.sink_count());
  score(store.window(req.layer, queries.head), sealed ? 0 : req.skipped, store.window_count());
  for (uint32_t r = 0; r < rows; ++r) *out.row(r) = w->read_m[r];
}

// Raises blocks to the estimates of the pages behind the sinks. False: damaged.
bool Attention::estimate_pages(const HeadQueries& queries, const BlockRows& out, Worker* w) const {
  static_assert(score_block_tokens == tile_blocks * quad_tokens);
  const Scanned scanned = queries.req.selector->raise_blocks(
      query_of(queries, 0), {out.scores, out.blocks}, &w->selector);
  w->counts += scanned;
  return scanned.intact;
}

// As estimate_pages(), exactly.
bool Attention::score_pages(const HeadQueries& queries, const BlockRows& out, Worker* w) const {
  const PageStore& pages = queries.req.store.pages();
  const uint32_t tokens = shape_.page_tokens, rows = queries.rows.rows,
                 call_pages = exact_blocks * out.block_pages;
  const std::size_t stride = std::size_t{call_pages} * tokens;
  w->traced.resize(std::max(w->traced.size(), rows * stride));
  w->pages.resize(call_pages);
  for (uint32_t p = 1, end; p < pages.pages() && !queries.req.cancel.fired(); p = end) {
    end = std::min(pages.pages(), (p / call_pages + 1) * call_pages);
    for (uint32_t i = p; i < end; ++i) {
      w->pages[i - p] = pages.page(queries.req.layer, queries.head, i);
      if (!pages.intact_page(queries.req.layer, queries.head, i)) return false;
      w->pages[i - p].bias = 0;
    }
    kernels_.score_tokens(queries.rows, w->pages.data(), end - p, w->traced.data(), stride,
                          w->scratch.data());
    for (uint32_t r = 0; r < rows; ++r)
      out.raise(r, p, w->traced.data() + r * stride, (end - p) * tokens, score_block_tokens);
  }
  return true;
}

// Groups of neighbouring tokens whose queries are scored in one task: few, so that keys are read
// seldom, but enough for all threads.
uint32_t Attention::score_groups(std::span<const AttentionRequest> documents,
                                 uint32_t heads) const {
  const uint32_t tokens = documents[0].tokens - documents[0].first;
  const uint64_t fewest = ceil_div(tokens, std::max(1u, block_rows_ / config_.group())),
                 parallel = ceil_div(2 * pool_->threads(), documents.size() * heads);
  return static_cast<uint32_t>(std::min<uint64_t>(std::max(fewest, parallel), tokens));
}

Status Attention::score_blocks(std::span<const AttentionRequest> documents, uint32_t first_head,
                               uint32_t end_head, std::span<float* const> scores) {
  if (documents.empty() || documents[0].first == documents[0].tokens) return {};
  const uint32_t heads = end_head - first_head, group = config_.group(),
                 tokens = documents[0].tokens - documents[0].first,
                 groups = score_groups(documents, heads), parts = heads * groups;
  for (Worker& w : workers_) w.counts = {};
  FirstFailure failure;
  pool_->run(static_cast<uint32_t>(documents.size()) * parts, [&](uint32_t task, uint32_t worker) {
    const AttentionRequest& req = documents[task / parts];
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const PageStore& pages = req.store.pages();
    const uint32_t h = task % parts / groups, blocks = score_block_count(req.store);
    const QueryGroup part = query_group_of(tokens, groups, task % groups);
    const HeadQueries queries =
        gather(req, {first_head + h, req.first + part.first, part.count}, false, &w).uncapped();
    const BlockRows out{
        scores[task / parts] + (std::size_t{h} * tokens + part.first) * group * blocks, blocks,
        score_block_tokens / shape_.page_tokens};
    const uint32_t rows = queries.rows.rows;
    for (uint32_t r = 0; r < rows; ++r)
      std::fill_n(out.row(r), blocks, -std::numeric_limits<float>::infinity());
    score_near(queries, out, &w);
    const bool estimated = req.selector && req.store.sketch().built();
    if (pages.pages() > 1 &&
        !(estimated ? estimate_pages(queries, out, &w) : score_pages(queries, out, &w)))
      return failure.note(pages.damaged());
    for (uint32_t r = 0; r < rows; ++r) {
      const float centre = centre_score(req, queries.head, row_of(queries.rows, r));
      for (uint32_t b = 0; b < blocks; ++b) out.row(r)[b] += centre;
    }
  });
  for (const Worker& w : workers_) counts_ += w.counts;
  return std::move(failure).take();
}

}  // namespace kvasir
