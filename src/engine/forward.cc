#include "engine/forward.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "base/magnitude.h"

namespace kvasir {

Status Forward::create(std::shared_ptr<const Model> model, uint64_t context, ThreadPool* pool,
                       std::unique_ptr<Forward>* out) {
  std::unique_ptr<Forward> forward(new Forward(std::move(model), context, pool));
  const Model& m = *forward->model_;
  const std::vector<DeviceWeights>& gpus = m.device_weights();
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    std::unique_ptr<LayerExecutor> executor;
    RETURN_IF_ERROR(make_gpu_executor(m, static_cast<int>(i), &forward->host_, &executor));
    forward->executors_.push_back(std::move(executor));
  }
  const uint32_t first = gpus.empty() ? 0 : gpus.back().end_layer();
  if (gpus.empty() || !gpus.back().has_output())
    forward->executors_.push_back(make_cpu_executor(m, first, &forward->host_, pool));
  for (uint32_t l = first; l < m.config().depth(); ++l)
    forward->has_host_states_ |= m.config().layer(l).is_recurrent();
  for (std::size_t i = 0; i < forward->executors_.size(); ++i) {
    LayerRun run;
    run.first_layer = forward->executors_[i]->first_layer();
    run.end_layer = forward->executors_[i]->end_layer();
    run.executor = i < gpus.size() ? static_cast<int>(i) : on_cpu;
    if (run.executor != on_cpu) run.fallback = Fallback::not_planned;
    forward->plan_.runs.push_back(std::move(run));
  }
  *out = std::move(forward);
  return {};
}

Forward::Forward(std::shared_ptr<const Model> model, uint64_t context, ThreadPool* pool)
    : model_(std::move(model)), ropes_(model_->ropes(context)), pool_(pool), host_(*model_, pool),
      layer_inputs_(*model_, pool) {}

// A mapped file that another process has cut would end this process. Between two steps that is an
// error; within a step it is not found.
Status Forward::check_files(const ForwardStep& step, const StepStores& stores) const {
  RETURN_IF_ERROR(model_->check_file());
  RETURN_IF_ERROR(stores.store.check_file());
  if (stores.windows) RETURN_IF_ERROR(stores.windows->check_file());
  for (const AttendedDocument& d : step.documents) RETURN_IF_ERROR(d.store->check_file());
  if (!step.scores) return {};
  for (const AttendedDocument& d : step.scores->documents) RETURN_IF_ERROR(d.store->check_file());
  return {};
}

Status Forward::run(const ForwardStep& step, const StepStores& stores) {
  RETURN_IF_ERROR(check_files(step, stores));
  if (step.chunk > 0) return run_span(step, stores);
  end_spans();
  last_is_span_ = false;
  const CancelLatch cancel(step.cancel);
  resize(step.size());
  const auto gpus = static_cast<uint32_t>(model_->device_weights().size());
  StepContext c{step,     cancel,     stores.store, stores.windows, stores.states,      pool_,
                x_.get(), cos_.get(), sin_.get(),   gpus,           layer_inputs_.get()};
  make_turns(c);
  c.turns = turns_.data();
  std::optional<ThreadPool::Awake> awake;
  if (gpus > 0 && (step.size() > max_alone || !step.documents.empty() || step.scores))
    awake.emplace(pool_);
  if (c.states) c.states->prepare(step.open ? step.size() : 0, has_host_states_);
  RETURN_IF_ERROR(make_plan(c));

  take_inputs(&c);
  layer_inputs_.make(c);
  for (const auto& executor : executors_) {
    StepPart part(executor.get());
    RETURN_IF_ERROR(executor->begin(c));
    for (uint32_t l = executor->first_layer(); l < executor->end_layer(); ++l) {
      RETURN_IF_ERROR(executor->mixer(l));  // x += mixer(norm(x))
      if (c.is_pinned && l == executor->end_layer() / 2) embed_ahead(c, executor.get());
      if (host_.ends_after(step, l)) return cancel.fired() ? step_cancelled() : Status();
      RETURN_IF_ERROR(executor->feed_forward(l));  // x += ffn(norm(x))
      if (cancel.fired()) return step_cancelled();
    }
    RETURN_IF_ERROR(executor->end());
    if (cancel.fired()) return step_cancelled();
    RETURN_IF_ERROR(host_.reserve_pages(c));  // a GPU may have done it while it was at work
    part.complete();
  }
  RETURN_IF_ERROR(write_logits(c, executors_.back().get()));
  if (cancel.fired()) return step_cancelled();
  uint32_t kept = step.size();
  if (step.accept) RETURN_IF_ERROR(step.accept(&kept));
  commit(c, kept);
  return {};
}

