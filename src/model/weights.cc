// Tensor names to places in the forward pass.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "model/model.h"
#include "model/tensor_binder.h"

namespace kvasir {
namespace {

std::string formats_by_bytes(const Gguf& gguf) {
  std::map<TensorType, uint64_t> bytes;
  for (const GgufTensor& t : gguf.tensors()) bytes[t.type] += t.bytes;
  std::vector<std::pair<uint64_t, TensorType>> order;
  for (const auto& [type, size] : bytes) order.emplace_back(size, type);
  std::sort(order.rbegin(), order.rend());
  std::string out;
  for (const auto& [size, type] : order)
    out += (out.empty() ? "" : " ") + std::string(tensor_type_info(type)->name);
  return out;
}

// Binds the tensors of one layer.
class LayerBinder {
 public:
  LayerBinder(TensorBinder* bind, const ModelConfig& model, uint32_t number, LayerWeights* out)
      : LayerBinder(bind, model, model.layer(number), number, out) {}
  // Of a layer that has the file's block of this number.
  LayerBinder(TensorBinder* bind, const ModelConfig& model, const LayerConfig& layer,
              uint32_t block, LayerWeights* out)
      : bind_(*bind), model_(model), names_(model.architecture->names), layer_(layer),
        at_("blk." + std::to_string(block) + "."), w_(*out) {}

  void bind() {
    const uint32_t width = model_.width;
    const bool mixes = layer_.mixer != MixerKind::none, feeds = layer_.has_feed_forward();
    norm(layer_.norm_before() && mixes, names_.mixer_norm, &w_.mixer_norm);
    if (layer_.is_latent()) latent(layer_.latent);
    else if (layer_.has_attention()) attention();
    if (layer_.is_recurrent()) recurrent();
    norm(layer_.norm_after(), names_.mixer_post_norm, &w_.mixer_post_norm);
    norm(layer_.norm_before() && !layer_.is_parallel() && feeds, names_.ffn_norm, &w_.ffn_norm);
    if (layer_.has_dense()) dense();
    if (layer_.has_experts()) experts(width, layer_.experts);
    norm(layer_.norm_after(), names_.ffn_post_norm, &w_.ffn_post_norm);
    if (model_.layer_input > 0) layer_input(width, model_.layer_input);
    if (model_.streams > 1) altup(width, model_.streams);
    if (model_.architecture->scales_layers)
      bind_.vector(name("layer_output_scale.weight"), 1, false, &w_.output_scale);
  }

 private:
  std::string name(const char* tensor) const { return at_ + tensor; }
  void linear(const char* tensor, uint32_t rows, uint32_t cols, Linear* out) {
    bind_.linear(name(tensor), rows, cols, layer_.biases, out);
  }
  void norm(bool exists, const char* tensor, Norm* out) {
    if (!exists) return;
    // Falcon-H1's second norm has no suffix.
    const bool is_bare = layer_.mixer == MixerKind::both && bind_.has(name(tensor));
    bind_.vector(name(tensor) + (is_bare ? "" : ".weight"), model_.width, true, &out->weight);
    if (model_.norm == NormKind::layer)
      bind_.vector(name(tensor) + ".bias", model_.width, false, &out->bias);
  }

  void attention() {
    const uint32_t width = model_.width, q = layer_.q_width(), kv = layer_.kv_width();
    if (!layer_.gates_output && bind_.has(name(names_.qkv) + ".weight")) {
      bind_.fused(name(names_.qkv), width, layer_.biases, {{q, &w_.q}, {kv, &w_.k}, {kv, &w_.v}});
    } else {
      linear(names_.q, layer_.gates_output ? 2 * q : q, width, &w_.q);
      if (layer_.writes_kv) linear(names_.k, kv, width, &w_.k);
      if (layer_.writes_kv && !layer_.v_is_k) linear(names_.v, kv, width, &w_.v);
      if (!layer_.writes_kv)  // what is there is not used
        for (const char* unused : {names_.k, names_.v, names_.k_norm})
          bind_.ignore(name(unused) + ".weight");
    }
    linear(names_.o, width, q, &w_.o);
    qk_norm(names_.q_norm, layer_.heads, &w_.q_norm);
    if (layer_.writes_kv) qk_norm(names_.k_norm, layer_.kv_heads, &w_.k_norm);
    if (layer_.sinks) bind_.vector(name(names_.sinks) + ".weight", layer_.heads, true, &w_.sinks);
  }

