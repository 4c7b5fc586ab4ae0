// Spans: all tokens of a span go through a layer, chunk by chunk, before they go through the next
// one. A layer's weights are read once for the span, and attention of a layer needs the keys and
// values of that layer alone. The residual stream of the span is in host memory.
//
// The stores are forks while the span is under way, so a failure leaves the sequence as it was.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "engine/forward.h"
#include "os/os.h"

namespace kvasir {

constexpr uint64_t min_span = 8192, max_span = 65536;  // tokens

Status step_cancelled() {
  return Status::error(Code::cancelled, "cancelled; the sequence is as it was before the chunk");
}

struct Forward::Span {
  Span(const ForwardStep& s, const StepStores& stores)
      : step(s), cancel(s.cancel), store(stores.store), begin(stores.store.tokens()) {
    if (stores.windows) windows.emplace(*stores.windows);
    if (stores.states) states.emplace(*stores.states);
    const uint32_t n = s.size();
    for (uint32_t at = s.probe ? std::min(s.probed_chunk, n) : 0; at < n; at += s.chunk)
      if (at > 0) ends.push_back(at);
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
  const uint64_t begin;        // its first token's position
  std::vector<uint32_t> ends;  // of chunks
  uint64_t done = 0;           // tokens of layers
  Buffer<float> x;             // [tokens][width]
  Buffer<float> cos, sin;      // of each chunk: [RoPE sets][n][rope dim / 2]
};

// Whether weights would be read from the file again with each chunk.
bool Forward::prefers_spans() const { return model_->weights().bytes > os::available_memory(); }

uint64_t Forward::span_tokens(const ForwardStep& step, const StepStores& stores,
                              uint32_t chunk) const {
  const ModelConfig& config = model_->config();
  const bool plain = !step.selector && !step.trace && !step.asked && !step.hidden && !step.accept &&
                     !step.open && !step.inputs;
  const bool follows = stores.store.can_span() && (!stores.windows || stores.windows->can_span());
  // These have more than the residual stream between layers.
  const bool has_stream_alone =
      config.streams == 1 && config.layer_input == 0 && !config.shares_kv();
  if (!plain || !follows || !has_stream_alone) return 0;
  if (forced_span_ > 0) return forced_span_;
  if (!prefers_spans()) return 0;
  const uint64_t token = uint64_t{config.width + 2 * config.angles()} * sizeof(float);
  const uint64_t room = os::available_memory() / 8 / token;
  return std::clamp(room, min_span, max_span) / chunk * chunk;
}

Status Forward::run_span(const ForwardStep& step, const StepStores& stores) {
  Span span(step, stores);
  RETURN_IF_ERROR(begin_span(&span));
  for (const auto& executor : executors_)
    for (uint32_t l = executor->first_layer(); l < executor->end_layer(); ++l)
      RETURN_IF_ERROR(run_layer(&span, executor.get(), l));
  commit_span(&span, stores);
  return {};
}

std::size_t Forward::run_of(uint32_t layer) const {
  std::size_t i = 0;
  while (plan_.runs[i].end_layer <= layer) ++i;
  return i;
}

Status Forward::begin_span(Span* span) {
  const ForwardStep& step = span->step;
  const uint32_t n = step.size(), chunk = span->largest();
  const Cancel* const cancel = step.cancel;
  RETURN_IF_ERROR(span->store.begin_span(n, chunk, pool_, cancel));
  if (span->windows) RETURN_IF_ERROR(span->windows->begin_span(n, chunk, pool_, cancel));
  if (span->states) RETURN_IF_ERROR(span->states->begin_span());
  if (step.queries) step.queries->prepare(n);
  const std::size_t width = model_->config().width, angles = model_->config().angles();
  span->x = make_buffer<float>(n * width);
  span->cos = make_buffer<float>(n * angles);
  span->sin = make_buffer<float>(n * angles);
  for (std::size_t i = 0; i < span->ends.size(); ++i) {
    if (span->cancel.fired()) return step_cancelled();
    const uint32_t first = span->first(i);
    ForwardStep part;
    part.tokens = step.tokens.subspan(first, span->ends[i] - first);
    const StepContext c{
        part, span->cancel, span->store, nullptr, nullptr, pool_, span->x.get() + first * width};
    embed(c, span->begin + first, span->cos.get() + first * angles,
          span->sin.get() + first * angles);
  }
  return {};
}

Status Forward::run_layer(Span* span, LayerExecutor* executor, uint32_t layer) {
  span->store.begin_layer();
  if (span->windows) span->windows->begin_layer();
  RETURN_IF_ERROR(executor->begin_layer(layer, span->cancel));
  for (std::size_t i = 0; i < span->ends.size(); ++i)
    RETURN_IF_ERROR(run_chunk(span, executor, layer, i));
  return {};
}

// A chunk of a layer, as a step of that layer alone.
Status Forward::run_chunk(Span* span, LayerExecutor* executor, uint32_t layer, std::size_t i) {
  const ModelConfig& config = model_->config();
  const LayerConfig& l = config.layer(layer);
  const uint32_t first = span->first(i), n = span->ends[i] - first;
  const bool last_layer = layer + 1 == config.depth(), last = i + 1 == span->ends.size();
  ForwardStep part = span->step;
  part.tokens = span->step.tokens.subspan(first, n);
  part.chunk = 0, part.progress = nullptr;
  if (i > 0) part.probe = nullptr, part.plan = {};
  if (part.want == ForwardStep::Logits::last && !last) part.want = ForwardStep::Logits::none;
  if (part.want == ForwardStep::Logits::all) part.logits += std::size_t{first} * config.vocabulary;
  const auto gpus = static_cast<uint32_t>(model_->device_weights().size());
  const StepContext c{part,
                      span->cancel,
                      span->store,
                      span->windows ? &*span->windows : nullptr,
                      span->states ? &*span->states : nullptr,
                      pool_,
                      span->x.get() + std::size_t{first} * config.width,
                      span->cos.get() + first * config.angles(),
                      span->sin.get() + first * config.angles(),
                      gpus};
  if (c.states) c.states->prepare();
  const bool attends = l.has_attention() && !l.is_windowed();
  if (part.queries && attends && i > 0) part.queries->make_way(l.kv, n);
  host_.begin_chunk(c, layer);
  RETURN_IF_ERROR(executor->plan(c, request_of(c), &plan_.runs[run_of(layer)]));
  StepPart step_part(executor);
  RETURN_IF_ERROR(executor->begin(c));
  RETURN_IF_ERROR(executor->mixer(layer));
  RETURN_IF_ERROR(executor->feed_forward(layer));
  RETURN_IF_ERROR(executor->end());
  if (last_layer) RETURN_IF_ERROR(write_logits(c, executor));
  if (span->cancel.fired()) return step_cancelled();
  step_part.complete();
  span->store.end_chunk(attends ? l.kv : KvStore::no_layer, n, cpu_kernels(), pool_);
  const bool windowed = l.has_attention() && l.is_windowed();
  if (c.windows) c.windows->end_chunk(windowed ? l.kv : KvStore::no_layer, n, cpu_kernels(), pool_);
  if (c.states && l.is_recurrent()) RETURN_IF_ERROR(c.states->end_chunk(l.state));
  executor->committed(c);
  span->done += n;
  const auto& progress = span->step.progress;
  if (progress && !progress(span->done, uint64_t{span->step.size()} * config.depth()))
    return Status::error(Code::cancelled, "stopped by the progress callback");
  return {};
}

void Forward::commit_span(Span* span, const StepStores& stores) {
  const uint32_t n = span->step.size();
  if (span->step.queries) span->step.queries->commit(span->begin, n, pool_);
  span->store.commit_span(cpu_kernels(), pool_);
  stores.store = std::move(span->store);
  if (span->windows) {
    span->windows->commit_span(cpu_kernels(), pool_);
    *stores.windows = std::move(*span->windows);
  }
  if (!span->states) return;
  span->states->commit_span(n);
  *stores.states = std::move(*span->states);
}

}  // namespace kvasir
