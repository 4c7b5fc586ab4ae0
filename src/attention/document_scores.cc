// Scores of documents for a question: which of their blocks have a key that a query looks for.
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/worker.h"
#include "backend/query_groups.h"
#include "base/checked.h"

namespace kvasir {
namespace {

constexpr uint32_t exact_blocks = 8;  // per kernel call
constexpr uint32_t near_tokens = 64;  // likewise

typedef float Four __attribute__((vector_size(16)));

Four larger_of(Four a, Four b) { return a > b ? a : b; }

// Adds a number to n scores, while they are in a cache. What is not finite has no key.
RowFacts raise_row(float* scores, uint32_t n, float more) {
  typedef int32_t Ints __attribute__((vector_size(16)));
  constexpr uint32_t lanes = sizeof(Four) / sizeof(float);
  constexpr float none = -std::numeric_limits<float>::infinity();
  const uint32_t whole = n / lanes * lanes;
  Four last = {none, none, none, none};  // the scores behind them
  std::memcpy(&last, scores + whole, (n - whole) * sizeof(float));
  last += more;
  std::memcpy(scores + whole, &last, (n - whole) * sizeof(float));
  const Four zero = {};
  Four best = {none, none, none, none}, sum = {}, squares = {};
  Ints count = {};
  const auto add = [&](Four x) {
    const Ints finite = x - x == zero;
    best = larger_of(x, best);
    sum += finite ? x : zero;
    count -= finite;
  };
  for (uint32_t i = 0; i < whole; i += lanes) {
    Four x;
    std::memcpy(&x, scores + i, sizeof x);
    x += more;
    std::memcpy(scores + i, &x, sizeof x);
    add(x);
  }
  add(last);
  const auto total = [](Four x) { return (x[0] + x[1]) + (x[2] + x[3]); };
  const int32_t finite = count[0] + count[1] + count[2] + count[3];
  if (finite == 0) return {none, 0};
  const float all = static_cast<float>(finite), mean = total(sum) / all;
  const auto add_square = [&](Four x) {
    const Four off = x - x == zero ? x - mean : zero;
    squares += off * off;
  };
  for (uint32_t i = 0; i < whole; i += lanes) {
    Four x;
    std::memcpy(&x, scores + i, sizeof x);
    add_square(x);
  }
  add_square(last);
  return {std::max({best[0], best[1], best[2], best[3]}), total(squares) / all};
}

}  // namespace

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
      float* row = w->traced.data();  // [n][columns]
      kernels_.multiply(keys.k + std::size_t{first} * dim, dim, 1, n, transposed, columns, columns,
                        dim, row, columns);
      float* const best = w->read_m.data();
      for (uint32_t t = 0; t < n; ++t, row += columns)
        for (uint32_t r = 0; r < columns; ++r) best[r] = row[r] > best[r] ? row[r] : best[r];
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
  const uint32_t block_pages = out.block_pages, call_pages = exact_blocks * block_pages;
  w->pages.resize(call_pages);
  for (uint32_t p = 1, end; p < pages.pages() && !queries.req.cancel.fired(); p = end) {
    // the rest of the first block, then whole ones
    end = std::min(pages.pages(), p < block_pages ? block_pages : p + call_pages);
    for (uint32_t i = p; i < end; ++i) {
      w->pages[i - p] = pages.page(queries.req.layer, queries.head, i);
      if (!pages.intact_page(queries.req.layer, queries.head, i)) return false;
      w->pages[i - p].bias = 0;
    }
    kernels_.raise_by_pages(queries.rows, w->pages.data(), end - p, block_pages,
                            out.scores + p / block_pages, out.blocks, w->scratch.data());
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
                               uint32_t end_head, std::span<const ScoredRows> to) {
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
    const std::size_t row = (std::size_t{h} * tokens + part.first) * group;
    const BlockRows out{to[task / parts].scores + row * blocks, blocks,
                        score_block_tokens / shape_.page_tokens};
    const uint32_t rows = queries.rows.rows;
    for (uint32_t r = 0; r < rows; ++r)
      std::fill_n(out.row(r), blocks, -std::numeric_limits<float>::infinity());
    score_near(queries, out, &w);
    const bool estimated = req.selector && req.store.sketch().built();
    if (pages.pages() > 1 &&
        !(estimated ? estimate_pages(queries, out, &w) : score_pages(queries, out, &w)))
      return failure.note(pages.damaged());
    for (uint32_t r = 0; r < rows; ++r)
      to[task / parts].facts[row + r] =
          raise_row(out.row(r), blocks, centre_score(req, queries.head, row_of(queries.rows, r)));
  });
  for (const Worker& w : workers_) counts_ += w.counts;
  return std::move(failure).take();
}

}  // namespace kvasir
