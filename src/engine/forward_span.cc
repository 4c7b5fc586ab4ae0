// Spans: all tokens of a span go through a layer, chunk by chunk, before they go through the next
// one. A layer's weights are read once for the span, and attention of a layer needs the keys and
// values of that layer alone. The residual stream of the span is in host memory.
//
// The stores are forks while the span is under way, so a failure leaves the sequence as it was.
#include <algorithm>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "engine/forward.h"
#include "engine/span_size.h"
#include "os/os.h"

namespace kvasir {

Status step_cancelled() {
  return Status::error(Code::cancelled, "cancelled; the sequence is as it was before the chunk");
}

constexpr std::size_t chunks_ahead = 2;  // that are embedded before a chunk is computed

struct Forward::Span {
  Span(const ForwardStep& s, const StepStores& stores)
      : step(s), cancel(s.cancel), store(stores.store), begin(stores.store.tokens()) {
    if (stores.windows) windows.emplace(*stores.windows);
    if (stores.states) states.emplace(*stores.states);
    const uint32_t n = s.size();
    for (uint32_t at = s.chunk; at < n; at += s.chunk) ends.push_back(at);
    ends.push_back(n);
  }
  uint32_t first(std::size_t chunk) const { return chunk == 0 ? 0 : ends[chunk - 1]; }
  uint32_t largest() const {
    uint32_t out = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) out = std::max(out, ends[i] - first(i));
    return out;
  }

  const ForwardStep& step;
  const CancelLatch cancel;
  KvStore store;
  std::optional<KvStore> windows;
  std::optional<RecurrentState> states;
  const uint64_t begin;                  // its first token's position
  std::vector<uint32_t> ends;            // of chunks
  uint64_t done = 0;                     // tokens of layers
  Buffer<float> memory;                  // of the next three, where they are not pinned
  float* x = nullptr;                    // [tokens][width]
  float *cos = nullptr, *sin = nullptr;  // of each chunk: [RoPE sets][n][rope dim / 2]
};

// Bytes of pages of so many tokens, with their summaries.
static uint64_t page_bytes_of(const StoreShape& shape, uint64_t tokens) {
  const uint64_t extents = ceil_div(tokens, shape.page.extent_tokens());
  const uint64_t sketch = shape.is_selected() ? shape.page.sketch_bytes() * shape.heads_total() : 0;
  return extents * (shape.slab_bytes() + sketch);
}

SpanSize Forward::span_size(const ForwardStep& step, const StepStores& stores) const {
  const ModelConfig& config = model_->config();
  SpanSize size;
  size.weights = model_->weights().bytes;
  size.text = page_bytes_of(stores.store.shape(), step.size() + step.follows);
  size.stream = uint64_t{config.width + 2 * config.angles()} * sizeof(float);
  if (stores.windows) {
    const StoreShape& shape = stores.windows->shape();
    size.windows = page_bytes_of(shape, shape.page.extent_tokens()) / shape.page.extent_tokens();
  }
  size.available = os::available_memory();
  return size;
}

// Whether weights would be read from the file, or computed by the CPU in place of a GPU, with each
// chunk.
bool Forward::prefers_spans(const SpanSize& size) const {
  const std::vector<DeviceWeights>& gpus = model_->device_weights();
  return gpus.empty() ? size.weights_exceed()
                      : DeviceWeights::some_come(gpus, model_->config().depth());
}

Fallback Forward::why_no_span(const StepStores& stores) const {
  const ModelConfig& config = model_->config();
  if (refuses_spans_) return Fallback::no_room_for_weights;
  if (stores.store.budget().bytes > 0) return Fallback::memory_limit;
  if (stores.store.window_tokens() == KvStore::keep_all) return Fallback::full_precision;
  if (config.streams > 1 || config.layer_input > 0) return Fallback::more_streams;
  return config.shares_kv() ? Fallback::shared_keys : Fallback::none;
}

