#include "engine/cpu_executor.h"

#include <algorithm>
#include <atomic>

#include "base/magnitude.h"

namespace kvasir {

CpuExecutor::CpuExecutor(const Model& model, uint32_t first_layer, HostAttention* attention,
                         ThreadPool* pool)
    : LayerExecutor(first_layer, model.config().depth()), model_(model), kernels_(cpu_kernels()),
      attention_(attention), pool_(pool), products_(pool) {
  const Weights& weights = model.weights();
  for (uint32_t l = first_layer; l < end_layer(); ++l) {
    const LayerWeights& w = weights.layers[l];
    for (const Linear* linear :
         {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down, &w.input_gate, &w.input_out,
          &w.altup.router, &w.altup.laurel_down, &w.altup.laurel_up, &w.recurrent.in,
          &w.recurrent.gate, &w.recurrent.alpha, &w.recurrent.beta, &w.recurrent.out})
      products_.consider(linear->w);
  }
  for (const WeightView& w : {weights.output.w, weights.stream_in.first, weights.stream_out.first})
    products_.consider(w);
  const std::vector<LayerConfig>& layers = model.config().layer_configs;
  const auto any_layer = [&](auto&& is) {
    return std::any_of(layers.begin() + first_layer, layers.end(), is);
  };
  if (any_layer([](const LayerConfig& c) { return c.is_latent(); }))
    latent_ = std::make_unique<CpuLatent>(model, first_layer, pool, &products_);
  products_.allocate();
  if (model.config().streams > 1) altup_ = std::make_unique<AltUp>(model, pool, &products_);
  if (model.config().recurrent_layers > 0)
    recurrent_ = std::make_unique<CpuRecurrent>(model, pool, &products_);
  if (any_layer([](const LayerConfig& c) { return c.has_experts(); }))
    experts_ = std::make_unique<CpuExperts>(model.config(), weights, first_layer, pool);
}

Status CpuExecutor::plan(const StepContext& c, const Request&, LayerRun* run) {
  SegmentFacts facts;
  facts.chosen = !c.attends_everything();
  facts.has_pages = c.store.pages().pages() > 0;
  facts.mapped = c.store.pages().mapped_bytes() > 0;
  run->segments = segments_of(facts);
  run->has_windows = c.windows != nullptr;
  return {};
}

Status CpuExecutor::begin(const StepContext& c) {
  step_ = &c, cancel_ = &c.cancel, n_ = c.tokens();
  resize(n_);
  products_.begin(c.cancel, c.product_method());
  if (altup_) altup_->begin(c.x, n_, c.cancel);
  if (recurrent_) recurrent_->begin(n_, c.step.open, c.states, c.cancel);
  return {};
}

// x += attention(h) + recurrent(h), what of them the layer has;  h = norm(x)
Status CpuExecutor::mixer(uint32_t layer) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  if (c.mixer == MixerKind::none) return {};
  if (altup_) altup_->predict(layer, step_->x);
  const bool lasts = c.is_parallel() || c.mixer == MixerKind::both;
  const float* h = norm(step_->x, w.mixer_norm, n_, lasts ? y_.get() : h_.get());
  if (c.is_latent()) return latent(layer, h);
  if (c.has_attention()) RETURN_IF_ERROR(attention(layer, h));
  return c.is_recurrent() ? recurrent(layer, h) : Status();
}

Status CpuExecutor::end() {
  const uint32_t wanted = step_->step.hidden_wanted();
  if (wanted > 0 && end_layer() == model_.config().depth())
    (void)norm(step_->x + std::size_t{n_ - wanted} * model_.config().width,
               model_.weights().output_norm, wanted, step_->step.hidden);
  return {};
}

Status CpuExecutor::logits(uint32_t first, float* out) {
  const ModelConfig& c = model_.config();
  const uint32_t n = n_ - first;
  float* x = step_->x + std::size_t{first} * c.width;
  if (altup_) altup_->merge(first, x);
  multiply(norm(x, model_.weights().output_norm, n, h_.get()), n, c.width,
           {{&model_.weights().output, out}});
  return {};
}

