// Attention of a question's tokens with one shared selection. All tokens attend all selected quads,
// and each quad is read once.
//
//   near    attends sinks and window of each token
//   choose  selects quads by the sum of their shares for the queries of every fourth token. These
//           count as the heads of one group (as in block_attention.cc). Threads without a head to
//           select for read the scales of a mapped file
//   attend  attends the selected quads with the rows of all tokens; each task has a part of them
//   merge   merges near and the parts, in order
//
// Accuracy over ten questions to each of two documents of 32,768 tokens and seven tasks:
//
//   budget                                   0.5%    1%      2%
//   each token selects for itself            75.4%   77.2%   78.0%
//   shared, by every fourth token            75.6%   77.7%   77.3%
//   shared, by every second token            75.8%   78.2%   77.4%   scans twice as much
#include <algorithm>

#include "attention/worker.h"
#include "backend/query_groups.h"

namespace kvasir {

constexpr uint32_t task_rows = 12;  // query rows for which a task scans the summaries, about

// A query group of a step, and the tasks that scan for it.
struct Attention::QueryBatch {
  const AttentionRequest& req;
  QueryGroup group;  // tokens of the step
  uint32_t task_tokens;

  // Group b of `groups` of a request.
  static QueryBatch of(const AttentionRequest& req, uint32_t groups, uint32_t b,
                       uint32_t heads_of_group) {
    QueryGroup group = query_group_of(req.tokens - req.first, groups, b);
    group.first += req.first;
    return {req, group, query_group_stride * std::max(1u, task_rows / heads_of_group)};
  }

  uint32_t tasks() const { return static_cast<uint32_t>(ceil_div(group.count, task_tokens)); }
  // The tokens of a task of a KV head, and those of them that select.
  HeadTokens tokens(uint32_t head, uint32_t task) const {
    const uint32_t begin = task * task_tokens;
    return {head, group.first + begin, std::min(task_tokens, group.count - begin)};
  }
  HeadTokens selecting(const HeadTokens& tokens) const {
    const uint32_t skipped = std::min(tokens.count, (group.count - 1) % query_group_stride);
    return {tokens.head, tokens.first + skipped,
            static_cast<uint32_t>(ceil_div(tokens.count - skipped, query_group_stride)),
            query_group_stride};
  }
};

// The blocks of tokens do not depend on the number of threads.
Status Attention::attend_query_batch(const AttentionRequest& req, float* out, float* lse) {
  const uint32_t tokens = req.tokens - req.first, groups = query_groups(tokens, config_.group());
  for (uint32_t b = 0; b < groups && !req.cancel.fired(); ++b) {
    const QueryBatch batch = QueryBatch::of(req, groups, b, config_.group());
    RETURN_IF_ERROR(choose_for_batch(batch));
    RETURN_IF_ERROR(attend_for_batch(batch, out, lse));
  }
  return {};
}

// Attends sinks and window with tokens of a group; near: of all tokens of the group.
void Attention::attend_batch_near(const QueryBatch& batch, const HeadTokens& tokens,
                                  const AttentionState& near, Worker* w) const {
  const AttentionState state =
      row_of(near, (tokens.first - batch.group.first) * config_.group(), shape_.dim);
  attend_sinks_and_window(gather(batch.req, tokens, false, w), tokens, state, w);
}

// The rows of a task that select, with their sums of sinks and window by uncapped scores in read_m
// and read_l of the worker.
QueryRows Attention::selecting_rows(const QueryBatch& batch, uint32_t task,
                                    const AttentionState& near, Worker* w) const {
  const uint32_t heads = config_.kv_heads, group = config_.group(), dim = shape_.dim;
  const HeadTokens selecting = batch.selecting(batch.tokens(task % heads, task / heads));
  if (selecting.count == 0) return {};
  const HeadQueries queries = gather(batch.req, selecting, true, w).uncapped();
  const uint32_t rows = queries.rows.rows;
  w->read_m.resize(rows), w->read_l.resize(rows);
  if (softcap_ != 0) {
    const AttentionState uncapped = empty_state(w->state.data(), rows, dim);
    attend_sinks_and_window(queries, selecting, uncapped, w);
    std::copy_n(uncapped.m, rows, w->read_m.data());
    std::copy_n(uncapped.l, rows, w->read_l.data());
    return queries.rows;
  }
  for (uint32_t r = 0; r < rows; ++r) {
    const uint32_t token = selecting.first + r / group * query_group_stride - batch.group.first,
                   from = token * group + r % group;
    w->read_m[r] = near.m[from], w->read_l[r] = near.l[from];
  }
  return queries.rows;
}

// The shares of a task, none where no token of it selects. near: with the tokens of the task.
Status Attention::sum_task_shares(const QueryBatch& batch, uint32_t task,
                                  const AttentionState& near, Array<float>* sums, Worker* w) const {
  const AttentionRequest& req = batch.req;
  const uint32_t heads = config_.kv_heads;
  const QueryRows rows = selecting_rows(batch, task, near, w);
  sums->clear();
  if (rows.rows == 0) return {};
  SelectorQuery query = query_of({req, task % heads, rows, 0}, req.plan.budget(req.layer));
  query.near_m = w->read_m.data(), query.near_l = w->read_l.data();
  query.share = true;
  query.first_extent = first_extent_of(req.store.pages(), task, heads * batch.tasks());
  const Scanned scanned = req.selector->sum_shares(query, &w->selector, sums);
  if (!scanned.intact) return req.store.pages().damaged();
  w->counts += scanned;
  return {};
}

// Computes the partials of sinks and window, and batch_sums_ of every task.
Status Attention::sum_batch_shares(const QueryBatch& batch) {
  const AttentionRequest& req = batch.req;
  const uint32_t heads = config_.kv_heads, tasks = heads * batch.tasks();
  reserve_partials(heads);
  batch_sums_.resize(std::max<std::size_t>(batch_sums_.size(), tasks));
  for (uint32_t h = 0; h < heads; ++h) (void)empty_partial(h, batch.group.count * config_.group());
  FirstFailure failure;
  pool_->run(tasks, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    const AttentionState near = partial(task % heads, batch.group.count * config_.group());
    attend_batch_near(batch, batch.tokens(task % heads, task / heads), near, &workers_[worker]);
    Status s = sum_task_shares(batch, task, near, &batch_sums_[task], &workers_[worker]);
    if (!s.ok()) failure.note(std::move(s));
  });
  return std::move(failure).take();
}

