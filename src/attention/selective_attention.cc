// Selective attention: each query attends sinks, window and the pages that the selector chose for
// it.
#include <algorithm>
#include <cmath>

#include "attention/worker.h"
#include "backend/query_groups.h"
#include "base/checked.h"
#include "select/blocks.h"

namespace kvasir {

// Number of blocks of neighbouring tokens that share a scan of the summaries. Blocks are small
// enough for every thread to have one. With three heads per group, a question of twenty tokens
// scans the summaries three times; with more than three threads per KV head, more often. A row's
// sums do not depend on its block, so results do not depend on the number of threads.
uint32_t Attention::scan_blocks(const Plan& plan, uint32_t tokens) const {
  const bool shares = plan.strategy->has(StrategyInfo::scans) && plan.compare == CompareLevel::none;
  const uint32_t block_tokens = shares ? std::max(1u, scanned_rows / config_.group()) : 1;
  const uint64_t per_head = ceil_div(pool_->threads(), config_.kv_heads);
  return static_cast<uint32_t>(
      std::max(ceil_div(tokens, block_tokens), std::min<uint64_t>(tokens, per_head)));
}

// Attends the tokens of a task.
Status Attention::attend_selected(const SelectiveTask& task, Worker* worker) const {
  const AttentionRequest& req = task.req;
  Worker& w = *worker;
  const uint32_t dim = shape_.dim, group = config_.group();
  const HeadTokens& own = task.own;
  const HeadQueries queries = gather(req, own, true, &w);
  const AttentionState state = empty_state(w.state.data(), queries.rows.rows, dim);
  attend_sinks_and_window(queries, own, state, &w);
  AttentionState near = state;  // by uncapped scores, as the selector's scores of pages
  if (softcap_ != 0) {
    w.near.resize(w.state.size());
    near = empty_state(w.near.data(), queries.rows.rows, dim);
    attend_sinks_and_window(queries.uncapped(), own, near, &w);
  }
  w.compare.estimated.clear(), w.compare.certified.clear();
  if (req.plan.compare != CompareLevel::none) w.compare.keep_near(near, group, dim);
  SelectorQuery query = query_of(queries, req.plan.budget(req.layer));
  query.near_m = near.m, query.near_l = near.l, query.token = own.first;
  query.first_extent = task.first_extent;
  const Scanned scanned = req.selector->scan(query, &w.selector);
  if (!scanned.intact) return req.store.pages().damaged();
  w.counts += scanned;
  for (uint32_t t = 0; t < own.count; ++t) {
    if (req.cancel.fired()) return {};
    query.first_row = t * group;
    query.token = own.first + t * own.stride;
    query.rows = row_of(queries.rows, query.first_row, group);
    query.near_m = near.m + query.first_row, query.near_l = near.l + query.first_row;
    req.selector->choose(query, &w.selector, &w.selection);
    if (!w.selection.intact) return req.store.pages().damaged();
    if (req.hidden.count() > 0) remove_pages(req.hidden.first, req.hidden.end, &w.selection);
    const HeadQueries token = queries.of_rows(query.first_row, group);
    const AttentionState token_state = row_of(state, query.first_row, dim);
    const bool traced = task.traces_last && t + 1 == own.count;
    RETURN_IF_ERROR(attend_choice(token, token_state, traced, &w));
    if (traced) trace_near(token, query.token, token_state.m, &w);
  }
  write_out(req, state, {own.head, task.out_token, own.count}, task.out, task.lse);
  return {};
}

Status Attention::selective(const AttentionRequest& req, uint32_t count, uint32_t stride,
                            float* out, float* lse) {
  const uint32_t heads = config_.kv_heads, blocks = scan_blocks(req.plan, count);
  const bool compares = req.plan.compare != CompareLevel::none;
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const QueryGroup block = query_group_of(count, blocks, task / heads);
    const HeadTokens own{task % heads, req.first + block.first * stride, block.count, stride};
    Status s =
        attend_selected({req, own, first_extent_of(req.store.pages(), task, heads * blocks),
                         trace_ && block.first + block.count == count, block.first, out, lse},
                        &w);
    if (!s.ok()) return failure.note(std::move(s));
    // a comparison has blocks of one token
    if (compares && !req.cancel.fired() &&
        !compare(gather(req, own, true, &w), block.first, &w.selection, out, &w))
      failure.note(req.store.pages().damaged());
  });
  return std::move(failure).take();
}

bool Attention::can_run_together(std::span<const AttentionRequest> documents) const {
  const auto selects = [&](const AttentionRequest& req) {
    const PageStore& pages = req.store.pages();
    const bool one = req.tokens - req.first == 1,
               as_one = req.plan.query_batch && (pages.mapped_extents() == 0 || pages.in_mapping());
    return req.selector && (one || as_one) && !req.plan.by_blocks &&
           req.plan.compare == CompareLevel::none;
  };
  return !trace_ && std::all_of(documents.begin(), documents.end(), selects);
}

