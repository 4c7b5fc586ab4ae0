#include "session/session.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "base/checked.h"

namespace kvasir {

constexpr uint32_t max_chunk = 4096, max_window = 1 << 20, max_threads = 256;
constexpr char probe_strategy[] = "quest";
constexpr uint64_t probe_context = 2048;  // sealed tokens: with fewer nothing much is left out
constexpr double probe_fraction = 0.02;   // small, so that what is left out shows
constexpr uint32_t probe_tokens = 32;
// tokens of such a step, which is exact, where others are not
constexpr uint32_t probe_chunk = 128;
// bytes of full-precision rows that a chosen chunk may need
constexpr uint64_t window_budget = 64 << 20;

static uint32_t choose_chunk(const Model& model) {
  const StoreShape shape = model.store_shape();
  const uint64_t row = uint64_t{shape.heads_total()} * 2 * shape.page.dim * sizeof(float);
  const bool on_device = !model.device_weights().empty();
  uint32_t chunk = on_device ? 1024 : 512;  // with fewer a large GPU waits for work
  while (chunk > 128 && chunk * row > window_budget * (on_device ? 4 : 1)) chunk /= 2;
  return chunk;
}

// Fills in what the caller left open; Code::bad_argument names what is out of range.
Status Session::resolve(const Model& model, SessionOptions* o) {
  const uint64_t trained = model.config().context;
  if (o->context > trained)
    return Status::error(Code::bad_argument,
                         "context_tokens is %" PRIu64 ": the model was trained for %" PRIu64
                         " tokens",
                         o->context, trained);
  if (o->context == 0) o->context = trained;
  if (o->threads > max_threads)
    return Status::error(Code::bad_argument, "threads is %u: use up to %u", o->threads,
                         max_threads);
  if (o->threads == 0) o->threads = std::min(os::cpu_count(), max_threads);
  if (o->prefill_chunk > max_chunk)
    return Status::error(Code::bad_argument, "prefill_chunk is %u: use up to %u", o->prefill_chunk,
                         max_chunk);
  if (o->prefill_chunk == 0) o->prefill_chunk = choose_chunk(model);
  if (o->window == 0) o->window = 64;
  if (o->window > max_window)
    return Status::error(Code::bad_argument, "window_tokens is %u: use up to %u", o->window,
                         max_window);
  o->memory.step_tokens = o->prefill_chunk;
  o->memory.reaper = model.reaper();
  if (Status s = check_memory_budget(o->memory, o->full_precision); !s.ok()) return s;
  RETURN_IF_ERROR(check_read_options(o->read));
  RETURN_IF_ERROR(check_filter_layers(o->read.filter_layers, model.config().layers));
  if (o->instructions && o->instructions->size() > max_instructions)
    return Status::error(Code::bad_argument, "instructions has %zu bytes: use up to %zu",
                         o->instructions->size(), max_instructions);
  return check_select_options(o->select, model.config().layers,
                              model.store_shape().page.block_tokens);
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options, KvStore store)
    : model_(std::move(model)), options_(options), store_(std::move(store)),
      queries_(model_->config().layers, model_->config().heads, model_->config().head_dim),
      chat_(model_->chat()) {}

Status Session::open(std::shared_ptr<const Model> model, const SessionOptions& options,
                     std::unique_ptr<Session>* out) {
  SessionOptions o = options;
  if (Status s = resolve(*model, &o); !s.ok()) return s;
  KvStore store(model->store_shape(), o.full_precision ? KvStore::keep_all : o.window);
  if (!strategy_wants(o.select.strategy, StrategyInfo::wants_representatives))
    store.drop_representatives();
  if (Status s = store.set_budget(o.memory, 0); !s.ok()) return s;
  std::unique_ptr<Session> session(new Session(std::move(model), o, std::move(store)));
  if (Status s = session->start(); !s.ok()) return s;
  *out = std::move(session);
  return {};
}

Status Session::start() {
  if (!pool_) {
    std::unique_ptr<ThreadPool> pool;
    if (Status s = ThreadPool::create(options_.threads, &pool); !s.ok()) return s;
    pool_ = std::move(pool);
  }
  return Forward::create(model_, pool_.get(), &forward_);
}

Status Session::fork(std::unique_ptr<Session>* out) const {
  std::unique_ptr<Session> session(new Session(model_, options_, KvStore(store_)));
  session->pool_ = pool_;
  session->queries_ = queries_;
  session->observed_ = observed_;
  session->tokens_ = tokens_;
  session->spelling_ = spelling_;
  session->turn_ = turn_;
  session->chat_ = chat_;
  session->layer_errors_ = layer_errors_;
  session->probed_at_ = probed_at_;
  session->read_tokens_ = read_tokens_;
  session->sparse_tokens_ = sparse_tokens_;
  session->document_tokens_ = document_tokens_;
  session->document_turn_ = document_turn_;
  session->logits_ = logits_;
  session->logits_at_ = logits_at_;
  if (Status s = session->start(); !s.ok()) return s;
  *out = std::move(session);
  return {};
}

Status Session::set_select(const SelectOptions& select) {
  if (Status s =
          check_select_options(select, model_->config().layers, store_.shape().page.block_tokens);
      !s.ok())
    return s;
  options_.select = select;
  chosen_ = false;
  return {};
}

void Session::set_measure(CompareLevel compare, bool certify) {
  options_.compare = compare;
  options_.select.certify = certify;
}

void Session::log(int level, const char* message) const {
  if (options_.log) options_.log(level, message);
}

Status Session::check_room(uint64_t more) const {
  if (more <= options_.context - tokens_.size()) return {};
  return Status::error(Code::context_full,
                       "%" PRIu64 " tokens do not fit: the sequence holds %zu of %" PRIu64
                       "; it is unchanged",
                       more, tokens_.size(), options_.context);
}

// Runs tokens at the end of the sequence, chunk by chunk; what is done stays, and the caller learns
// how much, whatever stops it. A document is attended exactly, an answer as the plan says; a
// question too, unless the strategy chooses once, when it is known.
Status Session::append(std::span<const Token> tokens, Reading reading, float* all_logits,
                       const Cancel* cancel, Progress* progress, uint64_t* done) {
  *done = 0;
  // it is of an answer that is no longer the last thing that was done
  if (!tracing_) trace_.reset();
  if (Status s = store_.check_budget(tokens_.size() + tokens.size()); !s.ok()) return s;
  try {
    return append_chunks(tokens, reading, all_logits, cancel, progress, done);
  } catch (const std::bad_alloc&) {
    return Status::error(Code::no_memory, "out of memory after %" PRIu64 " of %zu tokens", *done,
                         tokens.size());
  }
}

Status Session::append_chunks(std::span<const Token> tokens, Reading reading, float* all_logits,
                              const Cancel* cancel, Progress* progress, uint64_t* done) {
  const std::size_t vocabulary = model_->config().vocabulary;
  const bool document = reading == Reading::document,
             by_plan = reading == Reading::answer || (!document && !chooses_once());
  make_room_for(&tokens_, tokens.size());
  next_logits_.resize(vocabulary);
  while (*done < tokens.size()) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled");
    const bool probes = document && probe_is_due();
    const std::size_t most = probes && options_.read.strategy != "full"
                                 ? std::min(options_.prefill_chunk, probe_chunk)
                                 : options_.prefill_chunk;
    const std::size_t n = std::min(most, tokens.size() - *done);
    ForwardStep step;
    step.tokens = tokens.subspan(*done, n);
    step.cancel = cancel;
    step.queries = recorded_queries();
    if (tracing_ && *done + n == tokens.size()) step.trace = trace_.get();
    if (by_plan) {
      if (Status s = prepare_strategy(cancel, nullptr); !s.ok()) return s;
      if (Status s = choose_once(cancel); !s.ok()) return s;
      plan_step(&step);
      step.plan.together = asks_together(step);
    }
    Array<float> errors;
    if (probes) plan_probe(&step, &errors);
    if (document && !probes)
      if (Status s = plan_read(&step, tokens.size() - *done - n, cancel); !s.ok()) return s;
    const bool last = *done + n == tokens.size();
    step.want = all_logits ? ForwardStep::Logits::all
                : last     ? ForwardStep::Logits::last
                           : ForwardStep::Logits::none;
    step.logits = all_logits ? all_logits + *done * vocabulary : next_logits_.data();
    if (Status s = forward_->run(step, &store_); !s.ok()) return s;
    if (document && read_tokens_ == tokens_.size()) read_tokens_ += n;
    tokens_.insert(tokens_.end(), step.tokens.begin(), step.tokens.end());
    if (step.plan.by_blocks) sparse_tokens_ = tokens_.size();
    *done += n;
    if (reading != Reading::answer) forget_choice();
    if (!errors.empty()) note_probe(errors);
    if (last && all_logits)
      std::copy_n(all_logits + (*done - 1) * vocabulary, vocabulary, next_logits_.data());
    if (last) logits_.swap(next_logits_), logits_at_ = tokens_.size();
    if (document && last && sketch_is_due())
      if (Status s = finish_sketch(cancel); !s.ok()) return s;
    if (progress && !progress->update(*done, tokens.size()) && !last)
      return Status::error(Code::cancelled, "stopped by the progress callback");
  }
  return {};
}

