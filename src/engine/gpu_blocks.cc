// The products and norms of a GPU's layers, between two mixers.
#include "engine/gpu_executor.h"

namespace kvasir {

// All that a layer's mixers compute before attention. q, k and v go to qkv, one after another. The
// check is of the layer's input, which the layer before made. The normalised input of a parallel
// layer stays for its network.
void GpuExecutor::enqueue_projection(uint32_t layer, float* qkv) {
  const DeviceWeights::Layer& w = weights_of(layer);
  const DeviceWeights::Recurrent& r = w.recurrent;
  const LayerConfig& c = config_.layer(layer);
  if (c.mixer == MixerKind::none) return;
  const DeviceCheck before = check(layer > first_layer() ? layer - 1 : layer);
  const DeviceActivations y =
      norm(w.mixer_norm, c.is_parallel() ? work_.y : nullptr, before,
           {&w.q, &w.query_gate, &w.k, &w.v, &r.in, &r.gate, &r.alpha, &r.beta});
  if (c.has_attention()) enqueue_heads(layer, y, qkv);
  if (c.is_recurrent()) enqueue_recurrent(layer, y);
}

// y: the normalised input.
void GpuExecutor::enqueue_heads(uint32_t layer, const DeviceActivations& y, float* qkv) {
  const DeviceWeights::Layer& w = weights_of(layer);
  const LayerConfig& c = config_.layer(layer);
  const auto [q, k, v] = projected(layer, qkv);
  if (!c.writes_kv) multiply(y, {{&w.q, q}});
  else multiply(y, {{&w.q, q}, {&w.k, k}, {c.v_is_k ? &w.k : &w.v, v}});
  if (c.gates_output) multiply(y, {{&w.query_gate, work_.query_gates}});
  if (c.qk_norm == QkNorm::projection) {
    norm_in_place(q, w.q_norm.get(), c.q_width(), check(layer));
    if (c.writes_kv) norm_in_place(k, w.k_norm.get(), c.kv_width(), check(layer));
  }
  enqueue(ops_.rotate(stream_, heads_of(layer, qkv), check(layer)));
}

// What is done with each head of a projection.
DeviceHeads GpuExecutor::heads_of(uint32_t layer, float* qkv) const {
  const DeviceWeights::Layer& w = weights_of(layer);
  const LayerConfig& c = config_.layer(layer);
  DeviceHeads h{.n = n_,
                .heads = c.heads,
                .kv_heads = c.writes_kv ? c.kv_heads : 0,
                .head_dim = c.head_dim,
                .qkv = qkv,
                .norm_after_rope = c.qk_norm_after_rope,
                .norm_v = c.v_norm,
                .epsilon = config_.norm_epsilon,
                .q_factor = c.query_scale};
  if (c.qk_norm != QkNorm::none && c.qk_norm != QkNorm::projection) {
    h.norm = c.qk_norm == QkNorm::own ? DeviceHeadNorm::layer : DeviceHeadNorm::rms;
    h.q_norm = w.q_norm.get(), h.k_norm = w.k_norm.get();  // null: without weights
    h.norm_stride = c.qk_norm == QkNorm::own ? c.head_dim : 0;
  }
  if (c.temperature && config_.temperature.scale != 0) h.q_factors = work_.factors;
  if (!c.has_rope()) return h;
  const RopeConfig& rope = config_.ropes[c.rope];
  const std::size_t angles = n_ * config_.angles_before(c.rope);
  h.rotary_dim = rope.dim, h.neox = rope.neox;
  h.cos = work_.cos + angles, h.sin = work_.sin + angles;
  return h;
}

// Where a layer's attention writes its output: as the input of W_o, where nothing comes between.
DeviceActivations GpuExecutor::attended_output(uint32_t layer) const {
  const LayerConfig& c = config_.layer(layer);
  return c.gates_output ? DeviceActivations{n_, c.q_width(), work_.a} : output_of(layer, work_.a);
}

// The output of a layer's attention, which is in a.
DeviceActivations GpuExecutor::output_of(uint32_t layer, float* a) const {
  DeviceActivations x = inputs(a, config_.layer(layer).q_width(), {&weights_of(layer).o});
  x.f32 = a;
  return x;
}

void GpuExecutor::check_and_feed_forward(uint32_t layer, float* a) {
  const LayerConfig& c = config_.layer(layer);
  if (!c.has_attention()) return enqueue_feed_forward(layer, {});
  if (c.gates_output) {  // not in place: a may be on its way to host memory
    const float* gates = work_.query_gates + std::size_t{first_row_} * c.q_width();
    enqueue(ops_.sigmoid_gate(stream_, a, gates, check(layer), output_of(layer, work_.a)));
    return enqueue_feed_forward(layer, output_of(layer, work_.a));
  }
  enqueue(ops_.quantize(stream_, output_of(layer, a), check(layer)));
  enqueue_feed_forward(layer, output_of(layer, a));
}

// a: the output of the layer's attention, which has been checked, where it has attention.
void GpuExecutor::enqueue_feed_forward(uint32_t layer, const DeviceActivations& a) {
  const DeviceWeights::Layer& w = weights_of(layer);
  const LayerConfig& c = config_.layer(layer);
  if (c.has_attention()) add_product(a, w.o, w.mixer_post_norm, layer);
  if (c.is_recurrent()) add_recurrent(layer);
  if (c.has_experts()) enqueue_experts(layer);
  else if (c.has_dense()) add_product(enqueue_gated(layer), w.down, w.ffn_post_norm, layer);
  finish_layer(layer);
  if (layer + 1 < end_layer()) return;  // the next layer checks x
  enqueue(ops_.quantize(stream_, {n_, config_.width, work_.x}, check(layer)));
}

// The input of the dense network's last matrix: f(W_gate h) * W_up h.
DeviceActivations GpuExecutor::enqueue_gated(uint32_t layer) {
  const DeviceWeights::Layer& w = weights_of(layer);
  const LayerConfig& c = config_.layer(layer);
  DeviceActivations h = inputs(work_.y, size_.width, {&w.gate, &w.up});
  if (c.is_parallel()) h.f32 = work_.y, enqueue(ops_.quantize(stream_, h, check(layer)));
  else h = norm(w.ffn_norm, nullptr, check(layer), {&w.gate, &w.up});
  h.alone = open_;
  const DeviceActivations gated = inputs(work_.gate, c.feed_forward, {&w.down});
  DeviceProduct given[2];
  const std::span<DeviceProduct> products =
      c.gated ? prepare(h, {{&w.gate, work_.gate}, {&w.up, work_.up}}, given)
              : prepare(h, {{&w.up, work_.gate}}, given);
  enqueue(ops_.multiply_gated(stream_, products, Workspace::gated_tokens, h, c.activation,
                              check(layer), gated));
  return gated;
}

// x += norm(W_out (gelu(W_gate x) * the layer's input)), then the factor of the layer's output.
void GpuExecutor::finish_layer(uint32_t layer) {
  const DeviceWeights::Layer& w = weights_of(layer);
  if (const uint32_t size = config_.layer_input; size > 0) {
    const std::size_t all = step_->tokens(), first = all - n_;
    const float* own = work_.layer_inputs + (layer * all + first) * size;
    DeviceActivations x = inputs(work_.x, size_.width, {&w.input_gate});
    x.f32 = work_.x;
    enqueue(ops_.quantize(stream_, x, check(layer)));
    multiply(x, {{&w.input_gate, work_.gate}});
    const DeviceActivations gated = inputs(work_.gate, size, {&w.input_out});
    enqueue(ops_.activate(stream_, Activation::gelu, work_.gate, own, check(layer), gated));
    add_product(gated, w.input_out, w.input_norm, layer);
  }
  if (w.output_scale != 1) enqueue(ops_.scale(stream_, work_.x, n_ * size_.width, w.output_scale));
}

// Of n tokens from `first` on. keeps_hidden: what the matrix multiplies stays in work_.h.
void GpuExecutor::enqueue_logits(uint32_t first, uint32_t n, bool keeps_hidden) {
  DeviceActivations normed = inputs(work_.h, size_.width, {&weights_.output()});
  normed.n = n;
  if (keeps_hidden) normed.f32 = work_.h;
  enqueue_norm(work_.x + first * size_.width, weights_.output_norm(), check(end_layer() - 1),
               normed);
  multiply(normed, {{&weights_.output(), work_.logits}});
}

// A layer may lack some of the matrices.
std::span<DeviceProduct> GpuExecutor::prepare(const DeviceActivations& x,
                                              std::initializer_list<Product> products,
                                              std::span<DeviceProduct> room) {
  auto end = room.begin();
  for (const Product& p : products)
    if (p.matrix->w.data) *end++ = {p.matrix->w, p.matrix->bias.get(), p.y};
  const std::span<DeviceProduct> given(room.begin(), end);
  if (keeps_halves_ && x.n == step_->tokens()) kept_halves_.give(given);
  return given;
}

void GpuExecutor::multiply(const DeviceActivations& x, std::initializer_list<Product> products,
                           bool add) {
  DeviceActivations input = x;
  input.alone = open_;
  DeviceProduct room[4];
  enqueue(ops_.matmul(stream_, prepare(x, products, room), input, add));
}

// The normalised residual stream as the input of matrices, or the stream itself where there is no
// such norm. Either is checked. h: where its floats stay, or null.
DeviceActivations GpuExecutor::norm(const DeviceWeights::Norm& weights, float* h,
                                    const DeviceCheck& check,
                                    std::initializer_list<const DeviceWeights::Matrix*> matrices) {
  const bool has_norm = weights.weight.get() != nullptr;
  DeviceActivations out = inputs(h ? h : has_norm ? work_.h : work_.x, size_.width, matrices);
  if (h) out.f32 = h;
  if (has_norm) {
    enqueue_norm(work_.x, weights, check, out);
    return out;
  }
  out.f32 = work_.x;
  enqueue(ops_.quantize(stream_, out, check));
  return out;
}

void GpuExecutor::enqueue_norm(const float* x, const DeviceWeights::Norm& weights,
                               const DeviceCheck& check, const DeviceActivations& out) {
  const float* weight = weights.weight.get();
  const float epsilon = config_.norm_epsilon;
  enqueue(config_.norm == NormKind::rms
              ? ops_.rms_norm(stream_, x, weight, epsilon, check, out)
              : ops_.layer_norm(stream_, x, weight, weights.bias.get(), epsilon, check, out));
}

void GpuExecutor::norm_in_place(float* x, const float* weight, uint32_t cols,
                                const DeviceCheck& check) {
  enqueue(ops_.rms_norm(stream_, x, weight, config_.norm_epsilon, check, {n_, cols, x}));
}

// The residual stream += W a, which is normalised first where there is such a norm.
void GpuExecutor::add_product(const DeviceActivations& a, const DeviceWeights::Matrix& w,
                              const DeviceWeights::Norm& post_norm, uint32_t layer) {
  if (!post_norm.weight.get()) return multiply(a, {{&w, work_.x}}, true);
  multiply(a, {{&w, work_.h}});
  enqueue(ops_.add_rms_norm(stream_, work_.h, post_norm.weight.get(), config_.norm_epsilon,
                            check(layer), {n_, config_.width, work_.x}));
}

}  // namespace kvasir
