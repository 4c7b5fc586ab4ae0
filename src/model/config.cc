#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "backend/page.h"
#include "base/number_text.h"
#include "base/plausible.h"
#include "base/quoted.h"
#include "gguf/limits.h"

namespace kvasir {
namespace {

constexpr std::size_t max_name = 255;  // bytes kept of a model's name

// Reads "<architecture>.<key>" values and remembers the first thing that is wrong.
class Schema {
 public:
  Schema(const Gguf& gguf, const std::string& architecture)
      : gguf_(gguf), prefix_(architecture + ".") {}

  uint64_t required(const char* key, uint64_t low, uint64_t high) {
    const auto value = gguf_.get_uint(prefix_ + key);
    if (!value)
      return fail(Status::error(Code::corrupt, "the model has no whole number '%s%s'",
                                prefix_.c_str(), key)),
             low;
    return checked(key, *value, low, high);
  }

  // At least 1, and no more than any model has.
  uint32_t size(const char* key, uint64_t max) {
    return claim(key, required(key, 1, UINT64_MAX), max);
  }

  // One for each layer, from a number or from an array. 0 in an array is kept.
  std::vector<uint32_t> sizes(const char* key, uint32_t layers, uint64_t max) {
    const auto array = gguf_.get_ints(prefix_ + key);
    if (!array) return std::vector<uint32_t>(layers, size(key, max));
    std::vector<uint32_t> sizes(layers, 1);
    if (array->size() < layers) {
      fail(Status::error(Code::corrupt, "the model's '%s%s' has %zu numbers for %u layers",
                         prefix_.c_str(), key, array->size(), layers));
      return sizes;
    }
    for (uint32_t l = 0; l < layers; ++l) {
      const int32_t value = (*array)[l];
      sizes[l] = value == 0 ? 0 : claim(key, static_cast<uint64_t>(std::max(value, 0)), max);
      if (value < 0)
        fail(Status::error(Code::corrupt, "the model's '%s%s' has a negative number",
                           prefix_.c_str(), key));
    }
    return sizes;
  }

  uint64_t optional(const char* key, uint64_t otherwise, uint64_t low, uint64_t high) {
    if (!gguf_.find(prefix_ + key)) return otherwise;
    return required(key, low, high);
  }

  double optional_float(const char* key, double otherwise, double low, double high) {
    if (!gguf_.find(prefix_ + key)) return otherwise;
    const auto value = gguf_.get_float(prefix_ + key);
    if (!value || !(*value >= low && *value <= high)) {
      fail(Status::error(Code::corrupt, "the model's '%s%s' is not a number from %s to %s",
                         prefix_.c_str(), key, number_text(low).c_str(),
                         number_text(high).c_str()));
      return otherwise;
    }
    return *value;
  }

  // A feature that changes the result and that the forward pass lacks.
  void refuse_nonzero(const char* key, const char* feature) {
    const auto value = gguf_.get_float(prefix_ + key);
    const auto whole = gguf_.get_uint(prefix_ + key);
    if ((value && *value != 0) || (whole && *whole != 0) ||
        (gguf_.find(prefix_ + key) && !value && !whole))
      refuse((std::string("uses ") + feature).c_str(), key);
  }

  // feature: "uses ALiBi".
  void refuse(const char* feature, const char* key) {
    fail(Status::error(Code::unsupported, "the model %s ('%s%s'), which Kvasir does not support",
                       feature, prefix_.c_str(), key));
  }
  bool has(const char* key) const { return gguf_.find(prefix_ + key) != nullptr; }

  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  Status take() { return std::move(status_); }
  const std::string& prefix() const { return prefix_; }

 private:
  uint32_t claim(const char* key, uint64_t value, uint64_t max) {
    uint32_t size = 1;
    if (!take_claim(value, max, &size))
      fail(Status::error(Code::limit, "the model's '%s%s' is %llu: at most %llu can be read",
                         prefix_.c_str(), key, static_cast<unsigned long long>(value),
                         static_cast<unsigned long long>(max)));
    return size;
  }