// Not where each token's own choice is looked at.
bool Session::asks_together(const ForwardStep& step) {
  const Plan& plan = step.plan;
  return step.tokens.size() > 1 && plan.strategy->has(StrategyInfo::asks_together) &&
         plan.share_heads && !plan.certify && !step.trace && plan.compare == CompareLevel::none;
}

// Which layers a choice of pages serves badly is a property of model and text, so it is measured
// where the exact answer is known: while reading, each time the text has grown by a quarter. A
// layer that retrieves shows it only where the text gives it something to retrieve, so what counts
// is the largest error seen.
bool Session::probe_is_due() const {
  const uint64_t sealed = store_.sealed_tokens();
  return sealed >= probe_context && sealed * 4 >= probed_at_ * 5;
}

void Session::plan_probe(ForwardStep* step, Array<float>* errors) {
  if (!probe_selector_) probe_selector_ = strategy_info(probe_strategy)->make();
  SelectOptions select = options_.select;
  select.strategy = probe_strategy;
  select.schedule = BudgetSchedule::uniform;
  select.budget_tokens = 0;
  select.budget_fraction = probe_fraction;
  select.unit_tokens = 0;
  step->plan = make_plan(select, store_.sealed_tokens(), model_->config().layers, {});
  step->probe = probe_selector_.get();
  step->probe_tokens = probe_tokens;
  errors->resize(model_->config().layers);
  layer_errors_.reserve(errors->size());  // note_probe() may not fail: the step is done by then
  step->errors = errors->data();
}

