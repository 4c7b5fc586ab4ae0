#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention/worker.h"
#include "backend/query_groups.h"
#include "base/checked.h"
#include "select/blocks.h"

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

// Turns the queries, scales them by 1 / sqrt(head_dim), pads and quantises them.
Attention::HeadQueries Attention::gather(const AttentionRequest& req, const HeadTokens& tokens,
                                         bool split, Worker* w) const {
  const uint32_t group = config_.group(), head_dim = config_.head_dim, dim = shape_.dim,
                 rows = tokens.count * group;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const QueryTurn& turn = req.turn;
  for (uint32_t r = 0; r < rows; ++r) {
    const float* from = req.q + out_at(tokens.first + r / group * tokens.stride, tokens.head) +
                        r % group * head_dim;
    float* to = w->q.data() + std::size_t{r} * dim;
    const float factor = turn.cos ? 1 : scale;
    for (uint32_t d = 0; d < head_dim; ++d) to[d] = from[d] * factor;
    std::fill(to + head_dim, to + dim, 0.0f);
  }
  if (turn.cos) {
    kernels_.rope(w->q.data() + turn.first, rows, dim, turn.dim, turn.cos, turn.sin, turn.neox);
    for (std::size_t i = 0; i < std::size_t{rows} * dim; ++i) w->q[i] *= scale;
  }
  int8_t* halves = split ? w->split.data() : nullptr;
  kernels_.quantize_queries(w->q.data(), rows, dim, w->q8.data(), halves, w->scale.data());
  return {req,
          tokens.head,
          {rows, dim, w->q.data(), w->q8.data(), halves, w->scale.data(), shape_.latent},
          softcap_};
}

void Attention::write_out(const AttentionRequest& req, const AttentionState& state,
                          const HeadTokens& tokens, float* out, float* lse) const {
  const uint32_t group = config_.group();
  for (uint32_t t = 0; t < tokens.count; ++t) {
    float* to = out + out_at(tokens.first + t, tokens.head);
    kernels_.finish(row_of(state, t * group, shape_.dim), group, shape_.dim, config_.head_dim, to,
                    config_.head_dim);
    add_value_centre(value_centre(req, tokens.head), state.l + t * group, group, config_.head_dim,
                     to);
  }
  if (!lse) return;
  for (uint32_t r = 0; r < tokens.count * group; ++r)
    lse[(std::size_t{tokens.first} + r / group) * config_.heads + tokens.head * group + r % group] =
        state.m[r] + std::log(state.l[r]);
}

void Attention::reserve_partials(std::size_t count) {
  partials_.resize(
      std::max(partials_.size(), count * round_up(state_floats(block_rows_, shape_.dim), 16)));
}

AttentionState Attention::partial(std::size_t i, uint32_t rows) {
  return state_at(partials_.data() + i * round_up(state_floats(block_rows_, shape_.dim), 16), rows,
                  shape_.dim);
}

AttentionState Attention::empty_partial(std::size_t i, uint32_t rows) {
  return empty_state(partial(i, rows).o, rows, shape_.dim);
}

AttentionState Attention::merge_partials(std::size_t i, uint32_t count, uint32_t rows) {
  for (uint32_t part = 1; part < count; ++part)
    kernels_.merge(partial(i, rows), partial(i + part, rows), rows, shape_.dim);
  return partial(i, rows);
}

