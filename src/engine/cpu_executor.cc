// A run of layers on the CPU.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <initializer_list>

#include "base/checked.h"
#include "base/magnitude.h"
#include "base/memory.h"
#include "engine/altup.h"
#include "engine/cpu_experts.h"
#include "engine/cpu_latent.h"
#include "engine/cpu_products.h"
#include "engine/cpu_recurrent.h"
#include "engine/cpu_tasks.h"
#include "engine/layer_executor.h"

namespace kvasir {
namespace {

// Gate values become what they exceed the mean by more than `scale` standard deviations, or 0.
void thin_out(float* gate, std::size_t n, float scale) {
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < n; ++i) sum += double{gate[i]};
  const double mean = sum / static_cast<double>(n);
  for (std::size_t i = 0; i < n; ++i)
    squares += (double{gate[i]} - mean) * (double{gate[i]} - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(n));
  const auto threshold = static_cast<float>(mean + double{scale} * deviation);
  for (std::size_t i = 0; i < n; ++i) gate[i] = std::max(gate[i] - threshold, 0.0f);
}

class CpuExecutor final : public LayerExecutor {
 public:
  CpuExecutor(const Model& model, uint32_t first_layer, HostAttention* attention, ThreadPool* pool);

  Status plan(const StepContext& step, const Request& request, LayerRun* run) override;
  Status begin(const StepContext& step) override;
  Status mixer(uint32_t layer) override;
  Status feed_forward(uint32_t layer) override;
  Status end() override;
  Status logits(uint32_t first, float* out) override;

 private:
  Status attention(uint32_t layer, const float* h);
  Status latent(uint32_t layer, const float* h);
  Status recurrent(uint32_t layer, const float* h);
  void project(uint32_t layer, const float* h);
  void gate_output(const LayerConfig& c, uint32_t first);
  void dense(uint32_t layer, const float* h, uint32_t n);
  Status experts(uint32_t layer, const CpuExperts::Input& input, float* out);
  Status add_experts(uint32_t layer, const float* x, uint32_t n);
  void resize(uint32_t n);
  void multiply(const float* x, uint32_t n, uint32_t cols,
                std::initializer_list<CpuProducts::Product> products) {
    products_.multiply(x, n, cols, products);
  }
  const float* norm(const float* x, const Norm& weights, uint32_t n, float* out);
  void normalise(const float* x, const Norm& weights, uint32_t n, float* y) const;
  void rotate(const LayerConfig& c, float* x, uint32_t heads, const Array<float>& weight);
  void normalise_heads(const LayerConfig& c, float* row, uint32_t heads,
                       const Array<float>& weight) const;
  void add_laurel(const float* laurel, uint32_t first);
  void make_values(const LayerConfig& c);
  void scale_queries(const LayerConfig& c);
  void add(float* x, const Norm& post_norm, uint32_t n);
  void activate(const LayerConfig& c, uint32_t n);
  void finish_layer(uint32_t layer, uint32_t first);
  void add_layer_input(float* x, const Norm& post_norm, uint32_t n, uint32_t first);
  Status check_layer(uint32_t layer, uint32_t first);
  template <class F>
  void by_rows(uint32_t n, F&& f) {
    for_blocks(pool_, *cancel_, 0, n,
               [&](std::size_t first, uint32_t count, uint32_t) { f(first, count); });
  }

  const Model& model_;
  const Kernels& kernels_;
  HostAttention* const attention_;
  ThreadPool* const pool_;
  // Of the step.
  const StepContext* step_ = nullptr;
  const CancelLatch* cancel_ = nullptr;
  uint32_t n_ = 0;  // tokens

