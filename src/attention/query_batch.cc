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
#include "select/blocks.h"

namespace kvasir {

constexpr uint32_t task_rows = 12;     // query rows for which a task scans the summaries, about
constexpr uint32_t part_entries = 64;  // pages or samples that a task attends

// A block of a step's tokens that share one selection.
struct Attention::Question {
  const AttentionRequest& req;
  uint32_t first, count;
};

AttentionState Attention::question_state(std::size_t i, uint32_t rows) {
  float* at = partials_.data() + i * round_up(state_floats(block_rows_, shape_.dim), 16);
  return {at, at + std::size_t{rows} * shape_.dim,
          at + std::size_t{rows} * shape_.dim + round_up(rows, 16)};
}

// The blocks of tokens do not depend on the number of threads.
Status Attention::attend_query_batch(const AttentionRequest& req, float* out, float* lse) {
  const uint32_t blocks = query_groups(req.tokens - req.first, config_.group());
  for (uint32_t b = 0; b < blocks && !req.cancel.fired(); ++b) {
    const QueryGroup askers = query_group_of(req.tokens - req.first, blocks, b);
    const Question batch{req, req.first + askers.first, askers.count};
    RETURN_IF_ERROR(choose_for_batch(batch));
    RETURN_IF_ERROR(attend_for_batch(batch, out, lse));
  }
  return {};
}

// Computes the near states, [kv_heads], and block_choices_, [kv_heads].
Status Attention::choose_for_batch(const Question& batch) {
  const uint32_t heads = config_.kv_heads, group = config_.group(), dim = shape_.dim,
                 count = batch.count;
  const uint32_t task_tokens = query_group_stride * std::max(1u, task_rows / group),
                 tasks = static_cast<uint32_t>(ceil_div(count, task_tokens));
  const uint32_t parity = (count - 1) % query_group_stride;  // first token that selects
  partials_.resize(
      std::max(partials_.size(), heads * round_up(state_floats(block_rows_, dim), 16)));
  question_sums_.resize(std::max(question_sums_.size(), std::size_t{heads} * tasks));
  block_choices_.resize(std::max<std::size_t>(block_choices_.size(), heads));
  for (uint32_t h = 0; h < heads; ++h)
    (void)empty_state(question_state(h, count * group).o, count * group, dim);
  const auto query_of = [&](uint32_t h, const QueryRows& rows, const float* m, const float* l) {
    SelectorQuery query{.kernels = kernels_,
                        .pages = batch.req.store.pages(),
                        .sketch = batch.req.store.sketch(),
                        .layer = batch.req.layer,
                        .kv_head = h,
                        .rows = rows,
                        .near_m = m,
                        .near_l = l,
                        .first_page = 1,
                        .budget_tokens = batch.req.plan.budget(batch.req.layer),
                        .share = true};
    query.coverage = batch.req.plan.coverage;
    return query;
  };
  FirstFailure failure;
  pool_->run(heads * tasks, [&](uint32_t task, uint32_t worker) {
    if (batch.req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const uint32_t h = task % heads, part = task / heads, begin = part * task_tokens,
                   tokens = std::min(task_tokens, count - begin);
    const AttentionState state = row_of(question_state(h, count * group), begin * group, dim);
    const QueryRows all = gather(&w, batch.req.q, batch.first + begin, tokens, 1, h, false);
    attend_sinks_and_window(batch.req, {h, batch.first + begin, tokens, 1}, all, softcap_, state,
                            &w);
    const uint32_t asking =
        (tokens - std::min(tokens, parity) + query_group_stride - 1) / query_group_stride;
    if (asking == 0) return question_sums_[task].clear();
    const QueryRows rows =
        gather(&w, batch.req.q, batch.first + begin + parity, asking, query_group_stride, h, true);
    w.read_m.resize(rows.rows), w.read_l.resize(rows.rows);
    if (softcap_ != 0) {  // selection uses the uncapped scores
      const AttentionState near = empty_state(w.state.data(), rows.rows, dim);
      attend_sinks_and_window(batch.req,
                              {h, batch.first + begin + parity, asking, query_group_stride}, rows,
                              0, near, &w);
      std::copy_n(near.m, rows.rows, w.read_m.data()),
          std::copy_n(near.l, rows.rows, w.read_l.data());
    } else {
      for (uint32_t r = 0; r < rows.rows; ++r) {
        const uint32_t from = (parity + r / group * query_group_stride) * group + r % group;
        w.read_m[r] = state.m[from], w.read_l[r] = state.l[from];
      }
    }
    SelectorQuery query = query_of(h, rows, w.read_m.data(), w.read_l.data());
    query.first_extent =
        static_cast<uint32_t>(uint64_t{batch.req.store.pages().extents()} * task / (heads * tasks));
    const Scanned scanned =
        batch.req.selector->sum_shares(query, &w.selector, &question_sums_[task]);
    if (!scanned.intact) return failure.note(batch.req.store.pages().damaged());
    w.counts.summary_bytes += scanned.summary_bytes, w.counts.keys_scanned += scanned.keys_scanned;
  });
  if (Status s = std::move(failure).take(); !s.ok() || batch.req.cancel.fired()) return s;
  // quads, about as many as pages
  const uint64_t chosen = batch.req.plan.budget(batch.req.layer) / quad_tokens * heads;
  pool_->run(heads + question_scales_.begin(batch.req.store.pages(), batch.req.layer, chosen),
             [&](uint32_t h, uint32_t worker) {
               if (h >= heads)
                 return batch.req.cancel.fired()
                            ? void()
                            : question_scales_.read(batch.req.store.pages(), h - heads);
               Worker& w = workers_[worker];
               Array<float>& sums = question_sums_[h];
               for (uint32_t part = 1; part < tasks; ++part)
                 if (const Array<float>& more = question_sums_[part * heads + h]; !more.empty()) {
                   if (sums.empty()) sums.assign(more.size(), 0.0f);
                   kernels_.add(sums.data(), more.data(), more.size());
                 }
               QueryRows rows{};  // only their number is used
               rows.rows = (count - parity + query_group_stride - 1) / query_group_stride * group;
               batch.req.selector->choose_by_sums(query_of(h, rows, nullptr, nullptr), sums,
                                                  &w.selector, &block_choices_[h]);
             });
  for (uint32_t h = 0; h < heads; ++h)
    if (!block_choices_[h].intact) return batch.req.store.pages().damaged();
  return {};
}

Status Attention::attend_for_batch(const Question& batch, float* out, float* lse) {
  if (batch.req.cancel.fired()) return {};
  const uint32_t heads = config_.kv_heads, group = config_.group(), dim = shape_.dim,
                 rows = batch.count * group;
  question_parts_.clear();
  for (uint32_t h = 0; h < heads; ++h) {
    const Selection& choice = block_choices_[h];
    const std::size_t lists = choice.page_numbers[0].size(),
                      samples = choice.sampled ? choice.sample_numbers[0].size() : 0;
    const auto parts = static_cast<uint32_t>(ceil_div(std::max(lists, samples), part_entries));
    const Array<uint32_t>& numbers =
        lists >= samples ? choice.page_numbers[0] : choice.sample_numbers[0];
    for (uint32_t p = 0; p < parts; ++p)
      question_parts_.push_back(
          {h, p == 0 ? 0 : numbers[numbers.size() * p / parts],
           p + 1 == parts ? UINT32_MAX : numbers[numbers.size() * (p + 1) / parts]});
  }
  partials_.resize(std::max(partials_.size(), (heads + question_parts_.size()) *
                                                  round_up(state_floats(block_rows_, dim), 16)));
  FirstFailure failure;
  for (Worker& w : workers_) w.missed = 0;
  pool_->run(static_cast<uint32_t>(question_parts_.size()), [&](uint32_t task, uint32_t worker) {
    if (batch.req.cancel.fired()) return;
    Worker& w = workers_[worker];
    const QuestionPart part = question_parts_[task];
    const Selection& choice = block_choices_[part.head];
    const AttentionState state = empty_state(question_state(heads + task, rows).o, rows, dim);
    const auto take = [&](const Array<PageRef>& from, const Array<uint32_t>& of_pages,
                          Array<PageRef>* to, Array<uint32_t>* numbers) {
      const auto begin = std::lower_bound(of_pages.begin(), of_pages.end(), part.begin),
                 end = std::lower_bound(begin, of_pages.end(), part.end);
      numbers->assign(begin, end);
      to->assign(from.begin() + (begin - of_pages.begin()),
                 from.begin() + (end - of_pages.begin()));
    };
    begin_selection(1, &w.selection);
    take(choice.lists[0], choice.page_numbers[0], &w.selection.lists[0],
         &w.selection.page_numbers[0]);
    if (choice.sampled) {
      w.selection.samples.resize(1), w.selection.sample_numbers.resize(1);
      w.selection.sampled = true;
      take(choice.samples[0], choice.sample_numbers[0], &w.selection.samples[0],
           &w.selection.sample_numbers[0]);
    }
    const struct Held {
      PageStore::Hold& hold;
      ~Held() { hold.release(); }
    } held{w.hold};
    question_scales_.hand(batch.req.store.pages(), part.head, &w.hold.mapped);
    const uint64_t touched = w.counts.pages_touched;
    if (Status s = fetch_choice(batch.req, part.head, 0, &w.hold, &w); !s.ok())
      return failure.note(std::move(s));
    w.missed += w.hold.mapped.read();
    w.counts.pages_touched = touched + batch.count * (w.counts.pages_touched - touched);
    const QueryRows queries =
        gather(&w, batch.req.q, batch.first, batch.count, 1, part.head, false);
    const auto attend = [&](const Array<PageRef>& pages) {
      if (pages.empty()) return;
      attend_pages(batch.req, part.head, queries, pages, softcap_, state, &w);
    };
    attend(w.selection.lists[0]);
    if (choice.sampled) attend(w.selection.samples[0]);
  });
  if (Status s = std::move(failure).take(); !s.ok() || batch.req.cancel.fired()) return s;
  uint64_t missed = 0;
  for (const Worker& w : workers_) missed += w.missed;
  question_scales_.note_missed(missed);
  pool_->run(heads, [&](uint32_t h, uint32_t worker) {
    const AttentionState state = question_state(h, rows);
    for (std::size_t p = 0; p < question_parts_.size(); ++p)
      if (question_parts_[p].head == h)
        kernels_.merge(state, question_state(heads + p, rows), rows, dim);
    write_out(state, batch.first, batch.count, h, out, lse);
    workers_[worker].counts.tokens_read += batch.count * block_choices_[h].tokens;
  });
  return {};
}

}  // namespace kvasir