void Forward::make_turns(const StepContext& c) {
  const ModelConfig& config = model_->config();
  const std::size_t angles = config.angles();
  const std::span<const AttendedDocument> attended = c.step.documents,
                                          scored = c.step.scores
                                                       ? std::span<const AttendedDocument>(
                                                             c.step.scores->documents)
                                                       : attended.first(0);
  turns_.resize((attended.size() + scored.size()) * 2 * angles);
  float* to = turns_.data();
  for (const auto documents : {attended, scored})
    for (const AttendedDocument& document : documents) {
      for (std::size_t i = 0; i < config.ropes.size(); ++i)
        ropes_[i].turn(document.tokens_before, to + config.angles_before(i),
                       to + angles + config.angles_before(i));
      to += 2 * angles;
    }
}

// The embeddings and the angles, which may be there already; in pinned memory where a GPU has the
// first layer.
void Forward::take_inputs(StepContext* c) {
  const std::size_t n = c->tokens(), width = model_->config().width,
                    angles = model_->config().angles();
  float *cos = cos_.get(), *sin = sin_.get();
  float* const pinned = executors_.front()->pinned_inputs(*c);
  Ahead& ahead = ahead_[ahead_turn_];
  const Array<Token> tokens = std::exchange(ahead.tokens, {});
  const std::span<const Token> wanted = c->step.tokens;
  const bool is_there = pinned && ahead.position == c->store.tokens() &&
                        std::equal(tokens.begin(), tokens.end(), wanted.begin(), wanted.end());
  if (pinned) {
    c->x = is_there ? ahead.memory.get() : pinned;
    c->cos = cos = c->x + n * width, c->sin = sin = cos + n * angles;
    c->is_pinned = true;
  }
  if (!is_there) embed(*c, c->store.tokens(), cos, sin);
}

// The inputs of the next step, while the GPU computes this one. Without memory the next step makes
// them.
void Forward::embed_ahead(const StepContext& c, LayerExecutor* executor) try {
  const std::span<const Token> tokens = c.step.next;
  const std::size_t n = tokens.size(), width = model_->config().width,
                    angles = model_->config().angles(), floats = n * (width + 2 * angles);
  if (n <= max_alone) return;
  Ahead& ahead = ahead_[ahead_turn_ ^= 1];
  if (floats > ahead.floats) {
    ahead.floats = 0;
    if (!ahead.memory.allocate(model_->device_weights()[0].device(), floats, pool_).ok()) return;
    ahead.floats = floats;
  }
  float* const x = ahead.memory.get();
  ahead.position = c.store.tokens() + c.tokens();
  embed_tokens(c, tokens, ahead.position, {x, x + n * width, x + n * (width + angles)});
  ahead.tokens.assign(tokens.begin(), tokens.end());
  executor->bring_ahead(x, static_cast<uint32_t>(n));
} catch (const std::bad_alloc&) {
  ahead_[ahead_turn_].tokens.clear();
}

// Other tokens than the step's.
void Forward::embed_tokens(const StepContext& c, std::span<const Token> tokens, uint64_t position,
                           const Inputs& to) {
  ForwardStep part;
  part.tokens = tokens;
  const StepContext context{part, c.cancel, c.store, nullptr, nullptr, pool_, to.x};
  embed(context, position, to.cos, to.sin);
}

// x = E[tokens], or the step's inputs, and the angles of their positions, `position` the first.
void Forward::embed(const StepContext& c, uint64_t position, float* cos, float* sin) {
  constexpr uint32_t rows = 32;  // of a task
  const ModelConfig& config = model_->config();
  const uint32_t n = c.tokens(), width = config.width;
  pool_->run((n + rows - 1) / rows, [&](uint32_t task, uint32_t) {
    const uint32_t first = task * rows, end = std::min(n, first + rows);
    for (std::size_t i = 0; i < config.ropes.size(); ++i) {
      const Rope& rope = ropes_[i];
      const std::size_t at =
          std::size_t{n} * config.angles_before(i) + std::size_t{first} * (rope.dim() / 2);
      rope.angles(position + first, end - first, cos + at, sin + at);
    }
    for (uint32_t i = first; i < end; ++i) {
      float* x = c.x + std::size_t{i} * width;
      if (c.step.inputs && has_device_inputs()) continue;  // the GPU multiplies them first
      if (c.step.inputs) {
        std::copy_n(c.step.inputs + std::size_t{i} * width, width, x);
        continue;
      }
      cpu_kernels().dequantize_row(model_->weights().embedding,
                                   static_cast<uint32_t>(c.step.tokens[i]), x);
      if (config.embedding_scale != 1)
        for (uint32_t d = 0; d < width; ++d) x[d] *= config.embedding_scale;
    }
  });
}