  uint32_t capacity_ = 0;  // tokens that the workspace holds
  Buffer<float> h_;        // [n][width] a normalised input, or an output
  // [n][width] the input of a parallel layer's mixer and network; twice: of experts, and of their
  // router
  Buffer<float> y_;
  Buffer<float> q_, k_, v_, a_;  // [n][heads or kv_heads][head_dim]; a: attention's output
  Buffer<float> query_gates_;    // [n][heads][2][head_dim]: queries and their output's gates
  Buffer<float> gate_, up_;      // [n][feed_forward]
  CpuProducts products_;
  std::unique_ptr<AltUp> altup_;             // of a model with several streams
  std::unique_ptr<CpuExperts> experts_;      // null where no layer has experts
  std::unique_ptr<CpuRecurrent> recurrent_;  // null where no layer is recurrent
  std::unique_ptr<CpuLatent> latent_;        // likewise
};

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
  products_.begin(c.cancel);
  if (altup_) altup_->begin(c.x, n_, c.cancel);
  if (recurrent_) recurrent_->begin(n_, c.states, c.cancel);
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

// x += W_o attention(q, k, v);  q, k, v = RoPE(W h)
Status CpuExecutor::attention(uint32_t layer, const float* h) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  const float* laurel = altup_ ? altup_->laurel(layer, h) : nullptr;
  project(layer, h);
  if (c.writes_kv) make_values(c);
  rotate(c, q_.get(), c.heads, w.q_norm);
  if (c.writes_kv) rotate(c, k_.get(), c.kv_heads, w.k_norm);
  scale_queries(c);

  attention_->write(*step_, layer, {.q = q_.get(), .k = k_.get(), .v = v_.get()});
  RETURN_IF_ERROR(attention_->attend(*step_, layer, q_.get(), a_.get()));

  const uint32_t first = attention_->first_needed(step_->step, layer), n = n_ - first;
  if (c.gates_output) gate_output(c, first);
  multiply(a_.get() + std::size_t{first} * c.q_width(), n, c.q_width(), {{&w.o, h_.get()}});
  add(step_->x + std::size_t{first} * width, w.mixer_post_norm, n);
  if (laurel) add_laurel(laurel, first);
  return {};
}

// x += W_o outputs(attention(q, k, v)), as LatentConfig has them
Status CpuExecutor::latent(uint32_t layer, const float* h) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  latent_->project(*step_, layer, h, q_.get(), k_.get());
  scale_queries(c);
  attention_->write(*step_, layer, {.q = q_.get(), .k = k_.get(), .v = nullptr});
  RETURN_IF_ERROR(attention_->attend(*step_, layer, q_.get(), a_.get()));

  const uint32_t first = attention_->first_needed(step_->step, layer), n = n_ - first;
  const float* o = latent_->outputs(*step_, layer, a_.get() + std::size_t{first} * c.q_width(), n);
  multiply(o, n, c.o_width(), {{&w.o, h_.get()}});
  add(step_->x + std::size_t{first} * model_.config().width, w.mixer_post_norm, n);
  return {};
}

// q, k, v = W h, what of them the layer has
void CpuExecutor::project(uint32_t layer, const float* h) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  float* q = c.gates_output ? query_gates_.get() : q_.get();
  if (!c.writes_kv) multiply(h, n_, width, {{&w.q, q}});
  else if (c.v_is_k) multiply(h, n_, width, {{&w.q, q}, {&w.k, k_.get()}});
  else multiply(h, n_, width, {{&w.q, q}, {&w.k, k_.get()}, {&w.v, v_.get()}});
  if (!c.gates_output) return;
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    for (std::size_t i = first * c.heads; i < (first + count) * c.heads; ++i)
      std::copy_n(q + 2 * i * c.head_dim, c.head_dim, q_.get() + i * c.head_dim);
  });
}

// Attention's output of tokens [first, n) *= sigmoid(gate)
void CpuExecutor::gate_output(const LayerConfig& c, uint32_t first) {
  by_rows(n_ - first, [&](std::size_t begin, uint32_t count) {
    for (std::size_t i = (first + begin) * c.heads; i < (first + begin + count) * c.heads; ++i)
      kernels_.sigmoid_gate(a_.get() + i * c.head_dim,
                            query_gates_.get() + (2 * i + 1) * c.head_dim, c.head_dim);
  });
}

// x += recurrent(h)
Status CpuExecutor::recurrent(uint32_t layer, const float* h) {
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t first = attention_->first_needed(step_->step, layer);
  const bool good = recurrent_->run(layer, h, first, h_.get());
  add(step_->x + std::size_t{first} * model_.config().width, w.mixer_post_norm, n_ - first);
  return good || cancel_->fired() ? Status() : not_a_number("layer " + std::to_string(layer));
}