Status Attention::run(const AttentionRequest& req, float* out, float* lse) {
  const uint64_t behind_sinks =
      req.store.pages().pages() > 1 ? req.store.sealed_tokens() - shape_.page_tokens : 0;
  for (Worker& w : workers_) w.counts = {};
  const bool compare = req.plan.compare != CompareLevel::none;
  if (trace_) trace_->begin_layer();
  if (compare) comparison_.begin(req.plan.compare, req.store.pages(), 1, req.tokens);
  if (!req.selector && lse && softcap_ != 0 && !req.is_apart) {
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
    if (!req.is_apart && !req.is_part)
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

// Begins a state with the sink logits: a partial (o, m, l) of one score s without a value is
// (0, s, 1). Scores are those of centred keys, which centring shifts, unless a cap needs the
// others.
void Attention::begin_with_sink_logits(const HeadQueries& queries,
                                       const AttentionState& state) const {
  const auto& [req, head, rows, cap, first_head] = queries;
  if (!req.sink_logits) return;
  const uint32_t group = config_.group();
  for (uint32_t r = 0; r < rows.rows; ++r) {
    const float shift = cap == 0 ? centre_score(req, head, row_of(rows, r)) : 0;
    state.m[r] = req.sink_logits[head * group + (first_head + r) % group] - shift;
    state.l[r] = 1;
  }
}

// Attends the sinks, and the window and the step's tokens up to each query's own, from an empty
// state on.
void Attention::attend_sinks_and_window(const HeadQueries& queries, const HeadTokens& tokens,
                                        const AttentionState& state, Worker* w) const {
  const KvStore& store = queries.req.store;
  const uint32_t group = config_.group(), dim = shape_.dim, layer = queries.req.layer;
  const bool is_apart = queries.req.is_apart;
  begin_with_sink_logits(queries, state);
  uint32_t skipped = queries.req.skipped;  // rows of the sinks, or of the window without any
  if (store.pages().pages() > 0) {
    const KvStore::Rows sinks = store.sinks(layer, queries.head);
    const std::size_t from = std::size_t{skipped} * dim;
    attend_rows(queries, {sinks.k + from, sinks.v + from, store.sink_count() - skipped}, state, w);
    skipped = 0;
  }
  const auto seen = [&](uint32_t i) {  // rows up to token i's own
    return store.window_count() + (is_apart ? 0 : tokens.first + i * tokens.stride + 1);
  };
  const uint32_t window_rows = seen(tokens.count - 1);
  const KvStore::Rows window = store.window(layer, queries.head);
  for (uint32_t at = skipped; at < window_rows && !queries.req.cancel.fired(); at += part_tokens) {
    for (uint32_t r = 0; r < queries.rows.rows; ++r)
      w->limits[r] = seen(r / group) - std::min(seen(r / group), at);
    attend_rows(queries,
                {window.k + std::size_t{at} * dim, window.v + std::size_t{at} * dim,
                 std::min(part_tokens, window_rows - at), w->limits.data()},
                state, w);
  }
}

// The number of entry `i` of page_lists_.
uint32_t Attention::listed_page(const AttentionRequest& req, uint32_t i) {
  return i + 1 < req.hidden.first || req.hidden.count() == 0 ? i + 1 : i + 1 + req.hidden.count();
}

// Verifies and lists the sealed pages after that of the sinks. After a cancel the lists are
// incomplete.
Status Attention::list_pages(const AttentionRequest& req) {
  const uint32_t sealed = req.store.pages().pages(),
                 pages = (sealed > 1 ? sealed - 1 : 0) - req.hidden.count();
  std::atomic<bool> intact{true};
  pool_->run(config_.kv_heads, [&](uint32_t h, uint32_t) {
    page_lists_[h].resize(pages);
    for (uint32_t p = 0; p < pages; ++p) {
      // the call may read and verify a page of a mapped file
      if (p % extent_pages == 0 && req.cancel.fired()) return;
      const uint32_t number = listed_page(req, p);
      page_lists_[h][p] = req.store.pages().page(req.layer, h, number);
      if (!req.store.pages().intact_page(req.layer, h, number)) intact = false;
    }
  });
  return intact ? Status() : req.store.pages().damaged();
}

// Pages of a task of a single block. All threads share the one KV head of latent attention. So it
// has up to 16 tasks, of whole tiles of the kernel. The number of pages alone decides.
uint32_t Attention::pages_of_part(uint32_t pages) const {
  constexpr uint32_t parts = 16, min_pages = 8, tile_pages = 2;
  const uint32_t most = part_tokens / shape_.page_tokens;
  if (!shape_.latent) return most;
  const auto even = static_cast<uint32_t>(round_up(ceil_div(pages, parts), tile_pages));
  return std::max(even, min_pages);
}

Status Attention::exact(const AttentionRequest& req, float cap, float* out, float* lse) {
  RETURN_IF_ERROR(list_pages(req));
  const uint32_t group = config_.group(), heads = config_.kv_heads, tokens = req.tokens - req.first,
                 block_tokens = block_rows_ / group;
  const auto pages = static_cast<uint32_t>(page_lists_[0].size()),
             blocks = static_cast<uint32_t>(ceil_div(tokens, block_tokens));
  const uint32_t part_pages = pages_of_part(pages);
  const uint32_t parts =
      blocks == 1 ? std::max(1u, static_cast<uint32_t>(ceil_div(pages, part_pages))) : 1;
  if (parts > 1) reserve_partials(std::size_t{heads} * parts);

  // The most expensive tasks (last blocks, longest limits) go first, so that threads end evenly.
  pool_->run(heads * blocks * parts, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, block = blocks - 1 - task / heads % blocks,
                   part = task / heads / blocks, first = req.first + block * block_tokens;
    const HeadTokens own{h, first, std::min(block_tokens, req.tokens - first)};
    HeadQueries queries = gather(req, own, false, &w);
    queries.cap = cap;
    const uint32_t rows = queries.rows.rows;
    const AttentionState state = parts > 1 ? empty_partial(h * parts + part, rows)
                                           : empty_state(w.state.data(), rows, shape_.dim);
    const uint32_t begin = parts > 1 ? part * part_pages : 0;
    const uint32_t end = parts > 1 ? std::min(pages, begin + part_pages) : pages;
    if (part == 0) attend_sinks_and_window(queries, own, state, &w);
    // Each call has whole tiles of the kernel, so the sums are those of a single call.
    for (uint32_t p = begin; p < end && !req.cancel.fired(); p += part_pages)
      attend_pages(queries, {page_lists_[h].data() + p, std::min(part_pages, end - p)}, state, &w);
    w.counts.tokens_read += uint64_t{own.count} * (end - begin) * shape_.page_tokens;
    w.counts.pages_touched += uint64_t{own.count} * (end - begin);
    if (parts == 1) write_out(req, state, own, out, lse);
  });
  if (parts == 1 || req.cancel.fired()) return {};
  for (uint32_t h = 0; h < heads; ++h)
    write_out(req, merge_partials(h * parts, parts, tokens * group), {h, req.first, tokens}, out,
              lse);
  return {};
}

Status Attention::probe(const AttentionRequest& req, uint32_t count, const ProbedOutputs& exact,
                        double* difference, double* norm) {
  count = std::min(count, req.tokens);
  const uint32_t stride = probe_span(req.tokens, count) / count, width = config_.q_width();
  probed_.resize(std::size_t{count} * width);
  for (Worker& w : workers_) w.counts = {};
  RETURN_IF_ERROR(selective(req, count, stride, probed_.data(), nullptr));
  if (req.cancel.fired()) return {};
  std::vector<double> sums(2 * std::size_t{count});  // of each token: the difference's, the norm's
  pool_->run(count, [&](uint32_t t, uint32_t) {
    const float *from = exact.rows + std::size_t{t} * (exact.packed ? 1 : stride) * width,
                *other = probed_.data() + std::size_t{t} * width;
    double d2 = 0, e2 = 0;
    for (std::size_t i = 0; i < width; ++i) {
      const double e = static_cast<double>(from[i]), d = static_cast<double>(other[i]) - e;
      d2 += d * d;
      e2 += e * e;
    }
    sums[2 * t] = d2, sums[2 * t + 1] = e2;
  });
  for (std::size_t t = 0; t < count; ++t) *difference += sums[2 * t], *norm += sums[2 * t + 1];
  return {};
}

// Makes the selector's input for the queries of a KV head's group.
SelectorQuery Attention::query_of(const HeadQueries& queries, uint64_t budget) const {
  const KvStore& store = queries.req.store;
  const Plan& plan = queries.req.plan;
  return {.kernels = kernels_,
          .pages = store.pages(),
          .sketch = store.sketch(),
          .layer = queries.req.layer,
          .kv_head = queries.head,
          .rows = queries.rows,
          .near_m = nullptr,
          .near_l = nullptr,
          .first_page = 1,
          .budget_tokens = budget,
          .share = plan.share_heads,
          .range = plan.range,
          .memory = queries.req.memory,
          .unit_tokens = plan.unit_tokens,
          .representatives = &store.representatives(),
          .coverage = plan.coverage,
          .indexes = &store.indexes(),
          .breadth = plan.search_breadth};
}

bool Attention::compare(const HeadQueries& queries, uint32_t token, const Selection* choice,
                        const float* out, Worker* w) {
  return comparison_.compare({kernels_, queries.req.store.pages(), queries.req.layer, queries.head,
                              1, token, queries.rows, choice, out + out_at(token, queries.head),
                              &queries.req.cancel, value_centre(queries.req, queries.head)},
                             &w->compare);
}

Status Attention::compare_exact(const AttentionRequest& req, const float* out) {
  const uint32_t heads = config_.kv_heads, group = config_.group();
  std::atomic<bool> intact{true};
  pool_->run(heads * req.tokens, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const HeadTokens token{task % heads, task / heads, 1};
    const HeadQueries queries = gather(req, token, false, &w).uncapped();
    const AttentionState state = empty_state(w.state.data(), group, shape_.dim);
    attend_sinks_and_window(queries, token, state, &w);
    w.compare.keep_near(state, group, shape_.dim);
    if (!compare(queries, token.first, nullptr, out, &w)) intact = false;
  });
  return intact ? Status() : req.store.pages().damaged();
}

