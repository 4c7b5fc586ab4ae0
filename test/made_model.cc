#include "made_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

#include "../kernels/reference/reference.h"
#include "../tools/bench/encode_weights.h"
#include "text/test_vocabulary.h"

namespace kvasir::test {

uint64_t MadeTensor::rows() const {
  uint64_t n = 1;
  for (std::size_t d = 1; d < dims.size(); ++d) n *= dims[d];
  return n;
}

std::string_view MadeTensor::part() const {
  std::string_view text = name;
  if (layer >= 0) text.remove_prefix(text.find('.', 4) + 1);
  return text.substr(0, text.rfind('.'));
}

namespace {

using Random = std::mt19937;

// ---- weights

// Random bits with scales that give values of mean 0 and a root mean square of `sigma`. Bytes of
// scales and minima agree but for their lowest bits, so that a mean of 0 remains in each block.
struct Codes {
  TensorType type;
  float rms;              // with d = 1
  float minimum;          // of d: what the second half has
  int scale_at, half_at;  // bytes; half_at < 0: no second half
};
constexpr Codes codes[] = {
    {TensorType::q4_1, 4.61f, -7.5f, 0, 2},  {TensorType::q5_0, 9.24f, 0, 0, -1},
    {TensorType::q5_1, 9.23f, -15.5f, 0, 2}, {TensorType::iq4_nl, 70, 0, 0, -1},
    {TensorType::q2_k, 9.9f, 1.5f, 80, 82},  {TensorType::q3_k, 43.3f, 0, 108, -1},
    {TensorType::q5_k, 336, 15.5f, 0, 2},
};

void put_half(float value, std::byte* out) { encode_weights(TensorType::f16, &value, 1, out); }

void random_codes(const Codes& c, float sigma, Random* random, std::byte* out) {
  const uint32_t bytes = tensor_type_info(c.type)->block_bytes;
  for (uint32_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>((*random)() >> 24);
  if (c.type == TensorType::q2_k)
    for (int i = 0; i < 16; ++i) out[i] = (out[i] & std::byte{15}) | out[i] << 4;
  if (c.type == TensorType::q5_k) {
    for (int i = 8; i < 12; ++i) out[i] = out[i - 4] ^ (out[i] & std::byte{1});
    for (int i = 12; i < 16; ++i) out[i] = (out[i] & std::byte{15}) | out[i] << 4;
  }
  const float d = sigma / c.rms;
  put_half(d, out + c.scale_at);
  if (c.half_at >= 0) put_half(d * c.minimum, out + c.half_at);
}

std::vector<std::byte> random_weights(TensorType type, std::size_t n, float mean, float sigma,
                                      Random* random) {
  const TensorTypeInfo* info = tensor_type_info(type);
  std::vector<std::byte> out(n / info->block_elements * info->block_bytes);
  for (const Codes& c : codes) {
    if (c.type != type) continue;
    for (std::size_t at = 0; at < out.size(); at += info->block_bytes)
      random_codes(c, sigma, random, out.data() + at);
    return out;
  }
  std::normal_distribution<float> normal(mean, sigma);
  std::vector<float> x(n);
  for (float& value : x) value = normal(*random);
  encode_weights(type, x.data(), n, out.data());
  return out;
}

// ---- tensors

// Lists the tensors of a model, by its config.
class Lister {
 public:
  Lister(const ModelRecipe& recipe, const ModelConfig& config, uint64_t vocabulary)
      : r_(recipe), c_(config), names_(config.architecture->names), vocabulary_(vocabulary) {}

  std::vector<MadeTensor> list() {
    const uint64_t width = c_.width, depth = c_.depth();
    add("token_embd.weight", {width, vocabulary_}, TensorRole::embedding);
    norm(names_.output_norm, width);
    if (!r_.tied) add("output.weight", {width, vocabulary_}, TensorRole::matrix);
    if (c_.layer_input > 0) {
      const uint64_t all = depth * c_.layer_input;
      add("per_layer_token_embd.weight", {all, vocabulary_}, TensorRole::embedding);
      add("per_layer_model_proj.weight", {width, all}, TensorRole::matrix);
      norm("per_layer_proj_norm", c_.layer_input);
    }
    if (c_.streams > 1)
      for (const char* name : {"altup_proj.weight", "altup_unembd_proj.weight"})
        add(name, {width, width, c_.streams - uint64_t{1}}, TensorRole::matrix);
    for (layer_ = 0; layer_ < static_cast<int>(depth); ++layer_) {
      l_ = &c_.layer_configs[static_cast<std::size_t>(layer_)];
      layer();
    }
    return std::move(tensors_);
  }

 private:
  void add(const std::string& name, std::vector<uint64_t> dims, TensorRole role) {
    const std::string at = layer_ < 0 ? "" : "blk." + std::to_string(layer_) + ".";
    tensors_.push_back({at + name, std::move(dims), role, layer_, TensorType::f32, {}});
  }
  void norm(const std::string& name, uint64_t size) {
    add(name + ".weight", {size}, TensorRole::norm);
    if (c_.norm == NormKind::layer && size == c_.width)
      add(name + ".bias", {size}, TensorRole::vector);
  }
  void matrix(const std::string& name, uint64_t cols, uint64_t rows, bool biased = false) {
    add(name + ".weight", {cols, rows}, TensorRole::matrix);
    if (biased) add(name + ".bias", {rows}, TensorRole::vector);
  }

  void layer() {
    const uint64_t width = c_.width;
    const bool feeds = l_->has_feed_forward();
    if (l_->norm_before() && l_->mixer != MixerKind::none) norm(names_.mixer_norm, width);
    if (l_->has_attention()) attention();
    if (l_->is_recurrent()) recurrent(c_.recurrent);
    if (l_->norm_after()) norm(names_.mixer_post_norm, width);
    if (l_->norm_before() && !l_->is_parallel() && feeds) norm(names_.ffn_norm, width);
    if (l_->has_dense()) dense();
    if (l_->has_experts()) experts(l_->experts);
    if (l_->norm_after()) norm(names_.ffn_post_norm, width);
    if (c_.layer_input > 0) {
      matrix("inp_gate", width, c_.layer_input), matrix("proj", c_.layer_input, width);
      norm("post_norm", width);
    }
    if (c_.streams > 1) altup(width, c_.streams);
    if (c_.architecture->norms_values && c_.streams == 1)
      add("layer_output_scale.weight", {1}, TensorRole::norm);
  }

  void attention() {
    const uint64_t width = c_.width, q = l_->q_width(), kv = l_->kv_width();
    const bool biased = r_.biases && l_->biases;
    if (l_->is_latent()) return latent(l_->latent);
    if (r_.fused_qkv) {
      matrix(names_.qkv, width, q + 2 * kv, biased);
    } else {
      matrix(names_.q, width, l_->gates_output ? 2 * q : q, biased);
      if (l_->writes_kv) matrix(names_.k, width, kv, biased);
      if (l_->writes_kv && !l_->v_is_k) matrix(names_.v, width, kv, biased);
    }
    matrix(names_.o, q, width, biased && l_->sinks);
    qk_norm(names_.q_norm, l_->heads);
    if (l_->writes_kv) qk_norm(names_.k_norm, l_->kv_heads);
    if (l_->sinks) add(std::string(names_.sinks) + ".weight", {l_->heads}, TensorRole::vector);
  }

  void latent(const LatentConfig& c) {
    const uint64_t width = c_.width, heads = l_->heads;
    matrix("attn_q_a", width, c.query_rank);
    norm("attn_q_a_norm", c.query_rank);
    matrix("attn_q_b", c.query_rank, heads * c.query());
    matrix("attn_kv_a_mqa", width, c.rank + c.rotated);
    norm("attn_kv_a_norm", c.rank);
    if (c.joint) {
      matrix("attn_kv_b", c.rank, heads * (c.plain + c.values));
    } else {
      add("attn_k_b.weight", {c.plain, c.rank, heads}, TensorRole::matrix);
      add("attn_v_b.weight", {c.rank, c.values, heads}, TensorRole::matrix);
    }
    matrix(names_.o, heads * c.values, width);
  }

  void recurrent(const RecurrentConfig& r) {
    const uint64_t width = c_.width, heads = r.heads, inner = r.inner();
    if (r.kind == RecurrentKind::convolution) {
      matrix("shortconv.in_proj", width, 3 * width), matrix("shortconv.out_proj", width, width);
      return add("shortconv.conv.weight", {r.taps, r.channels}, TensorRole::vector);
    }
    const bool mamba = r.kind == RecurrentKind::mamba;
    if (mamba) {
      matrix("ssm_in", width, inner + r.channels + heads);
      add("ssm_conv1d.bias", {r.channels}, TensorRole::vector);
      add("ssm_d", {1, heads}, TensorRole::vector);
    } else {
      matrix(names_.qkv, width, r.channels), matrix("attn_gate", width, inner);
      if (r.cyclic_keys) matrix("ssm_beta", width, heads), matrix("ssm_alpha", width, heads);
      else matrix("ssm_ba", width, 2 * heads);
    }
    matrix("ssm_out", inner, width);
    add("ssm_conv1d.weight", {r.taps, r.channels}, TensorRole::vector);
    add("ssm_dt.bias", {heads}, TensorRole::vector);
    add("ssm_a", mamba ? std::vector<uint64_t>{1, heads} : std::vector<uint64_t>{heads},
        TensorRole::decay);
    if (!mamba) norm("ssm_norm", r.value_dim);
    else if (l_->mixer != MixerKind::both)
      add("ssm_norm.weight", {inner / r.key_heads, r.key_heads}, TensorRole::norm);
  }

  void qk_norm(const char* name, uint64_t heads) {
    const uint64_t head = l_->head_dim;
    const std::string weight = std::string(name) + ".weight";
    if (l_->qk_norm == QkNorm::head) add(weight, {head}, TensorRole::norm);
    if (l_->qk_norm == QkNorm::projection) add(weight, {heads * head}, TensorRole::norm);
    if (l_->qk_norm == QkNorm::own) add(weight, {head, heads}, TensorRole::norm);
  }

  void dense() {
    const uint64_t width = c_.width, inner = l_->feed_forward;
    if (l_->gated && r_.fused_up) {
      matrix(names_.up, width, 2 * inner);
    } else {
      if (l_->gated) matrix(names_.gate, width, inner);
      matrix(names_.up, width, inner);
    }
    matrix(names_.down, inner, width);
  }

  void experts(const ExpertConfig& e) {
    const uint64_t width = c_.width, inner = e.width, count = e.count;
    add("ffn_gate_inp.weight", {width, count}, TensorRole::router);
    if (e.parallel_dense) {
      norm("pre_ffw_norm_2", width), norm("post_ffw_norm_1", width);
      norm("post_ffw_norm_2", width);
      add("ffn_gate_inp.scale", {width}, TensorRole::norm);
      add("ffn_down_exps.scale", {count}, TensorRole::norm);
    }
    if (r_.biases && l_->sinks) add("ffn_gate_inp.bias", {count}, TensorRole::vector);
    if (e.gating == Gating::sigmoid && !e.weighs_input)
      add("exp_probs_b.bias", {count}, TensorRole::vector);
    const bool biased = r_.biases && l_->sinks;
    const auto each = [&](const char* name, uint64_t cols, uint64_t rows) {
      add(std::string(name) + ".weight", {cols, rows, count}, TensorRole::matrix);
      if (biased) add(std::string(name) + ".bias", {rows, count}, TensorRole::vector);
    };
    if (l_->gated) each("ffn_gate_exps", width, inner);
    each("ffn_up_exps", width, inner);
    each("ffn_down_exps", inner, width);
    if (e.shared_width == 0) return;
    if (l_->gated) matrix("ffn_gate_shexp", width, e.shared_width);
    matrix("ffn_up_shexp", width, e.shared_width);
    matrix("ffn_down_shexp", e.shared_width, width);
    if (c_.architecture->gates_shared_expert)
      add("ffn_gate_inp_shexp.weight", {width}, TensorRole::vector);
  }

  void altup(uint64_t width, uint64_t streams) {
    add("altup_router.weight", {width, streams}, TensorRole::matrix);
    norm("altup_router_norm", width);
    add("altup_predict_coef.weight", {streams, streams * streams}, TensorRole::vector);
    add("altup_correct_coef.weight", {streams, streams}, TensorRole::vector);
    add("altup_correct_scale.weight", {width}, TensorRole::norm);
    matrix("laurel_l", width, r_.rank), matrix("laurel_r", r_.rank, width);
    norm("laurel_post_norm", width);
  }

  const ModelRecipe& r_;
  const ModelConfig& c_;
  const TensorNames& names_;
  const uint64_t vocabulary_;
  int layer_ = -1;
  const LayerConfig* l_ = nullptr;
  std::vector<MadeTensor> tensors_;
};

// A head has as many numbers with RoPE as without it, and as many values. Newer files have keys of
// the absorbed form.
template <class F>
void add_latent_keys(const ModelRecipe& r, F&& number) {
  const uint32_t half = r.head_dim, whole = 2 * half;
  const bool absorbed = r.architecture == "deepseek2";
  number("attention.kv_lora_rank", r.latent_rank), number("attention.q_lora_rank", r.rank);
  number("rope.dimension_count", half);
  number("attention.head_count_kv", absorbed ? 1 : r.heads);
  number("attention.key_length", absorbed ? r.latent_rank + half : whole);
  number("attention.value_length", absorbed ? r.latent_rank : half);
  if (absorbed)
    number("attention.key_length_mla", whole), number("attention.value_length_mla", half);
}

GgufBuilder keys_of(const ModelRecipe& r, const TestVocabulary& words) {
  GgufBuilder b = bpe_file(words);
  const std::string prefix = r.architecture + ".";
  const auto number = [&](const char* key, uint32_t value) { b.key(prefix + key, value); };
  b.key("general.architecture", r.architecture);
  number("block_count", r.layers), number("embedding_length", r.width);
  number("context_length", r.context);
  number("attention.head_count", r.heads);
  if (r.latent_rank > 0) {
    add_latent_keys(r, number);
  } else {
    if (r.layer_kv_heads.empty()) number("attention.head_count_kv", r.kv_heads);
    else b.key(prefix + "attention.head_count_kv", r.layer_kv_heads);
    number("attention.key_length", r.head_dim), number("attention.value_length", r.head_dim);
  }
  if (r.layer_feed_forward.empty()) number("feed_forward_length", r.feed_forward);
  else b.key(prefix + "feed_forward_length", r.layer_feed_forward);
  if (r.window > 0) number("attention.sliding_window", r.window);
  if (r.experts > 0) {
    number("expert_count", r.experts), number("expert_used_count", r.used);
    number("expert_feed_forward_length", r.expert_width);
    if (r.shared_width > 0) number("expert_shared_feed_forward_length", r.shared_width);
  }
  const bool gemma4 = r.architecture == "gemma4";
  if (gemma4 || r.architecture == "gemma3n")
    number("embedding_length_per_layer_input", r.layer_input);
  if (gemma4) number("attention.key_length_swa", r.window_head_dim);
  if (gemma4) number("attention.value_length_swa", r.window_head_dim);
  if (r.more_keys) r.more_keys(&b, prefix);
  return b;
}

// What ModelConfig takes from the presence of tensors.
void add_optional_parts(const ModelRecipe& r, ModelConfig* c) {
  const Architecture& row = *c->architecture;
  for (LayerConfig& layer : c->layer_configs) {
    if (row.optional_ffn_norm) layer.norms = row.norms;
    if (row.optional_qk_norm) layer.qk_norm = row.qk_norm;
    if (r.architecture == "deepseek2") layer.latent.joint = false;
    layer.v_is_k = row.norms_values && r.keys_are_values && !layer.is_windowed();
  }
}

void fill(const ModelRecipe& r, const ModelConfig& c, Random* random, MadeTensor* t) {
  const std::size_t n = t->cols() * t->rows();
  const bool typed = t->role == TensorRole::matrix || t->role == TensorRole::embedding;
  if (typed && r.type_of) t->type = r.type_of(*t);
  const float per_input = 1 / std::sqrt(static_cast<float>(t->cols()));
  float mean = 0, sigma = per_input;
  if (t->role == TensorRole::embedding) sigma = 1 / c.embedding_scale;
  if (t->name == "per_layer_token_embd.weight")
    sigma = 1 / std::sqrt(static_cast<float>(c.layer_input));
  if (t->role == TensorRole::router) sigma *= r.router_gain;
  if (t->role == TensorRole::norm) mean = 1, sigma = 0.1f;
  // Scores that are not divided by sqrt(head_dim) would be those of one token only.
  const std::string_view part = t->part();
  if (c.architecture->unit_scale && (part == "attn_q_norm" || part == "attn_k_norm"))
    mean = 1 / std::pow(static_cast<float>(t->cols()), 0.25f), sigma = 0.1f * mean;
  if (t->role == TensorRole::vector) sigma = 0.2f;
  if (t->role == TensorRole::decay) mean = -0.5f, sigma = 0.1f;
  t->bytes = random_weights(t->type, n, mean, sigma, random);
}

}  // namespace

MadeTensor* MadeModel::find(std::string_view name) {
  const auto at = std::find_if(tensors.begin(), tensors.end(),
                               [&](const MadeTensor& t) { return t.name == name; });
  return at == tensors.end() ? nullptr : &*at;
}

std::vector<std::byte> MadeModel::build() const {
  GgufBuilder b = keys;
  for (const MadeTensor& t : tensors) b.tensor(t.name, t.dims, t.type, t.bytes);
  return b.build();
}

std::vector<std::byte> MadeModel::build_floats() const {
  GgufBuilder b = keys;
  for (const MadeTensor& t : tensors) {
    const auto rows = static_cast<uint32_t>(t.rows()), cols = static_cast<uint32_t>(t.cols());
    const WeightView w = {t.bytes.data(), t.type, rows, cols, t.bytes.size() / rows};
    std::vector<double> row(cols);
    std::vector<std::byte> floats;
    floats.reserve(t.rows() * cols * sizeof(float));
    for (uint32_t r = 0; r < rows; ++r) {
      reference::dequantize_row(w, r, row.data());
      for (const double x : row) append(&floats, static_cast<float>(x));
    }
    b.tensor(t.name, t.dims, TensorType::f32, std::move(floats));
  }
  return b.build();
}

MadeModel make_model(const ModelRecipe& recipe) {
  const TestVocabulary words = byte_vocabulary();
  MadeModel model{keys_of(recipe, words), {}, {}};
  const std::vector<std::byte> bytes = model.keys.build();
  Gguf gguf;
  Status s = Gguf::parse(bytes, &gguf);
  if (s.ok()) s = ModelConfig::read(gguf, &model.config);
  if (!s.ok()) throw std::runtime_error(recipe.architecture + ": " + s.message());
  add_optional_parts(recipe, &model.config);
  model.tensors = Lister(recipe, model.config, words.tokens.size()).list();
  Random random(recipe.seed);
  for (MadeTensor& t : model.tensors) fill(recipe, model.config, &random, &t);
  return model;
}

// ---- recipes

namespace {

void add_windows(ModelRecipe* r) {
  const bool chunked = r->architecture == "llama4";
  r->window = chunked ? 24 : 16, r->layers = 4;
  r->more_keys = [](GgufBuilder* b, const std::string& at) {
    b->key(at + "attention.sliding_window_pattern", uint32_t{2});
  };
}

void add_experts(ModelRecipe* r) { r->experts = 8, r->used = 2, r->expert_width = 64; }

void add_yarn(ModelRecipe* r) {
  const auto before = r->more_keys;
  r->more_keys = [before](GgufBuilder* b, const std::string& at) {
    if (before) before(b, at);
    b->key(at + "rope.scaling.type", "yarn").key(at + "rope.scaling.factor", 8.0f);
    b->key(at + "rope.scaling.original_context_length", uint32_t{64});
  };
}

void add_scales(ModelRecipe* r) {
  r->more_keys = [](GgufBuilder* b, const std::string& at) {
    b->key(at + "embedding_scale", 12.0f).key(at + "residual_scale", 0.5f);
    b->key(at + "logit_scale", 2.0f);
    if (at != "minicpm.") b->key(at + "attention.scale", 0.3f);
  };
}

void add_gemma4(ModelRecipe* r) {
  r->layers = 4, r->window = 16, r->keys_are_values = true;
  r->more_keys = [](GgufBuilder* b, const std::string& at) {
    b->key(at + "attention.sliding_window_pattern", std::vector<bool>{true, false, true, false});
    b->key(at + "attention.shared_kv_layers", uint32_t{1});
  };
}

void add_gemma3n(ModelRecipe* r) {
  r->layers = 4, r->window = 16;
  r->more_keys = [](GgufBuilder* b, const std::string& at) {
    b->key(at + "attention.sliding_window_pattern", std::vector<bool>{true, false, true, false});
    b->key(at + "attention.shared_kv_layers", uint32_t{2});
    b->key(at + "activation_sparsity_scale", std::vector<float>{1.6f, 1.6f, 0, 0});
  };
}

// States of 4 heads of 16 by 16 numbers, in 2 groups.
void add_states(ModelRecipe* r) {
  const bool delta = r->architecture.starts_with("qwen"), both = r->architecture == "falcon-h1",
             single = r->architecture.starts_with("nemotron");
  r->layers = 4;
  if (!delta && !both)
    r->layer_kv_heads =
        single ? std::vector<uint32_t>{0, 0, 2, 0} : std::vector<uint32_t>{0, 2, 0, 2};
  if (single) r->layer_feed_forward = {0, 96, 0, 96};
  const auto before = r->more_keys;
  r->more_keys = [before, delta](GgufBuilder* b, const std::string& at) {
    if (before) before(b, at);
    if (at.starts_with("lfm2")) return (void)b->key(at + "shortconv.l_cache", uint32_t{3});
    b->key(at + "ssm.conv_kernel", uint32_t{4}).key(at + "ssm.inner_size", uint32_t{64});
    b->key(at + "ssm.state_size", uint32_t{16}).key(at + "ssm.time_step_rank", uint32_t{4});
    b->key(at + "ssm.group_count", uint32_t{2});
    if (delta) b->key(at + "full_attention_interval", uint32_t{2});
  };
}

void complete(ModelRecipe* r) {
  const std::string& name = r->architecture;
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is({"gemma2", "gemma3", "olmo2", "exaone4", "cohere2", "gpt-oss", "llama4"})) add_windows(r);
  if (is({"llama4", "ernie4_5-moe", "qwen2moe", "qwen3moe", "dots1", "bailingmoe2", "gpt-oss",
          "granitemoe", "glm4moe", "deepseek2", "qwen3next", "qwen35moe", "lfm2moe",
          "nemotron_h_moe"}))
    add_experts(r);
  if (is({"llama4", "qwen2moe", "dots1", "bailingmoe2", "glm4moe", "ernie4_5-moe", "deepseek2",
          "qwen3next", "qwen35moe", "nemotron_h_moe"}))
    r->shared_width = 96;
  if (is({"qwen2", "qwen2moe", "gpt-oss", "seed_oss", "starcoder2", "glm4", "glm4moe"}))
    r->biases = true;
  if (is({"mistral3", "gpt-oss"})) add_yarn(r);
  if (is({"granite", "granitemoe", "minicpm", "granitehybrid"})) add_scales(r);
  if (name == "gemma4") add_gemma4(r);
  if (name == "gemma3n") add_gemma3n(r);
  if (find_architecture(name)->recurrent != RecurrentKind::none) add_states(r);
  if (is({"deepseek2", "minicpm3"})) r->latent_rank = 48, r->rank = 32;
  r->fused_qkv = is({"phi3", "bailingmoe2"}), r->fused_up = is({"phi3", "glm4"});
  r->tied = is({"gemma2", "cohere2", "command-r", "smollm3", "qwen3"});
}

}  // namespace

std::vector<ModelRecipe> recipes_of_all_architectures() {
  std::string names = architecture_names();
  names.replace(names.find(" and "), 5, ", ");
  std::vector<ModelRecipe> recipes;
  for (std::size_t begin = 0; begin < names.size();) {
    const std::size_t end = std::min(names.find(", ", begin), names.size());
    ModelRecipe& r = recipes.emplace_back();
    r.architecture = names.substr(begin, end - begin);
    complete(&r);
    begin = end + 2;
  }
  return recipes;
}

}  // namespace kvasir::test
