#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention/worker.h"
#include "backend/query_groups.h"
#include "base/checked.h"

namespace kvasir {

Attention::Attention(const HeadShape& config, const PageShape& shape, const Kernels& kernels,
                     ThreadPool* pool)
    : config_(config), shape_(shape), kernels_(kernels), pool_(pool),
      block_rows_(query_group_tokens(config.group()) * config.group()), workers_(pool->threads()),
      page_lists_(config.kv_heads), comparison_(config.layers, config.kv_heads) {
  const std::size_t rows = block_rows_, dim = shape.dim;
  // in parallel, because the system must provide and clear the memory
  pool->run(pool->threads(), [&](uint32_t i, uint32_t) {
    Worker& w = workers_[i];
    w.q.resize(rows * dim);
    w.q8.resize(rows * dim);
    w.split.resize(rows * 2 * dim);
    w.scale.resize(rows);
    w.limits.resize(rows);
    w.state.resize(state_floats(block_rows_, shape.dim));
    w.scratch.resize(kernels.attend_scratch(block_rows_, shape.dim));
  });
}

Attention::~Attention() = default;

// Gathers the query rows [token][head of the group] of the tokens first + i * stride, i < count.
// Scales them by 1 / sqrt(head_dim), pads and quantises them.
QueryRows Attention::gather(Worker* w, const float* q, uint32_t first, uint32_t count,
                            uint32_t stride, uint32_t kv_head, bool split) const {
  const uint32_t group = config_.group(), head_dim = config_.head_dim, dim = shape_.dim,
                 rows = count * group;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  for (uint32_t r = 0; r < rows; ++r) {
    const std::size_t head = std::size_t{kv_head} * group + r % group;
    const float* from =
        q + (first + std::size_t{r / group} * stride) * config_.q_width() + head * head_dim;
    float* to = w->q.data() + std::size_t{r} * dim;
    for (uint32_t d = 0; d < head_dim; ++d) to[d] = from[d] * scale;
    std::fill(to + head_dim, to + dim, 0.0f);
  }
  int8_t* halves = split ? w->split.data() : nullptr;
  kernels_.quantize_queries(w->q.data(), rows, dim, w->q8.data(), halves, w->scale.data());
  return {rows, dim, w->q.data(), w->q8.data(), halves, w->scale.data()};
}

void Attention::write_out(const AttentionState& state, uint32_t first, uint32_t count,
                          uint32_t kv_head, float* out, float* lse) const {
  const uint32_t group = config_.group();
  const std::size_t head = std::size_t{kv_head} * group * config_.head_dim;
  for (uint32_t t = 0; t < count; ++t)
    kernels_.finish(row_of(state, t * group, shape_.dim), group, shape_.dim, config_.head_dim,
                    out + (std::size_t{first} + t) * config_.q_width() + head, config_.head_dim);
  if (!lse) return;
  for (uint32_t r = 0; r < count * group; ++r)
    lse[(std::size_t{first} + r / group) * config_.heads + kv_head * group + r % group] =
        state.m[r] + std::log(state.l[r]);
}

Status Attention::run(const AttentionRequest& req, float* out, float* lse) {
  const uint64_t behind_sinks =
      req.store.pages().pages() > 1 ? req.store.sealed_tokens() - shape_.page_tokens : 0;
  for (Worker& w : workers_) w.counts = {};
  const bool compare = req.plan.compare != CompareLevel::none;
  if (trace_) trace_->begin_layer();
  if (compare) comparison_.begin(req.plan.compare, req.store.pages(), 1, req.tokens);
  if (!req.selector && lse && softcap_ != 0) {
    RETURN_IF_ERROR(exact(req, 0, out, lse));
    lse = nullptr;
    for (Worker& w : workers_) w.counts = {};  // two passes count once
  }
  Status s = !req.selector        ? exact(req, softcap_, out, lse)
             : req.plan.by_blocks ? by_blocks(req, out, lse)
             : req.plan.query_batch && req.tokens - req.first > 1
                 ? attend_query_batch(req, out, lse)
                 : selective(req, req.tokens - req.first, 1,
                             out + std::size_t{req.first} * config_.q_width(),
                             lse ? lse + std::size_t{req.first} * config_.heads : nullptr);
  if (trace_ && s.ok() && !req.cancel.fired()) {
    if (!req.selector) trace_exact(req, lse);
    trace_->end_layer(lse + std::size_t{req.tokens - 1} * config_.heads, pool_);
  }
  if (compare && s.ok() && !req.selector) s = compare_exact(req, out);
  if (compare && s.ok() && !req.cancel.fired()) comparison_.end(kernels_, req.layer);
  for (const Worker& w : workers_) counts_ += w.counts;
  counts_.tokens_present += behind_sinks * (req.tokens - req.first) * config_.kv_heads;
  return s;
}

void Attention::filter(const AttentionRequest& req, const float* lse, const RecentQueries* recent,
                       StepMemory* memory) const {
  if (req.cancel.fired()) return;
  req.selector->filter({kernels_, req.store.pages(), pool_, req.cancel, req.layer, req.tokens,
                        config_.heads, req.store.tokens(), req.q, lse, recent, 1,
                        req.plan.budget(req.layer), req.plan.filter_window},
                       memory);
}

// Attends the sinks, and the window and the step's tokens up to each query's own.
void Attention::attend_sinks_and_window(const AttentionRequest& req, const NearRows& near,
                                        const QueryRows& rows, float cap,
                                        const AttentionState& state, Worker* w) const {
  const uint32_t group = config_.group(), dim = shape_.dim;
  if (req.store.pages().pages() > 0) {
    const KvStore::Rows sinks = req.store.sinks(req.layer, near.head);
    attend_rows(req, near.head, rows, {sinks.k, sinks.v, req.store.sink_count()}, cap, state, w);
  }
  const uint32_t window_rows =
      req.store.window_count() + near.first + (near.count - 1) * near.stride + 1;
  for (uint32_t at = 0; at < window_rows && !req.cancel.fired(); at += part_tokens) {
    for (uint32_t r = 0; r < rows.rows; ++r) {
      const uint32_t seen = req.store.window_count() + near.first + r / group * near.stride + 1;
      w->limits[r] = seen - std::min(seen, at);
    }
    const KvStore::Rows window = req.store.window(req.layer, near.head);
    attend_rows(req, near.head, rows,
                {window.k + std::size_t{at} * dim, window.v + std::size_t{at} * dim,
                 std::min(part_tokens, window_rows - at), w->limits.data()},
                cap, state, w);
  }
}

Status Attention::exact(const AttentionRequest& req, float cap, float* out, float* lse) {
  const uint32_t group = config_.group(), heads = config_.kv_heads, dim = shape_.dim,
                 tokens = req.tokens - req.first;
  const uint32_t sealed = req.store.pages().pages(), pages = sealed > 1 ? sealed - 1 : 0;
  std::atomic<bool> intact{true};
  pool_->run(heads, [&](uint32_t h, uint32_t) {
    page_lists_[h].resize(pages);
    for (uint32_t p = 0; p < pages; ++p) {
      // the call may read and verify a page of a mapped file
      if (p % extent_pages == 0 && req.cancel.fired()) return;
      page_lists_[h][p] = req.store.pages().page(req.layer, h, p + 1);
      if (!req.store.pages().intact_page(req.layer, h, p + 1)) intact = false;
    }
  });
  if (!intact) return req.store.pages().damaged();

  const uint32_t block_tokens = block_rows_ / group;
  const auto blocks = static_cast<uint32_t>(ceil_div(tokens, block_tokens));
  const uint32_t part_pages = part_tokens / shape_.page_tokens;
  const uint32_t parts =
      blocks == 1 ? std::max(1u, static_cast<uint32_t>(ceil_div(pages, part_pages))) : 1;
  const std::size_t state_size = round_up(state_floats(block_rows_, dim), 16);
  if (parts > 1) partials_.resize(std::max(partials_.size(), heads * parts * state_size));

  // The most expensive tasks (last blocks, longest limits) go first, so that threads end evenly.
  pool_->run(heads * blocks * parts, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = blocks - 1 - task / heads % blocks,
                   part = task / heads / blocks;
    const uint32_t first = req.first + block * block_tokens,
                   count = std::min(block_tokens, req.tokens - first);
    const QueryRows rows = gather(&w, req.q, first, count, 1, h, false);
    const AttentionState state =
        empty_state(parts > 1 ? partials_.data() + (h * parts + part) * state_size : w.state.data(),
                    rows.rows, dim);
    const uint32_t begin = parts > 1 ? part * part_pages : 0;
    const uint32_t end = parts > 1 ? std::min(pages, begin + part_pages) : pages;
    if (part == 0) attend_sinks_and_window(req, {h, first, count, 1}, rows, cap, state, &w);
    // Each call has whole tiles of the kernel, so the sums are those of a single call.
    for (uint32_t p = begin; p < end && !req.cancel.fired(); p += part_pages)
      attend_pages(req, h, rows, {page_lists_[h].data() + p, std::min(part_pages, end - p)}, cap,
                   state, &w);
    w.counts.tokens_read += uint64_t{count} * (end - begin) * shape_.page_tokens;
    w.counts.pages_touched += uint64_t{count} * (end - begin);
    if (parts == 1) write_out(state, first, count, h, out, lse);
  });
  if (parts == 1 || req.cancel.fired()) return {};
  const uint32_t rows = tokens * group;
  const auto state_at = [&](std::size_t i) {
    float* at = partials_.data() + i * state_size;
    return AttentionState{at, at + std::size_t{rows} * dim,
                          at + std::size_t{rows} * dim + round_up(rows, 16)};
  };
  for (uint32_t h = 0; h < heads; ++h) {
    for (uint32_t part = 1; part < parts; ++part)
      kernels_.merge(state_at(std::size_t{h} * parts), state_at(std::size_t{h} * parts + part),
                     rows, dim);
    write_out(state_at(std::size_t{h} * parts), req.first, tokens, h, out, lse);
  }
  return {};
}