Status Attention::run_together(std::span<const AttentionRequest> documents, float* out,
                               float* lse) {
  for (Worker& w : workers_) w.counts = {};
  const uint32_t tokens = documents[0].tokens - documents[0].first;
  Status s = tokens > 1 ? run_batches(documents, out, lse) : run_tokens(documents, out, lse);
  for (const Worker& w : workers_) counts_ += w.counts;
  for (const AttentionRequest& req : documents)
    if (const KvStore& store = req.store; store.pages().pages() > 1)
      counts_.tokens_present +=
          (store.sealed_tokens() - shape_.page_tokens) * uint64_t{tokens} * config_.kv_heads;
  return s;
}

Status Attention::run_tokens(std::span<const AttentionRequest> documents, float* out, float* lse) {
  const uint32_t heads = config_.kv_heads;
  FirstFailure failure;
  pool_->run(static_cast<uint32_t>(documents.size()) * heads, [&](uint32_t task, uint32_t worker) {
    const uint32_t d = task / heads, h = task % heads;
    const AttentionRequest& req = documents[d];
    if (req.cancel.fired()) return;
    Status s = attend_selected({req,
                                {h, req.first, 1},
                                first_extent_of(req.store.pages(), h, heads),
                                false,
                                req.first,
                                out + std::size_t{d} * req.tokens * config_.q_width(),
                                lse + std::size_t{d} * req.tokens * config_.heads},
                               &workers_[worker]);
    if (!s.ok()) failure.note(std::move(s));
  });
  return std::move(failure).take();
}

// Fetches the pages of a list of the selection and of its samples, and sets their addresses. The
// addresses stay valid until `hold` is released. A page that is in both, or has several samples, is
// read once.
Status Attention::fetch_choice(const AttentionRequest& req, uint32_t head, std::size_t list,
                               PageStore::Hold* hold, Worker* w) const {
  Selection& s = w->selection;
  if (!s.sampled) {
    w->counts.pages_touched += s.lists[list].size();
    return s.lists[list].empty() ? Status()
                                 : req.store.pages().fetch(req.layer, head, s.page_numbers[list],
                                                           s.lists[list].data(), hold);
  }
  const std::size_t read = s.lists[list].size(), sampled = s.samples[list].size();
  const auto in_order = [&](auto&& f) {  // both are ascending
    for (std::size_t a = 0, b = 0; a < read || b < sampled;) {
      if (b == sampled || (a < read && s.page_numbers[list][a] <= s.sample_numbers[list][b]))
        f(&s.lists[list][a], s.page_numbers[list][a]), ++a;
      else f(&s.samples[list][b], s.sample_numbers[list][b]), ++b;
    }
  };
  w->numbers.clear();
  in_order([&](PageRef*, uint32_t number) {
    if (w->numbers.empty() || w->numbers.back() != number) w->numbers.push_back(number);
  });
  w->counts.pages_touched += w->numbers.size();
  if (w->numbers.empty()) return {};
  w->pages.resize(w->numbers.size());
  RETURN_IF_ERROR(req.store.pages().fetch(req.layer, head, w->numbers, w->pages.data(), hold));
  std::size_t at = 0;
  in_order([&](PageRef* page, uint32_t number) {
    if (w->numbers[at] != number) ++at;
    page->data = w->pages[at].data, page->scales = w->pages[at].scales;
  });
  return {};
}

// Attends the selection of one token: first the always-read part, then the samples. traced: also
// records in trace_.
Status Attention::attend_choice(const HeadQueries& queries, const AttentionState& state,
                                bool traced, Worker* w) const {
  const AttentionRequest& req = queries.req;
  const Selection& choice = w->selection;
  PageStore::Hold hold;
  const auto lists = static_cast<uint32_t>(choice.lists.size());
  for (uint32_t i = 0; i < lists; ++i) {
    const HeadQueries listed = lists == 1 ? queries : queries.of_head(i);
    const AttentionState sums = lists == 1 ? state : row_of(state, i, shape_.dim);
    const uint32_t rows = listed.rows.rows;
    const auto attend = [&](const Array<PageRef>& pages) {
      if (!pages.empty()) attend_pages(listed, pages, sums, w);
    };
    // relative to the final maximum of the state
    const auto trace = [&](const Array<PageRef>& pages, const Array<uint32_t>& numbers) {
      for (std::size_t p = 0; p < pages.size(); ++p)
        trace_page(listed, pages[p], numbers[p], sums.m, w);
    };
    RETURN_IF_ERROR(fetch_choice(req, queries.head, i, &hold, w));
    attend(choice.lists[i]);
    if (req.plan.certify && !certify(listed, i, sums, w)) return req.store.pages().damaged();
    if (choice.sampled) {
      w->read_m.assign(sums.m, sums.m + rows);
      w->read_l.assign(sums.l, sums.l + rows);
      attend(choice.samples[i]);
      if (traced) trace(choice.samples[i], choice.sample_numbers[i]);
      for (uint32_t r = 0; r < rows; ++r) {
        const double read = sums.l[r] > 0
                                ? static_cast<double>(w->read_l[r] / sums.l[r]) *
                                      std::exp(static_cast<double>(w->read_m[r] - sums.m[r]))
                                : 0;
        w->counts.mass += read;
        if (req.plan.compare != CompareLevel::none) w->compare.estimated.push_back(read);
      }
      w->counts.queries += rows;
    }
    if (traced) trace(choice.lists[i], choice.page_numbers[i]);
  }
  w->counts += choice;
  return {};
}

}  // namespace kvasir
