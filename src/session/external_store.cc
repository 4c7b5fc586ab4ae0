#include "session/external_store.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/number_text.h"
#include "os/os.h"
#include "session/limits.h"

namespace kvasir {

namespace {

constexpr uint32_t max_layers = 1024, max_heads = 1024;
constexpr uint64_t max_tokens_of_all = uint64_t{1} << 30;
constexpr uint32_t many = 16;  // tokens of a step from which the thread pool pays off
constexpr char no_model[] = "(no model)";

Status read_rows(const char* name, Numbers type, const void* from, std::size_t count,
                 ThreadPool* pool, Array<float>* to) {
  if (read_numbers({type, from, 0, count}, pool, to)) return {};
  return Status::error(Code::bad_argument,
                       "%s has NaN, infinity or a magnitude over 1e30; the cache is unchanged",
                       name);
}

Status out_of_range(const char* name, uint64_t is, uint64_t max) {
  return Status::error(Code::bad_argument, "%s is %" PRIu64 ": use 1 to %" PRIu64, name, is, max);
}

}  // namespace

StoreShape ExternalStore::store_shape(const BareOptions& o) {
  return {o.shape.layers, o.shape.kv_heads, PageShape::of(o.shape.head_dim)};
}

Status ExternalStore::resolve(BareOptions* o) {
  const HeadShape& s = o->shape;
  if (s.layers == 0 || s.layers > max_layers) return out_of_range("layers", s.layers, max_layers);
  if (s.heads == 0 || s.heads > max_heads) return out_of_range("heads", s.heads, max_heads);
  if (s.kv_heads == 0 || s.heads % s.kv_heads)
    return Status::error(Code::bad_argument, "kv_heads is %u: it has to divide heads, which is %u",
                         s.kv_heads, s.heads);
  if (s.head_dim == 0 || s.head_dim > max_head_dim)
    return out_of_range("head_dim", s.head_dim, max_head_dim);
  if (o->max_tokens == 0 || o->max_tokens > max_tokens_of_all)
    return out_of_range("max_tokens", o->max_tokens, max_tokens_of_all);
  RETURN_IF_ERROR(resolve_threads_and_window(&o->threads, &o->window));
  o->memory.reaper = std::make_shared<os::FileReaper>();
  o->memory.step_tokens = 1;  // the minimum; larger steps raise it
  RETURN_IF_ERROR(check_memory_budget(o->memory, o->full_precision));
  RETURN_IF_ERROR(
      check_select_options(o->select, s.layers, PageShape::of(s.head_dim).block_tokens));
  const StrategyInfo* info = strategy_info(o->select.strategy);  // null: auto
  if (info && (info->index || info->has(StrategyInfo::chooses_once)))
    return Status::error(
        Code::bad_argument,
        "strategy is \"%s\", which needs a model, and a cache has none: use another strategy",
        o->select.strategy.c_str());
  return {};
}

ExternalStore::ExternalStore(const BareOptions& options, KvStore store)
    : options_(options), store_(std::move(store)), layer_updated_(options.shape.layers) {}

Status ExternalStore::start() {
  if (!pool_) {
    std::unique_ptr<ThreadPool> pool;
    RETURN_IF_ERROR(ThreadPool::create(options_.threads, &pool));
    pool_ = std::move(pool);
  }
  attention_ =
      std::make_unique<Attention>(options_.shape, store_.shape().page, cpu_kernels(), pool_.get());
  return {};
}

Status ExternalStore::open(const BareOptions& options, std::unique_ptr<ExternalStore>* out) {
  BareOptions o = options;
  RETURN_IF_ERROR(resolve(&o));
  KvStore store(store_shape(o), o.full_precision ? KvStore::keep_all : o.window);
  if (!strategy_needs(o.select.strategy, StrategyInfo::needs_representatives))
    store.drop_representatives();
  RETURN_IF_ERROR(store.set_budget(o.memory, 0));
  std::unique_ptr<ExternalStore> cache(new ExternalStore(o, std::move(store)));
  RETURN_IF_ERROR(cache->start());
  *out = std::move(cache);
  return {};
}

Status ExternalStore::fork(const Cancel* cancel, std::unique_ptr<ExternalStore>* out) {
  RETURN_IF_ERROR(settle("copied", cancel));
  std::unique_ptr<ExternalStore> cache(new ExternalStore(options_, KvStore(store_)));
  cache->pool_ = pool_;
  RETURN_IF_ERROR(cache->start());
  *out = std::move(cache);
  return {};
}

// Commits a complete step before an operation on the whole sequence. `what`: a participle for the
// message.
Status ExternalStore::commit_complete(const char* what) {
  if (step_tokens_ > 0 && !complete())
    return Status::error(
        Code::bad_state,
        "the step of %u tokens has %u of %u layers: update the others, or truncate "
        "the cache, before it is %s",
        step_tokens_, updated_, options_.shape.layers, what);
  if (step_tokens_ > 0) commit();
  return {};
}

Status ExternalStore::finish(const KvStore** out) {
  RETURN_IF_ERROR(commit_complete("used by a session"));
  *out = &store_;
  return {};
}

// Commits as commit_complete(), and builds the sketch that the next token would need.
Status ExternalStore::settle(const char* what, const Cancel* cancel) {
  RETURN_IF_ERROR(commit_complete(what));
  const Plan plan = make_plan(options_.select, store_.sealed_tokens(), options_.shape.layers, {});
  return prepare_sketch(plan, cancel);
}

void ExternalStore::commit() {
  store_.commit(step_tokens_, cpu_kernels(), pool_.get());
  step_tokens_ = 0;
  committed_ = true;
}

// Builds the sketch of the keys if the plan needs one and there is no current one.
Status ExternalStore::prepare_sketch(const Plan& plan, const Cancel* cancel) {
  if (!plan.strategy->has(StrategyInfo::needs_sketch) || store_.pages().pages() < 2 ||
      store_.sketch().is_current())
    return {};
  // without query moments: later queries are unknown
  return store_.build_sketch(nullptr, cpu_kernels(), pool_.get(), cancel, step_tokens_);
}

// Plans the next step. Its first attention, which can be cancelled, builds the strategy's sketch.
void ExternalStore::plan_step(uint32_t tokens) {
  step_selector_ = nullptr;
  if (tokens > 1) {
    plan_ = {};
    return;
  }
  Plan plan = make_plan(options_.select, store_.sealed_tokens(), options_.shape.layers, {});
  if (plan.strategy != planned_) {
    planned_ = nullptr;
    selector_ = plan.strategy->make ? plan.strategy->make() : nullptr;
    memory_ = selector_ ? selector_->make_memory() : nullptr;
    planned_ = plan.strategy;
  }
  plan_ = std::move(plan);
  step_selector_ = selector_.get();
}

// Makes all checks that do not need the commit before the last step is committed.
Status ExternalStore::begin_step(uint32_t tokens) {
  RETURN_IF_ERROR(store_.check_file());
  const uint64_t held = this->tokens();
  if (tokens > options_.max_tokens - held)
    return Status::error(Code::context_full,
                         "%u tokens do not fit: the cache holds %" PRIu64 " of %" PRIu64
                         "; it is unchanged",
                         tokens, held, options_.max_tokens);
  RETURN_IF_ERROR(store_.check_budget(held + tokens, 0, tokens));
  // null: auto, which needs no representatives
  const StrategyInfo* strategy = strategy_info(options_.select.strategy);
  if (tokens == 1 && strategy && strategy->has(StrategyInfo::needs_representatives) &&
      store_.pages_after(held) >= 2 && !store_.representatives().known())
    return Status::error(Code::bad_state, "%s selects by queries: pass q in every update",
                         strategy->name.data());
  if (complete()) commit();
  plan_step(tokens);
  RETURN_IF_ERROR(store_.prepare(tokens, KvStore::Overlap::nothing, pool_.get()));
  committed_ = false;
  chosen_by_ = no_layer;
  step_tokens_ = tokens;
  updated_ = 0;
  std::fill(layer_updated_.begin(), layer_updated_.end(), false);
  return {};
}

Status ExternalStore::update(uint32_t layer, Numbers type, const void* k, const void* v,
                             const void* q, uint32_t tokens) {
  const HeadShape& s = options_.shape;
  if (layer >= s.layers)
    return Status::error(Code::bad_argument, "layer is %u: the cache has %u", layer, s.layers);
  if (tokens == 0 || tokens > max_step) return out_of_range("tokens", tokens, max_step);
  const bool open = step_tokens_ > 0 && !complete();
  if (open && tokens != step_tokens_)
    return Status::error(Code::bad_state, "tokens is %u: the step has %u, and %u of its %u layers",
                         tokens, step_tokens_, updated_, s.layers);
  if (open && layer_updated_[layer])
    return Status::error(Code::bad_state,
                         "layer %u already has its update: the step has %u of %u layers", layer,
                         updated_, s.layers);
  const StrategyInfo* strategy = strategy_info(options_.select.strategy);
  if (!q && strategy && strategy->has(StrategyInfo::needs_representatives))
    return Status::error(Code::bad_argument, "q is NULL: %s needs the queries of every update",
                         strategy->name.data());
  const std::size_t count = std::size_t{tokens} * s.kv_width();
  RETURN_IF_ERROR(read_rows("k", type, k, count, pool_.get(), &k_));
  RETURN_IF_ERROR(read_rows("v", type, v, count, pool_.get(), &v_));
  if (q)
    RETURN_IF_ERROR(read_rows("q", type, q, std::size_t{tokens} * s.q_width(), pool_.get(), &q_));
  if (!open) RETURN_IF_ERROR(begin_step(tokens));
  store_.write(layer, tokens, k_.data(), v_.data(), tokens < many ? nullptr : pool_.get());
  if (q) {
    store_.observe(layer, tokens, q_.data(), s.heads);
  } else {
    store_.forget_representatives();
  }
  // now, so that the next step need not seal all layers
  store_.seal(layer, tokens, cpu_kernels(), pool_.get());
  layer_updated_[layer] = true;
  ++updated_;
  return {};
}

// Checks that the selection for the layer comes from its filter layer and from this step.
Status ExternalStore::check_choice(uint32_t layer) const {
  if (plan_.filter.empty() || plan_.is_dense(layer)) return {};
  uint32_t filter = layer;
  while (!plan_.is_filter(--filter)) {
  }  // ends: the layers before the first filter layer are dense
  if (filter == chosen_by_) return {};
  return Status::error(Code::bad_state,
                       "layer %u needs the selection of filter layer %u in this step: attend layer "
                       "%u first",
                       layer, filter, filter);
}

Status ExternalStore::attention(const BareQuery& query) {
  const HeadShape& s = options_.shape;
  const uint32_t layer = query.layer, n = query.tokens;
  if (layer >= s.layers)
    return Status::error(Code::bad_argument, "layer is %u: the cache has %u", layer, s.layers);
  if (!(query.scale >= 0) || !std::isfinite(query.scale))
    return Status::error(Code::bad_argument, "scale is %s: use a positive number, or 0",
                         number_text(query.scale).c_str());
  RETURN_IF_ERROR(store_.check_file());
  if (!(query.softcap >= 0) || !std::isfinite(query.softcap))
    return Status::error(Code::bad_argument, "softcap is %s: use a positive number, or 0",
                         number_text(query.softcap).c_str());
  if (step_tokens_ == 0 && committed_)
    return Status::error(Code::bad_state,
                         "layer %u has no open step: a save, fork, truncate or failed update ended "
                         "the last one; its tokens are in the cache and not to be updated again",
                         layer);
  if (step_tokens_ == 0 || !layer_updated_[layer])
    return Status::error(Code::bad_state,
                         "layer %u has no update in this step: call kv_cache_update first", layer);
  if (n != step_tokens_)
    return Status::error(Code::bad_argument, "tokens is %u: the step has %u", n, step_tokens_);
  RETURN_IF_ERROR(check_choice(layer));
  const Selector* selector = plan_.is_dense(layer) ? nullptr : step_selector_;
  if (selector) RETURN_IF_ERROR(prepare_sketch(plan_, query.cancel));
  const std::size_t count = std::size_t{n} * s.q_width();
  RETURN_IF_ERROR(read_rows("q", query.type, query.q, count, pool_.get(), &q_));
  // Attention scales by 1 / sqrt(head_dim).
  const float factor =
      query.scale == 0 ? 1.0f : query.scale * std::sqrt(static_cast<float>(s.head_dim));
  if (factor != 1.0f)
    for (std::size_t i = 0; i < count; ++i) q_[i] *= factor;
  if (out_.size() < count) out_.resize(count);
  const bool chooses = plan_.is_filter(layer);
  if (chooses) lse_.resize(std::size_t{n} * s.heads);
  const CancelLatch cancel(query.cancel);
  float* totals = chooses ? lse_.data() : nullptr;
  attention_->set_softcap(query.softcap);
  AttentionRequest request{.layer = layer,
                           .tokens = n,
                           .q = q_.data(),
                           .store = store_,
                           .selector = selector,
                           .plan = plan_,
                           .memory = memory_.get(),
                           .cancel = cancel};
  RETURN_IF_ERROR(attention_->run(request, out_.data(), totals));
  if (chooses && !cancel.fired()) {
    chosen_by_ = no_layer;  // until the selection is complete
    request.selector = step_selector_, attention_->filter(request, totals, nullptr, memory_.get());
    if (!cancel.fired()) chosen_by_ = layer;
  }
  if (!selector || plan_.strategy->has(StrategyInfo::reads_keys)) store_.drop_resident_pages(layer);
  if (cancel.fired()) return Status::error(Code::cancelled, "cancelled; the cache is unchanged");
  write_numbers(query.type, out_.data(), count, query.out);
  return {};
}

Status ExternalStore::truncate(uint64_t tokens) {
  const uint64_t held = this->tokens();
  if (tokens > held)
    return Status::error(Code::bad_argument,
                         "cannot truncate to %" PRIu64 " tokens: the cache has %" PRIu64
                         "; it is unchanged",
                         tokens, held);
  if (complete() && tokens > store_.tokens()) {  // the dropped tokens of the step are not sealed
    store_.keep_first(static_cast<uint32_t>(tokens - store_.tokens()), step_tokens_);
    step_tokens_ = static_cast<uint32_t>(tokens - store_.tokens());
    commit();
    return {};
  }
  if (tokens < store_.tokens()) {
    RETURN_IF_ERROR(store_.rewind(tokens, cpu_kernels()));
    committed_ = false;
  }
  step_tokens_ = 0;  // drops an incomplete step, or one without remaining tokens
  return {};
}

Status ExternalStore::save(const std::string& path, const Cancel* cancel, Progress::Report report) {
  RETURN_IF_ERROR(store_.check_file());
  RETURN_IF_ERROR(settle("saved", cancel));
  format::Identity identity;
  identity.model = options_.identity;
  std::memcpy(identity.model_name, no_model, sizeof no_model);
  SavedSequence state;
  state.turn = store_.tokens() > 0;
  state.window_tokens = options_.window;
  const SavedPart none{format::SectionKind::tokens, nullptr, 0};
  return save_store(path, identity, {store_}, state, {&none, 1}, cancel, std::move(report));
}

Status ExternalStore::load(const std::string& path, BareOptions options, bool verify,
                           const Cancel* cancel, Progress::Report report,
                           std::unique_ptr<ExternalStore>* out) {
  RETURN_IF_ERROR(resolve(&options));
  CachePeek peek;
  RETURN_IF_ERROR(CachePeek::open(path, &peek));
  const format::Identity& id = peek.identity();
  const auto mismatch = [&](const char* what) {
    return Status::error(Code::model_mismatch, "%s %s; nothing was loaded", path.c_str(), what);
  };
  if (id.vocabulary != 0)
    return mismatch("was saved by a session: load it with kv_load and its model");
  if (id.layers != options.shape.layers || id.kv_heads != options.shape.kv_heads ||
      id.head_dim != options.shape.head_dim || id.latent)
    return mismatch("has another shape");
  if (id.model != options.identity) return mismatch("has another identity: prefill it again");
  const StoreShape shape = store_shape(options);
  SavedSequence state;
  RETURN_IF_ERROR(read_saved(peek, &state));
  RETURN_IF_ERROR(check_saved(peek, shape, options.shape.group(), state));
  if (state.tokens > options.max_tokens)
    return Status::error(Code::context_full,
                         "%s holds %" PRIu64 " tokens: the cache may hold %" PRIu64
                         "; nothing was loaded",
                         path.c_str(), state.tokens, options.max_tokens);
  if (verify) {
    Progress progress(std::move(report));
    RETURN_IF_ERROR(peek.verify(&progress, cancel));
  }
  std::shared_ptr<const CacheFile> file;
  RETURN_IF_ERROR(CacheFile::open(std::move(peek), &file, nullptr, cancel));
  options.full_precision = state.full_precision;
  options.window = state.window_tokens;
  KvStore store(shape, options.window);
  RETURN_IF_ERROR(load_store(file, state, options.shape.group(), options.memory, state.tokens,
                             nullptr, cancel, &store));
  std::unique_ptr<ExternalStore> cache(new ExternalStore(options, std::move(store)));
  RETURN_IF_ERROR(cache->start());
  *out = std::move(cache);
  return {};
}

ExternalStats ExternalStore::stats() const {
  const Plan plan = make_plan(options_.select, store_.sealed_tokens(), options_.shape.layers, {});
  const ReadCounts& read = attention_->counts();
  ExternalStats s;
  s.threads = options_.threads;
  s.tokens = tokens();
  s.max_tokens = options_.max_tokens;
  s.sealed_tokens = store_.sealed_tokens();
  s.page_tokens = store_.shape().page.page_tokens;
  s.sink_tokens = store_.sink_count();
  s.window_tokens = store_.window_count();
  s.step_tokens = step_tokens_;
  s.private_bytes = store_.private_bytes();
  s.mapped_bytes = store_.pages().mapped_bytes();
  s.spilled_bytes = store_.pages().spilled_bytes();
  s.memory_limit = store_.budget().bytes;
  s.budget_tokens = plan.budget_tokens;
  s.tokens_read = read.tokens_read;
  s.tokens_present = read.tokens_present;
  s.pages_touched = read.pages_touched;
  s.decode_strategy = plan.strategy->name;
  return s;
}

std::string ExternalStore::stats_json() const {
  const Plan plan = make_plan(options_.select, store_.sealed_tokens(), options_.shape.layers, {});
  const ExternalStats s = stats();
  char text[1536];
  std::snprintf(
      text, sizeof text,
      "{\"tokens\":%" PRIu64 ",\"max_tokens\":%" PRIu64
      ",\"threads\":%u,\"precision\":\"%s\",\"page_tokens\":%u,\"sealed_pages\":%u,"
      "\"sealed_tokens\":%" PRIu64
      ",\"sink_tokens\":%u,\"window_tokens\":%u,\"step_tokens\":%u,\"private_bytes\":%" PRIu64
      ",\"mapped_bytes\":%" PRIu64 ",\"spilled_bytes\":%" PRIu64 ",\"memory_limit\":%" PRIu64
      ",\"decode_strategy\":\"%s\",\"decode_strategy_because\":\"%s\",\"budget_tokens\":%" PRIu64
      ",\"tokens_read\":%" PRIu64 ",\"tokens_present\":%" PRIu64 ",\"pages_touched\":%" PRIu64
      ",\"kernels\":\"%s\"}",
      s.tokens, s.max_tokens, s.threads, options_.full_precision ? "f32" : "int8", s.page_tokens,
      store_.pages().pages(), s.sealed_tokens, s.sink_tokens, s.window_tokens, s.step_tokens,
      s.private_bytes, s.mapped_bytes, s.spilled_bytes, s.memory_limit, s.decode_strategy.c_str(),
      plan.why, s.budget_tokens, s.tokens_read, s.tokens_present, s.pages_touched,
      cpu_kernels().name);
  return text;
}

}  // namespace kvasir