// Selects for a head by the sums of all its tasks.
void Attention::choose_by_batch(const QueryBatch& batch, uint32_t head, const Array<float>& sums,
                                Selection* choice, Worker* w) const {
  const AttentionRequest& req = batch.req;
  QueryRows rows{};  // only their number is used
  rows.rows = batch.group.selecting() * config_.group();
  SelectorQuery query = query_of({req, head, rows, 0}, req.plan.budget(req.layer));
  query.share = true;
  req.selector->choose_by_sums(query, sums, &w->selector, choice);
  if (req.hidden.count() > 0) remove_pages(req.hidden.first, req.hidden.end, choice);
}

// sums += more, [blocks or quads]; empty: zeros.
static void add_shares(const Kernels& kernels, const Array<float>& more, Array<float>* sums) {
  if (more.empty()) return;
  if (sums->empty()) sums->assign(more.size(), 0.0f);
  kernels.add(sums->data(), more.data(), more.size());
}

// Also computes block_choices_, [kv_heads]. Further tasks read the scales of a mapped file.
Status Attention::choose_for_batch(const QueryBatch& batch) {
  const AttentionRequest& req = batch.req;
  const PageStore& pages = req.store.pages();
  const uint32_t heads = config_.kv_heads;
  if (Status s = sum_batch_shares(batch); !s.ok() || req.cancel.fired()) return s;
  block_choices_.resize(std::max<std::size_t>(block_choices_.size(), heads));
  // quads, about as many as pages
  const uint64_t chosen = req.plan.budget(req.layer) / quad_tokens * heads;
  const uint32_t readers = batch_scales_.begin(pages, req.layer, chosen);
  pool_->run(heads + readers, [&](uint32_t task, uint32_t worker) {
    if (task >= heads) {
      if (!req.cancel.fired()) batch_scales_.read(pages, task - heads);
      return;
    }
    Worker& w = workers_[worker];
    Array<float>& sums = batch_sums_[task];
    for (uint32_t part = 1; part < batch.tasks(); ++part)
      add_shares(kernels_, batch_sums_[part * heads + task], &sums);
    choose_by_batch(batch, task, sums, &block_choices_[task], &w);
  });
  for (uint32_t h = 0; h < heads; ++h)
    if (!block_choices_[h].intact) return pages.damaged();
  return {};
}

// choice: of the head.
Status Attention::attend_batch_part(const QueryBatch& batch, const BatchPart& part,
                                    const Selection& choice, const AttentionState& state,
                                    Worker* w) const {
  const PageStore& pages = batch.req.store.pages();
  const QueryGroup& group = batch.group;
  copy_part(choice, part.pages, &w->selection);
  const struct Held {
    PageStore::Hold& hold;
    ~Held() { hold.release(); }
  } held{w->hold};
  batch_scales_.hand(pages, part.head, &w->hold.mapped);
  const uint64_t touched = w->counts.pages_touched;
  RETURN_IF_ERROR(fetch_choice(batch.req, part.head, 0, &w->hold, w));
  w->missed += w->hold.mapped.read();
  w->counts.pages_touched = touched + group.count * (w->counts.pages_touched - touched);
  const HeadQueries queries = gather(batch.req, {part.head, group.first, group.count}, false, w);
  const auto attend = [&](const Array<PageRef>& refs) {
    if (!refs.empty()) attend_pages(queries, refs, state, w);
  };
  attend(w->selection.lists[0]);
  if (w->selection.sampled) attend(w->selection.samples[0]);
  return {};
}

