// Scores of documents for a question: which of them has a key that a query looks for.
#include <algorithm>
#include <memory>

#include "attention/worker.h"
#include "base/checked.h"

namespace kvasir {

// Raises best, [rows], to the largest estimate of the pages behind the sinks. False: damaged.
bool Attention::raise_to_pages(const HeadQueries& queries, const Selector& selector, float* best,
                               Worker* w) const {
  const PageStore& pages = queries.req.store.pages();
  const Scanned scanned = selector.scan(query_of(queries, 0), &w->selector);
  w->counts += scanned;
  if (!scanned.intact) return false;
  const std::size_t stride = pages.extents() * shape_.extent_quads();
  for (uint32_t r = 0; r < queries.rows.rows; ++r) {
    const float* scores = w->selector.scores.data() + r * stride;
    const float* end = scores + std::size_t{pages.pages()} * shape_.page_quads();
    for (scores += shape_.page_quads(); scores < end; ++scores)
      best[r] = std::max(best[r], *scores);
  }
  return true;
}

Status Attention::best_scores(const AttentionRequest& req, float* best) {
  const PageStore& pages = req.store.pages();
  const bool sketched = req.store.sketch().built(), has_pages = pages.pages() > 1;
  if (!sketched) RETURN_IF_ERROR(list_pages(req));
  const std::unique_ptr<const Selector> selector = make_bounded_selector();
  const uint32_t heads = config_.kv_heads, group = config_.group(),
                 block_tokens = std::max(1u, scanned_rows / group),
                 blocks = static_cast<uint32_t>(ceil_div(req.tokens, block_tokens));
  for (Worker& w : workers_) w.counts = {};
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, first = task / heads * block_tokens;
    const HeadTokens own{h, first, std::min(block_tokens, req.tokens - first)};
    const HeadQueries queries = gather(req, own, true, &w).uncapped();
    const AttentionState state = empty_state(w.state.data(), queries.rows.rows, shape_.dim);
    attend_sinks_and_window(queries, own, state, &w);
    if (has_pages && sketched && !raise_to_pages(queries, *selector, state.m, &w))
      return failure.note(pages.damaged());
    const uint32_t count = has_pages && !sketched ? pages.pages() - 1 : 0,
                   part = part_tokens / shape_.page_tokens;
    for (uint32_t p = 0; p < count && !req.cancel.fired(); p += part)
      attend_pages(queries, {page_lists_[h].data() + p, std::min(part, count - p)}, state, &w);
    for (uint32_t r = 0; r < queries.rows.rows; ++r)
      best[(std::size_t{first} + r / group) * config_.heads + h * group + r % group] = state.m[r];
  });
  for (const Worker& w : workers_) counts_ += w.counts;
  RETURN_IF_ERROR(std::move(failure).take());
  AttentionRequest all = req;
  all.first = 0;
  add_centre_scores(all, 1, best);
  return {};
}

}  // namespace kvasir
