#include "model/latent_config.h"

#include <cmath>

#include "gguf/limits.h"

namespace kvasir {
namespace {

constexpr uint64_t max_head = 4096;     // numbers of a head
constexpr uint32_t rank_multiple = 16;  // that products with W_kh take

// The sizes of a head's queries and values. Newer files have them under keys of their own, and the
// sizes of the absorbed form under the usual ones.
void read_heads(Schema* schema, uint32_t width, uint32_t heads, LatentConfig* c) {
  constexpr const char *query = "attention.key_length_mla", *value = "attention.value_length_mla";
  const bool has_own = schema->has(query) || schema->has(value);
  const auto size = [&](const char* key) {
    return static_cast<uint32_t>(schema->required(key, 1, max_head));
  };
  const uint32_t all = size(has_own ? query : "attention.key_length");
  if (all <= c->rotated)
    schema->fail(Status::error(Code::corrupt,
                               "the model's keys have %u dimensions, of which %u rotate: "
                               "latent attention has some that do not",
                               all, c->rotated));
  else c->plain = all - c->rotated;
  c->values = has_own ? size(value)
                      : static_cast<uint32_t>(
                            schema->optional("attention.value_length", width / heads, 1, max_head));
  if (c->values == 0) schema->refuse("has heads without values", "attention.head_count");
  if (!has_own) return;
  const uint64_t absorbed = uint64_t{c->rank} + c->rotated;
  if (schema->optional("attention.key_length", absorbed, 1, UINT32_MAX) != absorbed ||
      schema->optional("attention.value_length", c->rank, 1, UINT32_MAX) != c->rank)
    schema->fail(Status::error(
        Code::corrupt,
        "the model's '%sattention.key_length' and 'value_length' are not those of a latent vector "
        "of %u numbers and %u rotated ones",
        schema->prefix().c_str(), c->rank, c->rotated));
}

}  // namespace

void read_latent(const Gguf& gguf, Schema* schema, uint32_t width, LayerConfig* layer) {
  LatentConfig c;
  if (layer->heads == 0) return;  // refused with other such layers
  if (layer->kv_heads != 1 && layer->kv_heads != layer->heads)
    schema->fail(Status::error(Code::corrupt,
                               "the model has %u KV heads for %u query heads: latent attention has "
                               "one or as many",
                               layer->kv_heads, layer->heads));
  layer->mixer = MixerKind::latent;
  layer->kv_heads = 1;
  c.rank = schema->size("attention.kv_lora_rank", gguf_limits::width);
  if (c.rank % rank_multiple)
    schema->fail(Status::error(Code::unsupported,
                               "the model's '%sattention.kv_lora_rank' is %u: Kvasir supports "
                               "multiples of %u",
                               schema->prefix().c_str(), c.rank, rank_multiple));
  c.rotated = static_cast<uint32_t>(schema->required("rope.dimension_count", 2, max_head));
  read_heads(schema, width, layer->heads, &c);
  // Small models make their queries by one matrix, whatever the key says.
  if (!gguf.find_tensor("blk.0.attn_q.weight"))
    c.query_rank = schema->size("attention.q_lora_rank", gguf_limits::width);
  c.joint = !gguf.find_tensor("blk.0.attn_k_b.weight");
  layer->latent = c;
}

double latent_scale(const LatentConfig& latent, const RopeConfig& rope) {
  return rope.score_scale / std::sqrt(static_cast<double>(latent.query()));
}

}  // namespace kvasir
