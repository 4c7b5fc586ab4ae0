#include "session/drafter.h"

#include <algorithm>
#include <utility>

#include "engine/cpu_tasks.h"
#include "select/plan.h"

namespace kvasir {

// Rows that wait for each other; and of a step of them on a GPU, whose memory is planned for few.
constexpr std::size_t max_pending = 64, max_device_rows = 256;
// That a draft on a GPU reads, besides sinks and window. A wrong draft changes no answer.
constexpr uint64_t draft_budget_tokens = 512;

Status Drafter::create(const std::shared_ptr<const Model>& model, uint64_t context, bool selects,
                       ThreadPool* pool, std::unique_ptr<Drafter>* out, const Cancel* cancel) {
  std::shared_ptr<const MtpLayer> mtp;
  RETURN_IF_ERROR(MtpLayer::open(model, cancel, &mtp));
  std::unique_ptr<Drafter> drafter(new Drafter(mtp, selects, pool));
  const std::shared_ptr<const Model> layer(mtp, &mtp->layer);
  RETURN_IF_ERROR(Forward::create(layer, context, pool, &drafter->forward_));
  *out = std::move(drafter);
  return {};
}

Drafter::Drafter(std::shared_ptr<const MtpLayer> mtp, bool selects, ThreadPool* pool)
    : mtp_(std::move(mtp)), pool_(pool), products_(pool),
      sampler_({}, mtp_->whole->tokenizer().suppressed()), selects_(selects && on_gpu()) {
  products_.consider(mtp_->inputs.projection.w);
  products_.allocate();
  logits_.resize(mtp_->layer.config().vocabulary);
  last_.resize(mtp_->layer.config().width);
}

StoreShape Drafter::shape_of(const Model& model) {
  StoreShape shape = model.store_shape();
  shape.layers = 1;
  shape.drafts = true;
  return shape;
}

DraftState Drafter::make_state(uint64_t tokens, uint32_t window_tokens) const {
  DraftState state(KvStore(shape_of(mtp_->layer), window_tokens));
  state.store.drop_representatives();
  state.first = std::max<uint64_t>(1, tokens);
  return state;
}

// Keeps the rows of the first `at` tokens.
Status Drafter::cut(uint64_t at, DraftState* state) const {
  const std::size_t width = last_.size();
  if (at >= state->end() && at <= state->next_row()) {
    state->tokens.resize(at - state->end());
    state->hidden.resize(std::min(state->hidden.size(), (state->tokens.size() + 1) * width));
    return {};
  }
  const bool none = at <= state->first || at > state->next_row();
  if (none) state->store.cut(0);
  else RETURN_IF_ERROR(state->store.rewind(at - state->first, cpu_kernels()));
  if (none) state->first = std::max<uint64_t>(1, at);
  state->tokens.clear(), state->hidden.clear();
  return {};
}

Status Drafter::begin_step(uint64_t at, DraftState* state, ForwardStep* step) {
  const bool is_ahead = at == 0 || state->ahead == step->tokens[0];
  if (state->next_row() != at && !(state->next_row() == at + 1 && is_ahead))
    RETURN_IF_ERROR(cut(at, state));
  const std::size_t width = last_.size(), n = step->size();
  if (n > hidden_capacity_) {
    hidden_capacity_ = 0, hidden_ = {};  // never old and new together
    hidden_ = make_buffer<float>(n * width);
    hidden_capacity_ = step->size();
  }
  state->tokens.reserve(state->tokens.size() + n);
  state->hidden.reserve((state->tokens.size() + n + 1) * width);
  step->hidden = hidden_.get();
  at_ = at;
  return {};
}

Status Drafter::end_step(const ForwardStep& step, uint32_t kept, DraftState* state) {
  const std::size_t width = last_.size(), floats = state->hidden.size();
  const std::size_t known = state->next_row() - at_;  // 1 where the first token's row is there
  if (known == 0 && !state->knows_last(width)) state->hidden.resize(floats + width, 0.0f);
  state->tokens.insert(state->tokens.end(),
                       step.tokens.begin() + static_cast<std::ptrdiff_t>(known),
                       step.tokens.begin() + kept);
  state->hidden.insert(state->hidden.end(), step.hidden, step.hidden + kept * width);
  const bool ends_text = step.size() > 1 && !step.open && step.follows == 0;
  if (state->tokens.size() < max_pending && !ends_text) return {};
  Status s = compute_pending(step.cancel, state);
  if (!s.ok()) (void)cut(at_, state);
  return s;
}

Status Drafter::take(uint64_t at, const ForwardStep& tokens, const float* hidden,
                     DraftState* state) {
  ForwardStep step = tokens;
  RETURN_IF_ERROR(begin_step(at, state, &step));
  std::copy_n(hidden, step.size() * last_.size(), step.hidden);
  return end_step(step, step.size(), state);
}

void Drafter::note_last(uint64_t tokens, std::span<const float> hidden, DraftState* state) {
  if (state->next_row() == tokens && !state->knows_last(last_.size()))
    state->hidden.insert(state->hidden.end(), hidden.begin(), hidden.end());
}

// All but the newest token's `hidden` is used up.
Status Drafter::compute_pending(const Cancel* cancel, DraftState* state) {
  const std::size_t width = last_.size(), all = state->tokens.size();
  std::size_t done = 0;
  Status s;
  while (s.ok() && done < all) {
    const std::size_t n = on_gpu() ? std::min(all - done, max_device_rows) : all;
    s = run({std::span(state->tokens).subspan(done, n), state->hidden.data() + done * width},
            cancel, &state->store);
    if (s.ok()) done += n;
  }
  const auto rows = static_cast<std::ptrdiff_t>(done);
  state->tokens.erase(state->tokens.begin(), state->tokens.begin() + rows);
  state->hidden.erase(state->hidden.begin(),
                      state->hidden.begin() + rows * static_cast<std::ptrdiff_t>(width));
  return s;
}

Status Drafter::complete(uint64_t at, const Cancel* cancel, DraftState* state) {
  if (state->next_row() > at) RETURN_IF_ERROR(cut(at, state));
  return compute_pending(cancel, state);
}

Status Drafter::draft(uint64_t at, Token next, uint32_t count, const Cancel* cancel,
                      DraftState* state, Array<Token>* out) {
  const std::size_t width = last_.size();
  if (state->next_row() != at || !state->knows_last(width)) return {};
  // A GPU has graphs for as many rows as a step with drafts has.
  if (on_gpu() && state->tokens.size() >= ForwardStep::max_device_open_tokens)
    RETURN_IF_ERROR(compute_pending(cancel, state));
  RETURN_IF_ERROR(find_sketch(cancel, &state->store));
  Array<Token> with_next = state->tokens;
  with_next.push_back(next);
  state->ahead = -1;
  RETURN_IF_ERROR(run({with_next, state->hidden.data(), true}, cancel, &state->store));
  state->tokens.clear(), state->hidden.clear();
  state->ahead = next;
  std::optional<KvStore> chain;  // rows that follow from drafts go away
  for (uint32_t i = 0; i < count; ++i) {
    if (i > 0) {
      if (!chain) chain.emplace(state->store);
      RETURN_IF_ERROR(run({std::span(out->end() - 1, 1), last_.data(), true}, cancel, &*chain));
    }
    if (best_ < 0) RETURN_IF_ERROR(sampler_.sample(logits_, {}, &best_));
    out->push_back(best_);
  }
  return {};
}

// Where a draft is to select, the keys get their sketch; later rows are added to it.
Status Drafter::find_sketch(const Cancel* cancel, KvStore* store) {
  if (!selects_ || store->pages().pages() == 0 || store->sketch().is_current()) return {};
  ++sketches_;
  try {
    return store->build_sketch(nullptr, cpu_kernels(), pool_, cancel);
  } catch (const std::bad_alloc&) {
    return Status::error(Code::no_memory, "out of memory for the sketch of an MTP layer's keys");
  }
}

// joined_ = [norm(E[token]); norm(hidden)]
void Drafter::join(const Rows& rows) {
  const ModelConfig& config = mtp_->layer.config();
  const Kernels& kernels = cpu_kernels();
  const std::size_t width = config.width;
  const auto n = static_cast<uint32_t>(rows.tokens.size());
  if (n > capacity_) {
    capacity_ = 0, joined_ = {}, inputs_ = {};  // never old and new together
    joined_ = make_buffer<float>(n * 2 * width);
    inputs_ = make_buffer<float>(n * width);
    products_.resize(n, 2 * width);
    capacity_ = n;
  }
  pool_->run(n, [&](uint32_t i, uint32_t) {
    float* x = joined_.get() + i * 2 * width;
    kernels.dequantize_row(mtp_->layer.weights().embedding, static_cast<uint32_t>(rows.tokens[i]),
                           x);
    for (std::size_t d = 0; d < width; ++d) x[d] *= config.embedding_scale;
    kernels.rms_norm(x, mtp_->inputs.token_norm.weight.data(), config.norm_epsilon, 1, config.width,
                     x);
    kernels.rms_norm(rows.hidden + i * width, mtp_->inputs.hidden_norm.weight.data(),
                     config.norm_epsilon, 1, config.width, x + width);
  });
}

// Appends rows to a store.
Status Drafter::run(const Rows& rows, const Cancel* cancel, KvStore* store) {
  const auto n = static_cast<uint32_t>(rows.tokens.size());
  const CancelLatch latch(cancel);
  join(rows);
  if (!on_gpu()) {
    products_.begin(latch);
    products_.multiply(joined_.get(), n, static_cast<uint32_t>(2 * last_.size()),
                       {{&mtp_->inputs.projection, inputs_.get()}});
  }
  if (latch.fired()) return Status::error(Code::cancelled, "cancelled");
  ForwardStep step;
  step.tokens = rows.tokens;
  step.cancel = cancel;
  step.inputs = on_gpu() ? joined_.get() : inputs_.get();
  step.keys_only = !rows.drafts;
  if (rows.drafts) plan(*store, &step);
  RETURN_IF_ERROR(forward_->run(step, {*store}));
  for (const LayerRun& run : forward_->plan().runs) pinning_ += run.staging == Fallback::pinning;
  return {};
}

void Drafter::plan(const KvStore& store, ForwardStep* step) {
  step->want = ForwardStep::Logits::last;
  step->logits = logits_.data();
  step->hidden = last_.data();
  step->last_hidden = true;
  best_ = -1;
  if (!chooses_on_cpu_) step->best = &best_;
  step->never_best = mtp_->whole->tokenizer().suppressed();
  // On a GPU so few rows go the way of single tokens, which is faster.
  step->open = step->size() > 1 && on_gpu();
  if (!selects_ || (store.pages().pages() > 0 && !store.sketch().built())) return;
  SelectOptions options;
  options.strategy = "bounded";
  options.budget_tokens = draft_budget_tokens;
  step->plan = make_plan(options, store.sealed_tokens(), 1, {});
  if (!selector_) selector_ = step->plan.strategy->make();
  step->selector = selector_.get();
}

}  // namespace kvasir