uint64_t Forward::span_tokens(const ForwardStep& step, const StepStores& stores,
                              uint32_t chunk) const {
  const bool plain = !step.selector && !step.trace && !step.asked && !step.hidden && !step.accept &&
                     !step.open && !step.inputs;
  const bool follows = stores.store.can_span() && (!stores.windows || stores.windows->can_span());
  const SpanSize size = span_size(step, stores);
  const bool prefers = forced_span_ > 0 || prefers_spans(size);
  span_fallback_ = prefers ? why_no_span(stores) : Fallback::none;
  if (!plain || !follows || !prefers || span_fallback_ != Fallback::none) return 0;
  return forced_span_ > 0 ? forced_span_ : size.tokens(chunk);
}

// A sketch of a span that failed has keys that the store has not.
Status Forward::run_span(const ForwardStep& step, const StepStores& stores) {
  Status s = try_span(step, stores);
  if (!s.ok() && step.sketch) step.sketch->abandon();
  return s;
}

// Code::no_memory too where an allocation fails: chunks need less.
Status Forward::try_span(const ForwardStep& step, const StepStores& stores) try {
  RETURN_IF_ERROR(open_spans());
  std::optional<ThreadPool::Awake> awake;
  if (!model_->device_weights().empty()) awake.emplace(pool_);
  Span span(step, stores);
  RETURN_IF_ERROR(begin_span(&span));
  last_is_span_ = !model_->device_weights().empty();
  if (Status s = run_layers(&span); !s.ok()) return abandon_span(), std::move(s);
  add_to_sketch(&span, model_->config().depth(), span.ends.size() - 1);
  if (step.take_hidden) RETURN_IF_ERROR(pass_hidden(span));
  return commit_span(&span, stores);
} catch (const std::bad_alloc&) {
  abandon_span();
  return Status::error(Code::no_memory, "no memory for a span");
}

Status Forward::run_layers(Span* span) {
  const std::vector<LayerRun>& runs = plan_of_spans().runs;
  for (std::size_t i = 0; i < runs.size(); ++i)
    for (uint32_t l = runs[i].first_layer; l < runs[i].end_layer; ++l)
      RETURN_IF_ERROR(run_layer(span, i, l));
  return {};
}

// The residual stream may be on its way between two chunks.
void Forward::abandon_span() noexcept {
  for (const auto& executor : span_executors_) executor->abandon();
}

ExecutionPlan& Forward::plan_of_spans() {
  return model_->device_weights().empty() ? plan_ : span_plan_;
}

// The GPUs' executors of spans, which take the memory of the others.
Status Forward::open_spans() {
  const std::vector<DeviceWeights>& gpus = model_->device_weights();
  if (gpus.empty() || !span_executors_.empty()) return {};
  for (const auto& executor : executors_) executor->rest();
  std::vector<std::unique_ptr<LayerExecutor>> opened;
  span_plan_ = {};
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    std::unique_ptr<LayerExecutor> executor;
    RETURN_IF_ERROR(make_span_executor(*model_, static_cast<int>(i), &host_, &executor));
    LayerRun run;
    run.first_layer = gpus[i].first_layer();
    run.end_layer = i + 1 == gpus.size() ? model_->config().depth() : gpus[i].end_layer();
    run.executor = static_cast<int>(i);
    span_plan_.runs.push_back(std::move(run));
    opened.push_back(std::move(executor));
  }
  span_executors_ = std::move(opened);
  return {};
}

// The next text may have the memory that this one lacked.
void Forward::end_spans() {
  release_spans();
  refuses_spans_ = false;
}

void Forward::release_spans() {
  span_executors_.clear();
  span_memory_ = {}, span_memory_floats_ = 0;
}

bool Forward::refuse_spans() {
  release_spans();
  return !std::exchange(refuses_spans_, true);
}

