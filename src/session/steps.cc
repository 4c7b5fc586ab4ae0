// Steps of a session: plans and runs chunks of tokens, and updates the sequence after each.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "base/checked.h"
#include "session/session.h"

namespace kvasir {

constexpr uint64_t min_span_step = 65;  // tokens: fewer are a step of their own

Status Session::check_room(uint64_t more) const {
  const uint64_t used = sequence_.positions();
  if (used <= options_.context && more <= options_.context - used) return {};
  return Status::error(Code::context_full,
                       "%" PRIu64 " tokens do not fit: the sequence holds %" PRIu64 " of %" PRIu64
                       "; it is unchanged",
                       more, used, options_.context);
}

Status Session::append(const AppendRequest& request, uint64_t* done) {
  *done = 0;
  // the trace is valid only until the sequence changes
  if (!tracing_) trace_.reset();
  const std::size_t n = request.tokens.size();
  if (is_cancelled(request.cancel)) return Status::error(Code::cancelled, "cancelled");
  RETURN_IF_ERROR(sequence_.store.check_file());
  RETURN_IF_ERROR(
      fit_drafts([&] { return sequence_.store.check_budget(sequence_.tokens.size() + n); }));
  // rows behind a checkpoint stay in full precision: the only one is the document's end
  if (KvStore* windows = sequence_.windows_or_null();
      windows && options_.full_precision && request.kind == TextKind::document)
    windows->forget_checkpoints();
  try {
    if (request.kind != TextKind::document) RETURN_IF_ERROR(keep_document());
    return append_chunks(request, done);
  } catch (const std::bad_alloc&) {
    return Status::error(Code::no_memory, "out of memory after %" PRIu64 " of %zu tokens", *done,
                         n);
  }
}

Status Session::append_chunks(const AppendRequest& request, uint64_t* done) {
  const std::size_t vocabulary = model_->config().vocabulary, all = request.tokens.size();
  const struct Ended {  // however it ends
    Forward& forward;
    KvStore& store;
    ~Ended() { forward.end_text(), store.end_ahead(); }
  } ended{*forward_, sequence_.store};
  make_room_for(&sequence_.tokens, all);
  next_logits_.resize(vocabulary);
  KeySketch::Build sketch;
  while (*done < all) {
    if (is_cancelled(request.cancel)) return Status::error(Code::cancelled, "cancelled");
    ForwardStep step;
    std::array<Token, ForwardStep::max_open_tokens> best{-1};
    if (request.greedy) step.best = best.data(), step.never_best = model_->tokenizer().suppressed();
    Array<float> errors;
    RETURN_IF_ERROR(plan_chunk(request, *done, &step, &errors));
    if (request.kind == TextKind::document) plan_sketch(&sketch, &step);
    Status s = run_step(request, &step);
    if (s.code() == Code::no_memory && step.chunk > 0 && forward_->refuse_spans()) continue;
    RETURN_IF_ERROR(std::move(s));
    note_chunk(request, step);
    if (step.chunk > 0) ++spans_, span_tokens_ += step.size();
    if (request.goes_on) {
      *done = step.size();
      return {};
    }
    *done += step.size();
    if (!errors.empty()) LayerProbe::note(errors, &sequence_);
    const bool last = *done == all;
    if (last && request.all_logits)
      std::copy_n(request.all_logits + (all - 1) * vocabulary, vocabulary, next_logits_.data());
    if (last) note_logits(best[0]);
    keep_checkpoint(request, all - *done);
    if (last && request.kind == TextKind::document && sketch_is_due() &&
        !sequence_.store.take_sketch(std::move(sketch), cpu_kernels(), pool_.get(), request.cancel))
      RETURN_IF_ERROR(finish_sketch(request.cancel));
    if (last && request.kind == TextKind::document && drafter_)
      RETURN_IF_ERROR(drafter_->finish(request.cancel, &*sequence_.drafts));
    if (request.progress && !request.progress->update(*done, all) && !last)
      return Status::error(Code::cancelled, "stopped by the progress callback");
  }
  return {};
}

// best: -1, or those of the last token stay where they are.
void Session::note_logits(Token best) {
  const uint64_t at = sequence_.tokens.size();
  sequence_.logits_at = 0;
  if (best >= 0) return best_ = best, void(best_at_ = at);
  sequence_.logits.swap(next_logits_);
  sequence_.logits_at = at;
}

Status Session::run_step(const AppendRequest& request, ForwardStep* step) {
  if (drafter_ && step->chunk > 0) return run_span_step(step);
  bool lost = false;
  if (drafter_) {
    DraftState* const drafts = &*sequence_.drafts;
    RETURN_IF_ERROR(drafter_->begin_step(sequence_.store.tokens(), drafts, step));
    step->accept = [=, this, &lost](uint32_t* kept) {
      return or_without_drafts(drafter_->end_step(*step, *kept, drafts), &lost);
    };
  }
  Status s =
      request.goes_on ? run_open_step(request, step) : forward_->run(*step, sequence_.stores());
  if (lost) drop_drafts();
  return s;
}

// Where a GPU has no memory for the MTP layer, the session goes on without it.
Status Session::or_without_drafts(Status s, bool* lost) {
  *lost |= s.code() == Code::no_memory && !model_->device_weights().empty();
  return *lost ? Status() : std::move(s);
}

void Session::drop_drafts() {
  drafter_.reset(), sequence_.drafts.reset();
  sequence_.store.count_drafts({});
  options_.memory.drafts = {}, options_.drafts_left_out = true, no_drafter_room_ = true;
  log(1, "the GPU has no memory for the MTP layer: answers have no drafts of it");
}

// The MTP layer gets what it needs of a span's tokens at the span's end. A copy of its state
// replaces the state with the commit.
Status Session::run_span_step(ForwardStep* step) {
  DraftState drafts(*sequence_.drafts);
  bool lost = false;
  step->take_hidden = [&, at = sequence_.store.tokens()](uint32_t first, uint32_t n,
                                                         const float* hidden) {
    ForwardStep part;
    part.tokens = step->tokens.subspan(first, n);
    part.cancel = step->cancel;
    if (lost) return Status();
    return or_without_drafts(drafter_->take(at + first, part, hidden, &drafts), &lost);
  };
  Status s = forward_->run(*step, sequence_.stores());
  step->take_hidden = nullptr;
  if (lost) drop_drafts();
  RETURN_IF_ERROR(std::move(s));
  if (!lost) *sequence_.drafts = std::move(drafts);
  return {};
}

// Plans the step of the next chunk. If the step measures layer errors, *errors becomes non-empty.
Status Session::plan_chunk(const AppendRequest& request, uint64_t done, ForwardStep* step,
                           Array<float>* errors) {
  const bool document = request.kind == TextKind::document,
             by_plan = request.kind == TextKind::answer || (!document && !chooses_once()),
             probes = document && LayerProbe::is_due(sequence_);
  // GPUs measure within a sparse step. A CPU attends every token of a step that measures. It may
  // have to, where a GPU has just lost the room.
  const bool exact =
      probes && !(strategy_info(options_.read.strategy)->has(StrategyInfo::samples_tiles) &&
                  forward_->plan().prefills_on_gpus());
  uint32_t max_chunk = options_.prefill_chunk;
  if (exact && prefills_sparsely()) max_chunk = std::min(max_chunk, LayerProbe::chunk);
  const std::size_t all = request.tokens.size(), n = std::min<std::size_t>(max_chunk, all - done);
  const bool last = done + n == all;
  step->tokens = request.tokens.subspan(done, n);
  step->cancel = request.cancel;
  step->follows = all - done - n;
  step->next = request.tokens.subspan(done + n, std::min<std::size_t>(max_chunk, step->follows));
  step->queries = recorded_queries();
  if (tracing_ && last) step->trace = trace_.get();
  if (by_plan) {
    RETURN_IF_ERROR(prepare_strategy(request.cancel, nullptr));
    RETURN_IF_ERROR(choose_once(request.cancel));
    plan_step(step);
    step->plan.query_batch = !request.goes_on && batches_queries(*step);
    fill_documents(step->trace != nullptr, !request.goes_on, step);
  }
  if (probes) {
    const bool on_gpu = !model_->device_weights().empty();
    probe_.plan(options_.select, &sequence_, on_gpu ? LayerProbe::gpu_tokens : step->size(), step,
                errors);
  }
  if (document && !exact) RETURN_IF_ERROR(plan_prefill(step, all - done - n, request.cancel));
  if (document && options_.read.strategy == "full") plan_span(request, done, step);
  step->want = request.all_logits           ? ForwardStep::Logits::all
               : done + step->size() == all ? ForwardStep::Logits::last
                                            : ForwardStep::Logits::none;
  step->logits = request.all_logits ? request.all_logits + done * model_->config().vocabulary
                                    : next_logits_.data();
  return {};
}

// Makes the step of a chunk one of a span, with the chunks that can go through a layer with it.
// Queries of a first chunk, whose keys get their centre behind it, may not be among the newest.
void Session::plan_span(const AppendRequest& request, uint64_t done, ForwardStep* step) {
  const uint64_t left = request.tokens.size() - done, chunk = options_.prefill_chunk,
                 most = forward_->span_tokens(*step, sequence_.stores(), options_.prefill_chunk);
  if (most == 0) return;
  // Each span reads all weights, so none is small: the last one has up to a quarter more, and
  // others are about equal.
  const uint64_t count = ceil_div(4 * left, 5 * most), each = round_up(left / count, chunk),
                 n = count == 1 ? left : std::min(most, each);
  const bool begins = sequence_.store.pages().pages() == 0;
  const uint64_t least = begins ? step->size() + RecentQueries::capacity : min_span_step;
  if (n < least) return;
  step->chunk = static_cast<uint32_t>(chunk);
  step->tokens = request.tokens.subspan(done, n);
  step->follows = left - n, step->next = {};
  if (!request.progress) return;
  step->progress = [&request, done, n](uint64_t part, uint64_t all) {
    const uint64_t tokens = n * part / all;  // the end of the span reports its last ones
    return tokens >= n || request.progress->update(done + tokens, request.tokens.size());
  };
}

// left: tokens that are known to follow.
void Session::limit_checkpoints(uint64_t left) {
  const uint64_t now = sequence_.tokens.size();
  const uint32_t most = checkpoints_of(*model_, options_.window, now, options_.memory.checkpoints);
  const CheckpointLimits limits = {most, sequence_.document_end(), now + left};
  if (sequence_.states) sequence_.states->limit_checkpoints(limits);
  if (sequence_.windows) sequence_.windows->limit_checkpoints(limits);
}

// A checkpoint at the end of the document, which a question or an answer follows. A step may have
// computed the document's last token again as one of an answer.
Status Session::keep_document() {
  SequenceState& s = sequence_;
  limit_checkpoints(0);
  if (s.windows && s.windows->last_checkpoint() < s.prefilled_tokens &&
      s.tokens.size() <= s.prefilled_tokens + 1)
    s.windows->keep();
  if (!s.states || s.prefilled_tokens != s.tokens.size()) return {};
  RETURN_IF_ERROR(s.states->keep());
  if (!s.has_logits() || s.document_logits_at == s.tokens.size()) return {};
  s.document_logits_at = 0;
  s.document_logits = s.logits;
  s.document_logits_at = s.tokens.size();
  return {};
}

// A checkpoint every so many tokens of a document, of which `left` follow. States take long to
// copy: those that would be dropped before the document's end are left out, but for one in eight
// intervals, where a cancelled prefill may stop. The prefill goes on without a checkpoint that
// cannot be kept; the next chunk tries again.
void Session::keep_checkpoint(const AppendRequest& request, uint64_t left) {
  std::optional<RecurrentState>& states = sequence_.states;
  KvStore* windows = options_.full_precision ? nullptr : sequence_.windows_or_null();
  if (request.kind != TextKind::document || (!states && !windows)) return;
  limit_checkpoints(left);
  const uint64_t last = states ? states->last_checkpoint() : windows->last_checkpoint();
  const uint64_t now = sequence_.tokens.size(), interval = options_.checkpoint_interval;
  if (now - last < interval) return;
  constexpr uint64_t max_intervals = 8;
  const CheckpointLimits at_end = {
      checkpoints_of(*model_, options_.window, now + left, options_.memory.checkpoints),
      sequence_.prefilled_tokens < now ? sequence_.document_end() : CheckpointLimits::none,
      now + left};
  Status s;
  try {
    if (states && left > 0 && now - last < max_intervals * interval &&
        !states->outlives(at_end, interval))
      return;
    if (states) s = states->keep();
    if (windows && s.ok()) windows->keep();
  } catch (const std::bad_alloc&) {
    s = Status::error(Code::no_memory, "out of memory");
  }
  if (s.ok()) return;
  char line[480];
  std::snprintf(line, sizeof line, "no checkpoint was kept after %zu tokens: %s",
                sequence_.tokens.size(), s.message());
  log(1, line);
}

void Session::note_chunk(const AppendRequest& request, const ForwardStep& step) {
  SequenceState& s = sequence_;
  if (request.kind == TextKind::document && s.prefilled_tokens == s.tokens.size())
    s.prefilled_tokens = std::min(s.prefilled_tokens + step.size(), request.max_prefilled);
  s.tokens.insert(s.tokens.end(), step.tokens.begin(), step.tokens.end());
  best_ = -1;
  if (step.plan.by_blocks) s.sparse_tokens = s.tokens.size();
  if (request.kind != TextKind::answer) forget_choice();
}

// Appends a token of an answer.
Status Session::append_token(Token token, const Cancel* cancel, bool greedy) {
  uint64_t done = 0;
  return append(
      {.tokens = {&token, 1}, .kind = TextKind::answer, .cancel = cancel, .greedy = greedy}, &done);
}

// Copies the logits that a GPU has kept to the sequence. Where they are gone, they are computed
// again when they are needed.
void Session::fetch_logits() {
  if (!has_best()) return;
  sequence_.logits.resize(model_->config().vocabulary);
  if (forward_->last_logits(sequence_.logits))
    sequence_.logits_at = sequence_.tokens.size(), best_ = -1;
}

// True if the tokens of a step may share a selection. False if a measurement needs one per token.
bool Session::batches_queries(const ForwardStep& step) {
  const Plan& plan = step.plan;
  return step.tokens.size() > 1 && plan.strategy->has(StrategyInfo::batches_queries) &&
         plan.share_heads && !plan.certify && !step.trace && plan.compare == CompareLevel::none;
}

// Plans a step of a sparse prefill. left: tokens of the document after the step.
Status Session::plan_prefill(ForwardStep* step, uint64_t left, const Cancel* cancel) {
  if (options_.full_precision || left < options_.read.exact_tokens) return {};
  Plan plan =
      make_read_plan(options_.read, sequence_.store.sealed_tokens(), model_->config().layers);
  if (!plan.strategy) return {};
  // the end of the prefill builds the sketch again
  if (plan.strategy->has(StrategyInfo::needs_sketch) && !sequence_.store.sketch().is_current() &&
      !forward_->plan().prefills_on_gpus())
    RETURN_IF_ERROR(build_sketch(cancel));
  if (!prefill_selector_)
    prefill_selector_ =
        plan.strategy->has(StrategyInfo::filters) ? make_flat_selector() : plan.strategy->make();
  step->plan = std::move(plan);
  step->selector = prefill_selector_.get();
  return {};
}

// Makes the plan of the next decode step.
Plan Session::next_plan() const {
  // for strategies that choose once, a budget fraction does not grow during an answer
  const bool fixed = chooses_once() && sequence_.observed.queries.count() > 0;
  const uint64_t sealed =
      fixed ? uint64_t{sequence_.observed.pages} * sequence_.store.shape().page.page_tokens
            : sequence_.store.sealed_tokens();
  return make_plan(options_.select, sealed, model_->config().layers, sequence_.layer_errors);
}

void Session::plan_step(ForwardStep* step) {
  Plan plan = next_plan();
  plan.compare = options_.compare;
  if (decode_.set_plan(plan)) {
    char line[160];
    std::snprintf(line, sizeof line, "decode attends by '%s': %s", plan.strategy->name.data(),
                  plan.why);
    log(2, line);
  }
  decode_.fill(step);
}

// Computes the logits after the last token if they are missing (after a rewind).
Status Session::refresh_logits(const Cancel* cancel, Progress::Report report) {
  // true if prefill, not an answer, appended the last token
  const bool read_last =
      chooses_once() && (sequence_.observed.queries.count() == 0 ||
                         sequence_.observed.queries.end() == sequence_.tokens.size());
  const bool can_choose =
      !read_last || sequence_.observed.queries.count() > 0 || sequence_.queries.count() > 0;
  if (sequence_.logits_at == sequence_.tokens.size() && sequence_.logits_at > 0 && can_choose)
    return {};
  if (sequence_.states) {  // no token can be taken out of a state
    RETURN_IF_ERROR(cut_stores(sequence_.tokens.size() - 1, cancel));
    return prefill_missing(cancel, std::move(report));
  }
  const Token last = sequence_.tokens.back();
  ForwardStep step;
  step.tokens = {&last, 1};
  step.cancel = cancel;
  step.queries = recorded_queries();
  if (tracing_) step.trace = trace_.get();
  step.want = ForwardStep::Logits::last;
  sequence_.logits.resize(model_->config().vocabulary);
  step.logits = sequence_.logits.data();
  if (!read_last) {
    RETURN_IF_ERROR(choose_once(cancel));
    plan_step(&step);
  } else {
    forget_choice();
  }
  fill_documents(step.trace != nullptr, false, &step);
  KvStore store(sequence_.store);
  std::optional<KvStore> windows(sequence_.windows);
  store.pop();
  if (windows) windows->pop();
  Array<float> hidden(sequence_.drafts ? model_->config().width : 0);
  if (sequence_.drafts) step.hidden = hidden.data();
  RETURN_IF_ERROR(forward_->run(step, {store, windows ? &*windows : nullptr}));
  if (drafter_) drafter_->note_last(sequence_.tokens.size(), hidden, &*sequence_.drafts);
  sequence_.store = std::move(store);
  sequence_.windows = std::move(windows);
  sequence_.logits_at = sequence_.tokens.size();
  if (!read_last)
    sequence_.prefilled_tokens =
        std::min<uint64_t>(sequence_.prefilled_tokens, sequence_.tokens.size() - 1);
  return {};
}

Status Session::check_has_tokens() const {
  if (!sequence_.tokens.empty()) return {};
  return Status::error(Code::bad_state,
                       sequence_.is_composed()
                           ? "no answer was kept: call kv_generate with KV_KEEP_TURN first"
                           : "the sequence is empty: prefill a text first");
}

Status Session::next(const SamplingOptions& sampling, const Cancel* cancel, Token* token,
                     bool* end) {
  RETURN_IF_ERROR(check_has_tokens());
  RETURN_IF_ERROR(check_measure());
  RETURN_IF_ERROR(check_sampling_options(sampling));
  RETURN_IF_ERROR(check_room(1));
  const bool greedy = takes_largest(sampling);
  if (!greedy) fetch_logits();
  Progress none;
  RETURN_IF_ERROR(prefill_missing(cancel, {}));
  RETURN_IF_ERROR(prepare_strategy(cancel, &none));
  RETURN_IF_ERROR(prepare_index(false, cancel, &none));
  Token chosen = greedy && has_best() ? best_ : -1;
  if (chosen < 0) RETURN_IF_ERROR(refresh_logits(cancel, {}));
  const uint64_t begin = os::now_ns();
  if (chosen < 0)
    RETURN_IF_ERROR(Sampler(sampling, model_->tokenizer().suppressed())
                        .sample(sequence_.logits, sequence_.tokens, &chosen));
  forward_->attention().reset_counts();
  const struct Cut {  // however the step ends
    SequenceState& sequence;
    ~Cut() { sequence.spelling.cut(sequence.tokens.size()); }
  } cut{sequence_};
  if (sequence_.turn == Turn::document) sequence_.spelling.add_unknown(sequence_.tokens.size());
  RETURN_IF_ERROR(append_token(chosen, cancel, greedy));
  if (sequence_.turn == Turn::empty) sequence_.turn = Turn::tokens;
  last_ = {forward_->attention().counts(), 1, os::now_ns() - begin};
  *token = chosen;
  *end = model_->tokenizer().ends_turn(chosen);
  return {};
}

}  // namespace kvasir
