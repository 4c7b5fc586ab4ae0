#include "session/session.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <utility>

#include "base/checked.h"
#include "model/gpu_workspace.h"
#include "session/limits.h"

namespace kvasir {

constexpr uint32_t max_chunk = 4096;
// maximum bytes of full-precision rows of a default chunk
constexpr uint64_t window_budget = 64 << 20;

// Whether a chunk of so many tokens leaves the experts of a layer few tokens each: unpacking their
// weights takes the time of a dozen.
static bool has_idle_experts(const ModelConfig& config, uint32_t chunk) {
  constexpr uint64_t enough = 64;
  return std::any_of(config.layer_configs.begin(), config.layer_configs.end(),
                     [&](const LayerConfig& c) {
                       return uint64_t{chunk} * c.experts.used < enough * c.experts.count;
                     });
}

static uint32_t choose_chunk(const Model& model) {
  const StoreShape shape = model.store_shape(), windows = model.windows_shape();
  const auto floats = [](const StoreShape& s) {
    return uint64_t{s.heads_total()} * s.page.planes() * s.page.dim;
  };
  const uint64_t row = (floats(shape) + floats(windows)) * sizeof(float);
  uint32_t chunk = has_idle_experts(model.config(), 512) ? 1024 : 512;
  if (!model.device_weights().empty()) chunk = large_step;
  for (const DeviceWeights& weights : model.device_weights())
    chunk = std::min(chunk, weights.usual_step());
  const uint64_t most = window_budget * (chunk > 1024 ? 8 : chunk > 512 ? 4 : 1);
  while (chunk > 128 && chunk * row > most) chunk /= 2;
  return chunk;
}

static Status check_drafts(const SessionOptions& o) {
  if (o.lookup_tokens > SessionOptions::max_lookup_tokens)
    return Status::error(Code::bad_argument, "lookup_tokens is %u: use up to %u", o.lookup_tokens,
                         SessionOptions::max_lookup_tokens);
  if (o.draft_tokens > Drafter::max_tokens)
    return Status::error(Code::bad_argument, "draft_tokens is %u: use up to %u", o.draft_tokens,
                         Drafter::max_tokens);
  return {};
}

// Replaces options that are 0 by their defaults. Code::bad_argument names an option out of range.
Status Session::resolve(const Model& model, SessionOptions* o) {
  const uint64_t trained = model.config().context;
  if (o->context > trained)
    return Status::error(Code::bad_argument,
                         "context_tokens is %" PRIu64 ": the model was trained for %" PRIu64
                         " tokens",
                         o->context, trained);
  if (o->context == 0) o->context = trained;
  RETURN_IF_ERROR(resolve_threads_and_window(&o->threads, &o->window));
  if (o->prefill_chunk > max_chunk)
    return Status::error(Code::bad_argument, "prefill_chunk is %u: use up to %u", o->prefill_chunk,
                         max_chunk);
  if (o->prefill_chunk == 0) o->prefill_chunk = choose_chunk(model);
  o->memory.step_tokens = o->prefill_chunk;
  o->memory.reaper = model.reaper();
  o->memory.windows = model.windows_shape();
  o->memory.checkpoints = choose_checkpoints(model, o->window, o->memory.bytes);
  if (o->checkpoint_interval == 0) o->checkpoint_interval = choose_checkpoint_interval(model);
  if (const auto states = make_states(model.config(), o->memory.checkpoints))
    o->memory.states = states->max_bytes();
  RETURN_IF_ERROR(check_drafts(*o));
  if (o->draft_tokens > 0) {
    o->memory.drafts = Drafter::shape_of(model);
    o->memory.hidden_width = model.config().width;
  }
  RETURN_IF_ERROR(check_memory_budget(o->memory, o->full_precision));
  RETURN_IF_ERROR(check_read_options(o->read));
  RETURN_IF_ERROR(check_filter_layers(o->read.filter_layers, model.config().layers));
  if (o->instructions && o->instructions->size() > max_instructions)
    return Status::error(Code::bad_argument, "instructions has %zu bytes: use up to %zu",
                         o->instructions->size(), max_instructions);
  return check_select_options(o->select, model.config().layers,
                              model.store_shape().page.block_tokens);
}

namespace {
uint64_t checkpoint_bytes(const Model& model, uint32_t window_tokens) {
  return model.config().state_size() * sizeof(float) +
         KvStore::checkpoint_bytes(model.windows_shape(), window_tokens);
}
}  // namespace

// They may take half a gigabyte, or an eighth of the sequence's memory.
uint32_t choose_checkpoints(const Model& model, uint32_t window_tokens, uint64_t budget) {
  constexpr uint64_t room = 512 << 20, most = 32;
  const uint64_t bytes = checkpoint_bytes(model, window_tokens);
  if (bytes == 0) return 0;
  const uint64_t count = (budget > 0 ? std::min(room, budget / 8) : room) / bytes;
  return static_cast<uint32_t>(std::clamp<uint64_t>(count, 1, most));
}

uint64_t checkpoint_room(uint64_t page_bytes) {
  return std::max<uint64_t>(192 << 20, page_bytes / 20 * 3);
}

uint32_t checkpoints_of(const Model& model, uint32_t window_tokens, uint64_t tokens,
                        uint32_t most) {
  const uint64_t bytes = checkpoint_bytes(model, window_tokens);
  if (bytes == 0) return 0;
  const StoreShape& shape = model.store_shape();
  const uint64_t pages = tokens / shape.page.extent_tokens() * shape.slab_bytes();
  const uint64_t count = checkpoint_room(pages) / bytes;
  return static_cast<uint32_t>(std::clamp<uint64_t>(count, 1, std::max(1u, most)));
}

// A rewind prefills up to an interval again. Of intervals below a window, checkpoints would keep
// everything; of four windows, they take up to a quarter of it.
uint64_t choose_checkpoint_interval(const Model& model) {
  return std::max<uint64_t>(1024, 4 * model.windows_shape().window);
}

std::optional<KvStore> make_windows(const Model& model, uint32_t window_tokens,
                                    uint32_t checkpoints) {
  if (model.config().windows.layers == 0) return {};
  KvStore windows(model.windows_shape(), window_tokens);
  windows.limit_checkpoints({checkpoints});
  return windows;
}

std::optional<RecurrentState> make_states(const ModelConfig& config, uint32_t checkpoints) {
  if (config.recurrent_layers == 0) return {};
  return RecurrentState(config.recurrent_layers, config.recurrent.state_size(), checkpoints);
}

uint64_t SequenceState::resume_point(uint64_t position) const {
  for (uint64_t to = position;; position = to) {
    if (windows) to = windows->resume_point(to);
    if (states) to = states->resume_point(to);
    if (to == position) return to;
  }
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options,
                 SequenceState sequence)
    : model_(std::move(model)), options_(options), sequence_(std::move(sequence)) {}

Status Session::open(std::shared_ptr<const Model> model, const SessionOptions& options,
                     std::unique_ptr<Session>* out) {
  SessionOptions o = options;
  RETURN_IF_ERROR(resolve(*model, &o));
  KvStore store(model->store_shape(), o.full_precision ? KvStore::keep_all : o.window);
  if (!strategy_needs(o.select.strategy, StrategyInfo::needs_representatives))
    store.drop_representatives();
  RETURN_IF_ERROR(set_budget(&o, [&] { return store.set_budget(o.memory, 0); }));
  std::optional<KvStore> windows =
      make_windows(*model, store.window_tokens(), o.memory.checkpoints);
  SequenceState sequence(model->config(), model->chat(), std::move(store), std::move(windows),
                         make_states(model->config(), o.memory.checkpoints));
  std::unique_ptr<Session> session(new Session(std::move(model), o, std::move(sequence)));
  RETURN_IF_ERROR(session->start());
  *out = std::move(session);
  return {};
}

Status Session::start(const Cancel* cancel) {
  if (!pool_) {
    std::unique_ptr<ThreadPool> pool;
    RETURN_IF_ERROR(ThreadPool::create(options_.threads, &pool));
    pool_ = std::move(pool);
  }
  RETURN_IF_ERROR(Forward::create(model_, options_.context, pool_.get(), &forward_));
  forward_->force_spans(options_.span_tokens);
  if (options_.draft_tokens == 0 || options_.drafts_left_out) return {};
  const bool selects = options_.memory.bytes == 0;
  RETURN_IF_ERROR(
      Drafter::create(model_, options_.context, selects, pool_.get(), &drafter_, cancel));
  if (!sequence_.drafts)
    sequence_.drafts =
        drafter_->make_state(sequence_.tokens.size(), sequence_.store.window_tokens());
  return {};
}

Status Session::fork(std::unique_ptr<Session>* out) {
  fetch_logits();
  std::unique_ptr<Session> session(new Session(model_, options_, SequenceState(sequence_)));
  session->pool_ = pool_;
  session->pace_.begin_fork(pace_);
  session->no_drafter_room_ = no_drafter_room_;
  RETURN_IF_ERROR(session->start());
  *out = std::move(session);
  return {};
}

Status Session::set_select(const SelectOptions& select) {
  RETURN_IF_ERROR(check_select_options(select, model_->config().layers,
                                       sequence_.store.shape().page.block_tokens));
  if (sequence_.is_composed()) RETURN_IF_ERROR(check_composed_strategy(select));
  SelectOptions copy = select;  // an assignment that fails would change a part
  options_.select = std::move(copy);
  decode_.forget_plan();
  documents_planned_ = false;
  return {};
}

void Session::set_measure(CompareLevel compare, bool certify) {
  options_.compare = compare;
  options_.select.certify = certify;
}

void Session::log(int level, const char* message) const {
  if (options_.log) options_.log(level, message);
}

}  // namespace kvasir