Status Forward::begin_span(Span* span) {
  const ForwardStep& step = span->step;
  const uint32_t n = step.size(), chunk = span->largest();
  const Cancel* const cancel = step.cancel;
  RETURN_IF_ERROR(span->store.begin_span(n, chunk, pool_, cancel));
  if (span->windows) RETURN_IF_ERROR(span->windows->begin_span(n, chunk, pool_, cancel));
  if (span->states) RETURN_IF_ERROR(span->states->begin_span());
  if (step.queries) step.queries->prepare(span->begin, n);
  make_span_memory(span);
  for (std::size_t i = 0; i < chunks_ahead; ++i) embed_chunk(span, i);
  return {};
}

// A chunk's stream goes to a GPU while the chunk before it is computed.
void Forward::embed_chunk(Span* span, std::size_t i) {
  if (i >= span->ends.size()) return;
  const std::size_t width = model_->config().width, angles = model_->config().angles(),
                    first = span->first(i);
  const StepContext c{span->step, span->cancel, span->store, nullptr, nullptr, pool_};
  embed_tokens(c, span->step.tokens.subspan(first, span->ends[i] - first), span->begin + first,
               {span->x + first * width, span->cos + first * angles, span->sin + first * angles});
}

// GPUs copy the stream of each chunk to and fro: pinned, where the system has so much.
void Forward::make_span_memory(Span* span) {
  const std::size_t n = span->step.size(), width = model_->config().width,
                    angles = model_->config().angles(), floats = n * (width + 2 * angles);
  const std::vector<DeviceWeights>& gpus = model_->device_weights();
  if (floats > span_memory_floats_) span_memory_ = {}, span_memory_floats_ = 0;
  if (!gpus.empty() && floats > span_memory_floats_ &&
      span_memory_.allocate(gpus[0].device(), floats, pool_).ok())
    span_memory_floats_ = floats;
  if (span_memory_floats_ == 0) span->memory = make_buffer<float>(floats);
  span->x = span_memory_floats_ > 0 ? span_memory_.get() : span->memory.get();
  span->cos = span->x + n * width;
  span->sin = span->cos + n * angles;
}

Status Forward::run_layer(Span* span, std::size_t executor, uint32_t layer) {
  span->store.begin_layer();
  if (span->windows) span->windows->begin_layer();
  const auto chunks = static_cast<uint32_t>(span->ends.size());
  const bool pinned = span_memory_floats_ > 0,
             is_last = layer + 1 == plan_of_spans().runs[executor].end_layer;
  LayerExecutor* const e = span_executor(executor);
  RETURN_IF_ERROR(e->begin_layer(
      {layer, is_last, span->ends, pinned ? span->x : nullptr, pool_, span->cancel}));
  const uint32_t next = layer_to_read_ahead(span->step, layer);
  for (uint32_t i = 0; i < chunks; ++i) {
    if (next < model_->config().depth()) model_->read_ahead(next, i, chunks);
    RETURN_IF_ERROR(run_chunk(span, executor, layer, i));
  }
  return {};
}

// While a GPU computes the last chunk of a layer, which takes it the longest, the one before it is
// added. The chunks of the next layer cover it.
void Forward::add_to_sketch(Span* span, uint32_t layer, std::size_t chunk) {
  const ForwardStep& step = span->step;
  if (!step.sketch || layer == 0) return;
  const LayerConfig& before = model_->config().layer(layer - 1);
  const bool adds =
      chunk + 1 == span->ends.size() && before.has_attention() && !before.is_windowed();
  span->store.add_span_to_sketch(adds ? before.kv : KvStore::no_layer, step.size(),
                                 host_.next_moments(step), cpu_kernels(), pool_, step.cancel,
                                 step.sketch);
}

// While a layer is computed, a part of the next one is read with each chunk. depth: none, where
// memory may not hold both. GPUs have a WeightStream.
uint32_t Forward::layer_to_read_ahead(const ForwardStep& step, uint32_t layer) const {
  const uint32_t depth = model_->config().depth();
  uint32_t next = layer + 1;
  if (next == depth && step.follows > 0) next = 0;
  if (next == depth || !model_->device_weights().empty()) return depth;
  const uint64_t both = model_->layer_bytes(layer) + model_->layer_bytes(next);
  return both < os::available_memory() / 2 ? next : depth;
}

