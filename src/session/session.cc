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
constexpr double probe_fraction = 0.02;    // small, so that what is left out shows
constexpr uint32_t probe_tokens = 32;
constexpr uint32_t probe_chunk = 128;     // tokens of such a step, which is exact, where others are not
constexpr uint64_t sketch_context = 1024;  // sealed tokens: a shorter text gets a sketch when a strategy asks for it
constexpr uint64_t least_insertion = 64;  // one in so many of the sealed tokens: fewer are scored sooner than a graph is copied
constexpr uint64_t index_context = 2048;  // sealed tokens: all of a shorter text are scored
constexpr uint64_t window_budget = 64 << 20;  // bytes of full-precision rows that a chosen chunk may need

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
    return Status::error(Code::bad_argument, "context is %" PRIu64 ": the model was trained for %" PRIu64 " tokens", o->context, trained);
  if (o->context == 0) o->context = trained;
  if (o->threads > max_threads) return Status::error(Code::bad_argument, "threads is %u: use up to %u", o->threads, max_threads);
  if (o->threads == 0) o->threads = std::min(os::processor_count(), max_threads);
  if (o->prefill_chunk > max_chunk)
    return Status::error(Code::bad_argument, "prefill_chunk is %u: use up to %u", o->prefill_chunk, max_chunk);
  if (o->prefill_chunk == 0) o->prefill_chunk = choose_chunk(model);
  if (o->window == 0) o->window = 64;
  if (o->window > max_window) return Status::error(Code::bad_argument, "window is %u: use up to %u", o->window, max_window);
  o->memory.step_tokens = o->prefill_chunk;
  if (Status s = check_memory_budget(o->memory, o->full_precision); !s.ok()) return s;
  if (Status s = check_read_options(o->read); !s.ok()) return s;
  return check_select_options(o->select, model.config().layers, model.store_shape().page.block_tokens);
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options, KvStore store)
    : model_(std::move(model)),
      options_(options),
      store_(std::move(store)),
      queries_(model_->config().layers, model_->config().heads, model_->config().head_dim),
      chat_(model_->chat()) {}

Status Session::open(std::shared_ptr<const Model> model, const SessionOptions& options, std::unique_ptr<Session>* out) {
  SessionOptions o = options;
  if (Status s = resolve(*model, &o); !s.ok()) return s;
  KvStore store(model->store_shape(), o.full_precision ? KvStore::keep_all : o.window);
  if (!strategy_wants(o.select.strategy, StrategyInfo::wants_representatives)) store.drop_representatives();
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
  if (Status s = check_select_options(select, model_->config().layers, store_.shape().page.block_tokens); !s.ok()) return s;
  options_.select = select;
  chosen_ = false;
  return {};
}

void Session::log(int level, const char* message) const {
  if (options_.log) options_.log(level, message);
}

Status Session::check_room(uint64_t more) const {
  if (more <= options_.context - tokens_.size()) return {};
  return Status::error(Code::context_full, "%" PRIu64 " tokens do not fit: the timeline holds %zu of %" PRIu64 "; it is unchanged", more,
                       tokens_.size(), options_.context);
}

// Runs tokens at the end of the timeline, chunk by chunk; what is done stays, and the caller learns how much, whatever stops it.
// A document is attended exactly, an answer as the plan says; a question too, unless the strategy chooses once, when it is known.
Status Session::append(std::span<const Token> tokens, Reading reading, float* all_logits, const Cancel* cancel, Progress* progress,
                       uint64_t* done) {
  *done = 0;
  if (!tracing_) trace_.reset();  // it is of an answer that is no longer the last thing that was done
  if (Status s = store_.check_budget(tokens_.size() + tokens.size()); !s.ok()) return s;
  try {
    return append_chunks(tokens, reading, all_logits, cancel, progress, done);
  } catch (const std::bad_alloc&) {
    return Status::error(Code::no_memory, "out of memory after %" PRIu64 " of %zu tokens", *done, tokens.size());
  }
}