Status Attention::probe(const AttentionRequest& req, uint32_t count, const float* exact,
                        double* difference, double* norm) {
  count = std::min(count, req.tokens);
  const uint32_t stride = probe_span(req.tokens, count) / count, width = config_.q_width();
  probed_.resize(std::size_t{count} * width);
  for (Worker& w : workers_) w.counts = {};
  RETURN_IF_ERROR(selective(req, count, stride, probed_.data(), nullptr));
  if (req.cancel.fired()) return {};
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t i = 0; i < width; ++i) {
      const double e = static_cast<double>(exact[t * stride * width + i]),
                   d = static_cast<double>(probed_[t * width + i]) - e;
      *difference += d * d;
      *norm += e * e;
    }
  }
  return {};
}

// Makes the selector's input for the queries of a KV head's group.
SelectorQuery Attention::query_of(const AttentionRequest& req, uint32_t head, const QueryRows& rows,
                                  uint64_t budget) const {
  const KvStore& store = req.store;
  const Plan& plan = req.plan;
  return {.kernels = kernels_,
          .pages = store.pages(),
          .sketch = store.sketch(),
          .layer = req.layer,
          .kv_head = head,
          .rows = rows,
          .near_m = nullptr,
          .near_l = nullptr,
          .first_page = 1,
          .budget_tokens = budget,
          .share = plan.share_heads,
          .range = plan.range,
          .memory = req.memory,
          .unit_tokens = plan.unit_tokens,
          .representatives = &store.representatives(),
          .coverage = plan.coverage,
          .indexes = &store.indexes(),
          .breadth = plan.search_breadth};
}

