#include "engine/gpu_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/parallel_chunks.h"
#include "base/checked.h"

namespace kvasir {

static uint32_t count_experts(const ModelConfig& config, const DeviceWeights& layers) {
  uint32_t n = 0;
  for (uint32_t l = layers.first_layer(); l < layers.end_layer(); ++l)
    n += config.layer(l).has_experts();
  return n;
}

GpuExecutor::KvLayers GpuExecutor::kv_layers(const ModelConfig& config,
                                             const DeviceWeights& weights, bool windowed) {
  KvLayers out;
  for (uint32_t l = weights.first_layer(); l < weights.end_layer(); ++l) {
    const LayerConfig& c = config.layer(l);
    if (!c.has_attention() || c.is_windowed() != windowed || !c.writes_kv) continue;
    if (out.count++ == 0) out.first = c.kv;
  }
  return out;
}

GpuExecutor::KvLayers GpuExecutor::state_layers(const ModelConfig& config,
                                                const DeviceWeights& weights) {
  KvLayers out;
  for (uint32_t l = weights.first_layer(); l < weights.end_layer(); ++l)
    if (config.layer(l).is_recurrent() && out.count++ == 0) out.first = config.layer(l).state;
  return out;
}

GpuExecutor::GpuExecutor(const Model& model, int number, HostAttention* attention,
                         std::unique_ptr<WeightStream> streamed)
    : LayerExecutor(model.device_weights()[static_cast<std::size_t>(number)].first_layer(),
                    model.device_weights()[static_cast<std::size_t>(number)].end_layer()),
      model_(model), config_(model.config()), size_(workspace_widths_of(config_, model.weights())),
      number_(number), weights_(model.device_weights()[static_cast<std::size_t>(number)]),
      streamed_(std::move(streamed)), kv_(kv_layers(config_, weights_, false)),
      windows_kv_(kv_layers(config_, weights_, true)), device_(weights_.device()),
      ops_(device_->kernels()), host_(attention), graphs_(ops_, max_alone * graph_parts()),
      kept_halves_(device_),
      has_experts_(expert_widths_of(config_, model.weights(), false).has_experts),
      waits_for_experts_(!streamed_ && count_experts(config_, weights_) > weights_.expert_layers()),
      experts_size_(
          expert_widths_of(config_, model.weights(), streamed_ || weights_.expert_layers() > 0)),
      states_(device_, config_, state_layers(config_, weights_).first,
              state_layers(config_, weights_).count),
      windows_(device_, config_, windows_kv_.first, streamed_ ? 1 : windows_kv_.count),
      selective_(device_, weights_.sketches(), config_, model.store_shape(), kv_.first, kv_.count),
      hybrid_(device_, weights_.sketches(), config_, model.store_shape(), kv_.first, kv_.count),
      prefill_attention_(device_, config_, model.store_shape(), kv_.first,
                         streamed_ ? 1 : kv_.count) {
  if (streamed_) return;  // begin_layer() follows
  attention_number_.push_back(0);
  for (uint32_t l = first_layer(); l < end_layer(); ++l) {
    const LayerConfig& c = config_.layer(l);
    attention_number_.push_back(attention_number_.back() + c.has_attention());
    if (!c.has_attention()) continue;
    if (c.is_windowed() && !c.writes_kv) last_sharing_ = l;
    if (c.is_windowed() && c.writes_kv && config_.shares_kv()) source_ = l;
  }
  if (last_sharing_ == no_layer) source_ = no_layer;
  std::vector<const float*> sinks;  // [kv_.count], null: none; or empty
  bool any_sinks = false;
  for (uint32_t l = first_layer(); l < end_layer(); ++l) {
    const LayerConfig& c = config_.layer(l);
    if (!c.has_attention() || c.is_windowed() || !c.writes_kv) continue;
    sinks.push_back(weights_.layers()[local(l)].sinks.get());
    any_sinks |= sinks.back() != nullptr;
  }
  if (!any_sinks) sinks.clear();
  selective_.set_sink_logits(sinks), hybrid_.set_sink_logits(sinks);
  prefill_attention_.set_sink_logits(std::move(sinks));
}

GpuExecutor::~GpuExecutor() {
  if (stream_) (void)ops_.wait(stream_);
  forget_graphs();
  const auto close = [&](DeviceStream* stream) {
    if (stream) (void)ops_.wait(stream), (void)ops_.close_stream(stream);
  };
  close(stream_), close(copies_);
  std::for_each(deliveries_.begin(), deliveries_.end(), close);
}

Status GpuExecutor::open() {
  RETURN_IF_ERROR(bad_layer_.allocate(device_, 1));
  RETURN_IF_ERROR(device_->status(ops_.open_stream(device_->context(), &copies_), "a stream"));
  return device_->status(ops_.open_stream(device_->context(), &stream_), "a stream");
}

Status GpuExecutor::plan(const StepContext& c, const Request& request, LayerRun* run) {
  mode_ = AttentionMode::cpu, keeps_halves_ = false;
  pool_threads_ = c.pool->threads();
  if (c.tokens() > capacity_) RETURN_IF_ERROR(catch_up());
  Fallback why = request.why;
  // What a step cannot do without comes first.
  RETURN_IF_ERROR(resize(std::max(c.tokens(), KvMirror::max_tokens)));
  RETURN_IF_ERROR(plan_states(c));
  RETURN_IF_ERROR(plan_windows(c, &why));
  HostAttention::GpuWork work = request.gpu;
  if (windows_kv_.count > 0 && !has_windows_) work = HostAttention::GpuWork::none;  // no room
  if (config_.attention_softcap != 0 && kv_.count > 0)
    work = HostAttention::GpuWork::none, why = Fallback::capped_scores;
  if (config_.shares_kv() && kv_.count > 0)
    work = HostAttention::GpuWork::none, why = Fallback::shared_keys;
  if (kv_.count == 0 || c.step.keys_only) work = HostAttention::GpuWork::none;
  switch (work) {
    case HostAttention::GpuWork::none:
      if (!streamed_) trim();
      break;
    case HostAttention::GpuWork::prefill:
      RETURN_IF_ERROR(plan_prefill(c, &why));
      break;
    case HostAttention::GpuWork::decode:
      RETURN_IF_ERROR(plan_decode(c, &why));
      break;
  }
  if (mode_ != AttentionMode::gpu_prefill) RETURN_IF_ERROR(catch_up());
  const bool hybrid = mode_ == AttentionMode::co_execution;
  run->attention = mode_;
  run->fallback = why;
  run->staging = why == Fallback::pinning ? why : staging();
  run->has_experts = has_experts_;
  run->experts_end = streamed_ ? config_.depth() : weights_.experts_end();
  run->streamed_layers = streamed_ ? streamed_->streamed_layers() : 0;
  run->has_windows = windows_kv_.count > 0;
  run->windows_executor = has_windows_ ? number_ : on_cpu;
  run->share = hybrid ? hybrid_.share() : std::string();
  SegmentFacts facts{.attention = mode_, .executor = number_, .chosen = !c.attends_everything()};
  if (mode_ == AttentionMode::gpu_prefill) facts.chosen = c.step.plan.by_blocks;
  facts.has_pages = c.store.pages().pages() > 0;
  facts.mapped = c.store.pages().mapped_bytes() > 0;
  facts.staged = run->staging != Fallback::none;
  facts.gpu_sixteenths = hybrid ? hybrid_.sixteenths() : 0;
  run->segments = kv_.count > 0 ? segments_of(facts) : std::vector<Segment>();
  return {};
}

Status GpuExecutor::plan_decode(const StepContext& c, Fallback* why) {
  RETURN_IF_ERROR(plan_selective(c, why));
  if (mode_ != AttentionMode::co_execution || !hybrid_.needs_rate(pool_threads_)) return {};
  RETURN_IF_ERROR(measure_rate(c));
  if (hybrid_.needs_rate(pool_threads_)) return {};  // there are too few pages
  return plan_selective(c, why);                     // how the pages are shared is known now
}

Status GpuExecutor::measure_rate(const StepContext& c) {
  double rate = 0;
  RETURN_IF_ERROR(host_->page_rate(c, kv_.first, kv_.first + kv_.count, &rate));
  if (c.cancel.fired() || rate == 0) return {};
  return hybrid_.measure(rate, pool_threads_, c.cancel, stream_);
}

// Why the CPU stages or attends pages that the GPU could read.
Fallback GpuExecutor::staging() const {
  if (mode_ != AttentionMode::gpu_selective && mode_ != AttentionMode::co_execution)
    return Fallback::none;
  const bool hybrid = mode_ == AttentionMode::co_execution;
  if (hybrid ? hybrid_.reads() : !selective_.needs_staging()) return Fallback::none;
  const Fallback cannot = hybrid ? hybrid_.cannot_read() : selective_.cannot_share();
  return cannot != Fallback::none ? cannot : Fallback::pinning;
}

Status GpuExecutor::begin(const StepContext& c) {
  step_ = &c, n_ = c.tokens(), open_ = c.step.open, rows_ = rows_of(c), error_ = 0;
  replays_ = records_ = finds_best_ = logits_stay_ = false;
  logits_ = hidden_ = 0, undelivered_ = first_layer();
  RETURN_IF_ERROR(resize(n_));
  if (span_x_) make_second_stream(0);
  if (waits_for_experts_) RETURN_IF_ERROR(resize_experts(n_));
  forget_moved_graphs();
  if (!is_behind_) *bad_layer_.get() = no_layer;
  // large; the buffer is unused so far
  float* const small = c.is_pinned ? nullptr : small_inputs();
  const bool by_host =
      small || (!c.is_pinned && n_ * (size_.width + 2 * size_.angles) <= prefill_host_room_);
  float* const pinned = small ? small : by_host ? prefill_host_.get() : nullptr;
  if (pinned) keep_inputs(pinned);
  // A copy in a graph takes less of the CPU's time than one that is enqueued alone.
  graph_uploads_ =
      small && !weights_.inputs().w.data && mode_ == AttentionMode::gpu_selective && records_step();
  if (!graph_uploads_) RETURN_IF_ERROR(enqueue_inputs(pinned, small != nullptr));
  if (has_windows_) enqueue(windows_.begin(c.windows->tokens(), stream_));
  std::vector<float> factors, staged;  // until the wait
  if (config_.temperature.scale != 0) {
    factors.resize(n_);
    for (uint32_t i = 0; i < n_; ++i) factors[i] = config_.temperature.at(c.position() + i);
    enqueue(ops_.upload(stream_, work_.factors, factors.data(), n_ * sizeof(float)));
  }
  if (config_.layer_input > 0) enqueue_layer_inputs(&staged);
  if (!(by_host || c.is_pinned) || !factors.empty() || !staged.empty())
    RETURN_IF_ERROR(wait("a step"));
  switch (mode_) {
    case AttentionMode::cpu:
      return c.step.keys_only ? Status() : resize_host(n_);
    case AttentionMode::gpu_prefill:
      return {};
    case AttentionMode::gpu_selective:
      RETURN_IF_ERROR(prepare_output());
      selective_.begin(attends_last() ? rows_ - 1 : 0);
      if (records_step()) begin_recording(step_part());
      if (graph_uploads_ && !replays_) RETURN_IF_ERROR(enqueue_inputs(small, true));
      return {};
    case AttentionMode::co_execution:
      RETURN_IF_ERROR(prepare_output());
      hybrid_.begin(c.store, c.pool, stream_, copies_);
      return {};
  }
  return {};
}

// Copies the residual stream and the angles to pinned memory, one after another.
void GpuExecutor::keep_inputs(float* pinned) {
  const StepContext& c = *step_;
  const std::size_t x = n_ * size_.width, angles = n_ * size_.angles;
  if (!c.step.inputs || !weights_.inputs().w.data) parallel_copy(c.x, x, pinned, c.pool);
  parallel_copy(c.cos, angles, pinned + x, c.pool);
  parallel_copy(c.sin, angles, pinned + x + angles, c.pool);
}

// Uploads what each step has for itself. pinned: null, or where keep_inputs() has put it.
// has_more: there is room for the inputs behind it.
Status GpuExecutor::enqueue_inputs(float* pinned, bool has_more) {
  const StepContext& c = *step_;
  const std::size_t x = n_ * size_.width, angles = n_ * size_.angles;
  if (!is_behind_)
    enqueue(ops_.upload(stream_, work_.first_bad, bad_layer_.get(), sizeof(uint32_t)));
  const auto upload = [&](float* to, const float* from, std::size_t n, std::size_t at) {
    enqueue(ops_.upload(stream_, to, pinned ? pinned + at : from, n * sizeof(float)));
  };
  if (c.step.inputs && weights_.inputs().w.data)
    RETURN_IF_ERROR(enqueue_joined(has_more ? pinned + x + 2 * angles : nullptr));
  else if (moves_stream()) enqueue_stream();
  else if (!takes_stream()) upload(work_.x, c.x, x, 0);
  upload(work_.cos, c.cos, angles, x);
  upload(work_.sin, c.sin, angles, x + angles);
  if (moves_stream()) enqueue_next_stream();
  if (states_.layers() > 0) enqueue(states_.begin(stream_));
  if (mode_ == AttentionMode::gpu_selective) enqueue(selective_.enqueue_counts(stream_));
  // With addresses of the last step a kernel would write to the sequence's own state.
  return device_->status(error_, "a step's inputs");
}

// x = W inputs + b. pinned: null, or room for the inputs.
Status GpuExecutor::enqueue_joined(float* pinned) {
  const DeviceWeights::Matrix& w = weights_.inputs();
  const std::size_t bytes = joined_bytes(w.w.cols, n_);
  if (bytes > joined_.bytes()) RETURN_IF_ERROR(joined_.allocate(device_, bytes, "a step's inputs"));
  DeviceActivations x = joined_inputs(joined_.get(), w.w.cols, n_);
  const bool floats = tensor_type_info(w.w.type)->block_elements == 1;
  const std::size_t count = std::size_t{n_} * x.cols;
  const float* from = pinned ? pinned : step_->step.inputs;
  if (pinned) std::copy_n(step_->step.inputs, count, pinned);
  enqueue(ops_.upload(stream_, x.f32, from, count * sizeof(float)));
  if (floats) x.q = nullptr, x.scale = nullptr, x.sums = nullptr;
  enqueue(ops_.quantize(stream_, x, check(first_layer())));
  multiply(x, {{&w, work_.x}});
  return {};
}

// Uploads what each layer gets of each token: [depth][n][size].
void GpuExecutor::enqueue_layer_inputs(std::vector<float>* staged) {
  const std::size_t size = config_.layer_input, depth = config_.depth();
  staged->resize(depth * n_ * size);
  for (std::size_t t = 0; t < n_; ++t)
    for (std::size_t l = 0; l < depth; ++l)
      std::copy_n(step_->layer_inputs + (t * depth + l) * size, size,
                  staged->data() + (l * n_ + t) * size);
  enqueue(ops_.upload(stream_, work_.layer_inputs, staged->data(), staged->size() * sizeof(float)));
}

Status GpuExecutor::mixer(uint32_t layer) {
  if (step_->step.keys_only) return keep_keys(layer);
  if (!has_attention(layer)) return mix_without_attention(layer);
  if (attends_window(layer)) return mix_window(layer);
  RETURN_IF_ERROR(project(layer));
  return attend(layer);
}

// q, k, v = RoPE(W norm(x))
Status GpuExecutor::project(uint32_t layer) {
  switch (mode_) {
    case AttentionMode::cpu:
      return project_for_cpu(layer);
    case AttentionMode::co_execution:
      return project_hybrid(layer);
    case AttentionMode::gpu_selective:
      if (!replays_) enqueue_attended(layer);
      return {};
    case AttentionMode::gpu_prefill:
      return project_prefill(layer);
  }
  return {};
}

// Keys and values go to the store, and the layer computes nothing else.
Status GpuExecutor::keep_keys(uint32_t layer) {
  const std::size_t floats = 2 * std::size_t{n_} * config_.layer(layer).kv_width();
  if (floats > keys_host_room_) {
    keys_host_room_ = 0;
    RETURN_IF_ERROR(keys_host_.allocate(device_, floats));
    keys_host_room_ = floats;
  }
  enqueue_projection(layer, work_.qkv);
  float* const k = keys_host_.get();
  enqueue(ops_.download(stream_, k, projected(layer, work_.qkv).k, floats * sizeof(float)));
  enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  RETURN_IF_ERROR(wait("a layer"));
  step_->store.write(config_.layer(layer).kv, n_, k, k + floats / 2,
                     n_ > 1 ? step_->pool : nullptr);
  return {};
}

Status GpuExecutor::attend(uint32_t layer) {
  switch (mode_) {
    case AttentionMode::cpu:
      return attend_on_cpu(layer);
    case AttentionMode::gpu_selective:
      return attend_selective(layer);
    case AttentionMode::co_execution:
      return attend_hybrid(layer);
    case AttentionMode::gpu_prefill:
      return attend_prefill(layer);
  }
  return {};
}

Status GpuExecutor::end() {
  if (step_->step.keys_only) return {};
  Status s;
  switch (mode_) {
    case AttentionMode::cpu:
      s = end_on_cpu();
      break;
    case AttentionMode::gpu_selective:
      s = end_selective();
      break;
    case AttentionMode::co_execution:
      s = end_hybrid();
      break;
    case AttentionMode::gpu_prefill:
      s = end_prefill();
      break;
  }
  if (!s.ok() || step_->cancel.fired()) return s;
  if (has_end()) return step_->step.hidden ? write_hidden() : Status();
  if (moves_stream()) return end_chunk();
  enqueue(ops_.download(stream_, step_->x, work_.x, n_ * size_.width * sizeof(float)));
  return wait("a step");
}

// What the output matrix multiplies for each token, where it has not come with the step.
Status GpuExecutor::write_hidden() {
  float* const out = step_->step.hidden;
  const uint32_t wanted = step_->step.hidden_wanted();
  if (hidden_ == wanted)
    return std::copy_n(host_hidden_.get(), wanted * size_.width, out), Status();
  const DeviceActivations normed{wanted, config_.width, work_.h};
  const float* x = work_.x + (n_ - wanted) * size_.width;
  enqueue_norm(x, weights_.output_norm(), check(end_layer() - 1), normed);
  enqueue(ops_.download(stream_, out, work_.h, wanted * size_.width * sizeof(float)));
  return wait("the output");
}

void GpuExecutor::committed(const StepContext& c, uint32_t kept) {
  const KvStore& store = c.store;
  logits_stay_ = logits_ == 1 && best(0) >= 0;
  if (has_windows_) windows_.committed(*c.windows);
  switch (mode_) {
    case AttentionMode::cpu:
      break;
    case AttentionMode::gpu_selective:
      selective_.committed(store, kept);
      break;
    case AttentionMode::co_execution:
      hybrid_.committed(store, kept);
      break;
    case AttentionMode::gpu_prefill:
      prefill_attention_.committed(store);
      break;
  }
}

Status GpuExecutor::logits(uint32_t first, float* out) {
  for (uint32_t at = first; at < n_ && !step_->cancel.fired(); at += logit_rows) {
    const uint32_t n = std::min(logit_rows, n_ - at);
    enqueue_logits(at, n);
    float* to = out + (at - first) * size_.vocabulary;
    enqueue(ops_.download(stream_, to, work_.logits, n * size_.vocabulary * sizeof(float)));
    RETURN_IF_ERROR(wait("the output"));
  }
  return {};
}

// ---- work of the stream ------------------------------------------------------------------------

Status GpuExecutor::wait(const char* what, DeviceStream* stream) {
  stream = stream ? stream : stream_;
  enqueue(ops_.wait(stream));
  if (error_) (void)ops_.wait(stream);  // nothing is on its way to memory that may go now
  RETURN_IF_ERROR(device_->status(std::exchange(error_, 0), what));
  RETURN_IF_ERROR(std::exchange(experts_status_, Status()));
  if (*bad_layer_.get() == no_layer) return {};
  return not_a_number("layer " + std::to_string(*bad_layer_.get()));
}

void GpuExecutor::begin_recording(uint32_t part) {
  const GpuGraphs::Turn turn = graphs_.begin(stream_, graph_of(part), graph_wait(), &error_);
  records_ = turn == GpuGraphs::Turn::recorded;
  replays_ = turn == GpuGraphs::Turn::launched;
}

// Where no graph was made, the step's work is enqueued once more.
void GpuExecutor::end_recording() {
  if (!std::exchange(records_, false)) return;
  if (graphs_.end(stream_, graph_of(step_part()), &error_)) return;
  if (graph_uploads_) (void)enqueue_inputs(small_inputs_.get(), true);  // fails in joined ones only
  for (uint32_t l = first_layer(); l < end_layer(); ++l) {
    enqueue_attended(l);
    if (attends_window(l)) enqueue_window(l, attended(l), work_.a);
    else if (has_attention(l)) (void)attend_selective(l);  // fails in staging only
  }
  enqueue_end();
}

void GpuExecutor::enqueue_attended(uint32_t layer) {
  if (layer > first_layer()) enqueue_rest(layer - 1);
  enqueue_projection(layer, attended(layer));
}

void GpuExecutor::enqueue_rest(uint32_t layer) {
  const LayerConfig& c = config_.layer(layer);
  if (!c.has_attention() || c.gates_output || attends_window(layer))
    check_and_feed_forward(layer, work_.a);
  else enqueue_feed_forward(layer, output_of(layer, work_.a));
}

// After the last layer's attention, where a GPU attended the step.
void GpuExecutor::enqueue_end() {
  of_last_rows(attends_last() ? n_ - 1 : 0, [&] { enqueue_rest(end_layer() - 1); });
}

// Queries, keys and values come to host memory.
void GpuExecutor::enqueue_kept(DeviceStream* stream) {
  enqueue(ops_.download(stream, attended_host_.get(), attended_.get(),
                        attention_number_.back() * attended_floats() * sizeof(float)));
  enqueue(ops_.download(stream, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
}

void GpuExecutor::enqueue_output() {
  if (logits_ == 0) return;
  enqueue_logits(n_ - logits_, logits_, hidden_ > 0);
  if (finds_best_) {
    enqueue(ops_.find_largest(stream_, work_.logits, logits_, size_.vocabulary, best_.get()));
    enqueue(ops_.download(stream_, host_best_.get(), best_.get(), logits_ * best_bytes));
  } else {
    enqueue(ops_.download(stream_, host_logits_.get(), work_.logits,
                          logits_ * size_.vocabulary * sizeof(float)));
  }
  if (hidden_ > 0)
    enqueue(
        ops_.download(stream_, host_hidden_.get(), work_.h, hidden_ * size_.width * sizeof(float)));
}

// What a decode step that a GPU attended leaves goes to the store.
Status GpuExecutor::finish_decode() {
  const bool hybrid = mode_ == AttentionMode::co_execution;
  // Few rows take less time than threads take to wake up.
  constexpr std::size_t few = 16;
  ThreadPool* const pool = n_ * attention_number_.back() <= few ? nullptr : step_->pool;
  run_tasks(pool, layers(), [&](uint32_t i, uint32_t) {
    const uint32_t layer = first_layer() + i;
    if (!has_attention(layer)) return;
    const auto [q, k, v] = projected(layer, attended_host_.get() + attended_at(layer));
    const float* lse = nullptr;
    if (!config_.layer(layer).is_windowed())
      lse = hybrid ? hybrid_.lse_of(local_kv(layer)) : selective_.lse_of(local_kv(layer));
    host_->keep(*step_, layer, {.q = q, .k = k, .v = v, .lse = lse});
  });
  return {};
}

Status make_gpu_executor(const Model& model, int number, HostAttention* attention,
                         std::unique_ptr<LayerExecutor>* out) {
  auto executor = std::make_unique<GpuExecutor>(model, number, attention);
  RETURN_IF_ERROR(executor->open());
  *out = std::move(executor);
  return {};
}

}  // namespace kvasir