void Attention::add_centre_scores(const AttentionRequest& req, float sign, float* lse) const {
  if (softcap_ != 0 || req.store.centre().empty()) return;
  pool_->run(req.tokens - req.first,
             [&](uint32_t task, uint32_t) { add_centre_scores(req, req.first + task, sign, lse); });
}

void Attention::add_centre_scores(const AttentionRequest& req, uint32_t token, float sign,
                                  float* lse) const {
  if (softcap_ != 0 || req.store.centre().empty()) return;
  const uint32_t group = config_.group(), heads = config_.heads;
  const float scale = sign / std::sqrt(static_cast<float>(config_.head_dim));
  const QueryTurn& turn = req.turn;
  alignas(64) float turned[max_latent_dim];
  for (uint32_t h = 0; h < heads; ++h) {
    const std::size_t at = std::size_t{token} * heads + h;
    const float *q = req.q + at * config_.head_dim,
                *centre = req.store.centre().data() +
                          (std::size_t{req.layer} * config_.kv_heads + h / group) * shape_.dim;
    if (turn.cos) {
      std::copy_n(q, config_.head_dim, turned);
      kernels_.rope(turned + turn.first, 1, 0, turn.dim, turn.cos, turn.sin, turn.neox);
      q = turned;
    }
    lse[at] += dot(q, centre, config_.head_dim) * scale;
  }
}

}  // namespace kvasir
