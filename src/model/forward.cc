#include "model/forward.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "base/magnitude.h"
#include "model/device_timeline.h"

namespace kvasir {

static Status cancelled() { return Status::error(Code::cancelled, "cancelled; the timeline is as it was before the chunk"); }

Status Forward::create(std::shared_ptr<const Model> model, ThreadPool* pool, std::unique_ptr<Forward>* out) {
  std::unique_ptr<Forward> forward(new Forward(std::move(model), pool));
  const std::vector<DeviceWeights>& devices = forward->model_->device_weights();
  for (const DeviceWeights& weights : devices) {
    std::unique_ptr<Stage> stage;
    if (Status s = make_device_stage(*forward->model_, weights, &stage); !s.ok()) return s;
    forward->stages_.push_back(std::move(stage));
  }
  const uint32_t layers = devices.empty() ? 0 : devices.back().end_layer();
  if (devices.empty() || !devices.back().has_output()) forward->stages_.push_back(make_cpu_stage(*forward->model_, layers, forward->kernels_, pool));
  *out = std::move(forward);
  return {};
}

Forward::Forward(std::shared_ptr<const Model> model, ThreadPool* pool)
    : model_(std::move(model)),
      kernels_(cpu_kernels()),
      pool_(pool),
      attention_(model_->config(), model_->store_shape().page, kernels_, pool),
      left_to_processor_(model_->device_weights().size(), "nothing was asked yet"),
      handed_(model_->device_weights().size()),
      beside_(model_->device_weights().size()) {}

Status Forward::run(const ForwardStep& step, KvStore* store) {
  const ModelConfig& c = model_->config();
  const auto n = static_cast<uint32_t>(step.tokens.size());
  const CancelLatch cancel(step.cancel);
  resize(n);
  attention_.set_trace(step.trace);
  if (step.trace) step.trace->begin_step();
  const bool on_device = !model_->device_weights().empty();
  const bool may_attend =
      on_device && !step.trace && !step.probe && !step.asked && n <= DeviceTimeline::most_tokens && store->budget().bytes == 0 && (step.selector || n == 1);
  const bool may_read = on_device && !step.selector && !step.trace && !step.memory && n > 1;
  const bool many = n > 1 && store->budget().bytes == 0;
  const KvStore::Together together = may_attend ? KvStore::Together::lists : may_read || many ? KvStore::Together::heads : KvStore::Together::nothing;
  if (Status s = store->prepare_rows(n, together, pool_, step.cancel); !s.ok()) return s;
  bool has_pages = false;
  const auto prepare_pages = [&] { return std::exchange(has_pages, true) ? Status() : store->prepare_pages(n, pool_, step.cancel); };
  if (!may_read)
    if (Status s = prepare_pages(); !s.ok()) return s;
  if (step.queries) step.queries->prepare(n);

  constexpr uint32_t rows = 32;  // of embeddings, a task's
  pool_->run((n + rows - 1) / rows, [&](uint32_t task, uint32_t) {
    const uint32_t first = task * rows, end = std::min(n, first + rows), half = model_->rope().dim() / 2;
    model_->rope().angles(store->tokens() + first, end - first, cos_.get() + std::size_t{first} * half, sin_.get() + std::size_t{first} * half);
    for (uint32_t i = first; i < end; ++i)
      kernels_.dequantize_row(model_->weights().embedding, static_cast<uint32_t>(step.tokens[i]), x_.get() + std::size_t{i} * c.width);
  });

  const uint32_t wanted = step.want == ForwardStep::Logits::all ? n : step.want == ForwardStep::Logits::last ? 1 : 0;
  const auto devices = static_cast<uint32_t>(left_to_processor_.size());
  const Stage::Attending attending{*store, step.plan, pool_, cancel, wanted, step.want == ForwardStep::Logits::last, devices, !step.selector};
  for (std::size_t at = 0; at < stages_.size(); ++at) {
    Stage* const stage = stages_[at].get();
    const char* why_not = step.selector && step.trace ? "passages are traced" : "everything is read";
    bool reads = false;
    if (may_read) {
      if (Status s = stage->can_read(attending, n, &why_not); !s.ok()) return s;
      reads = !why_not;
    } else if (!may_attend)
      stage->trim();
    else if (Status s = can_attend(attending, n, stage, &why_not); !s.ok())
      return s;
    const bool attends = !reads && may_attend && (!why_not || stage->attends_beside());
    if (at < left_to_processor_.size()) note_device(at, why_not, attends);
    if (Status s = stage->begin({n, x_.get(), cos_.get(), sin_.get(), &cancel, pool_}); !s.ok()) return s;
    if (attends) {
      ReadCounts counts;
      const auto pages = [&](uint32_t l, const float* q, Beside* device) { return attend_pages(step, l, q, cancel, *store, device); };
      if (Status s = stage->attend(attending, pages, &counts); !s.ok()) return s;
      if (cancel.fired()) return cancelled();
      attention_.add_counts(counts);
      pool_->run(stage->end_layer() - stage->first_layer(), [&](uint32_t i, uint32_t) {
        const uint32_t l = stage->first_layer() + i;
        keep(step, l, stage->attended(l), store);
      });
    }
    if (reads)
      if (Status s = read(step, attending, cancel, stage, store, prepare_pages); !s.ok()) return s;
    if (Status s = prepare_pages(); !s.ok()) return s;
    for (uint32_t l = stage->first_layer(); !attends && !reads && l < stage->end_layer(); ++l) {
      Stage::Projected of;
      if (Status s = stage->project(l, &of); !s.ok()) return s;
      many ? enter(l, n, {of.q, of.k, of.v}, store) : enter_alone(l, n, {of.q, of.k, of.v}, store);
      const uint32_t first = first_wanted(step, l);
      if (Status s = attend(step, l, first, of, cancel, store); !s.ok()) return s;
      if (Status s = stage->complete(l, first); !s.ok()) return s;
      if (cancel.fired()) return cancelled();
    }
    if (Status s = stage->end(); !s.ok()) return s;
  }
  if (Status s = write_logits(step, n, cancel); !s.ok()) return s;
  if (cancel.fired()) return cancelled();
  if (step.trace) step.trace->commit();
  if (step.queries) step.queries->commit(store->tokens(), n, pool_);
  const bool was_centred = !store->centre().empty();
  store->commit(n, kernels_, pool_);
  for (const std::unique_ptr<Stage>& stage : stages_) stage->committed(*store);
  if (step.queries && !was_centred && !store->centre().empty()) step.queries->centre(store->centre(), c.kv_heads, store->shape().page.dim);
  return {};
}

Status Forward::prepare(const ForwardStep& step, const KvStore& store, Progress* progress) {
  const std::size_t devices = left_to_processor_.size();
  const CancelLatch cancel(step.cancel);
  const Stage::Attending of{store, step.plan, pool_, cancel, 0, false, static_cast<uint32_t>(devices), !step.selector};
  for (std::size_t at = 0; at < devices; ++at) {
    const char* why_not = nullptr;
    do {
      if (cancel.fired()) return Status::error(Code::cancelled, "cancelled");
      const bool is_first = !why_not;
      if (Status s = can_attend(of, 1, stages_[at].get(), &why_not); !s.ok()) return s;
      if (is_first && stages_[at]->attends_beside())  // what they share is known now
        if (Status s = stages_[at]->can_attend(of, 1, &why_not); !s.ok()) return s;
      note_device(at, why_not, !why_not || stages_[at]->attends_beside());
      if (!progress->update(handed_[at] == Stage::sharing ? at : at + 1, devices)) return Status::error(Code::cancelled, "stopped by the progress callback");
    } while (handed_[at] == Stage::sharing);
  }
  return {};
}

// As Stage::can_attend(); where the stage attends beside the processor it is told once how fast that is, and how they share pages follows with the next step.
Status Forward::can_attend(const Stage::Attending& of, uint32_t n, Stage* stage, const char** why_not) {
  if (Status s = stage->can_attend(of, n, why_not); !s.ok() || !stage->attends_beside() || !stage->wants_rate()) return s;
  double rate;
  if (Status s = attention_.reading_rate(stage->first_layer(), stage->end_layer(), of.store, of.cancel, &rate); !s.ok() || of.cancel.fired() || rate == 0) return s;
  return stage->measure(rate, of.cancel);
}

void Forward::note_device(std::size_t at, const char* why_not, bool attends) {
  left_to_processor_[at] = why_not;
  beside_[at] = why_not && attends ? stages_[at]->share() : std::string();
  if (attends) handed_[at] = stages_[at]->hands();
}

// The processor's part of a layer that a device attends.
Status Forward::attend_pages(const ForwardStep& step, uint32_t layer, const float* q, const CancelLatch& cancel, const KvStore& store, Beside* device) {
  const auto n = static_cast<uint32_t>(step.tokens.size());
  const Selector* selector = step.plan.is_dense(layer) ? nullptr : step.selector;
  if (Status s = attention_.run_beside(layer, n, q, store, selector, step.plan, step.memory, cancel, device); !s.ok() || cancel.fired()) return s;
  if (!step.memory || !step.plan.is_filter(layer)) return {};
  const float* totals = nullptr;
  if (Status s = device->totals(&totals); !s.ok()) return s;
  attention_.filter(layer, n, q, totals, store, step.queries, *step.selector, step.plan, cancel, step.memory);
  if (n > 1 || cancel.fired() || !device->packs()) return {};
  SelectorScratch scratch;
  Selection choice;
  SelectorQuery query{kernels_, store.pages(), store.sketch(), layer, 0, {}, nullptr, nullptr, 1, step.plan.budget(layer), true};
  query.memory = step.memory;
  step.selector->choose(query, &scratch, &choice);
  return device->pack(layer, choice);
}

// A text, by a stage that attends it too: what the store and strategies learn from a layer they learn while the stage goes on.
Status Forward::read(const ForwardStep& step, const Stage::Attending& of, const CancelLatch& cancel, Stage* stage, KvStore* store,
                     const std::function<Status()>& meanwhile) {
  const uint32_t n = static_cast<uint32_t>(step.tokens.size()), kv_heads = model_->config().kv_heads;
  const auto take = [&](uint32_t layer, const Stage::Read& read) {
    enter(layer, n, {read.q, read.k, read.v}, store);
    store->seal(layer, n, kernels_, pool_);
    if (step.queries) step.queries->write(layer, n, read.q, read.totals, pool_);
    if (step.asked) step.asked->write(kernels_, layer, step.asked_at, n, read.q);
    return step.probe ? probe(step, layer, read.q, read.a, cancel, *store) : Status();
  };
  const uint32_t outputs = step.probe ? Attention::probe_span(n, step.probe_tokens) : 0;
  if (Status s = stage->read(of, outputs, meanwhile, take); !s.ok()) return s;
  if (cancel.fired()) return cancelled();
  const uint64_t behind_sinks = store->pages().pages() > 1 ? store->sealed_tokens() - store->shape().page.page_tokens : 0;
  const uint64_t lists = uint64_t{n} * kv_heads * (stage->end_layer() - stage->first_layer());
  ReadCounts counts;
  counts.tokens_read = counts.tokens_present = behind_sinks * lists;
  counts.pages_touched = behind_sinks / store->shape().page.page_tokens * lists;
  attention_.add_counts(counts);
  return {};
}

// What a layer has projected goes to the store, by the pool.
void Forward::enter(uint32_t layer, uint32_t n, const Entering& of, KvStore* store) {
  pool_->run(2 * model_->config().kv_heads, [&](uint32_t task, uint32_t) {
    const uint32_t head = task / 2;
    if (task % 2) return store->write_values(layer, head, n, of.v);
    store->write_keys(layer, head, n, of.k);
    store->observe(layer, head, n, of.q, model_->config().heads);
  });
}

void Forward::enter_alone(uint32_t layer, uint32_t n, const Entering& of, KvStore* store) {
  store->write(layer, n, of.k, of.v);
  store->observe(layer, n, of.q, model_->config().heads);
}

// What a stage that attends has found; by one of the pool's workers.
void Forward::keep(const ForwardStep& step, uint32_t layer, const Stage::Attended& of, KvStore* store) {
  const auto n = static_cast<uint32_t>(step.tokens.size());
  enter_alone(layer, n, {of.q, of.k, of.v}, store);
  if (step.queries) step.queries->write(layer, n, of.q, of.totals, nullptr);
}

// The first token that a layer's attention, and what comes after it, is computed for. In the last layer nothing but logits and recent queries' totals
// comes of it. Totals by a strategy's choice are not worth the time: who asks for the last layer's later, by a change of the strategy within a kept
// conversation, finds no_total and goes by the other queries.
uint32_t Forward::first_wanted(const ForwardStep& step, uint32_t layer) const {
  const Plan& plan = step.plan;
  if (layer + 1 < model_->config().layers || step.want == ForwardStep::Logits::all) return 0;
  if (step.probe || plan.by_blocks || plan.is_filter(layer) || plan.compare != CompareLevel::none) return 0;
  const bool exact = !step.selector || plan.is_dense(layer);
  const uint32_t wanted = exact && step.queries ? RecentQueries::capacity : 1, n = static_cast<uint32_t>(step.tokens.size());
  return n - std::min(n, wanted);
}

// Attention of a layer, of tokens `first` and later, and what strategies learn from it.
Status Forward::attend(const ForwardStep& step, uint32_t layer, uint32_t first, const Stage::Projected& of, const CancelLatch& cancel, KvStore* store) {
  const auto n = static_cast<uint32_t>(step.tokens.size());
  const Selector* selector = step.plan.is_dense(layer) ? nullptr : step.selector;
  std::fill_n(of.a, std::size_t{first} * model_->config().q_width(), 0.0f);
  std::fill_n(totals_.get(), std::size_t{first} * model_->config().heads, RecentQueries::no_total);
  if (Status s = attention_.run(layer, first, n, of.q, *store, selector, step.plan, step.memory, cancel, of.a, totals_.get()); !s.ok()) return s;
  if (step.plan.by_blocks && step.plan.is_filter(layer))
    if (Status s = attention_.filter_blocks(layer, n, of.q, *store, *step.selector, step.plan, cancel); !s.ok()) return s;
  if (step.memory && step.plan.is_filter(layer))
    attention_.filter(layer, n, of.q, totals_.get(), *store, step.queries, *step.selector, step.plan, cancel, step.memory);
  if (step.queries) step.queries->write(layer, n, of.q, totals_.get(), pool_);
  if (step.asked) step.asked->write(kernels_, layer, step.asked_at, n, of.q);
  if (step.probe)
    if (Status s = probe(step, layer, of.q, of.a, cancel, *store); !s.ok()) return s;
  if (!selector || step.plan.strategy->has(StrategyInfo::reads_keys)) store->let_go(layer);
  return {};
}

Status Forward::probe(const ForwardStep& step, uint32_t layer, const float* q, const float* exact,
                      const CancelLatch& cancel, const KvStore& store) {
  const auto n = static_cast<uint32_t>(step.tokens.size());
  double difference = 0, norm = 0;
  if (Status s = attention_.probe(layer, n, std::min(n, step.probe_tokens), q, store, *step.probe, step.plan, exact,
                                  cancel, &difference, &norm);
      !s.ok())
    return s;
  // Where nearly nothing comes out of a layer, nearly anything is a large error: it has to stay a number.
  step.errors[layer] = norm > 0 ? static_cast<float>(std::min(std::sqrt(difference / norm), 1e6)) : 0.0f;
  return {};
}

Status Forward::write_logits(const ForwardStep& step, uint32_t n, const CancelLatch& cancel) {
  if (step.want == ForwardStep::Logits::none) return {};
  const uint32_t first = step.want == ForwardStep::Logits::last ? n - 1 : 0;
  if (Status s = stages_.back()->logits(first, step.logits); !s.ok()) return s;
  const std::size_t rows = n - first, vocabulary = model_->config().vocabulary;
  std::atomic<bool> finite{true};
  pool_->run(static_cast<uint32_t>(rows), [&](uint32_t row, uint32_t) {
    if (!cancel.fired() && !all_finite({step.logits + row * vocabulary, vocabulary})) finite = false;
  });
  return cancel.fired() || finite ? Status() : not_a_number("the output");
}

void Forward::resize(uint32_t n) {
  if (n <= capacity_) return;
  const auto grow = [](Buffer<float>& array, std::size_t size) {
    array = {};  // never old and new together
    array = make_buffer<float>(size);
  };
  capacity_ = 0;
  grow(x_, std::size_t{n} * model_->config().width);
  grow(totals_, std::size_t{n} * model_->config().heads);
  grow(cos_, std::size_t{n} * (model_->rope().dim() / 2));
  grow(sin_, std::size_t{n} * (model_->rope().dim() / 2));
  capacity_ = n;
}

}  // namespace kvasir
