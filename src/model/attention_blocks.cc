// Sparse prefill: the queries of a block of neighbouring tokens read the same chosen pages, so that a page that is read serves a hundred
// rows, and choosing costs a few rows' scores.
//
//   choose  a sample of the block's queries scores the summaries, as if it were the heads of one group: a block of tokens counts with the sum of
//           the shares of attention that it would have. Choosing for a pooled block of queries is what MInference (arXiv 2407.02490, section
//           3.2, block-sparse head) does; its blocks' mean queries and keys are replaced by sampled queries and the strategy's own scores
//   near    sinks, window, the step's own tokens and the newest pages are read by every block
//   filter  with filter layers (OmniKV) these read everything; what the sample scores highest there, in any KV head, is what all heads of the
//           layers up to the next one read
#include <bit>
#include <span>

#include "model/attention_worker.h"
#include "select/blocks.h"

namespace kvasir {

constexpr uint32_t sample_tokens = 4;  // of a block's (about 40), that choose for it

namespace {

// Every block also reads the pages from `first` on, whole.
void add_recent(uint32_t first, uint32_t pages, uint32_t page_tokens, Selection* out) {
  Array<PageRef>& list = out->lists[0];
  Array<uint32_t>& numbers = out->page_numbers[0];
  while (!numbers.empty() && numbers.back() >= first) {
    out->tokens -= static_cast<uint64_t>(std::popcount(list.back().tokens));
    list.pop_back(), numbers.pop_back();
  }
  for (uint32_t p = first; p < pages; ++p) {
    list.push_back({nullptr, nullptr, ~uint64_t{0} >> (64 - page_tokens)});
    numbers.push_back(p);
    out->tokens += page_tokens;
  }
}

// What is in any of the selections' lists, as one.
void unite(std::span<const Selection> parts, uint32_t pages, Selection* out) {
  Array<uint64_t> tokens(pages);
  for (const Selection& part : parts)
    for (std::size_t i = 0; i < part.page_numbers[0].size(); ++i) tokens[part.page_numbers[0][i]] |= part.lists[0][i].tokens;
  begin_selection(1, out);
  for (uint32_t p = 0; p < pages; ++p) {
    if (tokens[p] == 0) continue;
    out->lists[0].push_back({nullptr, nullptr, tokens[p]});
    out->page_numbers[0].push_back(p);
    out->tokens += static_cast<uint64_t>(std::popcount(tokens[p]));
  }
}

}  // namespace

// Into the worker's selection. `near` is what the block's rows have attended so far.
void Attention::choose_for_block(uint32_t layer, uint32_t head, uint32_t count, const QueryRows& rows, const KvStore& store, const Selector& selector,
                                 uint64_t budget, const AttentionState& near, Worker* w) const {
  const uint32_t group = config_.group(), dim = shape_.dim, tokens = std::min(count, sample_tokens), sampled = tokens * group;
  Worker::Sample& sample = w->sample;
  sample.f32.resize(std::size_t{sampled} * dim);
  sample.q8.resize(std::size_t{sampled} * dim);
  sample.split.resize(std::size_t{sampled} * 2 * dim);
  for (Array<float>* x : {&sample.scale, &sample.m, &sample.l}) x->resize(sampled);
  for (uint32_t i = 0; i < tokens; ++i) {
    const std::size_t from = std::size_t{(i + 1) * count / tokens - 1} * group, to = std::size_t{i} * group;
    std::copy_n(rows.f32 + from * dim, group * dim, sample.f32.data() + to * dim);
    std::copy_n(rows.q + from * dim, group * dim, sample.q8.data() + to * dim);
    std::copy_n(rows.split + from * 2 * dim, group * 2 * dim, sample.split.data() + to * 2 * dim);
    std::copy_n(rows.scale + from, group, sample.scale.data() + to);
    std::copy_n(near.m + from, group, sample.m.data() + to);
    std::copy_n(near.l + from, group, sample.l.data() + to);
  }
  const QueryRows queries{sampled, dim, sample.f32.data(), sample.q8.data(), sample.split.data(), sample.scale.data()};
  SelectorQuery query{kernels_, store.pages(), store.sketch(), layer, head, queries, sample.m.data(), sample.l.data(), 1, budget, true};
  selector.select(query, &w->selector, &w->selection);
  w->counts.summary_bytes += w->selection.summary_bytes;
  w->counts.keys_scanned += w->selection.keys_scanned;
  w->counts.head_keys += w->selection.head_keys();
}

Status Attention::by_blocks(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan,
                            const CancelLatch& cancel, float* out, float* totals) {
  const uint32_t heads = config_.kv_heads, block_tokens = block_rows_ / config_.group(), pages = store.pages().pages();
  const auto blocks = static_cast<uint32_t>(ceil_div(n, block_tokens));
  const auto near_pages = static_cast<uint32_t>(ceil_div(plan.recent_tokens, shape_.page_tokens));
  const uint32_t recent = std::max(1u, pages - std::min(pages, near_pages));  // page 0 holds the sinks
  const uint32_t part_pages = part_tokens / shape_.page_tokens;
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = blocks - 1 - task / heads, first = block * block_tokens, count = std::min(block_tokens, n - first);
    const QueryRows rows = gather(&w, q, first, count, 1, h, true);
    const AttentionState state = empty_state(w.state.data(), rows.rows, shape_.dim);
    attend_near(layer, h, first, count, 1, rows, store, 0, cancel, state, &w);
    if (plan.filter.empty())
      choose_for_block(layer, h, count, rows, store, selector, plan.budget(layer), state, &w);
    else
      w.selection = block_choices_[block];
    if (!w.selection.intact) return failure.note(store.pages().damaged());
    add_recent(recent, pages, shape_.page_tokens, &w.selection);
    PageStore::Hold hold;
    Array<PageRef>& list = w.selection.lists[0];
    if (Status s = store.pages().fetch(layer, h, w.selection.page_numbers[0], list.data(), &hold); !s.ok()) return failure.note(std::move(s));
    for (std::size_t at = 0; at < list.size() && !cancel.fired(); at += part_pages)
      kernels_.attend_pages(rows, list.data() + at, static_cast<uint32_t>(std::min<std::size_t>(part_pages, list.size() - at)), state,
                            w.scratch.data());
    w.counts.tokens_read += count * w.selection.tokens;
    w.counts.pages_touched += count * list.size();
    write_out(state, first, count, h, out, totals);
  });
  return std::move(failure).take();
}