  uint64_t checked(const char* key, uint64_t value, uint64_t low, uint64_t high) {
    if (value >= low && value <= high) return value;
    fail(Status::error(Code::corrupt, "the model's '%s%s' is %llu: it must be %llu to %llu",
                       prefix_.c_str(), key, static_cast<unsigned long long>(value),
                       static_cast<unsigned long long>(low),
                       static_cast<unsigned long long>(high)));
    return low;
  }

  const Gguf& gguf_;
  std::string prefix_;
  Status status_;
};

RopeConfig read_rope(const Gguf& gguf, Schema* schema, const ModelConfig& c) {
  RopeConfig rope;
  rope.neox = c.architecture->rope_neox;
  rope.dim =
      static_cast<uint32_t>(schema->optional("rope.dimension_count", c.head_dim, 2, c.head_dim));
  if (rope.dim % 2)
    schema->fail(Status::error(Code::corrupt, "the model rotates an odd number of dimensions (%u)",
                               rope.dim));
  rope.base = schema->optional_float("rope.freq_base", 10000, 1.0001, 1e12);
  // the key of older files
  const double linear = schema->optional_float("rope.scale_linear", 1, 1e-3, 1e6);
  if (linear != 1) rope.scaling = RopeScaling::linear, rope.factor = linear;

  const std::string type_key = schema->prefix() + "rope.scaling.type";
  if (!gguf.find(type_key)) return rope;
  const std::string_view type = gguf.get_string(type_key).value_or("?");
  if (type == "none") return rope;
  if (type != "linear" && type != "yarn") {
    schema->fail(Status::error(
        Code::unsupported, "the model's RoPE scaling is '%s': Kvasir knows none, linear and yarn",
        Quoted(type).text()));
    return rope;
  }
  rope.scaling = type == "yarn" ? RopeScaling::yarn : RopeScaling::linear;
  rope.factor = schema->optional_float("rope.scaling.factor", 1, 1e-3, 1e6);
  if (rope.scaling != RopeScaling::yarn) return rope;
  rope.original_context =
      schema->optional("rope.scaling.original_context_length", c.context, 1, uint64_t{1} << 32);
  rope.yarn_attention_factor = schema->optional_float("rope.scaling.attn_factor", 1, 1e-3, 1e3);
  rope.yarn_attention_factor = schema->optional_float("rope.scaling.yarn_attn_factor",
                                                      rope.yarn_attention_factor, 1e-3, 1e3);
  rope.yarn_beta_fast = schema->optional_float("rope.scaling.yarn_beta_fast", 32, 1e-3, 1e6);
  rope.yarn_beta_slow = schema->optional_float("rope.scaling.yarn_beta_slow", 1, 1e-3, 1e6);
  if (schema->optional_float("rope.scaling.yarn_ext_factor", 1, 0, 1e3) != 1)
    schema->fail(Status::error(
        Code::unsupported,
        "the model's YaRN extrapolation factor is not 1, which Kvasir does not support"));
  schema->refuse_nonzero("rope.scaling.yarn_log_multiplier", "a YaRN log multiplier");
  return rope;
}

// The layers, by the row of the architecture and the file.
void read_layers(Schema* schema, ModelConfig* c) {
  const Architecture& row = *c->architecture;
  const auto heads = schema->sizes("attention.head_count", c->layers, gguf_limits::heads);
  const auto kv_heads =
      schema->has("attention.head_count_kv")
          ? schema->sizes("attention.head_count_kv", c->layers, gguf_limits::heads)
          : heads;
  const auto feed_forward =
      schema->sizes("feed_forward_length", c->layers, gguf_limits::feed_forward);
  const uint64_t window = schema->optional("attention.sliding_window", 0, 0, UINT64_MAX);
  const bool experts = schema->optional("expert_count", 0, 0, UINT64_MAX) > 0;
  for (uint32_t l = 0; l < c->layers; ++l) {
    LayerConfig layer;
    layer.mixer = kv_heads[l] == 0 ? MixerKind::recurrent : MixerKind::attention;
    layer.ffn = experts ? FfnKind::experts : FfnKind::swiglu;
    layer.norms = row.norms;
    layer.qk_norm = row.qk_norm;
    layer.biases = row.biases;
    if (Architecture::is_every(row.no_rope_every, l)) layer.rope = LayerConfig::no_rope;
    const bool windowed = window < c->context && !Architecture::is_every(row.full_every, l);
    layer.window = windowed ? window : 0;
    layer.heads = heads[l], layer.kv_heads = kv_heads[l];
    layer.feed_forward = feed_forward[l];
    c->layer_configs.push_back(layer);
  }
}

// Keys and values of all heads have one size.
void read_head_size(Schema* schema, ModelConfig* c) {
  const uint32_t plain = c->width / c->heads;
  c->head_dim = static_cast<uint32_t>(schema->optional("attention.key_length", plain, 2, 4096));
  if (c->head_dim < 2 ||
      schema->optional("attention.value_length", c->head_dim, 2, 4096) != c->head_dim)
    schema->refuse("has keys and values of different sizes", "attention.value_length");
  if (c->head_dim > max_head_dim)
    schema->fail(Status::error(Code::unsupported,
                               "the model's heads have %u dimensions: Kvasir supports up to %u",
                               c->head_dim, max_head_dim));
  for (LayerConfig& layer : c->layer_configs) layer.head_dim = c->head_dim;
}

// What a LayerConfig can say and executors cannot do yet.
void refuse_layers(Schema* schema, const ModelConfig& c) {
  const LayerConfig& first = c.layer_configs[0];
  for (const LayerConfig& layer : c.layer_configs) {
    if (layer.mixer != MixerKind::attention)
      schema->refuse("has layers without attention", "attention.head_count_kv");
    if (layer.ffn != FfnKind::swiglu) schema->refuse("is a mixture of experts", "expert_count");
    if (layer.window > 0)
      schema->refuse("attends through a sliding window", "attention.sliding_window");
    if (layer.heads != first.heads || layer.kv_heads != first.kv_heads)
      schema->refuse("has layers with different numbers of heads", "attention.head_count");
    if (layer.feed_forward != first.feed_forward)
      schema->refuse("has layers of different widths", "feed_forward_length");
  }
  if (first.heads == 0 || first.feed_forward == 0)
    schema->refuse("has layers without heads or without a feed-forward network",
                   "attention.head_count");
  else if (first.kv_heads > 0 && first.heads % first.kv_heads)
    schema->fail(Status::error(
        Code::corrupt, "the model has %u query heads for %u KV heads: not a whole number each",
        first.heads, first.kv_heads));
}

void refuse_unsupported(Schema* schema, const Gguf& gguf) {
  schema->refuse_nonzero("attn_logit_softcapping", "capped attention logits");
  schema->refuse_nonzero("final_logit_softcapping", "capped logits");
  schema->refuse_nonzero("attention.scale", "its own attention scale");
  schema->refuse_nonzero("logit_scale", "scaled logits");
  schema->refuse_nonzero("embedding_scale", "scaled embeddings");
  schema->refuse_nonzero("residual_scale", "scaled residuals");
  schema->refuse_nonzero("attention.max_alibi_bias", "ALiBi");
  schema->refuse_nonzero("attention.clamp_kqv", "clamped projections");
  if (gguf.get_bool(schema->prefix() + "attention.causal") == false)
    schema->fail(Status::error(Code::unsupported,
                               "the model's attention is not causal: it is not a text generator"));
  if (gguf.get_bool(schema->prefix() + "use_parallel_residual") == true)
    schema->refuse("uses parallel residuals", "use_parallel_residual");
}

}  // namespace

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
  c.layers = schema.size("block_count", gguf_limits::layers);
  c.width = schema.size("embedding_length", gguf_limits::width);
  c.context = schema.required("context_length", 1, uint64_t{1} << 31);
  c.rms_epsilon =
      static_cast<float>(schema.optional_float("attention.layer_norm_rms_epsilon", 1e-5, 1e-12, 1));
  read_layers(&schema, &c);
  refuse_layers(&schema, c);
  RETURN_IF_ERROR(schema.take());
  c.heads = c.layer_configs[0].heads;
  c.kv_heads = c.layer_configs[0].kv_heads;
  c.feed_forward = c.layer_configs[0].feed_forward;
  read_head_size(&schema, &c);
  c.ropes.push_back(read_rope(gguf, &schema, c));
  refuse_unsupported(&schema, gguf);
  RETURN_IF_ERROR(schema.take());
  *out = std::move(c);
  return {};
}

}  // namespace kvasir