// A step of a document after which `left` tokens of it follow, where it is to be read sparsely.
// Steps in which layers are measured are exact.
Status Session::plan_read(ForwardStep* step, uint64_t left, const Cancel* cancel) {
  if (options_.full_precision || left < options_.read.exact_tokens) return {};
  Plan plan = make_read_plan(options_.read, store_.sealed_tokens(), model_->config().layers);
  if (!plan.strategy) return {};
  // found again at the end
  if (plan.strategy->has(StrategyInfo::wants_sketch) && !store_.sketch().is_current())
    if (Status s = build_sketch(cancel); !s.ok()) return s;
  if (!read_selector_)
    read_selector_ =
        plan.strategy->has(StrategyInfo::filters) ? make_flat_selector() : plan.strategy->make();
  step->plan = std::move(plan);
  step->selector = read_selector_.get();
  return {};
}

void Session::note_probe(const Array<float>& errors) {
  layer_errors_.resize(errors.size());
  for (std::size_t l = 0; l < errors.size(); ++l)
    layer_errors_[l] = std::max(layer_errors_[l], errors[l]);
  probed_at_ = store_.sealed_tokens();
}

void Session::plan_step(ForwardStep* step) {
  // a budget that is a fraction does not grow while an answer is made
  const bool fixed = chooses_once() && observed_.queries.count() > 0;
  const uint64_t sealed =
      fixed ? uint64_t{observed_.pages} * store_.shape().page.page_tokens : store_.sealed_tokens();
  const Plan plan = make_plan(options_.select, sealed, model_->config().layers, layer_errors_);
  if (!planned_ || plan.strategy != plan_.strategy) {
    selector_ = plan.strategy->make ? plan.strategy->make() : nullptr;
    memory_ = selector_ ? selector_->make_memory() : nullptr;
    chosen_ = false;
    char line[160];
    std::snprintf(line, sizeof line, "decode attends by '%s': %s", plan.strategy->name.data(),
                  plan.why);
    log(2, line);
  }
  plan_ = plan;
  plan_.compare = options_.compare;
  planned_ = true;
  step->plan = plan_;
  step->selector = selector_.get();
  step->memory = memory_.get();
}