Status Attention::filter_blocks(uint32_t layer, uint32_t n, const float* q, const KvStore& store, const Selector& selector, const Plan& plan,
                                const CancelLatch& cancel) {
  const uint32_t heads = config_.kv_heads, block_tokens = block_rows_ / config_.group();
  const auto blocks = static_cast<uint32_t>(ceil_div(n, block_tokens));
  std::vector<Selection> of_heads(std::size_t{blocks} * heads);
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = task / heads, first = block * block_tokens, count = std::min(block_tokens, n - first);
    const QueryRows rows = gather(&w, q, first, count, 1, h, true);
    const AttentionState state = empty_state(w.state.data(), rows.rows, shape_.dim);
    attend_near(layer, h, first, count, 1, rows, store, 0, cancel, state, &w);
    choose_for_block(layer, h, count, rows, store, selector, ceil_div(plan.budget_tokens, heads), state, &w);
    if (!w.selection.intact) return failure.note(store.pages().damaged());
    std::swap(of_heads[std::size_t{block} * heads + h], w.selection);
  });
  if (Status s = std::move(failure).take(); !s.ok() || cancel.fired()) return s;
  block_choices_.resize(blocks);
  pool_->run(blocks, [&](uint32_t block, uint32_t) {
    unite({of_heads.data() + std::size_t{block} * heads, heads}, store.pages().pages(), &block_choices_[block]);
  });
  return {};
}

}  // namespace kvasir
