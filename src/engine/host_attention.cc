#include "engine/host_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/checked.h"

namespace kvasir {

HostAttention::HostAttention(const Model& model, ThreadPool* pool)
    : model_(model), config_(model.config()), pool_(pool),
      attention_(config_, model.store_shape().page, cpu_kernels(), pool) {
  attention_.set_softcap(config_.attention_softcap);
  if (config_.windows.layers == 0) return;
  windows_.emplace(config_.windows, model.windows_shape().page, cpu_kernels(), pool);
  windows_->set_softcap(config_.attention_softcap);
}

void HostAttention::make_lse_room(uint32_t tokens) {
  const std::size_t floats = std::size_t{tokens} * config_.heads;
  if (floats <= lse_room_) return;
  lse_room_ = 0, lse_ = {};  // never old and new together
  lse_ = make_buffer<float>(floats);
  lse_room_ = floats;
}

Status HostAttention::begin(const StepContext& c, GpuWork gpu) {
  make_lse_room(c.tokens());
  attention_.set_trace(c.step.trace);
  if (c.step.trace) c.step.trace->begin_step();
  for (const AttendedDocument& document : c.step.documents)
    if (document.trace) document.trace->begin_step();
  const bool by_heads = gpu == GpuWork::prefill || (c.tokens() > 1 && c.store.budget().bytes == 0);
  const auto together = gpu == GpuWork::decode ? KvStore::Overlap::lists
                        : by_heads             ? KvStore::Overlap::heads
                                               : KvStore::Overlap::nothing;
  RETURN_IF_ERROR(
      c.store.prepare_rows(c.tokens(), together, pool_, c.step.cancel, gpu == GpuWork::prefill));
  if (c.windows)
    RETURN_IF_ERROR(
        c.windows->prepare_rows(c.tokens(), KvStore::Overlap::nothing, pool_, c.step.cancel));
  has_pages_ = false;
  if (gpu != GpuWork::prefill) RETURN_IF_ERROR(reserve_pages(c));
  if (c.step.queries) c.step.queries->prepare(c.store.tokens(), c.tokens());
  return {};
}

Status HostAttention::begin_chunk(const StepContext& c, uint32_t layer) {
  make_lse_room(c.tokens());
  attention_.set_trace(nullptr);
  has_pages_ = true;
  const LayerConfig& config = config_.layer(layer);
  const bool attends = config.has_attention(), windowed = attends && config.is_windowed();
  RETURN_IF_ERROR(c.store.prepare_chunk(attends && !windowed ? config.kv : KvStore::no_layer,
                                        c.tokens(), pool_));
  if (!c.windows) return {};
  return c.windows->prepare_chunk(windowed ? config.kv : KvStore::no_layer, c.tokens(), pool_);
}

Status HostAttention::reserve_pages(const StepContext& c) {
  if (std::exchange(has_pages_, true)) return {};
  RETURN_IF_ERROR(c.store.prepare_pages(c.tokens(), pool_, c.step.cancel));
  return c.windows ? c.windows->prepare_pages(c.tokens(), pool_, c.step.cancel) : Status();
}

void HostAttention::reserve_ahead(const StepContext& c) {
  const auto next = static_cast<uint32_t>(std::min<uint64_t>(c.step.follows, c.tokens()));
  if (next == 0) return;
  try {
    c.store.prepare_ahead(c.tokens() + next, pool_);
  } catch (const std::bad_alloc&) {  // the next step fails, or finds room
  }
}

void HostAttention::write(const StepContext& c, uint32_t layer, const LayerRows& rows) {
  const LayerConfig& config = config_.layer(layer);
  const uint32_t n = c.tokens(), kv = config.kv, heads = config.heads;
  if (!config.writes_kv) return;
  if (config.is_windowed()) return c.windows->write(kv, n, rows.k, rows.v, n > 1 ? pool_ : nullptr);
  KvStore& store = c.store;
  if (n == 1 || store.budget().bytes > 0) {
    store.write(kv, n, rows.k, rows.v);
    return store.observe(kv, n, rows.q, heads);
  }
  constexpr uint32_t piece = 256;  // rows of a task
  pool_->run(2 * config.kv_heads * static_cast<uint32_t>(ceil_div(n, piece)), [&](uint32_t task,
                                                                                  uint32_t) {
    const uint32_t head = task / 2 % config.kv_heads, first = task / 2 / config.kv_heads * piece,
                   end = std::min(n, first + piece);
    task % 2 ? store.write_values(kv, head, {first, end}, rows.v)
             : store.write_keys(kv, head, {first, end}, rows.k);
  });
  if (!store.representatives().known()) return;
  pool_->run(config.kv_heads,
             [&](uint32_t head, uint32_t) { store.observe(kv, head, n, rows.q, heads); });
}

// In the last layer only logits and the newest queries' lse follow from the attention. Which
// tokens have an lse by a strategy's choice is not worth the time: who asks for it later, by a
// change of the strategy within a kept conversation, finds no_total and goes by other queries.
uint32_t HostAttention::first_needed(const ForwardStep& step, uint32_t layer) const {
  const Plan& plan = step.plan;
  const uint32_t n = step.size(), kv = config_.layer(layer).kv;
  if (layer + 1 < config_.depth() || step.want == ForwardStep::Logits::all) return 0;
  if (step.hidden_wanted() > 1 || step.take_hidden) return 0;
  if (config_.layer(layer).is_windowed() || !config_.layer(layer).has_attention()) return n - 1;
  if (step.probe || plan.by_blocks || plan.is_filter(kv)) return 0;
  if (plan.compare != CompareLevel::none) return 0;
  const bool exact = !step.selector || plan.is_dense(kv);
  const uint32_t wanted = exact && step.queries ? RecentQueries::capacity : 1;
  return n - std::min(n, wanted);
}

Status HostAttention::attend(const StepContext& c, uint32_t layer, const float* q, float* out) {
  if (config_.layer(layer).is_windowed()) return attend_window(c, layer, q, out);
  const ForwardStep& step = c.step;
  const Plan& plan = step.plan;
  const uint32_t n = c.tokens(), first = first_needed(step, layer), kv = config_.layer(layer).kv;
  const Selector* selector = plan.is_dense(kv) || c.attends_everything() ? nullptr : step.selector;
  std::fill_n(out, std::size_t{first} * config_.q_width(), 0.0f);
  std::fill_n(lse_.get(), std::size_t{first} * config_.heads, RecentQueries::no_total);
  const AttentionRequest request{.layer = kv,
                                 .first = first,
                                 .tokens = n,
                                 .q = q,
                                 .store = c.store,
                                 .selector = selector,
                                 .plan = plan,
                                 .memory = step.memory,
                                 .sink_logits = sink_logits(layer),
                                 .is_part = !step.documents.empty(),
                                 .cancel = c.cancel};
  if (step.scores) RETURN_IF_ERROR(score_documents(c, config_.layer(layer), request));
  if (ends_after(step, layer)) return {};
  RETURN_IF_ERROR(attention_.run(request, out, lse_.get()));
  if (!step.documents.empty())
    RETURN_IF_ERROR(attend_documents(c, config_.layer(layer), request, out));
  if (plan.is_filter(kv)) {
    AttentionRequest filtered = request;
    filtered.selector = step.selector;
    if (plan.by_blocks) RETURN_IF_ERROR(attention_.filter_blocks(filtered));
    if (step.memory) attention_.filter(filtered, lse_.get(), step.queries, step.memory);
  }
  if (step.queries) step.queries->write(kv, n, q, lse_.get(), pool_);
  if (step.asked) step.asked->write(cpu_kernels(), kv, step.asked_at, n, q);
  if (step.probe) RETURN_IF_ERROR(probe(c, layer, q, {out, false}));
  if (!selector || plan.strategy->has(StrategyInfo::reads_keys)) c.store.drop_resident_pages(kv);
  return {};
}

Status HostAttention::attend_window(const StepContext& c, uint32_t layer, const float* q,
                                    float* out) {
  const LayerConfig& config = config_.layer(layer);
  const uint32_t first = first_needed(c.step, layer);
  std::fill_n(out, std::size_t{first} * config.q_width(), 0.0f);
  const AttentionRequest request{.layer = config.kv,
                                 .first = first,
                                 .tokens = c.tokens(),
                                 .q = q,
                                 .store = *c.windows,
                                 .plan = c.step.plan,
                                 .sink_logits = sink_logits(layer),
                                 .window = {config.window, config.chunked},
                                 .cancel = c.cancel};
  return windows_->run_windowed(request, out);
}

const float* HostAttention::sink_logits(uint32_t layer) const {
  const Array<float>& sinks = model_.weights().layers[layer].sinks;
  return sinks.empty() ? nullptr : sinks.data();
}

Status HostAttention::attend_with_gpu(const StepContext& c, uint32_t layer, const float* q,
                                      HybridGpu* gpu) {
  const ForwardStep& step = c.step;
  const Plan& plan = step.plan;
  const uint32_t kv = config_.layer(layer).kv;
  AttentionRequest request{.layer = kv,
                           .tokens = step.open ? 1 : c.tokens(),
                           .q = q,
                           .store = c.store,
                           .selector = plan.is_dense(kv) ? nullptr : step.selector,
                           .plan = plan,
                           .memory = step.memory,
                           .cancel = c.cancel};
  RETURN_IF_ERROR(attention_.run_with_gpu(request, gpu));
  if (c.cancel.fired() || !step.memory || !plan.is_filter(kv)) return {};
  const float* lse = nullptr;
  RETURN_IF_ERROR(gpu->lse(&lse));
  request.selector = step.selector;
  attention_.filter(request, lse, step.queries, step.memory);
  if (c.tokens() > 1 || c.cancel.fired() || !gpu->packs()) return {};
  // What the filter layer chose for the layers after it goes to the GPU at once.
  SelectorScratch scratch;
  Selection choice;
  SelectorQuery query{.kernels = cpu_kernels(),
                      .pages = c.store.pages(),
                      .sketch = c.store.sketch(),
                      .layer = kv,
                      .kv_head = 0,
                      .rows = {},
                      .near_m = nullptr,
                      .near_l = nullptr,
                      .first_page = 1,
                      .budget_tokens = plan.budget(kv),
                      .share = true};
  query.memory = step.memory;
  step.selector->choose(query, &scratch, &choice);
  return gpu->pack(kv, choice);
}

Status HostAttention::page_rate(const StepContext& c, uint32_t first, uint32_t end, double* rate) {
  const AttentionRequest request{.store = c.store, .plan = c.step.plan, .cancel = c.cancel};
  return attention_.page_rate(first, end, request, rate);
}

void HostAttention::keep(const StepContext& c, uint32_t layer, const LayerRows& rows) {
  const uint32_t kv = config_.layer(layer).kv;
  if (config_.layer(layer).is_windowed()) return c.windows->write(kv, c.tokens(), rows.k, rows.v);
  c.store.write(kv, c.tokens(), rows.k, rows.v);
  c.store.observe(kv, c.tokens(), rows.q, config_.heads);
  if (c.step.queries) c.step.queries->write(kv, c.tokens(), rows.q, rows.lse, nullptr);
}

Status HostAttention::take(const StepContext& c, uint32_t layer, const LayerRows& rows) {
  const ForwardStep& step = c.step;
  const uint32_t n = c.tokens(), kv = config_.layer(layer).kv;
  const bool windowed = config_.layer(layer).is_windowed();
  if (!windowed && c.store.can_seal_rows(n)) {
    c.store.seal_rows(kv, {n, rows.k, rows.v, probed_rows(step)}, cpu_kernels(), pool_);
  } else {
    write(c, layer, rows);
    if (windowed) return {};
    c.store.seal(kv, n, cpu_kernels(), pool_);
  }
  const uint32_t first = rows.first_query;
  if (step.queries)
    step.queries->write(kv, n - first, rows.q, rows.lse + std::size_t{first} * config_.heads,
                        pool_);
  if (step.asked) step.asked->write(cpu_kernels(), kv, step.asked_at, n, rows.q);
  // While a GPU computes the last layers, the CPU is to begin the next step.
  constexpr uint32_t last_layers = 2;
  if (step.sketch && step.follows > 0 && layer + last_layers >= config_.depth())
    step.sketch->stop_covering();
  if (step.sketch && step.queries)
    c.store.add_to_sketch(kv, n, next_moments(step), cpu_kernels(), pool_, step.cancel,
                          step.sketch);
  const float* const probed = rows.probed_q ? rows.probed_q : rows.q;
  return step.probe ? probe(c, layer, probed, {rows.attended, true}) : Status();
}

void HostAttention::touch_ahead(const StepContext& c, uint32_t layer) {
  c.store.touch_next_layer(config_.layer(layer).kv, c.tokens(), pool_);
}

KeySketch::QueryMoment HostAttention::next_moments(const ForwardStep& step) const {
  const uint32_t dim = model_.store_shape().page.dim;
  return [&step, dim, heads = config_.kv_heads](uint32_t layer, uint32_t head, double* moment) {
    step.queries->add_next_moment(cpu_kernels(), layer, head, heads, dim, moment);
  };
}

uint32_t HostAttention::queries_wanted(const StepContext& c) {
  const bool all = c.step.asked || c.store.representatives().known();
  return all ? c.tokens() : std::min(c.tokens(), RecentQueries::capacity);
}

HostAttention::Probed HostAttention::probed(const ForwardStep& step) {
  if (!step.probe) return {};
  const uint32_t rows = probed_rows(step), count = std::min(step.probe_tokens, rows);
  return {count, Attention::probe_span(rows, count) / count};
}

// First tokens of a step that a probe needs. 0: none is probed.
uint32_t HostAttention::probed_rows(const ForwardStep& step) {
  return step.probe ? std::min(step.probe_span, step.size()) : 0;
}

void HostAttention::count_prefill(const StepContext& c, uint32_t layers) {
  const PageStore& pages = c.store.pages();
  const uint32_t page_tokens = c.store.shape().page.page_tokens;
  const uint64_t behind_sinks = pages.pages() > 1 ? c.store.sealed_tokens() - page_tokens : 0;
  const uint64_t heads = uint64_t{config_.kv_heads} * layers, n = c.tokens();
  // A sparse plan reads its budget, in the mean, but for tokens that are measured.
  const Plan& plan = c.step.plan;
  const uint64_t all = plan.by_blocks ? probed_rows(c.step) : n,
                 some = std::min(behind_sinks, plan.budget_tokens + plan.recent_tokens);
  ReadCounts counts;
  counts.tokens_present = behind_sinks * n * heads;
  counts.tokens_read = (behind_sinks * all + some * (n - all)) * heads;
  counts.pages_touched =
      (behind_sinks / page_tokens * all + some / page_tokens * (n - all)) * heads;
  attention_.add_counts(counts);
}

Status HostAttention::probe(const StepContext& c, uint32_t layer, const float* q,
                            const Attention::ProbedOutputs& exact) {
  const ForwardStep& step = c.step;
  const uint32_t kv = config_.layer(layer).kv;
  const AttentionRequest request{.layer = kv,
                                 .tokens = probed_rows(step),
                                 .q = q,
                                 .store = c.store,
                                 .selector = step.probe,
                                 .plan = step.probe_plan,
                                 .sink_logits = sink_logits(layer),
                                 .cancel = c.cancel};
  double difference = 0, norm = 0;
  RETURN_IF_ERROR(attention_.probe(request, step.probe_tokens, exact, &difference, &norm));
  // Where nearly nothing comes out of a layer, nearly anything is a large error: keep it finite.
  const double error = norm > 0 ? std::min(std::sqrt(difference / norm), 1e6) : 0;
  step.errors[kv] = static_cast<float>(error);
  return {};
}

}  // namespace kvasir