Status Session::append_chunks(std::span<const Token> tokens, Reading reading, float* all_logits, const Cancel* cancel, Progress* progress,
                              uint64_t* done) {
  const std::size_t vocabulary = model_->config().vocabulary;
  const bool document = reading == Reading::document, by_plan = reading == Reading::answer || (!document && !chooses_once());
  make_room_for(&tokens_, tokens.size());
  next_logits_.resize(vocabulary);
  while (*done < tokens.size()) {
    if (is_cancelled(cancel)) return Status::error(Code::cancelled, "cancelled");
    const bool probes = document && probe_is_due();
    const std::size_t most = probes && options_.read.strategy != "full" ? std::min(options_.prefill_chunk, probe_chunk) : options_.prefill_chunk;
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
    step.want = all_logits ? ForwardStep::Logits::all : last ? ForwardStep::Logits::last : ForwardStep::Logits::none;
    step.logits = all_logits ? all_logits + *done * vocabulary : next_logits_.data();
    if (Status s = forward_->run(step, &store_); !s.ok()) return s;
    if (document && read_tokens_ == tokens_.size()) read_tokens_ += n;
    tokens_.insert(tokens_.end(), step.tokens.begin(), step.tokens.end());
    if (step.plan.by_blocks) sparse_tokens_ = tokens_.size();
    *done += n;
    if (reading != Reading::answer) forget_choice();
    if (!errors.empty()) note_probe(errors);
    if (last && all_logits) std::copy_n(all_logits + (*done - 1) * vocabulary, vocabulary, next_logits_.data());
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
  return step.tokens.size() > 1 && plan.strategy->has(StrategyInfo::asks_together) && plan.share_heads && !plan.certify && !step.trace &&
         plan.compare == CompareLevel::none;
}

// Which layers a choice of pages serves badly is a property of model and text, so it is measured where the exact answer is known:
// while reading, each time the text has grown by a quarter. A layer that retrieves shows it only where the text gives it
// something to retrieve, so what counts is the largest error seen.
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

// A step of a document after which `left` tokens of it follow, where it is to be read sparsely. Steps in which layers are measured are exact.
Status Session::plan_read(ForwardStep* step, uint64_t left, const Cancel* cancel) {
  if (options_.full_precision || left < options_.read.exact_tokens) return {};
  Plan plan = make_read_plan(options_.read, options_.select, store_.sealed_tokens(), model_->config().layers);
  if (!plan.strategy) return {};
  if (plan.strategy->has(StrategyInfo::wants_sketch) && !store_.sketch().is_current())  // found again at the end
    if (Status s = build_sketch(cancel); !s.ok()) return s;
  if (!read_selector_) read_selector_ = plan.strategy->has(StrategyInfo::filters) ? make_flat_selector() : plan.strategy->make();
  step->plan = std::move(plan);
  step->selector = read_selector_.get();
  return {};
}

void Session::note_probe(const Array<float>& errors) {
  layer_errors_.resize(errors.size());
  for (std::size_t l = 0; l < errors.size(); ++l) layer_errors_[l] = std::max(layer_errors_[l], errors[l]);
  probed_at_ = store_.sealed_tokens();
}

Status Session::build_sketch(const Cancel* cancel) {
  const ModelConfig& c = model_->config();
  const auto asked = [&](uint32_t layer, uint32_t head, double* moment) {
    queries_.add_moment(cpu_kernels(), layer, head, c.kv_heads, store_.shape().page.dim, moment);
  };
  return store_.build_sketch(asked, cpu_kernels(), pool_.get(), cancel);
}

// At the end of a document, of which every token is in the timeline by now. A cancel loses nothing
// that was asked for: whoever needs the sketch next finds it, by the same queries. An older one is
// dropped, so that the same one is found as without the cancel.
Status Session::finish_sketch(const Cancel* cancel) {
  Status s = build_sketch(cancel);
  if (s.code() != Code::cancelled) return s;
  store_.forget_sketch();
  return {};
}

// When a text has been read to its end: at first, and when it has grown by a twentieth since.
bool Session::sketch_is_due() const {
  const uint64_t pages = store_.pages().pages(), built = store_.sketch().built_pages();
  return store_.sealed_tokens() >= sketch_context && pages * 20 >= built * 21 && pages > built;
}

// What the planned strategy needs beside the pages, where the reading has not left it, or the timeline has doubled by answers: made now,
// and kept with the timeline.
Status Session::prepare_strategy(const Cancel* cancel, Progress* progress) {
  const bool has_sketch = store_.sketch().is_current();
  if (store_.pages().pages() < 2 || (has_sketch && store_.representatives().known())) return {};
  const Plan plan = make_plan(options_.select, store_.sealed_tokens(), model_->config().layers, layer_errors_);
  if (plan.strategy->has(StrategyInfo::wants_representatives) && !store_.representatives().known())
    return read_again(cancel, progress);
  if (has_sketch || !plan.strategy->has(StrategyInfo::wants_sketch)) return {};
  log(2, "the sketch of the keys is made now");
  if (Status s = build_sketch(cancel); !s.ok()) return s;
  if (progress) (void)progress->update(1, 1);
  return {};
}

// Finds the representatives of a timeline that was read without them: its tokens are read a second time, into a store of their own.
Status Session::read_again(const Cancel* cancel, Progress* progress) {
  log(1, "the text was read without representative tokens: it is read again, once");
  KvStore store(store_.shape(), store_.window_tokens());
  MemoryBudget rest = options_.memory;
  if (rest.bytes) {  // it is for both, and the second one takes as much again
    if (store_.private_bytes() > rest.bytes / 2)
      if (Status s = store_.shrink(cancel); !s.ok()) return s;
    rest.bytes -= std::min(rest.bytes - 1, store_.private_bytes());
  }
  if (Status s = store.set_budget(rest, tokens_.size(), cancel); s.code() == Code::limit) {
    return Status::error(Code::limit, "the text cannot be read again beside itself, for its representative tokens: what is left of %s", s.message());
  } else if (!s.ok()) {
    return s;
  }
  for (std::size_t at = 0; at < tokens_.size();) {
    if (progress && !progress->update(at, tokens_.size())) return Status::error(Code::cancelled, "stopped by the progress callback");
    ForwardStep step;
    step.tokens = std::span<const Token>(tokens_).subspan(at, std::min<std::size_t>(options_.prefill_chunk, tokens_.size() - at));
    step.cancel = cancel;
    if (Status s = forward_->run(step, &store); !s.ok()) return s;
    at += step.tokens.size();
  }
  store_.take_representatives(std::move(store));
  if (progress) (void)progress->update(tokens_.size(), tokens_.size());
  return {};
}

bool Session::chooses_once() const {
  const StrategyInfo* info = strategy_info(options_.select.strategy);
  return info && info->has(StrategyInfo::chooses_once) && !options_.full_precision;
}

// At the first step of an answer, where the strategy does so; and again by the same queries where the choice is not at hand, as after loading.
Status Session::choose_once(const Cancel* cancel) {
  if (!chooses_once() || chosen_) return {};
  if (observed_.queries.count() == 0) observed_ = {queries_, store_.pages().pages()};
  ForwardStep step;
  plan_step(&step);
  const uint32_t layers = model_->config().layers;
  std::vector<uint64_t> budgets(layers);
  for (uint32_t l = 0; l < layers; ++l) budgets[l] = plan_.is_dense(l) ? 0 : plan_.budget(l);
  const CancelLatch latch(cancel);
  const uint32_t end = std::min(observed_.pages, store_.pages().pages());
  if (!selector_->observe({cpu_kernels(), store_.pages(), pool_.get(), latch, observed_.queries, model_->config().heads, 1, end, budgets,
                           plan_.share_heads}, memory_.get()))
    return store_.pages().damaged();
  if (latch.fired()) return Status::error(Code::cancelled, "cancelled");
  chosen_ = true;
  store_.let_go();
  return {};
}

Status Session::prepare(const Cancel* cancel, Progress::Report report) {
  Progress progress(std::move(report));
  if (Status s = prepare_strategy(cancel, &progress); !s.ok()) return s;
  return prepare_index(true, cancel, &progress);
}

Status Session::prepare_devices(const Cancel* cancel, Progress::Report report) {
  if (model_->device_weights().empty() || tokens_.empty()) return {};
  ForwardStep step;
  step.cancel = cancel;
  plan_step(&step);
  Progress progress(std::move(report));
  return forward_->prepare(step, &store_, &progress);
}

// The index that the planned strategy searches. `make`: where there is none, or it has to do with a quarter more tokens than it was made for; where
// it is less, but not next to nothing, they are inserted. Otherwise it is only looked at whether it is sound: what it does not know is scored.
Status Session::prepare_index(bool make, const Cancel* cancel, Progress* progress) {
  const uint64_t sealed = store_.sealed_tokens();
  const ModelConfig& config = model_->config();
  const Plan plan = make_plan(options_.select, sealed, config.layers, layer_errors_);
  if (!plan.strategy->index) return {};
  const IndexKind kind = *plan.strategy->index;
  const uint32_t graphs = options_.select.head_graphs ? config.heads / config.kv_heads : 1;
  TokenIndexes::Entry known = store_.indexes().of(kind);
  if (known.index)
    if (Status s = known.index->check(cancel); !s.ok()) return s;
  if (!make) {
    if (known.index && known.index->graphs() != graphs && !std::exchange(told_graphs_, true))
      log(1, graphs == 1 ? "the index has a graph for each query head: it is searched as it is until one without head_graphs is made"
                         : "the index has one graph for the query heads of a group: it is searched as it is until one with head_graphs is made");
    return {};
  }
  if (known.index && known.index->graphs() == graphs) {
    const uint64_t built = std::min(known.index->built(), known.valid), unknown = sealed - known.valid;
    if ((sealed - built) * 4 >= built) known = {};
    else if (!takes_insertions(kind) || unknown * least_insertion < sealed) return {};
  } else {
    known = {};
  }
  if (sealed < index_context) return {};
  const uint64_t bytes = known.index ? known.index->bytes() / known.index->items() * sealed
                                     : index_bytes(kind, store_.shape(), graphs, sealed);
  Status room = make_room_for_index(kind, bytes, cancel);
  std::shared_ptr<TokenIndex> index;
  if (room.ok()) {
    if (Status s = make_index(kind, graphs, known, cancel, progress, &index); !s.ok()) return s;
    room = make_room_for_index(kind, index->private_bytes(), cancel);
  }
  if (room.code() == Code::limit && known.index) {
    log(1, "memory_budget has no room for more in the index: what is not in it is scored token by token");
    return {};
  }
  if (!room.ok()) return room;
  store_.set_index(std::move(index), static_cast<uint32_t>(sealed));
  return {};
}

// One of so many bytes takes the place of that of its kind.
Status Session::make_room_for_index(IndexKind kind, uint64_t bytes, const Cancel* cancel) {
  const std::shared_ptr<TokenIndex>& old = store_.indexes().of(kind).index;
  const uint64_t more = bytes - std::min(bytes, old ? old->private_bytes() : 0);
  return store_.keep_within_budget(tokens_.size(), more, 0, cancel);
}

Status Session::make_index(IndexKind kind, uint32_t graphs, const TokenIndexes::Entry& known, const Cancel* cancel, Progress* progress,
                           std::shared_ptr<TokenIndex>* out) {
  log(2, known.index ? "tokens are inserted into the index of the keys now" : "the index of the keys is made now");
  const uint64_t begin = os::now_ns();
  IndexQueries queries;
  if (!known.index)
    if (Status s = read_queries(wanted_queries(kind), index_steps(store_.shape()), cancel, progress, &queries); !s.ok()) return s;
  IndexOrder order{kind, store_.pages(), queries, graphs, known, {}, &nearest_by_};
  for (const DeviceWeights& weights : model_->device_weights()) order.devices.push_back(weights.device());
  if (Status s = build_index(order, cpu_kernels(), pool_.get(), cancel, progress, out); !s.ok()) return s;
  store_.let_go();
  index_ms_ = static_cast<double>(os::now_ns() - begin) / 1e6;
  return {};
}

// The queries that an index is made from. What matters is that they are like those that will search it (measured in select/ood.cc): passages are
// asked, each in place of the timeline's newest tokens, on a copy. So they need not be kept while a document is read, and a loaded timeline gets the
// same ones. `steps` of progress follow.
Status Session::read_queries(uint32_t count, uint64_t steps, const Cancel* cancel, Progress* progress, IndexQueries* out) {
  if (count == 0) return {};
  const auto most = static_cast<uint32_t>(std::min<uint64_t>(count, tokens_.size() / 2));
  std::vector<Array<Token>> pieces;
  if (Status s = asked_passages(most, &pieces); !s.ok()) return s;
  const auto size = static_cast<uint32_t>(pieces[0].size()), n = size * static_cast<uint32_t>(pieces.size());
  *out = IndexQueries(store_.shape(), model_->config().heads, n);
  for (uint32_t at = 0; at < n; at += size) {
    if (!progress->update(at, n + steps)) return Status::error(Code::cancelled, "stopped by the progress callback; no index was made");
    KvStore copy(store_);
    if (Status s = copy.rewind(tokens_.size() - size, cpu_kernels()); !s.ok()) return s;
    for (uint32_t done = 0; done < size; done += options_.prefill_chunk) {
      ForwardStep step;
      step.tokens = std::span<const Token>(pieces[at / size]).subspan(done, std::min(options_.prefill_chunk, size - done));
      step.cancel = cancel;
      step.asked = out;
      step.asked_at = at + done;
      if (Status s = forward_->run(step, &copy); !s.ok()) return s;
    }
  }
  return {};
}

void Session::plan_step(ForwardStep* step) {
  const bool fixed = chooses_once() && observed_.queries.count() > 0;  // a budget that is a fraction does not grow while an answer is made
  const uint64_t sealed = fixed ? uint64_t{observed_.pages} * store_.shape().page.page_tokens : store_.sealed_tokens();
  const Plan plan = make_plan(options_.select, sealed, model_->config().layers, layer_errors_);
  if (!planned_ || plan.strategy != plan_.strategy) {
    selector_ = plan.strategy->make ? plan.strategy->make() : nullptr;
    memory_ = selector_ ? selector_->make_memory() : nullptr;
    chosen_ = false;
    char line[160];
    std::snprintf(line, sizeof line, "decode attends by '%s': %s", plan.strategy->name.data(), plan.why);
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
  const bool read_last = chooses_once() && (observed_.queries.count() == 0 || observed_.queries.end() == tokens_.size());  // not made by an answer
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

Status Session::next(const SamplingOptions& sampling, const Cancel* cancel, Token* token, bool* end) {
  if (tokens_.empty()) return Status::error(Code::bad_state, "the timeline is empty: read something first");
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
  if (Status s = append({&chosen, 1}, Reading::answer, nullptr, cancel, nullptr, &done); !s.ok()) return s;
  if (turn_ == Turn::empty) turn_ = Turn::tokens;
  last_read_ = forward_->attention().counts();
  last_steps_ = 1;
  last_decode_ns_ = os::now_ns() - begin;
  *token = chosen;
  *end = model_->tokenizer().ends_turn(chosen);
  return {};
}

}  // namespace kvasir
