#include "model/rope_config.h"

#include <cmath>

#include "base/quoted.h"

namespace kvasir {
namespace {

RopeScaling scaling_of(const Gguf& gguf, Schema* schema) {
  if (gguf.find_tensor("rope_factors_long.weight")) return RopeScaling::longrope;
  const std::string key = schema->prefix() + "rope.scaling.type";
  const std::string_view type =
      gguf.find(key) ? gguf.get_string(key).value_or("?") : std::string_view("linear");
  if (type == "none") return RopeScaling::none;
  if (type == "linear") return RopeScaling::linear;
  if (type == "yarn") return RopeScaling::yarn;
  if (type == "longrope") return RopeScaling::longrope;
  schema->fail(Status::error(
      Code::unsupported,
      "the model's RoPE scaling ('%s') is '%s': Kvasir knows none, linear, yarn and longrope",
      key.c_str(), Quoted(type).text()));
  return RopeScaling::none;
}

// The magnitude of cosines and sines (YaRN, equation 22). Files of models that scale their scores
// instead have a log multiplier, which takes it back.
double yarn_magnitude(const RopeConfig& rope, double log_multiplier) {
  const double log = std::log(rope.factor);
  return (1 + 0.1 * log) / (log_multiplier == 0 ? 1 : 1 + 0.1 * log_multiplier * log);
}

void read_yarn(Schema* schema, const ModelConfig& c, RopeConfig* rope) {
  rope->rounds_range = c.architecture->rounds_yarn;
  rope->yarn_beta_fast = schema->optional_float("rope.scaling.yarn_beta_fast", 32, 1e-3, 1e6);
  rope->yarn_beta_slow = schema->optional_float("rope.scaling.yarn_beta_slow", 1, 1e-3, 1e6);
  if (schema->optional_float("rope.scaling.yarn_ext_factor", 1, 0, 1e3) != 1)
    schema->refuse("extrapolates YaRN by a factor that is not 1", "rope.scaling.yarn_ext_factor");
  constexpr const char* key = "rope.scaling.yarn_log_multiplier";
  const double log_multiplier = schema->optional_float(key, 0, 0, 1e3);
  if (c.architecture->latent && log_multiplier > 0) {
    // The file has a tenth of it. It scales the scores, and the cosines and sines by nothing.
    const double scale = 1 + 0.1 * 10 * log_multiplier * std::log(rope->factor);
    rope->score_scale = scale * scale;
    if (!(scale > 0 && rope->score_scale < 1e6))
      schema->fail(Status::error(
          Code::corrupt,
          "the model scales its scores by a number that is not positive, or over 1e6: check '%s%s' "
          "and 'rope.scaling.factor'",
          schema->prefix().c_str(), key));
    return;
  }
  rope->magnitude *= yarn_magnitude(*rope, log_multiplier);
  if (!(rope->magnitude > 0 && rope->magnitude < 1e6))
    schema->fail(Status::error(Code::corrupt,
                               "the model's YaRN has a magnitude that is not positive: check '%s%s'"
                               " and 'rope.scaling.factor'",
                               schema->prefix().c_str(), key));
}

void refuse_odd(Schema* schema, const RopeConfig& rope) {
  if (rope.dim % 2)
    schema->fail(Status::error(Code::corrupt, "the model rotates an odd number of dimensions (%u)",
                               rope.dim));
}

RopeConfig read_set(const Gguf& gguf, Schema* schema, const ModelConfig& c) {
  RopeConfig rope;
  rope.neox = c.architecture->rope_neox;
  // Sections for time, height and width; a text's are the same, but pairs are NeoX's.
  constexpr const char* key = "rope.dimension_sections";
  const auto sections = gguf.get_ints(schema->prefix() + key);
  if (schema->has(key) && !sections)
    schema->fail(Status::error(Code::corrupt, "the model's '%s%s' are no whole numbers",
                               schema->prefix().c_str(), key));
  if (sections && sections->size() > 1 && (*sections)[0] > 0 && (*sections)[1] > 0)
    rope.neox = true;
  const LatentConfig& latent = c.layer(0).latent;
  const uint32_t head = latent.rank > 0 ? latent.rotated
                        : c.layers > 0  ? c.head_dim
                                        : c.windows.head_dim;
  rope.dim = static_cast<uint32_t>(schema->optional("rope.dimension_count", head, 2, head));
  refuse_odd(schema, rope);
  rope.base = schema->optional_float("rope.freq_base", 10000, 1.0001, 1e12);
  const double alpha = schema->optional_float("rope.scaling.alpha", 0, 0, 1e6);
  if (alpha > 0 && head > 2) rope.base *= std::pow(alpha, head / (head - 2.0));
  // the key of older files
  const double linear = schema->optional_float("rope.scale_linear", 1, 1e-3, 1e6);
  rope.factor = schema->optional_float("rope.scaling.factor", linear, 0, 1e6);
  if (rope.factor == 0) rope.factor = 1;
  rope.scaling = scaling_of(gguf, schema);
  rope.original_context =
      schema->optional("rope.scaling.original_context_length", c.context, 1, uint64_t{1} << 32);
  rope.magnitude = schema->optional_float("rope.scaling.attn_factor", 1, 1e-3, 1e3);
  if (rope.scaling == RopeScaling::yarn) read_yarn(schema, c, &rope);
  return rope;
}

// The set of the layers with a window.
RopeConfig windowed_set(Schema* schema, const ModelConfig& c, const RopeConfig& full) {
  const Architecture& row = *c.architecture;
  RopeConfig rope = full;
  rope.base = schema->optional_float(
      "rope.freq_base_swa", row.windowed_base > 0 ? row.windowed_base : full.base, 1.0001, 1e12);
  const uint32_t head = c.windows.head_dim;
  rope.dim = static_cast<uint32_t>(
      schema->optional("rope.dimension_count_swa", std::min(full.dim, head), 2, head));
  refuse_odd(schema, rope);
  rope.divisors = !row.freqs_in_full_only;
  if (row.scaling_in_full_only) rope.scaling = RopeScaling::none, rope.magnitude = 1;
  return rope;
}

}  // namespace

void read_ropes(const Gguf& gguf, Schema* schema, ModelConfig* c) {
  c->ropes.push_back(read_set(gguf, schema, *c));
  if (c->windows.layers == 0) return;
  const RopeConfig& full = c->ropes[0];
  const RopeConfig windowed = windowed_set(schema, *c, full);
  const bool divides = windowed.scaling == RopeScaling::longrope ||
                       (windowed.divisors && gguf.find_tensor("rope_freqs.weight"));
  if (divides && windowed.dim != full.dim)
    schema->fail(
        Status::error(Code::unsupported,
                      "the model has RoPE divisors for %u dimensions, and layers that rotate %u",
                      full.dim, windowed.dim));
  c->ropes.push_back(windowed);
  for (LayerConfig& layer : c->layer_configs)
    if (layer.is_windowed() && layer.has_rope()) layer.rope = 1;
}

}  // namespace kvasir
