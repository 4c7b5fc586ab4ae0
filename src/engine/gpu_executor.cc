#include "engine/gpu_executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/parallel_chunks.h"
#include "base/checked.h"

namespace kvasir {

static bool have_experts(const ModelConfig& config, const DeviceWeights& layers) {
  for (uint32_t l = layers.first_layer(); l < layers.end_layer(); ++l)
    if (config.layer(l).has_experts()) return true;
  return false;
}

GpuExecutor::GpuExecutor(const Model& model, int number, HostAttention* attention)
    : LayerExecutor(model.device_weights()[static_cast<std::size_t>(number)].first_layer(),
                    model.device_weights()[static_cast<std::size_t>(number)].end_layer()),
      model_(model), config_(model.config()), size_(widths_of(config_)), number_(number),
      weights_(model.device_weights()[static_cast<std::size_t>(number)]),
      device_(weights_.device()), ops_(device_->kernels()), host_(attention),
      graphs_(ops_, 3 * std::size_t{layers()} + 3), has_experts_(have_experts(config_, weights_)),
      selective_(device_, weights_.sketches(), config_, model.store_shape(), first_layer(),
                 layers()),
      hybrid_(device_, weights_.sketches(), config_, model.store_shape(), first_layer(), layers()),
      prefill_attention_(device_, config_, model.store_shape(), first_layer(), layers()) {}

GpuExecutor::~GpuExecutor() {
  if (stream_) (void)ops_.wait(stream_);
  forget_graphs();
  for (DeviceStream* stream : {stream_, copies_})
    if (stream) (void)ops_.wait(stream), (void)ops_.close_stream(stream);
}

Status GpuExecutor::open() {
  RETURN_IF_ERROR(bad_layer_.allocate(device_, 1));
  RETURN_IF_ERROR(device_->status(ops_.open_stream(device_->context(), &copies_), "a stream"));
  return device_->status(ops_.open_stream(device_->context(), &stream_), "a stream");
}

Status GpuExecutor::plan(const StepContext& c, const Request& request, LayerRun* run) {
  mode_ = AttentionMode::cpu;
  pool_threads_ = c.pool->threads();
  Fallback why = request.why;
  switch (request.gpu) {
    case HostAttention::GpuWork::none:
      trim();
      break;
    case HostAttention::GpuWork::prefill:
      RETURN_IF_ERROR(plan_prefill(c, &why));
      break;
    case HostAttention::GpuWork::decode:
      RETURN_IF_ERROR(plan_decode(c, &why));
      break;
  }
  const bool hybrid = mode_ == AttentionMode::co_execution;
  run->attention = mode_;
  run->fallback = why;
  run->staging = staging();
  run->experts_on_cpu = has_experts_;
  run->share = hybrid ? hybrid_.share() : std::string();
  SegmentFacts facts{.attention = mode_, .executor = number_, .chosen = !c.attends_everything()};
  facts.has_pages = c.store.pages().pages() > 0;
  facts.mapped = c.store.pages().mapped_bytes() > 0;
  facts.staged = run->staging != Fallback::none;
  facts.gpu_sixteenths = hybrid ? hybrid_.sixteenths() : 0;
  run->segments = segments_of(facts);
  return {};
}

Status GpuExecutor::plan_decode(const StepContext& c, Fallback* why) {
  RETURN_IF_ERROR(plan_selective(c, why));
  if (mode_ != AttentionMode::co_execution || !hybrid_.needs_rate(pool_threads_)) return {};
  RETURN_IF_ERROR(measure_rate(c));
  return plan_selective(c, why);  // how the pages are shared is known now
}

Status GpuExecutor::measure_rate(const StepContext& c) {
  double rate = 0;
  RETURN_IF_ERROR(host_->page_rate(c, first_layer(), end_layer(), &rate));
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

void GpuExecutor::trim() {
  release_prefill();
  selective_.trim(), hybrid_.trim();
}

Status GpuExecutor::begin(const StepContext& c) {
  step_ = &c, n_ = c.tokens();
  error_ = 0;
  replays_ = records_ = has_logits_ = false;
  RETURN_IF_ERROR(resize(n_));
  if (has_experts_) RETURN_IF_ERROR(resize_experts(n_));
  *bad_layer_.get() = no_layer;
  enqueue(ops_.upload(stream_, work_.first_bad, bad_layer_.get(), sizeof(uint32_t)));
  const std::size_t x = n_ * size_.width, angles = n_ * size_.angles;
  const bool by_host = x + 2 * angles <= prefill_host_room_;  // large; the buffer is unused so far
  const auto upload = [&](float* to, const float* from, std::size_t n, std::size_t at) {
    if (by_host) {
      parallel_copy(from, n, prefill_host_.get() + at, c.pool);
      from = prefill_host_.get() + at;
    }
    enqueue(ops_.upload(stream_, to, from, n * sizeof(float)));
  };
  upload(work_.x, c.x, x, 0);
  upload(work_.cos, c.cos, angles, x);
  upload(work_.sin, c.sin, angles, x + angles);
  if (!by_host) RETURN_IF_ERROR(wait("a step"));
  switch (mode_) {
    case AttentionMode::cpu:
      return resize_host(n_);
    case AttentionMode::gpu_prefill:
      return {};
    case AttentionMode::gpu_selective:
      RETURN_IF_ERROR(prepare_output());
      selective_.begin();
      if (records_step()) begin_recording(layers() + (has_logits_ ? 2 : 1));
      return {};
    case AttentionMode::co_execution:
      RETURN_IF_ERROR(prepare_output());
      hybrid_.begin(c.store, c.pool, stream_, copies_);
      return {};
  }
  return {};
}

Status GpuExecutor::mixer(uint32_t layer) {
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
      if (layer > first_layer()) check_and_feed_forward(layer - 1, prefill_output(layer - 1));
      enqueue_projection(layer, prefill_slot(layer));
      return {};
  }
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
  if (weights_.has_output()) return {};
  enqueue(ops_.download(stream_, step_->x, work_.x, n_ * size_.width * sizeof(float)));
  return wait("a step");
}

// What is under way goes to memory that others may get.
void GpuExecutor::abandon() noexcept {
  if (records_) {
    records_ = false;
    graphs_.abandon(stream_);
  }
  wait_for_streams();
  error_ = 0;
  experts_status_ = Status();
}

void GpuExecutor::committed(const KvStore& store) {
  switch (mode_) {
    case AttentionMode::cpu:
      break;
    case AttentionMode::gpu_selective:
      selective_.committed(store);
      break;
    case AttentionMode::co_execution:
      hybrid_.committed(store);
      break;
    case AttentionMode::gpu_prefill:
      prefill_attention_.committed(store);
      break;
  }
}

Status GpuExecutor::logits(uint32_t first, float* out) {
  if (has_logits_ && first + 1 == n_)
    return std::copy_n(host_logits_.get(), size_.vocabulary, out), Status();
  for (uint32_t at = first; at < n_ && !step_->cancel.fired(); at += logit_rows) {
    const uint32_t n = std::min(logit_rows, n_ - at);
    enqueue_logits(at, n);
    float* to = out + (at - first) * size_.vocabulary;
    enqueue(ops_.download(stream_, to, work_.logits, n * size_.vocabulary * sizeof(float)));
    RETURN_IF_ERROR(wait("the output"));
  }
  return {};
}

// ---- attention on the CPU ----------------------------------------------------------------------

Status GpuExecutor::project_for_cpu(uint32_t layer) {
  const std::size_t floats = n_ * (size_.q + 2 * size_.kv);
  as_graph(local(layer), [&] {
    if (layer > first_layer()) complete_before(layer);
    enqueue_projection(layer, work_.qkv);
    enqueue(ops_.download(stream_, host_qkv_.get(), work_.qkv, floats * sizeof(float)));
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  });
  return wait("a layer");
}

Status GpuExecutor::attend_on_cpu(uint32_t layer) {
  const float *q = host_qkv_.get(), *k = q + n_ * size_.q, *v = k + n_ * size_.kv;
  host_->write(*step_, layer, {.q = q, .k = k, .v = v});
  return host_->attend(*step_, layer, q, host_a_.get());
}

Status GpuExecutor::end_on_cpu() {
  as_graph(layers(), [&] {
    complete_before(end_layer());
    enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  });
  return wait("a step");
}

// The rest of the layer before this one. The CPU has attended it.
void GpuExecutor::complete_before(uint32_t layer) {
  enqueue(ops_.upload(stream_, work_.a, host_a_.get(), n_ * size_.q * sizeof(float)));
  check_and_feed_forward(layer - 1, work_.a);
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
  records_ = graphs_.begin(stream_, part, &error_);
  replays_ = !records_;
}

// Where no graph was made, the step's work is enqueued once more.
void GpuExecutor::end_recording() {
  if (!std::exchange(records_, false)) return;
  if (graphs_.end(stream_, layers() + (has_logits_ ? 2 : 1), &error_)) return;
  for (uint32_t l = first_layer(); l < end_layer(); ++l) {
    enqueue_attended(l);
    (void)attend_selective(l);  // fails in staging only
  }
  enqueue(selective_.enqueue_results(stream_));
  enqueue_results();
}

// q, k and v go to qkv, one after another. The check is of the layer's input, which the layer
// before made.
void GpuExecutor::enqueue_projection(uint32_t layer, float* qkv) {
  const DeviceWeights::Layer& w = weights_.layers()[local(layer)];
  float *k = qkv + n_ * size_.q, *v = k + n_ * size_.kv;
  const DeviceCheck before = check(layer > first_layer() ? layer - 1 : layer);
  const DeviceActivations h = norm(w.mixer_norm.get(), before, {&w.q, &w.k, &w.v});
  multiply(h, {{&w.q, qkv}, {&w.k, k}, {&w.v, v}});
  const LayerConfig& c = config_.layer(layer);
  if (c.qk_norm == QkNorm::projection) {
    norm_in_place(qkv, w.q_norm.get(), c.q_width(), check(layer));
    norm_in_place(k, w.k_norm.get(), c.kv_width(), check(layer));
  }
  const bool rotates = c.has_rope(), by_head = c.qk_norm == QkNorm::head;
  const std::size_t angles = rotates ? n_ * config_.angles_before(c.rope) : 0;
  const DeviceHeads heads{.n = n_,
                          .heads = c.heads,
                          .kv_heads = c.kv_heads,
                          .head_dim = c.head_dim,
                          .qkv = qkv,
                          .q_norm = by_head ? w.q_norm.get() : nullptr,
                          .k_norm = by_head ? w.k_norm.get() : nullptr,
                          .epsilon = config_.norm_epsilon,
                          .rotary_dim = rotates ? config_.ropes[c.rope].dim : 0,
                          .neox = rotates && config_.ropes[c.rope].neox,
                          .cos = work_.cos + angles,
                          .sin = work_.sin + angles};
  enqueue(ops_.rotate(stream_, heads, check(layer)));
}

void GpuExecutor::enqueue_attended(uint32_t layer) {
  if (layer > first_layer()) enqueue_feed_forward(layer - 1, output_of(layer - 1, work_.a));
  enqueue_projection(layer, attended(layer));
}

// The output of a layer's attention, which is in a.
DeviceActivations GpuExecutor::output_of(uint32_t layer, float* a) const {
  DeviceActivations x = inputs(a, size_.q, {&weights_.layers()[local(layer)].o});
  x.f32 = a;
  return x;
}

void GpuExecutor::check_and_feed_forward(uint32_t layer, float* a) {
  enqueue(ops_.quantize(stream_, output_of(layer, a), check(layer)));
  enqueue_feed_forward(layer, output_of(layer, a));
}

// a: the output of the layer's attention, which has been checked.
void GpuExecutor::enqueue_feed_forward(uint32_t layer, const DeviceActivations& a) {
  const DeviceWeights::Layer& w = weights_.layers()[local(layer)];
  add_product(a, w.o, w.mixer_post_norm.get(), layer);
  if (config_.layer(layer).has_experts()) {
    experts_status_ = run_experts(layer);
    return;
  }
  const DeviceActivations h = norm(w.ffn_norm.get(), check(layer), {&w.gate, &w.up});
  const DeviceActivations gated = inputs(work_.gate, size_.feed_forward, {&w.down});
  multiply(h, {{&w.gate, work_.gate}, {&w.up, work_.up}});
  enqueue(ops_.swiglu(stream_, work_.gate, work_.up, check(layer), gated));
  add_product(gated, w.down, w.ffn_post_norm.get(), layer);
  if (layer + 1 < end_layer()) return;  // the next layer checks x
  enqueue(ops_.quantize(stream_, {n_, config_.width, work_.x}, check(layer)));
}

// After the last layer's attention, where a GPU attended the step.
void GpuExecutor::enqueue_results() {
  enqueue_feed_forward(end_layer() - 1, output_of(end_layer() - 1, work_.a));
  enqueue(ops_.download(stream_, attended_host_.get(), attended_.get(),
                        layers() * attended_floats() * sizeof(float)));
  enqueue(ops_.download(stream_, bad_layer_.get(), work_.first_bad, sizeof(uint32_t)));
  if (!has_logits_) return;
  enqueue_logits(n_ - 1, 1);
  enqueue(
      ops_.download(stream_, host_logits_.get(), work_.logits, size_.vocabulary * sizeof(float)));
}

// What a decode step that a GPU attended leaves goes to the store.
Status GpuExecutor::finish_decode() {
  const bool hybrid = mode_ == AttentionMode::co_execution;
  step_->pool->run(layers(), [&](uint32_t i, uint32_t) {
    const float* q = attended_host_.get() + i * attended_floats();
    const float *k = q + n_ * size_.q, *v = k + n_ * size_.kv;
    const float* lse = hybrid ? hybrid_.lse_of(i) : selective_.lse_of(i);
    host_->keep(*step_, first_layer() + i, {.q = q, .k = k, .v = v, .lse = lse});
  });
  return {};
}

// Of n tokens from `first` on.
void GpuExecutor::enqueue_logits(uint32_t first, uint32_t n) {
  DeviceActivations normed = inputs(work_.h, size_.width, {&weights_.output()});
  normed.n = n;
  enqueue(ops_.rms_norm(stream_, work_.x + first * size_.width, weights_.output_norm(),
                        config_.norm_epsilon, check(end_layer() - 1), normed));
  multiply(normed, {{&weights_.output(), work_.logits}});
}

void GpuExecutor::multiply(const DeviceActivations& x, std::initializer_list<Product> products,
                           bool add) {
  DeviceProduct given[3];
  DeviceProduct* end = given;
  for (const Product& p : products) *end++ = {p.matrix->w, p.matrix->bias.get(), p.y};
  enqueue(ops_.matmul(stream_, {given, end}, x, add));
}

// The normalised residual stream as the input of matrices, or the stream itself where there is no
// such norm. Either is checked.
DeviceActivations GpuExecutor::norm(const float* weight, const DeviceCheck& check,
                                    std::initializer_list<const DeviceWeights::Matrix*> matrices) {
  DeviceActivations out = inputs(weight ? work_.h : work_.x, size_.width, matrices);
  if (weight) {
    enqueue(ops_.rms_norm(stream_, work_.x, weight, config_.norm_epsilon, check, out));
    return out;
  }
  out.f32 = work_.x;
  enqueue(ops_.quantize(stream_, out, check));
  return out;
}

void GpuExecutor::norm_in_place(float* x, const float* weight, uint32_t cols,
                                const DeviceCheck& check) {
  enqueue(ops_.rms_norm(stream_, x, weight, config_.norm_epsilon, check, {n_, cols, x}));
}

// The residual stream += W a, which is normalised first where there is such a norm.
void GpuExecutor::add_product(const DeviceActivations& a, const DeviceWeights::Matrix& w,
                              const float* post_norm, uint32_t layer) {
  if (!post_norm) return multiply(a, {{&w, work_.x}}, true);
  multiply(a, {{&w, work_.h}});
  enqueue(ops_.add_rms_norm(stream_, work_.h, post_norm, config_.norm_epsilon, check(layer),
                            {n_, config_.width, work_.x}));
}

Status make_gpu_executor(const Model& model, int number, HostAttention* attention,
                         std::unique_ptr<LayerExecutor>* out) {
  auto executor = std::make_unique<GpuExecutor>(model, number, attention);
  RETURN_IF_ERROR(executor->open());
  *out = std::move(executor);
  return {};
}

}  // namespace kvasir
