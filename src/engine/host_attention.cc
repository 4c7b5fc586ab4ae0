#include "engine/host_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvasir {

HostAttention::HostAttention(const ModelConfig& config, const PageShape& page, ThreadPool* pool)
    : config_(config), pool_(pool), attention_(config, page, cpu_kernels(), pool) {
  attention_.set_softcap(config.attention_softcap);
}

Status HostAttention::begin(const StepContext& c, GpuWork gpu) {
  const std::size_t floats = std::size_t{c.tokens()} * config_.heads;
  if (floats > lse_room_) {
    lse_room_ = 0, lse_ = {};  // never old and new together
    lse_ = make_buffer<float>(floats);
    lse_room_ = floats;
  }
  attention_.set_trace(c.step.trace);
  if (c.step.trace) c.step.trace->begin_step();
  const bool by_heads = gpu == GpuWork::prefill || (c.tokens() > 1 && c.store.budget().bytes == 0);
  const auto together = gpu == GpuWork::decode ? KvStore::Overlap::lists
                        : by_heads             ? KvStore::Overlap::heads
                                               : KvStore::Overlap::nothing;
  RETURN_IF_ERROR(c.store.prepare_rows(c.tokens(), together, pool_, c.step.cancel));
  has_pages_ = false;
  if (gpu != GpuWork::prefill) RETURN_IF_ERROR(reserve_pages(c));
  if (c.step.queries) c.step.queries->prepare(c.tokens());
  return {};
}

Status HostAttention::reserve_pages(const StepContext& c) {
  return std::exchange(has_pages_, true) ? Status()
                                         : c.store.prepare_pages(c.tokens(), pool_, c.step.cancel);
}

void HostAttention::write(const StepContext& c, uint32_t layer, const LayerRows& rows) {
  const uint32_t n = c.tokens(), heads = config_.heads;
  KvStore& store = c.store;
  if (n == 1 || store.budget().bytes > 0) {
    store.write(layer, n, rows.k, rows.v);
    return store.observe(layer, n, rows.q, heads);
  }
  pool_->run(2 * config_.kv_heads, [&](uint32_t task, uint32_t) {
    const uint32_t head = task / 2;
    if (task % 2) return store.write_values(layer, head, n, rows.v);
    store.write_keys(layer, head, n, rows.k);
    store.observe(layer, head, n, rows.q, heads);
  });
}

// In the last layer only logits and the newest queries' lse follow from the attention. Which
// tokens have an lse by a strategy's choice is not worth the time: who asks for it later, by a
// change of the strategy within a kept conversation, finds no_total and goes by other queries.
uint32_t HostAttention::first_needed(const ForwardStep& step, uint32_t layer) const {
  const Plan& plan = step.plan;
  if (layer + 1 < config_.depth() || step.want == ForwardStep::Logits::all) return 0;
  if (step.probe || plan.by_blocks || plan.is_filter(layer)) return 0;
  if (plan.compare != CompareLevel::none) return 0;
  const bool exact = !step.selector || plan.is_dense(layer);
  const uint32_t wanted = exact && step.queries ? RecentQueries::capacity : 1, n = step.size();
  return n - std::min(n, wanted);
}

Status HostAttention::attend(const StepContext& c, uint32_t layer, const float* q, float* out) {
  const ForwardStep& step = c.step;
  const Plan& plan = step.plan;
  const uint32_t n = c.tokens(), first = first_needed(step, layer);
  const Selector* selector = plan.is_dense(layer) ? nullptr : step.selector;
  std::fill_n(out, std::size_t{first} * config_.q_width(), 0.0f);
  std::fill_n(lse_.get(), std::size_t{first} * config_.heads, RecentQueries::no_total);
  const AttentionRequest request{.layer = layer,
                                 .first = first,
                                 .tokens = n,
                                 .q = q,
                                 .store = c.store,
                                 .selector = selector,
                                 .plan = plan,
                                 .memory = step.memory,
                                 .cancel = c.cancel};
  RETURN_IF_ERROR(attention_.run(request, out, lse_.get()));
  if (plan.is_filter(layer)) {
    AttentionRequest filtered = request;
    filtered.selector = step.selector;
    if (plan.by_blocks) RETURN_IF_ERROR(attention_.filter_blocks(filtered));
    if (step.memory) attention_.filter(filtered, lse_.get(), step.queries, step.memory);
  }
  if (step.queries) step.queries->write(layer, n, q, lse_.get(), pool_);
  if (step.asked) step.asked->write(cpu_kernels(), layer, step.asked_at, n, q);
  if (step.probe) RETURN_IF_ERROR(probe(c, layer, q, out));
  if (!selector || plan.strategy->has(StrategyInfo::reads_keys)) c.store.drop_resident_pages(layer);
  return {};
}