// x += network(h);  h = norm(x), or the mixer's input of a parallel layer
Status CpuExecutor::feed_forward(uint32_t layer) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  const uint32_t first = attention_->first_needed(step_->step, layer), n = n_ - first;
  float* x = step_->x + std::size_t{first} * width;
  if (!c.has_feed_forward()) return cancel_->fired() ? Status() : check_layer(layer, first);
  const float* h =
      c.is_parallel() ? y_.get() + std::size_t{first} * width : norm(x, w.ffn_norm, n, h_.get());
  if (c.has_dense()) dense(layer, h, n);
  if (c.has_experts() && c.has_dense()) RETURN_IF_ERROR(add_experts(layer, x, n));
  else if (c.has_experts()) RETURN_IF_ERROR(experts(layer, {n, h, h, too_large}, h_.get()));
  add(x, w.ffn_post_norm, n);
  finish_layer(layer, first);
  return cancel_->fired() ? Status() : check_layer(layer, first);
}

// h_ = W_down (f(W_gate h) * W_up h)
void CpuExecutor::dense(uint32_t layer, const float* h, uint32_t n) {
  const LayerConfig& c = model_.config().layer(layer);
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t width = model_.config().width;
  if (c.gated) multiply(h, n, width, {{&w.gate, gate_.get()}, {&w.up, up_.get()}});
  else multiply(h, n, width, {{&w.up, gate_.get()}});
  activate(c, n);
  multiply(gate_.get(), n, c.feed_forward, {{&w.down, h_.get()}});
}

Status CpuExecutor::experts(uint32_t layer, const CpuExperts::Input& input, float* out) {
  const bool good = experts_->run(layer, input, *cancel_, out);
  return good || cancel_->fired() ? Status() : not_a_number("layer " + std::to_string(layer));
}

// h_ = norm(h_) + norm(experts(norm(x))); h_ holds the output of the dense network.
Status CpuExecutor::add_experts(uint32_t layer, const float* x, uint32_t n) {
  const ExpertWeights& w = model_.weights().layers[layer].experts;
  const std::size_t cols = model_.config().width;
  float *const y = y_.get(), *const routed = y + n * cols;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    const std::size_t at = first * cols;
    normalise(h_.get() + at, w.dense_norm, count, h_.get() + at);
    normalise(x + at, w.router_norm, count, routed + at);
    normalise(x + at, w.input_norm, count, y + at);
  });
  RETURN_IF_ERROR(experts(layer, {n, y, routed, too_large}, y));
  by_rows(n, [&](std::size_t first, uint32_t count) {
    const std::size_t at = first * cols;
    normalise(y + at, w.output_norm, count, y + at);
    kernels_.add(h_.get() + at, y + at, count * cols);
  });
  return {};
}

Status CpuExecutor::end() {
  if (float* hidden = step_->step.hidden; hidden && end_layer() == model_.config().depth())
    (void)norm(step_->x, model_.weights().output_norm, n_, hidden);
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

// The norm of queries or keys, and RoPE. x: [n_][heads][head_dim].
void CpuExecutor::rotate(const LayerConfig& c, float* x, uint32_t heads,
                         const Array<float>& weight) {
  const ModelConfig& config = model_.config();
  const RopeConfig* rope = c.has_rope() ? &config.ropes[c.rope] : nullptr;
  const uint32_t half = rope ? rope->dim / 2 : 0;
  const std::size_t angles = rope ? std::size_t{n_} * config.angles_before(c.rope) : 0;
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    for (std::size_t t = first; t < first + count; ++t) {
      float* row = x + t * heads * c.head_dim;
      if (!c.qk_norm_after_rope) normalise_heads(c, row, heads, weight);
      const std::size_t at = angles + t * half;
      if (rope)
        kernels_.rope(row, heads, c.head_dim, rope->dim, step_->cos + at, step_->sin + at,
                      rope->neox);
      if (c.qk_norm_after_rope) normalise_heads(c, row, heads, weight);
    }
  });
}

// The norm of one token's queries or keys. row: [heads][head_dim].
void CpuExecutor::normalise_heads(const LayerConfig& c, float* row, uint32_t heads,
                                  const Array<float>& weight) const {
  const float epsilon = model_.config().norm_epsilon;
  switch (c.qk_norm) {
    case QkNorm::none:
      return;
    case QkNorm::plain:
      return kernels_.rms_norm(row, nullptr, epsilon, heads, c.head_dim, row);
    case QkNorm::head:
      return kernels_.rms_norm(row, weight.data(), epsilon, heads, c.head_dim, row);
    case QkNorm::projection:
      return kernels_.rms_norm(row, weight.data(), epsilon, 1, heads * c.head_dim, row);
    case QkNorm::own:
      for (uint32_t h = 0; h < heads; ++h, row += c.head_dim)
        kernels_.layer_norm(row, weight.data() + std::size_t{h} * c.head_dim, nullptr, epsilon, 1,
                            c.head_dim, row);
  }
}