Status Attention::attend_for_batch(const QueryBatch& batch, float* out, float* lse) {
  const AttentionRequest& req = batch.req;
  if (req.cancel.fired()) return {};
  const uint32_t heads = config_.kv_heads, rows = batch.group.count * config_.group();
  batch_parts_.clear();
  for (uint32_t h = 0; h < heads; ++h)
    for_each_part(block_choices_[h], 0, [&](const ListPart& part) {
      batch_parts_.push_back({h, part});
    });
  const auto parts = static_cast<uint32_t>(batch_parts_.size());
  reserve_partials(std::size_t{heads} + parts);
  FirstFailure failure;
  for (Worker& w : workers_) w.missed = 0;
  pool_->run(parts, [&](uint32_t task, uint32_t worker) {
    if (req.cancel.fired()) return;
    const BatchPart& part = batch_parts_[task];
    if (Status s = attend_batch_part(batch, part, block_choices_[part.head],
                                     empty_partial(heads + task, rows), &workers_[worker]);
        !s.ok())
      failure.note(std::move(s));
  });
  if (Status s = std::move(failure).take(); !s.ok() || req.cancel.fired()) return s;
  uint64_t missed = 0;
  for (const Worker& w : workers_) missed += w.missed;
  batch_scales_.note_missed(missed);
  pool_->run(heads, [&](uint32_t h, uint32_t worker) {
    const AttentionState state = partial(h, rows);
    for (uint32_t p = 0; p < parts; ++p)
      if (batch_parts_[p].head == h)
        kernels_.merge(state, partial(heads + p, rows), rows, shape_.dim);
    write_out(req, state, {h, batch.group.first, batch.group.count}, out, lse);
    workers_[worker].counts.tokens_read += batch.group.count * block_choices_[h].tokens;
  });
  return {};
}

// All of a head by one thread, with the sums of several threads: the parts are merged in the same
// order. states: of the result and of a part.
Status Attention::run_batch_head(const QueryBatch& batch, uint32_t head,
                                 const AttentionState (&states)[2], Worker* w) const {
  const uint32_t heads = config_.kv_heads, rows = batch.group.count * config_.group();
  w->sums.clear();
  attend_batch_near(batch, {head, batch.group.first, batch.group.count}, states[0], w);
  for (uint32_t task = 0; task < batch.tasks(); ++task) {
    if (batch.req.cancel.fired()) return {};
    RETURN_IF_ERROR(sum_task_shares(batch, task * heads + head, states[0], &w->task_sums, w));
    add_shares(kernels_, w->task_sums, &w->sums);
  }
  choose_by_batch(batch, head, w->sums, &w->choice, w);
  if (!w->choice.intact) return batch.req.store.pages().damaged();
  Status s;
  for_each_part(w->choice, 0, [&](const ListPart& part) {
    if (!s.ok() || batch.req.cancel.fired()) return;
    const AttentionState state = empty_state(states[1].o, rows, shape_.dim);
    s = attend_batch_part(batch, {head, part}, w->choice, state, w);
    if (s.ok()) kernels_.merge(states[0], state, rows, shape_.dim);
  });
  w->counts.tokens_read += batch.group.count * w->choice.tokens;
  return s;
}

// Of the tokens of a question over several documents: a task is a group of tokens and a head of a
// document. So threads wait for each other once a layer.
Status Attention::run_batches(std::span<const AttentionRequest> documents, float* out, float* lse) {
  const uint32_t heads = config_.kv_heads, group = config_.group(), tokens = documents[0].tokens,
                 groups = query_groups(tokens - documents[0].first, group), tasks = groups * heads;
  reserve_partials(2 * std::size_t{pool_->threads()});
  batch_scales_.release();  // each page of a mapping is where its scales are
  FirstFailure failure;
  pool_->run(static_cast<uint32_t>(documents.size()) * tasks, [&](uint32_t task, uint32_t worker) {
    const uint32_t d = task / tasks, h = task % heads;
    const AttentionRequest& req = documents[d];
    if (req.cancel.fired()) return;
    const QueryBatch batch = QueryBatch::of(req, groups, task % tasks / heads, group);
    const uint32_t rows = batch.group.count * group;
    const AttentionState states[] = {empty_partial(2 * worker, rows),
                                     partial(2 * worker + 1, rows)};
    if (Status s = run_batch_head(batch, h, states, &workers_[worker]); !s.ok())
      return failure.note(std::move(s));
    if (!req.cancel.fired())
      write_out(req, states[0], {h, batch.group.first, batch.group.count},
                out + std::size_t{d} * tokens * config_.q_width(),
                lse + std::size_t{d} * tokens * config_.heads);
  });
  return std::move(failure).take();
}

}  // namespace kvasir