Status CpuExecutor::check_layer(uint32_t layer, uint32_t first) {
  const LayerConfig& c = model_.config().layer(layer);
  std::atomic<bool> good{true};
  const auto check = [&](const float* x, std::size_t at, uint32_t count, std::size_t cols) {
    if (!all_below({x + at * cols, count * cols}, too_large))
      good.store(false, std::memory_order_relaxed);
  };
  if (c.has_attention())
    by_rows(n_, [&](std::size_t at, uint32_t count) {
      check(q_.get(), at, count, c.q_width());
      if (!c.writes_kv) return;
      check(k_.get(), at, count, c.kv_width());
      if (!c.is_latent()) check(v_.get(), at, count, c.kv_width());
    });
  by_rows(n_ - first, [&](std::size_t at, uint32_t count) {
    if (c.has_attention()) check(a_.get(), first + at, count, c.q_width());
    if (c.has_dense()) check(gate_.get(), at, count, c.feed_forward);
    check(step_->x, first + at, count, model_.config().width);
  });
  return good ? Status() : not_a_number("layer " + std::to_string(layer));
}

// The normalised rows of x, in out; x itself where the layer has no such norm.
const float* CpuExecutor::norm(const float* x, const Norm& weights, uint32_t n, float* out) {
  if (weights.empty()) return x;
  const std::size_t cols = model_.config().width;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    normalise(x + first * cols, weights, count, out + first * cols);
  });
  return out;
}

void CpuExecutor::normalise(const float* x, const Norm& weights, uint32_t n, float* y) const {
  const ModelConfig& c = model_.config();
  if (c.norm == NormKind::rms)
    return kernels_.rms_norm(x, weights.weight.data(), c.norm_epsilon, n, c.width, y);
  kernels_.layer_norm(x, weights.weight.data(),
                      weights.bias.empty() ? nullptr : weights.bias.data(), c.norm_epsilon, n,
                      c.width, y);
}

// x += h_, which is normalised first where the layer has such a norm.
void CpuExecutor::add(float* x, const Norm& post_norm, uint32_t n) {
  const std::size_t cols = model_.config().width;
  const float scale = model_.config().residual_scale;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    float* h = h_.get() + first * cols;
    if (!post_norm.empty()) normalise(h, post_norm, count, h);
    if (scale != 1)
      for (std::size_t i = 0; i < count * cols; ++i) h[i] *= scale;
    kernels_.add(x + first * cols, h, count * cols);
  });
}

void CpuExecutor::resize(uint32_t n) {
  if (n <= capacity_) return;
  const ModelConfig& c = model_.config();
  const std::size_t q_width = c.max_q_width(), kv_width = c.max_kv_width();
  const std::size_t widest =
      std::max({std::size_t{c.width}, q_width, std::size_t{c.feed_forward},
                std::size_t{c.layer_input}, std::size_t{c.recurrent.inner()}});
  std::size_t gated = 0;   // numbers of a token's queries and their gates
  std::size_t inputs = 0;  // rows of y_ for a token
  for (const LayerConfig& layer : c.layer_configs) {
    if (layer.is_parallel() || layer.mixer == MixerKind::both)
      inputs = std::max<std::size_t>(inputs, 1);
    if (layer.gates_output) gated = 2 * q_width;
    if (layer.experts.parallel_dense) inputs = 2;
  }
  const auto grow = [](auto& array, std::size_t size) {
    array = {};  // never old and new together
    array = make_buffer<std::remove_reference_t<decltype(array[0])>>(size);
  };
  capacity_ = 0;
  grow(h_, std::size_t{n} * c.width);
  grow(y_, n * inputs * c.width);
  grow(q_, n * q_width);
  grow(k_, n * kv_width);
  grow(v_, n * kv_width);
  grow(a_, n * q_width);
  grow(query_gates_, n * gated);
  grow(gate_, std::size_t{n} * std::max(c.feed_forward, c.layer_input));
  grow(up_, std::size_t{n} * c.feed_forward);
  if (altup_) altup_->resize(n);
  if (recurrent_) recurrent_->resize(n);
  if (latent_) latent_->resize(n);
  products_.resize(n, latent_ ? std::max(widest, latent_->widest()) : widest);
  capacity_ = n;
}

std::unique_ptr<LayerExecutor> make_cpu_executor(const Model& model, uint32_t first_layer,
                                                 HostAttention* attention, ThreadPool* pool) {
  return std::make_unique<CpuExecutor>(model, first_layer, attention, pool);
}

Status not_a_number(const std::string& where) {
  return Status::error(
      Code::corrupt,
      "%s made NaN or infinity: the model's file, or the cache that was loaded, is "
      "damaged; compare it with its source or fetch it again; the sequence is as "
      "it was before the chunk",
      where.c_str());
}

}  // namespace kvasir
