#include "model_shapes.h"

#include <numeric>

namespace kvasir {
namespace {

constexpr Family kLlama = {.architecture = "llama"};
constexpr Family kQwen3Moe = {.architecture = "qwen3moe", .rope_base = 1000000, .qk_norm = true};
constexpr Family kGptOss = {.architecture = "gpt-oss",
                            .ffn_norm = "post_attention_norm",
                            .rope_base = 150000,
                            .biases_and_sinks = true,
                            .window = 128};
constexpr Family kGemma3 = {.architecture = "gemma3",
                            .rope_base = 1000000,
                            .rms_epsilon = 1e-6f,
                            .qk_norm = true,
                            .sandwich = true,
                            .window = 1024};
constexpr Family kQwen35 = {.architecture = "qwen35",
                            .ffn_norm = "post_attention_norm",
                            .rope_base = 10000000,
                            .rms_epsilon = 1e-6f,
                            .qk_norm = true,
                            .hybrid = true};
constexpr Family kQwen35Moe = {.architecture = "qwen35moe",
                               .ffn_norm = "post_attention_norm",
                               .rope_base = 10000000,
                               .rms_epsilon = 1e-6f,
                               .qk_norm = true,
                               .hybrid = true};
constexpr uint32_t kAttentionInterval = 4;  // of a hybrid: every fourth layer attends

// Lists the tensors of a model.
class Tensors {
 public:
  Tensors(const Shape& shape, const TensorTypes& types, bool untied)
      : s_(shape), family_(*shape.family), types_(types), untied_(untied) {}

  std::vector<Tensor> list() {
    weight("token_embd", {s_.width, s_.vocab}, types_.embedding);
    norm("output_norm", s_.width);
    if (untied_) weight("output", {s_.width, s_.vocab}, types_.embedding);
    for (uint32_t i = 0; i < s_.layers + s_.mtp; ++i) {
      at_ = "blk." + std::to_string(i) + ".";
      if (i == s_.layers) mtp_inputs();
      norm("attn_norm", s_.width);
      if (family_.hybrid && i < s_.layers && (i + 1) % kAttentionInterval != 0) delta_net();
      else attention();
      norm(family_.ffn_norm, s_.width);
      if (s_.experts > 0) experts();
      else dense();
      if (family_.sandwich) norm("post_attention_norm", s_.width), norm("post_ffw_norm", s_.width);
    }
    return std::move(tensors_);
  }

 private:
  void add(const std::string& name, std::vector<uint64_t> dims, TensorType type, Fill fill) {
    tensors_.push_back({at_ + name, std::move(dims), type, fill});
  }
  void weight(const std::string& name, std::vector<uint64_t> dims, TensorType type) {
    add(name + ".weight", std::move(dims), type, Fill::weights);
  }
  void norm(const std::string& name, uint64_t size) {
    add(name + ".weight", {size}, TensorType::f32, Fill::ones);
  }
  // A matrix or those of all experts, with its biases where the family has them.
  void linear(const std::string& name, std::vector<uint64_t> dims, TensorType type) {
    const std::vector<uint64_t> biases(dims.begin() + 1, dims.end());
    weight(name, std::move(dims), type);
    if (family_.biases_and_sinks) add(name + ".bias", biases, TensorType::f32, Fill::weights);
  }
  void attention() {
    const uint64_t q = uint64_t{s_.heads} * s_.head_dim, kv = uint64_t{s_.kv_heads} * s_.head_dim;
    linear("attn_q", {s_.width, family_.hybrid ? 2 * q : q}, types_.matrices);  // and its gate
    linear("attn_k", {s_.width, kv}, types_.matrices);
    linear("attn_v", {s_.width, kv}, types_.matrices);
    linear("attn_output", {q, s_.width}, types_.matrices);
    if (family_.qk_norm) norm("attn_q_norm", s_.head_dim), norm("attn_k_norm", s_.head_dim);
    if (family_.biases_and_sinks) weight("attn_sinks", {s_.heads}, TensorType::f32);
  }
  void mtp_inputs() {
    linear("nextn.eh_proj", {2 * uint64_t{s_.width}, s_.width}, types_.matrices);
    for (const char* name : {"nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"})
      norm(name, s_.width);
  }
  void delta_net() {
    const uint64_t channels = 2 * uint64_t{kDeltaKeyHeads} * kDeltaState + kDeltaInner;
    linear("attn_qkv", {s_.width, channels}, types_.matrices);
    linear("attn_gate", {s_.width, kDeltaInner}, types_.matrices);
    linear("ssm_beta", {s_.width, kDeltaValueHeads}, types_.matrices);
    linear("ssm_alpha", {s_.width, kDeltaValueHeads}, types_.matrices);
    add("ssm_conv1d.weight", {kDeltaTaps, channels}, TensorType::f32, Fill::taps);
    add("ssm_dt.bias", {kDeltaValueHeads}, TensorType::f32, Fill::step);
    add("ssm_a", {kDeltaValueHeads}, TensorType::f32, Fill::decay);
    norm("ssm_norm", kDeltaState);
    linear("ssm_out", {kDeltaInner, s_.width}, types_.matrices);
  }
  void dense() {
    linear("ffn_gate", {s_.width, s_.ffn}, types_.matrices);
    linear("ffn_up", {s_.width, s_.ffn}, types_.matrices);
    linear("ffn_down", {s_.ffn, s_.width}, types_.matrices);
  }
  void experts() {
    linear("ffn_gate_inp", {s_.width, s_.experts}, TensorType::f32);
    linear("ffn_gate_exps", {s_.width, s_.ffn, s_.experts}, types_.experts);
    linear("ffn_up_exps", {s_.width, s_.ffn, s_.experts}, types_.experts);
    linear("ffn_down_exps", {s_.ffn, s_.width, s_.experts}, types_.experts);
    if (!family_.hybrid) return;
    weight("ffn_gate_inp_shexp", {s_.width}, TensorType::f32);
    linear("ffn_gate_shexp", {s_.width, s_.ffn}, types_.matrices);
    linear("ffn_up_shexp", {s_.width, s_.ffn}, types_.matrices);
    linear("ffn_down_shexp", {s_.ffn, s_.width}, types_.matrices);
  }