LayerExecutor* Forward::span_executor(std::size_t i) const {
  return (span_executors_.empty() ? executors_ : span_executors_)[i].get();
}

// What a chunk's plan has of the layers of a run.
static void merge(LayerRun&& from, LayerRun* to) {
  if (!from.segments.empty()) {
    to->attention = from.attention;
    to->segments = std::move(from.segments);
    to->fallback = from.fallback;
  }
  to->by_layers = true;
  to->streamed_layers = from.streamed_layers;
  to->has_experts = from.has_experts, to->experts_end = from.experts_end;
  if (!from.has_windows) return;
  to->has_windows = true, to->windows_executor = from.windows_executor;
}

// A chunk of one token is no step of an answer.
LayerExecutor::Request Forward::span_request(const StepContext& c) const {
  const LayerExecutor::Request request = request_of(c);
  if (request.gpu != HostAttention::GpuWork::decode) return request;
  return {HostAttention::GpuWork::none, Fallback::few_tokens};
}

// Of the last layer's chunk. The CPU computes them where no GPU has the output.
Status Forward::write_span_logits(const StepContext& c, LayerExecutor* executor) {
  const std::vector<DeviceWeights>& gpus = model_->device_weights();
  const uint32_t wanted = c.step.logits_wanted(), first = c.tokens() - wanted;
  if (wanted == 0) return {};
  if (gpus.empty() || gpus.back().has_output()) return write_logits(c, executor);
  ForwardStep part = c.step;
  part.tokens = c.step.tokens.subspan(first);
  const StepContext output{part,
                           c.cancel,
                           c.store,
                           c.windows,
                           c.states,
                           pool_,
                           c.x + std::size_t{first} * model_->config().width};
  LayerExecutor* const cpu = executors_.back().get();
  RETURN_IF_ERROR(cpu->begin(output));
  return write_logits(output, cpu);
}

// A chunk of a layer, as a step of that layer alone.
Status Forward::run_chunk(Span* span, std::size_t number, uint32_t layer, std::size_t i) {
  LayerExecutor* const executor = span_executor(number);
  const ModelConfig& config = model_->config();
  const LayerConfig& l = config.layer(layer);
  const uint32_t first = span->first(i), n = span->ends[i] - first;
  const bool last_layer = layer + 1 == config.depth(), last = i + 1 == span->ends.size();
  ForwardStep part = span->step;
  part.tokens = span->step.tokens.subspan(first, n);
  part.follows = span->ends.back() - span->ends[i];
  part.chunk = 0, part.progress = nullptr, part.sketch = nullptr;
  if (i > 0) part.probe = nullptr;
  if (part.want == ForwardStep::Logits::last && !last) part.want = ForwardStep::Logits::none;
  if (part.want == ForwardStep::Logits::all) part.logits += std::size_t{first} * config.vocabulary;
  const auto gpus = static_cast<uint32_t>(model_->device_weights().size());
  RETURN_IF_ERROR(check_files(part, {span->store, span->windows ? &*span->windows : nullptr}));
  const std::function<void()> adds_to_sketch = [&, is_added = false]() mutable {
    if (!std::exchange(is_added, true)) add_to_sketch(span, layer, i);
  };
  const StepContext c{part,
                      span->cancel,
                      span->store,
                      span->windows ? &*span->windows : nullptr,
                      span->states ? &*span->states : nullptr,
                      pool_,
                      span->x + std::size_t{first} * config.width,
                      span->cos + first * config.angles(),
                      span->sin + first * config.angles(),
                      gpus,
                      nullptr,
                      span_memory_floats_ > 0,
                      nullptr,
                      &adds_to_sketch};
  if (c.states) c.states->prepare();
  const bool attends = l.has_attention() && !l.is_windowed();
  if (part.queries && attends && i > 0) part.queries->make_way(l.kv, n);
  RETURN_IF_ERROR(host_.begin_chunk(c, layer));
  LayerRun run;
  RETURN_IF_ERROR(executor->plan(c, span_request(c), &run));
  merge(std::move(run), &plan_of_spans().runs[number]);
  StepPart step_part(executor);
  RETURN_IF_ERROR(executor->begin(c));
  RETURN_IF_ERROR(executor->mixer(layer));
  RETURN_IF_ERROR(executor->feed_forward(layer));
  RETURN_IF_ERROR(executor->end());
  adds_to_sketch();                                     // where no layer of a GPU has waited
  if (layer == 0) embed_chunk(span, i + chunks_ahead);  // the file has been checked
  if (last_layer) RETURN_IF_ERROR(write_span_logits(c, executor));
  if (span->cancel.fired()) return step_cancelled();
  step_part.complete();
  span->store.end_chunk(attends ? l.kv : KvStore::no_layer, n, cpu_kernels(), pool_);
  const bool windowed = l.has_attention() && l.is_windowed();
  if (c.windows) c.windows->end_chunk(windowed ? l.kv : KvStore::no_layer, n, cpu_kernels(), pool_);
  if (c.states && l.is_recurrent()) RETURN_IF_ERROR(c.states->end_chunk(l.state));
  executor->committed(c, c.tokens());
  span->done += n;
  const auto& progress = span->step.progress;
  if (progress && !progress(span->done, uint64_t{span->step.size()} * config.depth()))
    return Status::error(Code::cancelled, "stopped by the progress callback");
  return {};
}