Status HostAttention::attend_with_gpu(const StepContext& c, uint32_t layer, const float* q,
                                      HybridGpu* gpu) {
  const ForwardStep& step = c.step;
  const Plan& plan = step.plan;
  AttentionRequest request{.layer = layer,
                           .tokens = c.tokens(),
                           .q = q,
                           .store = c.store,
                           .selector = plan.is_dense(layer) ? nullptr : step.selector,
                           .plan = plan,
                           .memory = step.memory,
                           .cancel = c.cancel};
  RETURN_IF_ERROR(attention_.run_with_gpu(request, gpu));
  if (c.cancel.fired() || !step.memory || !plan.is_filter(layer)) return {};
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
                      .layer = layer,
                      .kv_head = 0,
                      .rows = {},
                      .near_m = nullptr,
                      .near_l = nullptr,
                      .first_page = 1,
                      .budget_tokens = plan.budget(layer),
                      .share = true};
  query.memory = step.memory;
  step.selector->choose(query, &scratch, &choice);
  return gpu->pack(layer, choice);
}

Status HostAttention::page_rate(const StepContext& c, uint32_t first, uint32_t end, double* rate) {
  const AttentionRequest request{.store = c.store, .plan = c.step.plan, .cancel = c.cancel};
  return attention_.page_rate(first, end, request, rate);
}

void HostAttention::keep(const StepContext& c, uint32_t layer, const LayerRows& rows) {
  c.store.write(layer, c.tokens(), rows.k, rows.v);
  c.store.observe(layer, c.tokens(), rows.q, config_.heads);
  if (c.step.queries) c.step.queries->write(layer, c.tokens(), rows.q, rows.lse, nullptr);
}

Status HostAttention::take(const StepContext& c, uint32_t layer, const LayerRows& rows) {
  const ForwardStep& step = c.step;
  const uint32_t n = c.tokens();
  write(c, layer, rows);
  c.store.seal(layer, n, cpu_kernels(), pool_);
  if (step.queries) step.queries->write(layer, n, rows.q, rows.lse, pool_);
  if (step.asked) step.asked->write(cpu_kernels(), layer, step.asked_at, n, rows.q);
  return step.probe ? probe(c, layer, rows.q, rows.attended) : Status();
}

uint32_t HostAttention::outputs_wanted(const ForwardStep& step) const {
  return step.probe ? Attention::probe_span(step.size(), step.probe_tokens) : 0;
}

void HostAttention::count_prefill(const StepContext& c, uint32_t layers) {
  const PageStore& pages = c.store.pages();
  const uint32_t page_tokens = c.store.shape().page.page_tokens;
  const uint64_t behind_sinks = pages.pages() > 1 ? c.store.sealed_tokens() - page_tokens : 0;
  const uint64_t lists = uint64_t{c.tokens()} * config_.kv_heads * layers;
  ReadCounts counts;
  counts.tokens_read = counts.tokens_present = behind_sinks * lists;
  counts.pages_touched = behind_sinks / page_tokens * lists;
  attention_.add_counts(counts);
}

Status HostAttention::probe(const StepContext& c, uint32_t layer, const float* q,
                            const float* exact) {
  const ForwardStep& step = c.step;
  const AttentionRequest request{.layer = layer,
                                 .tokens = c.tokens(),
                                 .q = q,
                                 .store = c.store,
                                 .selector = step.probe,
                                 .plan = step.plan,
                                 .cancel = c.cancel};
  double difference = 0, norm = 0;
  RETURN_IF_ERROR(attention_.probe(request, step.probe_tokens, exact, &difference, &norm));
  // Where nearly nothing comes out of a layer, nearly anything is a large error: keep it finite.
  const double error = norm > 0 ? std::min(std::sqrt(difference / norm), 1e6) : 0;
  step.errors[layer] = static_cast<float>(error);
  return {};
}

}  // namespace kvasir
