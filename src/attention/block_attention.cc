// Sparse prefill: the queries of a block of neighbouring tokens attend the same selection. One read
// of a page serves a hundred rows.
//
//   choose  scores the summaries with the queries of every second token, as if these were the heads
//           of one group. Selects units by the sum of their estimated shares of attention.
//           MInference (arXiv 2407.02490, section 3.2, block-sparse head) selects for a block by
//           its mean query and key. This code uses the queries themselves and the strategy's
//           scores, because the match of one token among forty is lost in their mean, and in a
//           sample of four
//   near    sinks, window, the step's own tokens and the newest pages are attended by every block
//   filter  filter layers (OmniKV) attend everything. The tokens with the highest scores there, in
//           any KV head, are attended by all heads of the layers up to the next filter layer
#include <bit>
#include <span>

#include "attention/worker.h"
#include "select/blocks.h"

namespace kvasir {

constexpr uint32_t block_stride = 2;  // every second token of a block selects for it
// query rows whose scores are in memory at once: 1.5 MB for quads at 128K tokens
constexpr uint32_t summed_rows = 12;

namespace {

// Adds the whole pages from `first` on, which every block attends.
void add_recent(uint32_t first, uint32_t pages, uint32_t page_tokens, Selection* out) {
  remove_pages(first, pages, out);
  for (uint32_t p = first; p < pages; ++p) {
    out->lists[0].push_back({nullptr, nullptr, ~uint64_t{0} >> (64 - page_tokens)});
    out->page_numbers[0].push_back(p);
    out->tokens += page_tokens;
  }
}

// Unites the lists of several selections.
void unite(std::span<const Selection> parts, uint32_t pages, Selection* out) {
  Array<uint64_t> tokens(pages);
  for (const Selection& part : parts)
    for (std::size_t i = 0; i < part.page_numbers[0].size(); ++i)
      tokens[part.page_numbers[0][i]] |= part.lists[0][i].tokens;
  begin_selection(1, out);
  for (uint32_t p = 0; p < pages; ++p) {
    if (tokens[p] == 0) continue;
    out->lists[0].push_back({nullptr, nullptr, tokens[p]});
    out->page_numbers[0].push_back(p);
    out->tokens += static_cast<uint64_t>(std::popcount(tokens[p]));
  }
}

}  // namespace

// Selects for the tokens of a block; the result is the worker's selection.
void Attention::choose_for_block(const AttentionRequest& req, const HeadTokens& block,
                                 uint64_t budget, Worker* w) const {
  // the block's last token always selects
  const HeadTokens selecting{block.head, block.first + (block.count - 1) % block_stride,
                             static_cast<uint32_t>(ceil_div(block.count, block_stride)),
                             block_stride};
  const HeadQueries queries = gather(req, selecting, true, w).uncapped();
  const AttentionState near = empty_state(w->state.data(), queries.rows.rows, shape_.dim);
  attend_sinks_and_window(queries, selecting, near, w);
  SelectorQuery query = query_of(queries, budget);
  query.near_m = near.m, query.near_l = near.l;
  query.share = true;
  query.draw = static_cast<uint32_t>(req.store.tokens() + block.first);
  query.cancel = &req.cancel;
  req.selector->select_for_rows(query, summed_rows, &w->selector, &w->selection);
  w->counts.summary_bytes += w->selection.summary_bytes;
  w->counts.keys_scanned += w->selection.keys_scanned;
}

Status Attention::by_blocks(const AttentionRequest& req, float* out, float* lse) {
  const uint32_t heads = config_.kv_heads, block_tokens = block_rows_ / config_.group(),
                 pages = req.store.pages().pages();
  const auto blocks = static_cast<uint32_t>(ceil_div(req.tokens, block_tokens));
  const auto near_pages =
      static_cast<uint32_t>(ceil_div(req.plan.recent_tokens, shape_.page_tokens));
  // page 0 holds the sinks
  const uint32_t recent = std::max(1u, pages - std::min(pages, near_pages));
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = blocks - 1 - task / heads,
                   first = block * block_tokens, count = std::min(block_tokens, req.tokens - first);
    const HeadTokens own{h, first, count};
    if (req.plan.filter.empty()) choose_for_block(req, own, req.plan.budget(req.layer), &w);
    else w.selection = block_choices_[block];
    if (req.cancel.fired()) return;
    const HeadQueries queries = gather(req, own, true, &w).uncapped();
    const AttentionState state = empty_state(w.state.data(), queries.rows.rows, shape_.dim);
    attend_sinks_and_window(queries, own, state, &w);
    if (!w.selection.intact) return failure.note(req.store.pages().damaged());
    add_recent(recent, pages, shape_.page_tokens, &w.selection);
    PageStore::Hold hold;
    const uint64_t touched = w.counts.pages_touched;
    if (Status s = fetch_choice(req, h, 0, &hold, &w); !s.ok()) return failure.note(std::move(s));
    w.counts.pages_touched = touched + count * (w.counts.pages_touched - touched);
    const auto attend = [&](const Array<PageRef>& refs, std::size_t entries) {
      for (std::size_t at = 0; at < refs.size() && !req.cancel.fired(); at += entries)
        attend_pages(queries, {refs.data() + at, std::min(entries, refs.size() - at)}, state, &w);
    };
    attend(w.selection.lists[0], part_tokens / shape_.page_tokens);
    if (w.selection.sampled) attend(w.selection.samples[0], part_tokens / quad_tokens);
    w.counts.tokens_read += count * w.selection.tokens;
    write_out(req, state, own, out, lse);
  });
  return std::move(failure).take();
}

Status Attention::filter_blocks(const AttentionRequest& req) {
  const uint32_t heads = config_.kv_heads, block_tokens = block_rows_ / config_.group();
  const auto blocks = static_cast<uint32_t>(ceil_div(req.tokens, block_tokens));
  std::vector<Selection> of_heads(std::size_t{blocks} * heads);
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = task / heads, first = block * block_tokens,
                   count = std::min(block_tokens, req.tokens - first);
    choose_for_block(req, {h, first, count}, ceil_div(req.plan.budget_tokens, heads), &w);
    if (req.cancel.fired()) return;
    if (!w.selection.intact) return failure.note(req.store.pages().damaged());
    std::swap(of_heads[std::size_t{block} * heads + h], w.selection);
  });
  if (Status s = std::move(failure).take(); !s.ok() || req.cancel.fired()) return s;
  block_choices_.resize(blocks);
  pool_->run(blocks, [&](uint32_t block, uint32_t) {
    unite({of_heads.data() + std::size_t{block} * heads, heads}, req.store.pages().pages(),
          &block_choices_[block]);
  });
  return {};
}

}  // namespace kvasir