// The GPUs' executors rest: what takes the rows may need their memory.
Status Forward::pass_hidden(const Span& span) {
  constexpr uint32_t together = 512;  // rows
  for (const auto& executor : span_executors_) executor->rest();
  const ModelConfig& config = model_->config();
  const Norm& norm = model_->weights().output_norm;
  const uint32_t n = span.step.size(), width = config.width;
  const Buffer<float> rows = make_buffer<float>(std::min(n, together) * std::size_t{width});
  for (uint32_t at = 0, count; at < n; at += count) {
    count = std::min(together, n - at);
    if (span.cancel.fired()) return step_cancelled();
    const float* const x = span.x + std::size_t{at} * width;
    pool_->run(count, [&](uint32_t i, uint32_t) {
      const std::size_t row = std::size_t{i} * width;
      write_norm(norm, x + row, rows.get() + row);
    });
    RETURN_IF_ERROR(span.step.take_hidden(at, count, rows.get()));
  }
  return {};
}

// The norm of one token's residual stream, before the output.
void Forward::write_norm(const Norm& norm, const float* x, float* out) const {
  const ModelConfig& c = model_->config();
  const Kernels& kernels = cpu_kernels();
  if (norm.empty()) std::copy_n(x, c.width, out);
  else if (c.norm == NormKind::rms)
    kernels.rms_norm(x, norm.weight.data(), c.norm_epsilon, 1, c.width, out);
  else
    kernels.layer_norm(x, norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(),
                       c.norm_epsilon, 1, c.width, out);
}

// The forks first: they may be cancelled.
Status Forward::commit_span(Span* span, const StepStores& stores) {
  const uint32_t n = span->step.size();
  const Cancel* const cancel = span->step.cancel;
  RETURN_IF_ERROR(span->store.commit_span(cpu_kernels(), pool_, cancel));
  if (span->windows) RETURN_IF_ERROR(span->windows->commit_span(cpu_kernels(), pool_, cancel));
  if (span->step.queries) span->step.queries->commit(span->begin, n, pool_);
  stores.store = std::move(span->store);
  if (span->windows) *stores.windows = std::move(*span->windows);
  if (!span->states) return {};
  span->states->commit_span(n);
  *stores.states = std::move(*span->states);
  return {};
}

}  // namespace kvasir