// logits = W_out norm(x), of the tokens that the step names.
Status Forward::write_logits(const StepContext& c, LayerExecutor* executor) {
  const uint32_t wanted = c.step.logits_wanted(), first = c.tokens() - wanted;
  if (wanted == 0) return {};
  if (Token* const best = c.step.best) {
    const std::span<const Token> never = c.step.never_best;
    uint32_t found = 0;
    for (Token b; found < wanted; best[found++] = b)
      if (b = executor->best(found); b < 0 || std::binary_search(never.begin(), never.end(), b))
        break;
    if (found == wanted) return {};
    *best = -1;
  }
  const float* const finished = executor->finished_logits(wanted);
  if (!finished) RETURN_IF_ERROR(executor->logits(first, c.step.logits));
  const std::size_t vocabulary = model_->config().vocabulary;
  std::atomic<bool> finite{true};
  pool_->run(wanted, [&](uint32_t row, uint32_t) {
    if (c.cancel.fired()) return;
    const std::size_t at = row * vocabulary;
    const float* from = finished ? finished + at : nullptr;
    if (!finish_logits(from, {c.step.logits + at, vocabulary})) finite = false;
  });
  return c.cancel.fired() || finite ? Status() : not_a_number("the output");
}

bool Forward::last_logits(std::span<float> out) {
  return executors_.back()->last_logits(out.data()) && finish_logits(nullptr, out);
}

// Copies the logits of one token from `from`, unless that is null; their factor and cap follow.
// Returns whether all are finite. By pieces: one is read from memory once.
bool Forward::finish_logits(const float* from, std::span<float> row) const {
  constexpr std::size_t piece = 4096;
  const ModelConfig& config = model_->config();
  bool finite = true;
  for (std::size_t at = 0; at < row.size(); at += piece) {
    const std::span<float> part = row.subspan(at, std::min(piece, row.size() - at));
    if (from) std::copy_n(from + at, part.size(), part.data());
    if (config.logit_scale != 1)
      for (float& logit : part) logit *= config.logit_scale;
    if (config.final_softcap != 0)
      cpu_kernels().softcap(part.data(), config.final_softcap, part.size());
    finite &= all_finite(part);
  }
  return finite;
}

void Forward::commit(const StepContext& c, uint32_t kept) {
  const ForwardStep& step = c.step;
  KvStore& store = c.store;
  if (step.trace) step.trace->commit();
  for (const AttendedDocument& document : step.documents)
    if (document.trace) document.trace->commit();
  if (kept < c.tokens()) {
    if (step.queries) step.queries->keep_first(kept, c.tokens());
    store.keep_first(kept, c.tokens());
    if (c.windows) c.windows->keep_first(kept, c.tokens());
    for (const auto& executor : executors_) executor->keep_first(kept);
  }
  if (step.queries) step.queries->commit(store.tokens(), kept, pool_);
  const bool was_centred = !store.centre().empty();
  store.commit(kept, cpu_kernels(), pool_);
  if (c.windows) c.windows->commit(kept, cpu_kernels(), pool_);
  if (c.states) c.states->commit(kept);
  for (const auto& executor : executors_) executor->committed(c, kept);
  if (step.queries && !was_centred && !store.centre().empty())
    step.queries->centre(store.centre(), model_->config().kv_heads, store.shape().page.dim, pool_);
}

void Forward::end_text() {
  end_spans();
  for (const auto& executor : executors_) executor->end_text();
  ahead_[0] = {}, ahead_[1] = {};
}

void Forward::resize(uint32_t n) {
  if (n <= capacity_) return;
  const auto grow = [](Buffer<float>& array, std::size_t size) {
    array = {};  // never old and new together
    array = make_buffer<float>(size);
  };
  capacity_ = 0;
  grow(x_, std::size_t{n} * model_->config().width);
  grow(cos_, std::size_t{n} * model_->config().angles());
  grow(sin_, std::size_t{n} * model_->config().angles());
  layer_inputs_.resize(n);
  capacity_ = n;
}

}  // namespace kvasir