// x = (x + laurel) / sqrt(2)
void CpuExecutor::add_laurel(const float* laurel, uint32_t first) {
  const std::size_t cols = model_.config().width;
  const float half = 1 / std::sqrt(2.0f);
  by_rows(n_ - first, [&](std::size_t begin, uint32_t count) {
    for (std::size_t i = (first + begin) * cols; i < (first + begin + count) * cols; ++i)
      step_->x[i] = (step_->x[i] + laurel[i]) * half;
  });
}

// What values have of their own: the keys in their place, and a norm.
void CpuExecutor::make_values(const LayerConfig& c) {
  if (!c.v_is_k && !c.v_norm) return;
  const std::size_t cols = c.kv_width();
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    float* v = v_.get() + first * cols;
    if (c.v_is_k) std::copy_n(k_.get() + first * cols, count * cols, v);
    if (c.v_norm)
      kernels_.rms_norm(v, nullptr, model_.config().norm_epsilon, count * c.kv_heads, c.head_dim,
                        v);
  });
}

// Factors of the scores go into the queries.
void CpuExecutor::scale_queries(const LayerConfig& c) {
  const Temperature& t = model_.config().temperature;
  const bool varies = c.temperature && t.scale != 0;
  if (c.query_scale == 1 && !varies) return;
  const uint64_t position = step_->store.tokens();
  const std::size_t cols = c.q_width();
  by_rows(n_, [&](std::size_t first, uint32_t count) {
    for (std::size_t i = first; i < first + count; ++i) {
      float factor = c.query_scale;
      if (varies) factor *= t.at(position + i);
      float* q = q_.get() + i * cols;
      for (std::size_t d = 0; d < cols; ++d) q[d] *= factor;
    }
  });
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

void CpuExecutor::activate(const LayerConfig& c, uint32_t n) {
  const std::size_t cols = c.feed_forward;
  by_rows(n, [&](std::size_t first, uint32_t count) {
    if (c.sparsity > 0)
      for (std::size_t t = first; t < first + count; ++t)
        thin_out(gate_.get() + t * cols, cols, c.sparsity);
    kernels_.activate(c.activation, gate_.get() + first * cols,
                      c.gated ? up_.get() + first * cols : nullptr, count * cols);
  });
}

// h_ goes to the stream, or to the streams that the layer does not compute on.
void CpuExecutor::add_layer_input(float* x, const Norm& post_norm, uint32_t n, uint32_t first) {
  if (!altup_) return add(x, post_norm, n);
  by_rows(n, [&](std::size_t begin, uint32_t count) {
    float* h = h_.get() + begin * model_.config().width;
    normalise(h, post_norm, count, h);
  });
  altup_->add(first, h_.get());
}

// x += norm(W_out (gelu(W_gate x) * the layer's input)), then the factor of the layer's output.
void CpuExecutor::finish_layer(uint32_t layer, uint32_t first) {
  const ModelConfig& c = model_.config();
  const LayerWeights& w = model_.weights().layers[layer];
  const uint32_t n = n_ - first, size = c.layer_input;
  float* x = step_->x + std::size_t{first} * c.width;
  const float* input = x;
  if (altup_) {
    altup_->correct(layer, first, x);
    altup_->scale(layer, first, x, h_.get());
    input = h_.get();
  }
  if (size > 0) {
    multiply(input, n, c.width, {{&w.input_gate, gate_.get()}});
    by_rows(n, [&](std::size_t begin, uint32_t count) {
      for (std::size_t t = begin; t < begin + count; ++t)
        kernels_.activate(Activation::gelu, gate_.get() + t * size,
                          step_->layer_inputs + ((first + t) * c.depth() + layer) * size, size);
    });
    multiply(gate_.get(), n, size, {{&w.input_out, h_.get()}});
    add_layer_input(x, w.input_norm, n, first);
  }
  if (w.output_scale.empty()) return;
  by_rows(n, [&](std::size_t begin, uint32_t count) {
    for (std::size_t i = begin * c.width; i < (begin + count) * c.width; ++i)
      x[i] *= w.output_scale[0];
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

}  // namespace

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