// The logits after the last token, made again where they are not at hand (after going back).
Status Session::refresh_logits(const Cancel* cancel) {
  // not made by an answer
  const bool read_last = chooses_once() && (observed_.queries.count() == 0 ||
                                            observed_.queries.end() == tokens_.size());
  const bool can_choose = !read_last || observed_.queries.count() > 0 || queries_.count() > 0;
  if (logits_at_ == tokens_.size() && logits_at_ > 0 && can_choose) return {};
  const Token last = tokens_.back();
  ForwardStep step;
  step.tokens = {&last, 1};
  step.cancel = cancel;
  step.queries = recorded_queries();
  if (tracing_) step.trace = trace_.get();
  step.want = ForwardStep::Logits::last;
  logits_.resize(model_->config().vocabulary);
  step.logits = logits_.data();
  if (!read_last) {
    if (Status s = choose_once(cancel); !s.ok()) return s;
    plan_step(&step);
  } else {
    forget_choice();
  }
  KvStore before(store_);
  store_.pop();
  try {
    if (Status s = forward_->run(step, &store_); !s.ok()) {
      store_ = std::move(before);
      return s;
    }
  } catch (...) {
    store_ = std::move(before);
    throw;
  }
  logits_at_ = tokens_.size();
  if (!read_last) read_tokens_ = std::min<uint64_t>(read_tokens_, tokens_.size() - 1);
  return {};
}

Status Session::next(const SamplingOptions& sampling, const Cancel* cancel, Token* token,
                     bool* end) {
  if (tokens_.empty())
    return Status::error(Code::bad_state, "the sequence is empty: read something first");
  if (Status s = check_sampling_options(sampling); !s.ok()) return s;
  if (Status s = check_room(1); !s.ok()) return s;
  Progress none;
  if (Status s = prepare_strategy(cancel, &none); !s.ok()) return s;
  if (Status s = prepare_index(false, cancel, &none); !s.ok()) return s;
  if (Status s = refresh_logits(cancel); !s.ok()) return s;
  const uint64_t begin = os::now_ns();
  Array<float> logits(logits_);  // sampling changes them; a failed step leaves the real ones
  Token chosen = 0;
  if (Status s = Sampler(sampling).sample(logits, tokens_, &chosen); !s.ok()) return s;
  forward_->attention().reset_counts();
  uint64_t done = 0;
  if (Status s = append({&chosen, 1}, Reading::answer, nullptr, cancel, nullptr, &done); !s.ok())
    return s;
  if (turn_ == Turn::empty) turn_ = Turn::tokens;
  last_read_ = forward_->attention().counts();
  last_steps_ = 1;
  last_decode_ns_ = os::now_ns() - begin;
  *token = chosen;
  *end = model_->tokenizer().ends_turn(chosen);
  return {};
}

}  // namespace kvasir