  void latent(const LatentConfig& c) {
    LatentWeights& w = w_.latent;
    const uint32_t width = model_.width, heads = layer_.heads;
    if (c.query_rank > 0) {
      linear("attn_q_a", c.query_rank, width, &w.query_a);
      bind_.vector(name("attn_q_a_norm.weight"), c.query_rank, true, &w.query_norm);
      linear("attn_q_b", heads * c.query(), c.query_rank, &w.query);
    } else {
      linear("attn_q", heads * c.query(), width, &w.query);
    }
    linear("attn_kv_a_mqa", c.rank + c.rotated, width, &w.kv);
    bind_.vector(name("attn_kv_a_norm.weight"), c.rank, true, &w.norm);
    if (c.joint) {
      const uint32_t both = c.plain + c.values;  // rows of a head
      const WeightView all = bind_.matrix(name("attn_kv_b.weight"), heads * both, c.rank);
      w.keys.first = w.values.first = all;
      w.keys.stride = w.values.stride = both * all.row_bytes;
      w.keys.first.rows = c.plain, w.values.first.rows = c.values;
      if (all.data) w.values.first.data += c.plain * all.row_bytes;
    } else {
      bind_.matrices(name("attn_k_b"), heads, c.rank, c.plain, &w.keys);
      bind_.matrices(name("attn_v_b"), heads, c.values, c.rank, &w.values);
      bind_.ignore(name("attn_kv_b.weight"));  // of files that have both
    }
    linear(names_.o, width, layer_.o_width(), &w_.o);
  }

  void recurrent() {
    const uint32_t width = model_.width;
    const RecurrentConfig& r = model_.recurrent;
    RecurrentWeights& w = w_.recurrent;
    const bool mamba = r.kind == RecurrentKind::mamba;
    if (r.kind == RecurrentKind::convolution) {
      bind_.fused(name("shortconv.in_proj"), width, layer_.biases,
                  {{width, &w.beta}, {width, &w.gate}, {width, &w.in}});
      linear("shortconv.out_proj", width, width, &w.out);
      bind_.taps(name("shortconv.conv.weight"), r.taps, r.channels, &w.convolution);
      return;
    }
    if (mamba) {
      bind_.fused(name("ssm_in"), width, layer_.biases,
                  {{r.inner(), &w.gate}, {r.channels, &w.in}, {r.heads, &w.alpha}});
      bind_.vector(name("ssm_conv1d.bias"), r.channels, false, &w.bias);
      bind_.table(name("ssm_d"), 1, r.heads, true, &w.skip);
    } else {
      delta_net(width, r);
    }
    linear("ssm_out", width, r.inner(), &w.out);
    bind_.taps(name("ssm_conv1d.weight"), r.taps, r.channels, &w.convolution);
    bind_.vector(name("ssm_dt.bias"), r.heads, true, &w.decay_bias);
    if (mamba) bind_.table(name("ssm_a"), 1, r.heads, true, &w.decay);
    else bind_.vector(name("ssm_a"), r.heads, true, &w.decay);
    if (mamba)  // Falcon-H1 has none
      bind_.table(name("ssm_norm.weight"), r.inner() / r.key_heads, r.key_heads,
                  layer_.mixer != MixerKind::both, &w.norm);
    else bind_.vector(name("ssm_norm.weight"), r.value_dim, true, &w.norm);
  }

  void delta_net(uint32_t width, const RecurrentConfig& r) {
    RecurrentWeights& w = w_.recurrent;
    if (r.joint) {
      linear("ssm_in", r.channels + r.inner(), width, &w.in);
    } else {
      linear(names_.qkv, r.channels, width, &w.in);
      linear("attn_gate", r.inner(), width, &w.gate);
    }
    if (bind_.has(name("ssm_ba.weight"))) return linear("ssm_ba", 2 * r.heads, width, &w.beta);
    linear("ssm_beta", r.heads, width, &w.beta);
    linear("ssm_alpha", r.heads, width, &w.alpha);
  }

