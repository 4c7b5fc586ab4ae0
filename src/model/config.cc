#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "backend/page.h"
#include "base/quoted.h"
#include "gguf/limits.h"
#include "model/latent_config.h"
#include "model/rope_config.h"
#include "model/schema.h"

namespace kvasir {
namespace {

constexpr std::size_t max_name = 255;  // bytes kept of a model's name

bool has_tensor(const Gguf& gguf, uint32_t layer, const char* name) {
  return gguf.find_tensor("blk." + std::to_string(layer) + "." + name) != nullptr;
}

// The layers that see a window: by an array of the file, by its period, or by the architecture's.
std::vector<bool> windowed_layers(const Gguf& gguf, Schema* schema, const Architecture& row,
                                  uint32_t layers) {
  constexpr const char* key = "attention.sliding_window_pattern";
  std::vector<bool> windowed(layers);
  const auto array = gguf.get_ints(schema->prefix() + key);
  if (array && array->size() < layers)
    schema->fail(Status::error(Code::corrupt, "the model's '%s%s' has %zu values for %u layers",
                               schema->prefix().c_str(), key, array->size(), layers));
  const uint64_t period = array ? 0 : schema->optional(key, row.full_every, 0, UINT32_MAX);
  for (uint32_t l = 0; l < layers; ++l)
    windowed[l] = array ? l < array->size() && (*array)[l] != 0
                        : !Architecture::is_every(static_cast<uint32_t>(period), l);
  return windowed;
}

// Windows of the layers; 0: none.
void read_windows(const Gguf& gguf, Schema* schema, ModelConfig* c) {
  const Architecture& row = *c->architecture;
  if (row.ignores_window) return;
  const uint64_t window = schema->optional("attention.sliding_window", row.window, 0, UINT64_MAX);
  if (window == 0 || (row.full_every == 0 && window >= c->context)) return;
  if (row.full_every == 0)
    return schema->fail(Status::error(
        Code::unsupported,
        "the model attends through a sliding window of %llu tokens ('%sattention.sliding_window'), "
        "which Kvasir does not support for %s: use a file without it",
        static_cast<unsigned long long>(window), schema->prefix().c_str(), row.name));
  const std::vector<bool> windowed = windowed_layers(gguf, schema, row, c->depth());
  for (uint32_t l = 0; l < c->depth(); ++l)
    if (windowed[l] && c->layer(l).has_attention()) {
      c->layer_configs[l].window = std::min(window, c->context);
      c->layer_configs[l].chunked = row.chunked;
    }
}

ExpertConfig read_experts(Schema* schema, const ModelConfig& c) {
  const Architecture& row = *c.architecture;
  ExpertConfig e;
  e.count = static_cast<uint32_t>(schema->optional("expert_count", 0, 0, gguf_limits::experts));
  if (e.count == 0) return e;
  e.parallel_dense = row.dense_and_experts;
  e.used = static_cast<uint32_t>(schema->required("expert_used_count", 1, e.count));
  uint64_t dense = 0;
  for (const LayerConfig& layer : c.layer_configs)
    dense = std::max<uint64_t>(dense, layer.feed_forward);
  const uint64_t width = row.experts_share_width ? std::max<uint64_t>(1, dense / e.used) : dense;
  e.width = static_cast<uint32_t>(
      schema->optional("expert_feed_forward_length", width, 1, gguf_limits::feed_forward));
  const uint64_t shared = schema->optional("expert_shared_count", 0, 0, gguf_limits::experts);
  e.shared_width = static_cast<uint32_t>(schema->optional(
      "expert_shared_feed_forward_length", row.expert_weighs_input ? e.width : shared * e.width, 0,
      gguf_limits::feed_forward));
  const uint64_t gating = schema->optional("expert_gating_func", 0, 0, 4);
  if (gating == 4) schema->refuse("chooses experts by softplus", "expert_gating_func");
  e.gating = gating == 0   ? row.gating
             : gating == 1 ? Gating::softmax
             : gating == 2 ? Gating::sigmoid
                           : Gating::softmax_chosen;
  e.normalise = schema->optional_bool("expert_weights_norm", row.normalises_experts);
  e.scale = static_cast<float>(schema->optional_float("expert_weights_scale", 0, -1e6, 1e6));
  if (e.scale == 0) e.scale = 1;
  e.groups = static_cast<uint32_t>(
      std::max<uint64_t>(1, schema->optional("expert_group_count", 1, 0, e.count)));
  e.groups_used = static_cast<uint32_t>(
      std::max<uint64_t>(1, schema->optional("expert_group_used_count", e.groups, 0, e.groups)));
  if (e.count % e.groups || e.used > e.groups_used * (e.count / e.groups))
    schema->fail(Status::error(Code::corrupt,
                               "the model chooses %u of %u experts in %u of %u groups", e.used,
                               e.count, e.groups_used, e.groups));
  e.weighs_input = row.expert_weighs_input;
  e.chooses_by_logits = row.chooses_by_logits;
  return e;
}

// The layers that have experts.
void place_experts(Schema* schema, ModelConfig* c) {
  const ExpertConfig experts = read_experts(schema, *c);
  if (experts.count == 0) return;
  const uint64_t dense = schema->optional("leading_dense_block_count", 0, 0, UINT32_MAX);
  const uint64_t step = schema->optional("interleave_moe_layer_step", 1, 0, UINT32_MAX);
  for (uint32_t l = 0; l < c->depth(); ++l)
    if (l >= dense && step > 0 && (l + 1) % step == 0 &&
        (!c->architecture->single_blocks || c->layer(l).mixer == MixerKind::none))
      c->layer_configs[l].experts = experts;
  const bool places = std::any_of(c->layer_configs.begin(), c->layer_configs.end(),
                                  [](const LayerConfig& l) { return l.has_experts(); });
  if (!places)
    schema->fail(Status::error(Code::corrupt,
                               "the model has %u experts ('%sexpert_count') and no layer for them",
                               experts.count, schema->prefix().c_str()));
}

// The layers that keep a state: by a list of the file, by its period, or by their KV heads.
std::vector<MixerKind> read_mixers(const Gguf& gguf, Schema* schema, const Architecture& row,
                                   const std::vector<uint32_t>& kv_heads,
                                   const std::vector<uint32_t>& feed_forward) {
  constexpr const char *list = "attention.recurrent_layers", *period = "full_attention_interval";
  const auto layers = static_cast<uint32_t>(kv_heads.size());
  std::vector<MixerKind> mixers(layers, MixerKind::attention);
  const auto array = gguf.get_ints(schema->prefix() + list);
  if (row.attention_every > 0 && schema->has(list) && !array)
    schema->refuse("does not list its recurrent layers one by one", list);
  if (row.attention_every > 0 && array && array->size() < layers)
    schema->fail(Status::error(Code::corrupt, "the model's '%s%s' has %zu values for %u layers",
                               schema->prefix().c_str(), list, array->size(), layers));
  const auto every = static_cast<uint32_t>(
      row.attention_every == 0 ? 0 : schema->optional(period, row.attention_every, 1, UINT32_MAX));
  for (uint32_t l = 0; l < layers; ++l) {
    bool recurrent = kv_heads[l] == 0;
    if (every > 0 && array) recurrent = l < array->size() && (*array)[l] != 0;
    else if (every > 0) recurrent = !Architecture::is_every(every, l);
    if (row.single_blocks && feed_forward[l] > 0) mixers[l] = MixerKind::none;
    else if (row.parallel_mixers) mixers[l] = MixerKind::both;
    else if (recurrent) mixers[l] = MixerKind::recurrent;
  }
  return mixers;
}

// Shapes that the file has for all recurrent layers.
RecurrentConfig read_recurrent(Schema* schema, const ModelConfig& c) {
  constexpr uint64_t most_state = 4096;  // rows or columns of a head's matrix
  const RecurrentKind kind = c.architecture->recurrent;
  RecurrentConfig r;
  r.kind = kind, r.cyclic_keys = c.architecture->cyclic_keys;
  if (kind == RecurrentKind::none) return r;
  const bool matrices = kind != RecurrentKind::convolution;
  r.taps = static_cast<uint32_t>(
      schema->required(matrices ? "ssm.conv_kernel" : "shortconv.l_cache", 2, max_taps));
  r.channels = c.width;
  if (!matrices) return r;
  const uint32_t inner = schema->size("ssm.inner_size", gguf_limits::feed_forward);
  r.key_dim = static_cast<uint32_t>(schema->required("ssm.state_size", 1, most_state));
  r.heads = schema->size("ssm.time_step_rank", gguf_limits::heads);
  r.key_heads = schema->size("ssm.group_count", gguf_limits::heads);
  r.value_dim = inner / r.heads;
  if (r.heads * r.value_dim != inner || r.value_dim == 0 || r.value_dim > most_state ||
      r.heads % r.key_heads || inner % r.key_heads)
    schema->fail(Status::error(
        Code::corrupt, "the model's state has %u heads in %u groups for %u numbers of a token",
        r.heads, r.key_heads, inner));
  if (uint64_t{r.key_heads} * r.key_dim > gguf_limits::feed_forward)
    schema->fail(Status::error(Code::limit, "the model's state has %u groups of %u numbers",
                               r.key_heads, r.key_dim));
  r.channels = inner + 2 * r.key_heads * r.key_dim;
  return r;
}

// The layers, by the row of the architecture and the file.
void read_layers(const Gguf& gguf, Schema* schema, uint32_t layers, ModelConfig* c) {
  const Architecture& row = *c->architecture;
  const auto heads = schema->sizes("attention.head_count", layers, gguf_limits::heads);
  const auto kv_heads = schema->has("attention.head_count_kv")
                            ? schema->sizes("attention.head_count_kv", layers, gguf_limits::heads)
                            : heads;
  const auto feed_forward = schema->sizes("feed_forward_length", layers, gguf_limits::feed_forward);
  const std::vector<MixerKind> mixers = read_mixers(gguf, schema, row, kv_heads, feed_forward);
  const bool rotates = !row.finetuned_rope || schema->optional_bool("rope.scaling.finetuned", true);
  for (uint32_t l = 0; l < layers; ++l) {
    LayerConfig layer;
    layer.mixer = mixers[l];
    layer.norms = row.norms;
    if (row.optional_ffn_norm && !has_tensor(gguf, l, "ffn_norm.weight"))
      layer.norms = NormPlacement::parallel;
    layer.qk_norm = row.qk_norm;
    if (row.optional_qk_norm && !has_tensor(gguf, l, "attn_q_norm.weight"))
      layer.qk_norm = QkNorm::none;
    layer.qk_norm_after_rope = row.qk_norm_after_rope;
    layer.v_norm = row.norms_values;
    layer.v_is_k = row.keys_are_values && !has_tensor(gguf, l, "attn_v.weight") &&
                   !has_tensor(gguf, l, "attn_qkv.weight");
    layer.biases = row.biases;
    layer.sinks = row.sinks;
    layer.activation = row.activation;
    layer.gated = row.gated;
    if (!rotates || Architecture::is_every(row.no_rope_every, l)) layer.rope = LayerConfig::no_rope;
    layer.temperature = row.temperature == 0 || !layer.has_rope();
    layer.heads = heads[l], layer.kv_heads = kv_heads[l];
    if (row.latent) read_latent(gguf, schema, c->width, &layer);
    if (!layer.has_attention()) layer.heads = layer.kv_heads = 0;
    layer.gates_output = row.gates_attention && layer.has_attention();
    if (!row.single_blocks || layer.mixer == MixerKind::none) layer.feed_forward = feed_forward[l];
    c->layer_configs.push_back(layer);
  }
  read_windows(gguf, schema, c);
  place_experts(schema, c);
  const bool has_windows = std::any_of(c->layer_configs.begin(), c->layer_configs.end(),
                                       [](const LayerConfig& l) { return l.is_windowed(); });
  if (has_windows && row.rope_in_windows_only)
    for (LayerConfig& layer : c->layer_configs)
      if (!layer.is_windowed()) layer.rope = LayerConfig::no_rope;
  // Llama 4 with 128 experts has no norms of queries and keys, and no layer without RoPE has.
  if (row.qk_norm == QkNorm::plain)
    for (LayerConfig& layer : c->layer_configs)
      if (!layer.has_rope() || schema->optional("expert_count", 0, 0, UINT64_MAX) == 128)
        layer.qk_norm = QkNorm::none;
}

uint32_t check_head_size(Schema* schema, uint32_t size, uint32_t max) {
  if (size > max)
    schema->fail(Status::error(Code::unsupported,
                               "the model's heads have %u dimensions: Kvasir supports up to %u",
                               size, max));
  return size;
}

// Keys and values of all heads have one size.
uint32_t read_head_size(Schema* schema, const char* keys, const char* values, uint32_t otherwise) {
  const auto size = static_cast<uint32_t>(schema->optional(keys, otherwise, 2, 4096));
  if (size < 2)
    schema->fail(Status::error(Code::corrupt, "the model's heads have %u dimensions ('%s%s')", size,
                               schema->prefix().c_str(), keys));
  if (schema->optional(values, size, 2, 4096) != size)
    schema->refuse("has keys and values of different sizes", values);
  return check_head_size(schema, size, max_head_dim);
}

// The shape of the layers with or without a window, whose keys and values are numbered.
void shape_layers(Schema* schema, bool windowed, uint32_t head_dim, ModelConfig* c,
                  HeadShape* shape) {
  for (LayerConfig& layer : c->layer_configs) {
    if (layer.is_windowed() != windowed || !layer.has_attention()) continue;
    if (shape->layers == 0)
      shape->heads = layer.heads, shape->kv_heads = layer.kv_heads, shape->head_dim = head_dim;
    if (layer.heads != shape->heads || layer.kv_heads != shape->kv_heads)
      schema->refuse("has layers with different numbers of heads", "attention.head_count");
    layer.head_dim = head_dim;
    if (layer.writes_kv) layer.kv = shape->layers++;
    if (!windowed) continue;
    c->window = layer.window, c->chunked = layer.chunked;
  }
  if (shape->layers > 0 && shape->kv_heads > 0 && shape->heads % shape->kv_heads)
    schema->fail(Status::error(
        Code::corrupt, "the model has %u query heads for %u KV heads: not a whole number each",
        shape->heads, shape->kv_heads));
}

// Streams and sparse gates of Gemma 3n. Files may leave out what the published models share.
void read_altup(const Gguf& gguf, Schema* schema, ModelConfig* c) {
  constexpr uint32_t sparse_layers = 10;
  constexpr float top_five_percent = 1.6448536f;
  if (!c->architecture->altup) return;
  c->streams = static_cast<uint32_t>(schema->optional("altup.num_inputs", 4, 2, max_streams));
  if (schema->optional("altup.active_idx", 0, 0, UINT32_MAX) != 0)
    schema->refuse("computes on another stream than the first", "altup.active_idx");
  constexpr const char* key = "activation_sparsity_scale";
  const auto sparsity = gguf.get_floats(schema->prefix() + key);
  const auto is_none = [](float x) { return std::isnan(x); };
  if (schema->has(key) && (!sparsity || sparsity->size() < c->depth() ||
                           std::any_of(sparsity->begin(), sparsity->end(), is_none)))
    return schema->fail(Status::error(Code::corrupt,
                                      "the model's '%s%s' has no number for each layer",
                                      schema->prefix().c_str(), key));
  for (uint32_t l = 0; l < c->depth(); ++l) {
    const float given = sparsity ? (*sparsity)[l] : l < sparse_layers ? top_five_percent : 0;
    c->layer_configs[l].sparsity = given > 0 && given < 100 ? given : 0;
  }
}

// The last layers attend the keys and values of the last layer before them that sees as much.
void share_layers(Schema* schema, ModelConfig* c) {
  constexpr uint32_t usual_own = 20;  // of Gemma 3n
  const bool counts = c->architecture->altup && c->depth() > usual_own;
  const uint64_t shared = schema->optional("attention.shared_kv_layers",
                                           counts ? c->depth() - usual_own : 0, 0, c->depth() - 1);
  if (shared > 0 && !c->architecture->shares_kv)
    return schema->refuse("shares keys and values among layers", "attention.shared_kv_layers");
  const uint64_t own = c->depth() - shared;
  for (uint64_t l = own; l < c->depth(); ++l) c->layer_configs[l].writes_kv = false;
}

// Their places, once those of the others are known.
void place_shared_layers(Schema* schema, ModelConfig* c) {
  for (uint32_t l = 0; l < c->depth(); ++l) {
    LayerConfig& layer = c->layer_configs[l];
    if (layer.writes_kv) continue;
    const HeadShape& shape = layer.is_windowed() ? c->windows : *c;
    if (shape.layers == 0)
      schema->fail(Status::error(
          Code::corrupt, "layer %u of the model shares keys and values that no layer has", l));
    layer.kv = shape.layers - 1;
  }
}

void read_shapes(Schema* schema, ModelConfig* c) {
  share_layers(schema, c);
  const auto attends = std::find_if(c->layer_configs.begin(), c->layer_configs.end(),
                                    [](const LayerConfig& l) { return l.has_attention(); });
  if (attends == c->layer_configs.end())
    return schema->refuse("has no layer that attends", "attention.head_count_kv");
  const LayerConfig& first = *attends;
  const uint32_t plain = c->width / first.heads;
  const uint32_t full =
      first.is_latent()
          ? check_head_size(schema, first.latent.rank + first.latent.rotated, max_latent_dim)
          : read_head_size(schema, "attention.key_length", "attention.value_length", plain);
  const uint32_t windowed = first.is_latent() ? full
                                              : read_head_size(schema, "attention.key_length_swa",
                                                               "attention.value_length_swa", full);
  shape_layers(schema, false, full, c, c);
  shape_layers(schema, true, windowed, c, &c->windows);
  place_shared_layers(schema, c);
  if (c->layers == 0)
    schema->refuse("has no layer that attends to all tokens", "attention.sliding_window");
  for (const LayerConfig& layer : c->layer_configs)
    c->feed_forward = std::max(c->feed_forward, layer.has_dense() ? layer.feed_forward : 0);
}

// What a LayerConfig can say and executors cannot do yet, and what contradicts itself.
void refuse_layers(Schema* schema, const ModelConfig& c) {
  for (const LayerConfig& layer : c.layer_configs) {
    if (layer.is_recurrent() && c.recurrent.kind == RecurrentKind::none)
      schema->refuse("has layers without attention", "attention.head_count_kv");
    const bool has_network = layer.has_feed_forward() || c.architecture->single_blocks;
    if ((layer.has_attention() && (layer.heads == 0 || layer.kv_heads == 0)) || !has_network)
      schema->refuse("has layers without heads or without a feed-forward network",
                     "attention.head_count");
    if (layer.has_experts() && layer.experts.width == 0)
      schema->refuse("has experts without a width", "expert_feed_forward_length");
  }
}

float factor(Schema* schema, const char* key, double otherwise) {
  const double value = schema->optional_float(key, otherwise, -1e6, 1e6);
  return static_cast<float>(value == 0 ? otherwise : value);
}

// Factors of embeddings, sub-layers, scores and logits.
void read_scales(Schema* schema, ModelConfig* c) {
  const Architecture& row = *c->architecture;
  const bool granite = row.scales == Scales::granite, minicpm = row.scales == Scales::minicpm;
  double attention = 0;  // 0: 1 / sqrt(head_dim)
  if (row.scales == Scales::gemma) c->embedding_scale = std::sqrt(static_cast<float>(c->width));
  if (row.scales == Scales::cohere) c->logit_scale = factor(schema, "logit_scale", 1);
  if (granite || minicpm) {
    c->embedding_scale = factor(schema, "embedding_scale", minicpm ? 12 : 1);
    c->residual_scale = factor(schema, "residual_scale",
                               minicpm ? 1.4 / std::sqrt(static_cast<double>(c->depth())) : 1);
    c->logit_scale = 1 / factor(schema, "logit_scale", minicpm ? 256.0 / c->width : 1);
  }
  if (row.scales == Scales::minicpm3) {
    c->embedding_scale = 12;
    c->residual_scale = 1.4f / std::sqrt(static_cast<float>(c->depth()));
    c->logit_scale = 256.0f / static_cast<float>(c->width);
  }
  if (granite) attention = schema->optional_float("attention.scale", 0, 0, 1e6);
  if (row.wide_scale_layers > 0 && c->depth() == row.wide_scale_layers)
    attention = 1 / std::sqrt(static_cast<double>(c->width) / c->heads);
  if (row.unit_scale) attention = 1;
  if (row.latent) attention = latent_scale(c->layer_configs[0].latent, c->ropes[0]);
  if (attention > 0)
    for (LayerConfig& layer : c->layer_configs)
      layer.query_scale = static_cast<float>(attention * std::sqrt(layer.head_dim));
  if (row.softcaps) {
    c->attention_softcap = static_cast<float>(
        schema->optional_float("attn_logit_softcapping", row.attention_softcap, 0, 1e6));
    c->final_softcap = static_cast<float>(
        schema->optional_float("final_logit_softcapping", row.final_softcap, 0, 1e6));
  }
}

void read_temperature(Schema* schema, ModelConfig* c) {
  if (c->architecture->temperature > 0) {  // of Llama 4
    c->temperature = {c->architecture->temperature, 8192, 1};
    return;
  }
  c->temperature.scale =
      static_cast<float>(schema->optional_float("attention.temperature_scale", 0, 0, 1e3));
  c->temperature.length = schema->optional("attention.temperature_length",
                                           c->ropes[0].original_context, 1, uint64_t{1} << 40);
}

void refuse_unsupported(Schema* schema, const Architecture& row) {
  if (!row.softcaps) {
    schema->refuse_nonzero("attn_logit_softcapping", "capped attention logits");
    schema->refuse_nonzero("final_logit_softcapping", "capped logits");
  }
  if (row.scales != Scales::granite)
    schema->refuse_nonzero("attention.scale", "its own attention scale");
  if (row.scales == Scales::none || row.scales == Scales::gemma || row.scales == Scales::minicpm3)
    schema->refuse_nonzero("logit_scale", "scaled logits");
  if (row.scales != Scales::granite && row.scales != Scales::minicpm) {
    schema->refuse_nonzero("embedding_scale", "scaled embeddings");
    schema->refuse_nonzero("residual_scale", "scaled residuals");
  }
  schema->refuse_nonzero("attention.max_alibi_bias", "ALiBi");
  schema->refuse_nonzero("attention.clamp_kqv", "clamped projections");
  if (!schema->optional_bool("attention.causal", true))
    schema->fail(Status::error(Code::unsupported,
                               "the model's attention is not causal: it is not a text generator"));
}

}  // namespace

bool ModelConfig::has_longrope() const {
  return std::any_of(ropes.begin(), ropes.end(),
                     [](const RopeConfig& r) { return r.scaling == RopeScaling::longrope; });
}

Status ModelConfig::read(const Gguf& gguf, ModelConfig* out) {
  ModelConfig c;
  const std::string_view architecture = gguf.get_string("general.architecture").value_or("");
  if (architecture.empty())
    return Status::error(Code::corrupt, "the file does not say its architecture: it is no model");
  c.architecture = find_architecture(architecture);
  if (!c.architecture)
    return Status::error(Code::unsupported, "the model's architecture is '%s': Kvasir runs %s",
                         Quoted(architecture).text(), architecture_names().c_str());
  c.name = gguf.get_string("general.name").value_or("").substr(0, max_name);

  Schema schema(gguf, c.architecture->name);
  const uint32_t blocks = schema.size("block_count", gguf_limits::layers);
  c.skipped_layers =
      static_cast<uint32_t>(schema.optional("nextn_predict_layers", 0, 0, blocks - 1));
  c.width = schema.size("embedding_length", gguf_limits::width);
  c.context = schema.required("context_length", 1, uint64_t{1} << 31);
  c.layer_input = static_cast<uint32_t>(schema.optional(
      "embedding_length_per_layer_input", c.architecture->altup ? 256 : 0, 0, gguf_limits::width));
  c.norm = c.architecture->norm;
  c.norm_epsilon = static_cast<float>(schema.optional_float(
      c.norm == NormKind::rms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon",
      1e-5, 1e-12, 1));
  RETURN_IF_ERROR(schema.take());
  read_layers(gguf, &schema, blocks - c.skipped_layers, &c);
  c.recurrent = read_recurrent(&schema, c);
  for (uint32_t l = 0; l < c.depth(); ++l) {
    if (!c.layer(l).is_recurrent()) continue;
    c.layer_configs[l].state = c.recurrent_layers++;
    c.recurrent.joint |=
        c.recurrent.kind == RecurrentKind::delta_net && has_tensor(gguf, l, "ssm_in.weight");
  }
  if (c.state_size() > gguf_limits::state_numbers)
    schema.fail(
        Status::error(Code::limit, "the model's states are %zu numbers: at most %llu can be read",
                      c.state_size(), static_cast<unsigned long long>(gguf_limits::state_numbers)));
  refuse_layers(&schema, c);
  RETURN_IF_ERROR(schema.take());
  read_shapes(&schema, &c);
  read_altup(gguf, &schema, &c);
  RETURN_IF_ERROR(schema.take());
  read_ropes(gguf, &schema, &c);
  read_scales(&schema, &c);
  read_temperature(&schema, &c);
  refuse_unsupported(&schema, *c.architecture);
  RETURN_IF_ERROR(schema.take());
  *out = std::move(c);
  return {};
}

}  // namespace kvasir
