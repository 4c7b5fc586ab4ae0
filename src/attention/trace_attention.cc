// Records in Trace the attention of a step's last token to the document. Scores the read tokens a
// second time: pages by the attention kernel, so the scores are the same; sinks and window, a few
// dozen tokens, in portable code. A sample counts as one quad, without its weight.
#include "attention/worker.h"

namespace kvasir {
namespace {

// dim is a multiple of 16.
float score(const float* a, const float* b, uint32_t dim) {
  constexpr uint32_t lanes = 16;
  float sums[lanes] = {}, sum = 0;
  for (uint32_t d = 0; d < dim; d += lanes)
    for (uint32_t i = 0; i < lanes; ++i) sums[i] += a[d + i] * b[d + i];
  for (float s : sums) sum += s;
  return sum;
}

}  // namespace

// Records sinks and window for the query heads of a group.
void Attention::trace_near(const HeadQueries& queries, uint32_t token, const float* bases,
                           Worker* w) const {
  const KvStore& store = queries.req.store;
  const QueryRows& rows = queries.rows;
  const uint32_t layer = queries.req.layer, head = queries.head,
                 first_head = head * config_.group();
  for (uint32_t r = 0; r < rows.rows; ++r) trace_->set_base(first_head + r, bases[r]);
  const auto add = [&](const float* k, uint64_t first, uint64_t end) {  // k: [end - first][dim]
    end = std::min(end, trace_->document());
    if (end <= first) return;
    w->traced.resize(end - first);
    for (uint32_t r = 0; r < rows.rows; ++r) {
      for (uint64_t t = first; t < end; ++t)
        w->traced[t - first] =
            score(rows.f32 + std::size_t{r} * rows.dim, k + (t - first) * rows.dim, rows.dim);
      trace_->add(first_head + r, first, w->traced, bases[r]);
    }
  };
  if (store.sink_count() > 0) add(store.sinks(layer, head).k, 0, store.sink_count());
  add(store.window(layer, head).k, store.sealed_tokens(),
      store.tokens() + (queries.req.is_apart ? 0 : token + 1));
}

// Records the selected tokens of a page.
void Attention::trace_page(const HeadQueries& queries, PageRef page, uint32_t number,
                           const float* bases, Worker* w) const {
  const QueryRows& rows = queries.rows;
  const uint32_t tokens = shape_.page_tokens;
  const uint64_t first = uint64_t{number} * tokens;
  if (first >= trace_->document()) return;
  w->traced.resize(std::size_t{rows.rows} * tokens);
  page.bias = 0;
  kernels_.score_tokens(rows, &page, 1, w->traced.data(), tokens, w->scratch.data());
  for (uint32_t r = 0; r < rows.rows; ++r)
    trace_->add(queries.head * config_.group() + queries.first_head + r, first,
                std::span(w->traced).subspan(std::size_t{r} * tokens, tokens), bases[r]);
}

// Records after exact(), which has set page_lists_. lse: [n][heads].
void Attention::trace_exact(const AttentionRequest& req, const float* lse) {
  const uint32_t heads = config_.kv_heads, pages = static_cast<uint32_t>(page_lists_[0].size());
  const uint32_t part_pages = part_tokens / shape_.page_tokens,
                 parts = std::max(1u, static_cast<uint32_t>(ceil_div(pages, part_pages)));
  pool_->run(heads * parts, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, part = task / heads,
                   end = std::min(pages, (part + 1) * part_pages);
    const HeadQueries queries = gather(req, {h, req.tokens - 1, 1}, false, &w);
    const float* bases = lse + std::size_t{req.tokens - 1} * config_.heads + h * config_.group();
    if (part == 0) trace_near(queries, req.tokens - 1, bases, &w);
    for (uint32_t p = part * part_pages; p < end; ++p)
      trace_page(queries, page_lists_[h][p], listed_page(req, p), bases, &w);
  });
}

}  // namespace kvasir