  const Shape& s_;
  const Family& family_;
  const TensorTypes types_;
  const bool untied_;
  std::string at_;
  std::vector<Tensor> tensors_;
};

void list_hybrid_keys(const ShapeKeys& keys) {
  keys.numbers("rope.dimension_sections", {11, 11, 10, 0});
  keys.number("full_attention_interval", kAttentionInterval);
  keys.number("ssm.conv_kernel", kDeltaTaps);
  keys.number("ssm.inner_size", kDeltaInner);
  keys.number("ssm.state_size", kDeltaState);
  keys.number("ssm.time_step_rank", kDeltaValueHeads);
  keys.number("ssm.group_count", kDeltaKeyHeads);
}

}  // namespace

// 1b and 3b of Llama 3.2, 8b of Llama 3.1, with a smaller vocabulary.
const std::map<std::string, Shape>& known_shapes() {
  static const std::map<std::string, Shape> shapes = {
      {"tiny", {&kLlama, 2, 256, 4, 2, 64, 512, 512, 4096, 0, 0}},
      {"1b", {&kLlama, 16, 2048, 32, 8, 64, 8192, 32768, 131072, 0, 0}},
      {"3b", {&kLlama, 28, 3072, 24, 8, 128, 8192, 32768, 131072, 0, 0}},
      {"8b", {&kLlama, 32, 4096, 32, 8, 128, 14336, 32768, 131072, 0, 0}},
      {"30b-a3b", {&kQwen3Moe, 48, 2048, 32, 4, 128, 768, 151936, 262144, 128, 8}},
      {"gpt-oss-20b", {&kGptOss, 24, 2880, 64, 8, 64, 2880, 201088, 131072, 32, 4}},
      {"gemma3-4b", {&kGemma3, 34, 2560, 8, 4, 256, 10240, 262144, 262144, 0, 0}},
      {"qwen35-4b", {&kQwen35, 32, 2560, 16, 4, 256, 9216, 248320, 262144, 0, 0}},
      {"qwen35-35b-a3b", {&kQwen35Moe, 40, 2048, 16, 2, 256, 512, 248320, 262144, 256, 8}},
  };
  return shapes;
}

uint64_t Tensor::elements() const {
  return std::accumulate(dims.begin(), dims.end(), uint64_t{1}, std::multiplies<>());
}

uint64_t Tensor::bytes() const {
  const TensorTypeInfo* info = tensor_type_info(type);
  return elements() / info->block_elements * info->block_bytes;
}

std::vector<Tensor> list_tensors(const Shape& shape, const TensorTypes& types, bool untied) {
  return Tensors(shape, types, untied).list();
}

void list_keys(const Shape& s, const ShapeKeys& keys) {
  const Family& family = *s.family;
  keys.number("block_count", s.layers + s.mtp);
  if (s.mtp) keys.number("nextn_predict_layers", 1);
  keys.number("embedding_length", s.width);
  keys.number("feed_forward_length", s.ffn);
  keys.number("context_length", s.context);
  keys.number("attention.head_count", s.heads);
  keys.number("attention.head_count_kv", s.kv_heads);
  keys.number("attention.key_length", s.head_dim);
  keys.number("attention.value_length", s.head_dim);
  keys.real("attention.layer_norm_rms_epsilon", family.rms_epsilon);
  keys.number("rope.dimension_count", family.hybrid ? s.head_dim / 4 : s.head_dim);
  keys.real("rope.freq_base", family.rope_base);
  keys.number("vocab_size", s.vocab);
  if (s.experts > 0) {
    keys.number("expert_count", s.experts);
    keys.number("expert_used_count", s.used);
    keys.number("expert_feed_forward_length", s.ffn);
    if (family.hybrid) keys.number("expert_shared_feed_forward_length", s.ffn);
  }
  if (family.window > 0) keys.number("attention.sliding_window", family.window);
  if (family.biases_and_sinks) {
    keys.text("rope.scaling.type", "yarn");
    keys.real("rope.scaling.factor", 32);
    keys.number("rope.scaling.original_context_length", 4096);
  }
  if (family.sandwich) {
    keys.text("rope.scaling.type", "linear");
    keys.real("rope.scaling.factor", 8);
  }
  if (family.hybrid) list_hybrid_keys(keys);
}

}  // namespace kvasir