// A block of neighbouring tokens shares a scan of the summaries. Blocks are small enough for every
// thread to have one. With three heads per group, a question of twenty tokens scans the summaries
// three times; with more than three threads per KV head, more often. A row's sums do not depend on
// its block, so results do not depend on the number of threads.
Status Attention::selective(const AttentionRequest& req, uint32_t count, uint32_t stride,
                            float* out, float* lse) {
  const uint32_t heads = config_.kv_heads, dim = shape_.dim, group = config_.group();
  const bool compare = req.plan.compare != CompareLevel::none;
  // tokens of a block
  const uint32_t most = req.plan.strategy->has(StrategyInfo::scans) && !compare
                            ? std::max(1u, scanned_rows / group)
                            : 1;
  const auto blocks = static_cast<uint32_t>(std::max(
      ceil_div(count, most), std::min<uint64_t>(count, ceil_div(pool_->threads(), heads))));
  FirstFailure failure;
  pool_->run(heads * blocks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = task / heads;
    const auto first = static_cast<uint32_t>(uint64_t{count} * block / blocks),
               end = static_cast<uint32_t>(uint64_t{count} * (block + 1) / blocks);
    const uint32_t tokens = end - first;
    const uint32_t at = req.first + first * stride;
    const QueryRows rows = gather(&w, req.q, at, tokens, stride, h, true);
    const AttentionState state = empty_state(w.state.data(), rows.rows, dim);
    attend_sinks_and_window(req, {h, at, tokens, stride}, rows, softcap_, state, &w);
    AttentionState near = state;  // by uncapped scores, as the selector's scores of pages
    if (softcap_ != 0) {
      w.near.resize(w.state.size());
      near = empty_state(w.near.data(), rows.rows, dim);
      attend_sinks_and_window(req, {h, at, tokens, stride}, rows, 0, near, &w);
    }
    w.compare.estimated.clear(), w.compare.certified.clear();
    if (compare) w.compare.keep_near(near, group, dim);
    SelectorQuery query = query_of(req, h, rows, req.plan.budget(req.layer));
    query.near_m = near.m, query.near_l = near.l, query.token = at;
    query.first_extent =
        static_cast<uint32_t>(uint64_t{req.store.pages().extents()} * task / (heads * blocks));
    const Scanned scanned = req.selector->scan(query, &w.selector);
    if (!scanned.intact) return failure.note(req.store.pages().damaged());
    w.counts.summary_bytes += scanned.summary_bytes;
    w.counts.keys_scanned += scanned.keys_scanned;
    for (uint32_t t = 0; t < tokens; ++t) {
      if (req.cancel.fired()) return;
      query.first_row = t * group;
      query.token = at + t * stride;
      query.rows = row_of(rows, query.first_row, group);
      query.near_m = near.m + query.first_row, query.near_l = near.l + query.first_row;
      req.selector->choose(query, &w.selector, &w.selection);
      if (!w.selection.intact) return failure.note(req.store.pages().damaged());
      const AttentionState its = row_of(state, query.first_row, dim);
      const bool traced = trace_ && first + t + 1 == count;
      if (Status s = attend_choice(req, h, query.rows, its, traced, &w); !s.ok())
        return failure.note(std::move(s));
      if (traced) trace_near(req, h, query.rows, query.token, its.m, &w);
    }
    write_out(state, first, tokens, h, out, lse);
    if (!compare) return;
    const float* its_out =
        out + std::size_t{first} * config_.q_width() + std::size_t{h} * group * config_.head_dim;
    if (!comparison_.compare({kernels_, req.store.pages(), req.layer, h, 1, first, rows,
                              &w.selection, its_out, &req.cancel},
                             &w.compare))
      failure.note(req.store.pages().damaged());
  });
  return std::move(failure).take();
}

