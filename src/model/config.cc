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

struct ArchitectureInfo {
  const char* name;
  Architecture architecture;
  bool neox;
};

constexpr ArchitectureInfo architectures[] = {
    // Mistral, Yi, SmolLM and TinyLlama files say llama as well
    {"llama", Architecture::llama, false},
    {"qwen2", Architecture::qwen2, true},
    {"qwen3", Architecture::qwen3, true},
};

// Reads "<architecture>.<key>" values and remembers the first thing that is wrong.
class Schema {
 public:
  Schema(const Gguf& gguf, const std::string& prefix) : gguf_(gguf), prefix_(prefix + ".") {}

  uint64_t required(const char* key, uint64_t low, uint64_t high) {
    const auto value = gguf_.get_uint(prefix_ + key);
    if (!value)
      return fail(Status::error(Code::corrupt, "the model has no whole number '%s%s'",
                                prefix_.c_str(), key)),
             low;
    return checked(key, *value, low, high);
  }

  // At least 1, and no more than any model has.
  uint32_t size(const char* key, uint64_t most) {
    const uint64_t value = required(key, 1, UINT64_MAX);
    uint32_t size = 1;
    if (!take_claim(value, most, &size))
      fail(Status::error(Code::limit, "the model's '%s%s' is %llu: at most %llu can be read",
                         prefix_.c_str(), key, static_cast<unsigned long long>(value),
                         static_cast<unsigned long long>(most)));
    return size;
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

  // A feature that changes the result and that the forward pass does not have.
  void refuse_nonzero(const char* key, const char* feature) {
    const auto value = gguf_.get_float(prefix_ + key);
    const auto whole = gguf_.get_uint(prefix_ + key);
    if ((value && *value != 0) || (whole && *whole != 0) ||
        (gguf_.find(prefix_ + key) && !value && !whole))
      fail(Status::error(Code::unsupported,
                         "the model uses %s ('%s%s'), which Kvasir does not support", feature,
                         prefix_.c_str(), key));
  }

  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  Status take() { return std::move(status_); }
  const std::string& prefix() const { return prefix_; }

 private:
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

void read_rope(const Gguf& gguf, Schema* schema, ModelConfig* c) {
  RopeConfig& rope = c->rope;
  rope.dim =
      static_cast<uint32_t>(schema->optional("rope.dimension_count", c->head_dim, 2, c->head_dim));
  if (rope.dim % 2)
    schema->fail(Status::error(Code::corrupt, "the model rotates an odd number of dimensions (%u)",
                               rope.dim));
  rope.base = schema->optional_float("rope.freq_base", 10000, 1.0001, 1e12);
  // the key of older files
  const double linear = schema->optional_float("rope.scale_linear", 1, 1e-3, 1e6);
  if (linear != 1) rope.scaling = RopeScaling::linear, rope.factor = linear;

  const std::string type_key = schema->prefix() + "rope.scaling.type";
  if (!gguf.find(type_key)) return;
  const std::string_view type = gguf.get_string(type_key).value_or("?");
  if (type == "none") return;
  if (type != "linear" && type != "yarn") {
    schema->fail(Status::error(
        Code::unsupported, "the model's RoPE scaling is '%s': Kvasir knows none, linear and yarn",
        Quoted(type).text()));
    return;
  }
  rope.scaling = type == "yarn" ? RopeScaling::yarn : RopeScaling::linear;
  rope.factor = schema->optional_float("rope.scaling.factor", 1, 1e-3, 1e6);
  if (rope.scaling != RopeScaling::yarn) return;
  rope.original_context =
      schema->optional("rope.scaling.original_context_length", c->context, 1, uint64_t{1} << 32);
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
}

void refuse_unsupported(Schema* schema, const ModelConfig& c, const Gguf& gguf) {
  const auto window = gguf.get_uint(schema->prefix() + "attention.sliding_window");
  const bool windowed = window
                            ? *window > 0 && *window < c.context
                            : gguf.find(schema->prefix() + "attention.sliding_window") != nullptr;
  if (windowed)
    schema->fail(Status::error(Code::unsupported,
                               "the model attends through a sliding window "
                               "('%sattention.sliding_window'), which Kvasir does not "
                               "support: use a model with full attention",
                               schema->prefix().c_str()));
  schema->refuse_nonzero("expert_count", "a mixture of experts");
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
    schema->fail(Status::error(Code::unsupported,
                               "the model uses parallel residuals, which Kvasir does not support"));
}

}  // namespace

Status ModelConfig::read(const Gguf& gguf, ModelConfig* out) {
  ModelConfig c;
  const std::string_view architecture = gguf.get_string("general.architecture").value_or("");
  const auto* info =
      std::find_if(std::begin(architectures), std::end(architectures),
                   [&](const ArchitectureInfo& a) { return architecture == a.name; });
  if (architecture.empty())
    return Status::error(Code::corrupt, "the file does not say its architecture: it is no model");
  if (info == std::end(architectures))
    return Status::error(Code::unsupported,
                         "the model's architecture is '%s': Kvasir runs llama, qwen2 and qwen3",
                         Quoted(architecture).text());
  c.architecture_name = architecture;
  c.name = gguf.get_string("general.name").value_or("").substr(0, max_name);
  c.architecture = info->architecture;
  c.rope.neox = info->neox;

  Schema schema(gguf, c.architecture_name);
  c.layers = schema.size("block_count", gguf_limits::layers);
  c.width = schema.size("embedding_length", gguf_limits::width);
  c.feed_forward = schema.size("feed_forward_length", gguf_limits::feed_forward);
  c.heads = schema.size("attention.head_count", gguf_limits::heads);
  c.kv_heads = gguf.find(schema.prefix() + "attention.head_count_kv")
                   ? schema.size("attention.head_count_kv", gguf_limits::heads)
                   : c.heads;
  c.context = schema.required("context_length", 1, uint64_t{1} << 31);
  c.rms_epsilon =
      static_cast<float>(schema.optional_float("attention.layer_norm_rms_epsilon", 1e-5, 1e-12, 1));
  if (c.heads % c.kv_heads)
    schema.fail(Status::error(
        Code::corrupt, "the model has %u query heads for %u KV heads: not a whole number each",
        c.heads, c.kv_heads));
  const uint32_t plain = c.width / c.heads;
  c.head_dim = static_cast<uint32_t>(schema.optional("attention.key_length", plain, 2, 4096));
  if (c.head_dim < 2 ||
      schema.optional("attention.value_length", c.head_dim, 2, 4096) != c.head_dim)
    schema.fail(Status::error(
        Code::unsupported,
        "the model's keys and values have different sizes, which Kvasir does not support"));
  if (c.head_dim > max_head_dim)
    schema.fail(Status::error(Code::unsupported,
                              "the model's heads have %u dimensions: Kvasir supports up to %u",
                              c.head_dim, max_head_dim));
  read_rope(gguf, &schema, &c);
  refuse_unsupported(&schema, c, gguf);
  if (Status s = schema.take(); !s.ok()) return s;
  *out = std::move(c);
  return {};
}

}  // namespace kvasir