  void qk_norm(const char* tensor, uint32_t heads, Array<float>* out) {
    const std::string weight = name(tensor) + ".weight";
    if (layer_.qk_norm == QkNorm::head) bind_.vector(weight, layer_.head_dim, true, out);
    if (layer_.qk_norm == QkNorm::projection)
      bind_.vector(weight, heads * layer_.head_dim, true, out);
    if (layer_.qk_norm == QkNorm::own) bind_.table(weight, layer_.head_dim, heads, true, out);
  }

  void dense() {
    const uint32_t width = model_.width, inner = layer_.feed_forward;
    if (layer_.gated && !bind_.has(name(names_.gate) + ".weight")) {
      bind_.fused(name(names_.up), width, layer_.biases, {{inner, &w_.gate}, {inner, &w_.up}});
    } else {
      if (layer_.gated) linear(names_.gate, inner, width, &w_.gate);
      linear(names_.up, inner, width, &w_.up);
    }
    linear(names_.down, width, inner, &w_.down);
  }

  void altup(uint32_t width, uint32_t streams) {
    AltUpWeights& w = w_.altup;
    linear("altup_router", streams, width, &w.router);
    norm(true, "altup_router_norm", &w.router_norm);
    bind_.table(name("altup_predict_coef.weight"), streams, streams * streams, true, &w.predict);
    bind_.table(name("altup_correct_coef.weight"), streams, streams, true, &w.correct);
    bind_.vector(name("altup_correct_scale.weight"), width, true, &w.scale);
    const uint32_t rank = bind_.rows_of(name("laurel_l.weight"), width);
    linear("laurel_l", rank, width, &w.laurel_down);
    linear("laurel_r", width, rank, &w.laurel_up);
    norm(true, "laurel_post_norm", &w.laurel_norm);
  }

  void layer_input(uint32_t width, uint32_t size) {
    linear("inp_gate", size, width, &w_.input_gate);
    linear("proj", width, size, &w_.input_out);
    norm(true, "post_norm", &w_.input_norm);
  }

  void experts(uint32_t width, const ExpertConfig& e) {
    ExpertWeights& w = w_.experts;
    if (e.parallel_dense) {
      bind_.vector(name("ffn_gate_inp.scale"), width, true, &w.router_norm.weight);
      norm(true, "pre_ffw_norm_2", &w.input_norm);
      norm(true, "post_ffw_norm_2", &w.output_norm);
      norm(true, "post_ffw_norm_1", &w.dense_norm);
    }
    bind_.linear(name("ffn_gate_inp"), e.count, width, true, &w.router);
    bind_.vector(name("exp_probs_b.bias"), e.count, false, &w.selection_bias);
    if (bind_.has(name("ffn_gate_up_exps.weight"))) {
      const std::string both = name("ffn_gate_up_exps");
      bind_.matrices(both, e.count, 2 * e.width, width, &w.gate);
      bind_.vector(both + ".scale", e.count, false, &w.gate.scales);
      bind_.vector(both + ".scale", e.count, false, &w.up.scales);
      w.up.stride = w.gate.stride;
      w.gate.first.rows = e.width;
      w.up.first = w.gate.first;
      if (w.up.first.data) w.up.first.data += std::size_t{e.width} * w.up.first.row_bytes;
    } else {
      if (layer_.gated) bind_.experts(name("ffn_gate_exps"), e.count, e.width, width, &w.gate);
      bind_.experts(name("ffn_up_exps"), e.count, e.width, width, &w.up);
    }
    bind_.experts(name("ffn_down_exps"), e.count, width, e.width, &w.down);
    if (e.shared_width == 0) return;
    if (layer_.gated) linear("ffn_gate_shexp", e.shared_width, width, &w.shared_gate);
    linear("ffn_up_shexp", e.shared_width, width, &w.shared_up);
    linear("ffn_down_shexp", width, e.shared_width, &w.shared_down);
    if (model_.architecture->gates_shared_expert)
      bind_.vector(name("ffn_gate_inp_shexp.weight"), width, true, &w.shared_router);
  }