// Fetches the pages of list i of the selection and of its samples, and sets their addresses. The
// addresses stay valid until `hold` is released. A page that is in both, or has several samples, is
// read once.
Status Attention::fetch_choice(const AttentionRequest& req, uint32_t head, std::size_t i,
                               PageStore::Hold* hold, Worker* w) const {
  Selection& s = w->selection;
  if (!s.sampled) {
    w->counts.pages_touched += s.lists[i].size();
    return s.lists[i].empty() ? Status()
                              : req.store.pages().fetch(req.layer, head, s.page_numbers[i],
                                                        s.lists[i].data(), hold);
  }
  const std::size_t read = s.lists[i].size(), sampled = s.samples[i].size();
  const auto in_order = [&](auto&& f) {  // both are ascending
    for (std::size_t a = 0, b = 0; a < read || b < sampled;) {
      if (b == sampled || (a < read && s.page_numbers[i][a] <= s.sample_numbers[i][b]))
        f(&s.lists[i][a], s.page_numbers[i][a]), ++a;
      else f(&s.samples[i][b], s.sample_numbers[i][b]), ++b;
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

// Attends the selection of one token: first the always-read part, then the samples. `rows` and
// `state` are those of the token. traced: also records in trace_.
Status Attention::attend_choice(const AttentionRequest& req, uint32_t head, const QueryRows& rows,
                                const AttentionState& state, bool traced, Worker* w) const {
  PageStore::Hold hold;
  const std::size_t lists = w->selection.lists.size();
  for (std::size_t i = 0; i < lists; ++i) {
    const QueryRows some = lists == 1 ? rows : row_of(rows, static_cast<uint32_t>(i));
    const AttentionState its =
        lists == 1 ? state : row_of(state, static_cast<uint32_t>(i), shape_.dim);
    const auto attend = [&](const Array<PageRef>& pages) {
      if (!pages.empty()) attend_pages(req, head, some, pages, softcap_, its, w);
    };
    // relative to the final maximum of the state
    const auto trace = [&](const Array<PageRef>& pages, const Array<uint32_t>& numbers) {
      for (std::size_t p = 0; p < pages.size(); ++p)
        trace_page(head, static_cast<uint32_t>(i), some, pages[p], numbers[p], its.m, w);
    };
    RETURN_IF_ERROR(fetch_choice(req, head, i, &hold, w));
    attend(w->selection.lists[i]);
    if (req.plan.certify && !certify(req, head, some, i, its, w))
      return req.store.pages().damaged();
    if (w->selection.sampled) {
      w->read_m.assign(its.m, its.m + some.rows);
      w->read_l.assign(its.l, its.l + some.rows);
      attend(w->selection.samples[i]);
      if (traced) trace(w->selection.samples[i], w->selection.sample_numbers[i]);
      for (uint32_t r = 0; r < some.rows; ++r) {
        const double read = its.l[r] > 0
                                ? static_cast<double>(w->read_l[r] / its.l[r]) *
                                      std::exp(static_cast<double>(w->read_m[r] - its.m[r]))
                                : 0;
        w->counts.mass += read;
        if (req.plan.compare != CompareLevel::none) w->compare.estimated.push_back(read);
      }
      w->counts.queries += some.rows;
    }
    if (traced) trace(w->selection.lists[i], w->selection.page_numbers[i]);
  }
  w->counts.tokens_read += w->selection.tokens;
  w->counts.summary_bytes += w->selection.summary_bytes;
  w->counts.keys_scanned += w->selection.keys_scanned;
  return {};
}

Status Attention::compare_exact(const AttentionRequest& req, const float* out) {
  const uint32_t heads = config_.kv_heads, group = config_.group();
  std::atomic<bool> intact{true};
  pool_->run(heads * req.tokens, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, token = task / heads;
    const QueryRows rows = gather(&w, req.q, token, 1, 1, h, false);
    const AttentionState state = empty_state(w.state.data(), group, shape_.dim);
    attend_sinks_and_window(req, {h, token, 1, 1}, rows, 0, state, &w);
    w.compare.keep_near(state, group, shape_.dim);
    const float* its_out =
        out + std::size_t{token} * config_.q_width() + std::size_t{h} * group * config_.head_dim;
    if (!comparison_.compare({kernels_, req.store.pages(), req.layer, h, 1, token, rows, nullptr,
                              its_out, &req.cancel},
                             &w.compare))
      intact = false;
  });
  return intact ? Status() : req.store.pages().damaged();
}

}  // namespace kvasir