  TensorBinder& bind_;
  const ModelConfig& model_;
  const TensorNames& names_;
  const LayerConfig& layer_;
  const std::string at_;
  LayerWeights& w_;
};

}  // namespace

static void bind_divisors(TensorBinder* bind, const ModelConfig& c, RopeDivisors* out) {
  const uint32_t size = c.ropes[0].dim / 2;
  if (c.has_longrope()) {
    bind->vector("rope_factors_long.weight", size, true, &out->longs);
    bind->vector("rope_factors_short.weight", size, true, &out->shorts);
  }
  bind->vector("rope_freqs.weight", size, false, &out->freqs);
}

static Status check_divisors(const RopeDivisors& divisors) {
  for (const Array<float>* all : {&divisors.freqs, &divisors.longs, &divisors.shorts})
    for (const float d : *all)
      if (!(d > 0))
        return Status::error(Code::corrupt, "tensor '%s' holds a number that is not positive",
                             all == &divisors.freqs   ? "rope_freqs.weight"
                             : all == &divisors.longs ? "rope_factors_long.weight"
                                                      : "rope_factors_short.weight");
  return {};
}

Status bind_weights(const Gguf& gguf, const std::byte* file, const ModelConfig& c, ModelUse use,
                    Weights* out, RopeDivisors* divisors) {
  Weights w;
  w.layers.resize(c.depth());
  TensorBinder bind(gguf, file, c);
  w.embedding = bind.matrix("token_embd.weight", c.vocabulary, c.width);
  for (uint32_t l = 0; l < c.depth(); ++l) LayerBinder(&bind, c, l, &w.layers[l]).bind();
  const std::string output_norm = c.architecture->names.output_norm;
  bind.vector(output_norm + ".weight", c.width, true, &w.output_norm.weight);
  if (c.norm == NormKind::layer)
    bind.vector(output_norm + ".bias", c.width, false, &w.output_norm.bias);
  if (c.layer_input > 0) {
    const uint32_t all = c.depth() * c.layer_input;
    w.input_embedding = bind.matrix("per_layer_token_embd.weight", c.vocabulary, all);
    bind.linear("per_layer_model_proj", all, c.width, false, &w.input_projection);
    bind.vector("per_layer_proj_norm.weight", c.layer_input, true, &w.input_norm.weight);
  }
  if (c.streams > 1) {
    bind.matrices("altup_proj", c.streams - 1, c.width, c.width, &w.stream_in);
    bind.matrices("altup_unembd_proj", c.streams - 1, c.width, c.width, &w.stream_out);
  }
  if (bind.has("output.weight")) {
    bind.linear("output", c.vocabulary, c.width, true, &w.output);
  } else {
    w.output.w = w.embedding;
  }
  bind_divisors(&bind, c, divisors);
  RETURN_IF_ERROR(bind.finish());
  if (use != ModelUse::inspect) RETURN_IF_ERROR(bind.read());
  RETURN_IF_ERROR(check_divisors(*divisors));
  // A router with a norm of its own divides by sqrt(width).
  for (LayerWeights& layer : w.layers)
    for (float& x : layer.experts.router_norm.weight) x /= std::sqrt(static_cast<float>(c.width));
  for (const GgufTensor& t : gguf.tensors()) {
    w.parameters += t.dims[0] * t.dims[1] * t.dims[2] * t.dims[3];
    w.bytes += t.bytes;
  }
  w.formats = formats_by_bytes(gguf);
  *out = std::move(w);
  return {};
}

Status bind_mtp(const Gguf& gguf, const std::byte* file, const ModelConfig& c, uint32_t block,
                Weights* out, MtpInputs* inputs) {
  TensorBinder bind(gguf, file, c);
  const std::string at = "blk." + std::to_string(block) + ".", nextn = at + "nextn.";
  out->layers.resize(1);
  LayerBinder(&bind, c, c.layer(0), block, &out->layers[0]).bind();
  bind.linear(nextn + "eh_proj", c.width, 2 * c.width, false, &inputs->projection);
  bind.vector(nextn + "enorm.weight", c.width, true, &inputs->token_norm.weight);
  bind.vector(nextn + "hnorm.weight", c.width, true, &inputs->hidden_norm.weight);
  bind.vector(nextn + "shared_head_norm.weight", c.width, true, &out->output_norm.weight);
  if (bind.has(nextn + "embed_tokens.weight"))
    out->embedding = bind.matrix(nextn + "embed_tokens.weight", c.vocabulary, c.width);
  if (bind.has(nextn + "shared_head_head.weight")) {
    out->output.bias = {};
    bind.linear(nextn + "shared_head_head", c.vocabulary, c.width, false, &out->output);
  }
  RETURN_IF_ERROR(bind.finish(at));
  return bind.read();
}

}  // namespace kvasir
