// Files of every architecture that contradict themselves: metadata, tensors and weights that lie.
// Each is refused with an error that names what is wrong, when it is opened or by the first step
// that meets it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>

#include "fault_count.h"
#include "helpers.h"
#include "hostile/lies.h"
#include "made_model.h"
#include "temp_folder.h"

using namespace kvasir;
using test::GgufBuilder;
using test::MadeModel;
using test::MadeTensor;
using test::ModelRecipe;
using test::TensorRole;

namespace {

constexpr std::size_t prompt = 20;

bool contains(const char* text, std::string_view words) {
  return std::string_view(text).find(words) != std::string_view::npos;
}

// A file, which is written over for each case.
class Scratch {
 public:
  // Opens the file and runs a few tokens. *logits may be null.
  Status run(const std::vector<std::byte>& bytes, std::vector<float>* logits = nullptr) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    std::shared_ptr<const Model> model;
    RETURN_IF_ERROR(Model::open(path_, "", &model));
    std::unique_ptr<Session> session;
    SessionOptions options;
    options.threads = 1;
    options.context = 256;
    RETURN_IF_ERROR(Session::open(model, options, &session));
    std::vector<float> out(prompt * model->config().vocabulary);
    std::vector<Token> tokens(prompt);
    for (std::size_t i = 0; i < prompt; ++i) tokens[i] = static_cast<Token>((i * 37 + 5) % 256);
    uint64_t done = 0;
    RETURN_IF_ERROR(session->prefill_tokens(tokens, out.data(), nullptr, {}, &done));
    Token token = 0;
    bool end = false;
    RETURN_IF_ERROR(session->next({}, nullptr, &token, &end));
    for (const float x : out)
      if (!std::isfinite(x)) return Status::error(Code::internal, "a logit that is not finite");
    if (logits) *logits = std::move(out);
    return {};
  }

 private:
  TempFolder folder_;
  const std::string path_ = folder_.file("lies.gguf");
};

// Adds a key to a file.
using Put = std::function<void(GgufBuilder*, const std::string& key)>;

// A copy of a model's metadata in which a key is another, or is missing.
GgufBuilder with_key(const MadeModel& model, const std::string& key, const Put& put) {
  const std::vector<std::byte> bytes = model.keys.build();
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  GgufBuilder out;
  for (const auto& [name, value] : gguf.entries()) {
    if (name == key) continue;
    std::vector<std::byte> raw;
    if (value.type == GgufType::array) test::append(&raw, value.element_type);
    if (value.type == GgufType::array) test::append(&raw, value.count);
    if (value.type == GgufType::string) test::append(&raw, uint64_t{value.bytes.size()});
    raw.insert(raw.end(), value.bytes.begin(), value.bytes.end());
    out.raw_key(name, static_cast<uint32_t>(value.type), raw);
  }
  if (put) put(&out, key);
  return out;
}

std::vector<std::byte> with_tensors(GgufBuilder b, const std::vector<MadeTensor>& tensors) {
  for (const MadeTensor& t : tensors) b.tensor(t.name, t.dims, t.type, t.bytes);
  return b.build();
}

MadeModel made(const std::string& architecture) {
  for (const ModelRecipe& r : test::recipes_of_all_architectures())
    if (r.architecture == architecture) return test::make_model(r);
  FAIL("no recipe of " << architecture);
  return {};
}

// f(model) for a model of each architecture.
template <class F>
void for_each_architecture(F&& f) {
  for (const ModelRecipe& recipe : test::recipes_of_all_architectures()) {
    CAPTURE(recipe.architecture);
    f(test::make_model(recipe));
  }
}

template <class T>
Put value(T x) {
  return [x](GgufBuilder* b, const std::string& key) { b->key(key, x); };
}
Put number(uint32_t x) { return value(x); }
Put real(float x) { return value(x); }
Put numbers(std::vector<uint32_t> x) { return value(std::move(x)); }
Put reals(std::vector<float> x) { return value(std::move(x)); }
Put flags(std::vector<bool> x) { return value(std::move(x)); }
Put text(const char* x) { return value(x); }

const float nan_value = std::nanf(""), infinity = std::numeric_limits<float>::infinity();

struct Lie {
  const char *architecture, *key;
  Put put;
  const char* words;  // of the message
};

// Models have 2 layers, with windows 4; every second layer of those sees everything.
const std::vector<Lie>& lies() {
  static const std::vector<Lie> all = {
      // windows and their patterns
      {"gemma3", "attention.sliding_window_pattern", flags({true, false, true}), "for 4 layers"},
      {"gemma3", "attention.sliding_window_pattern", reals({1, 0, 1, 0}), "window_pattern"},
      {"gemma3", "attention.sliding_window_pattern", text("2"), "window_pattern"},
      {"gemma3", "attention.sliding_window_pattern", flags({true, true, true, true}),
       "no layer that attends to all tokens"},
      {"olmo2", "attention.sliding_window_pattern", number(0), "no layer that attends"},
      {"llama4", "attention.sliding_window", real(16), "sliding_window"},
      {"gpt-oss", "attention.sliding_window", text("16"), "sliding_window"},
      {"llama", "attention.sliding_window", number(16), "sliding_window"},
      // arrays of layers
      {"gemma4", "attention.head_count_kv", numbers({2, 2}), "2 numbers for 4 layers"},
      {"gemma4", "attention.head_count_kv", numbers({2, 2, 0, 2}), "layers without attention"},
      {"gemma4", "attention.head_count_kv", numbers({3, 3, 3, 3}), "4 query heads for 3"},
      {"gemma4", "attention.head_count_kv", reals({2, 2, 2, 2}), "head_count_kv"},
      {"gemma4", "attention.head_count", numbers({4, 4, 2, 4}), "different numbers of heads"},
      {"gemma4", "attention.head_count", numbers({0, 4, 4, 4}), "head_count"},
      {"gemma4", "feed_forward_length", numbers({96, 96, 96}), "3 numbers for 4 layers"},
      {"gemma4", "feed_forward_length", numbers({96, 0, 96, 96}), "feed-forward"},
      {"gemma4", "feed_forward_length", value(std::vector<int32_t>{96, -1, 96, 96}), "negative"},
      {"gemma4", "attention.shared_kv_layers", number(4), "shared_kv_layers"},
      {"gemma4", "attention.shared_kv_layers", number(3), "that no layer has"},
      {"gemma4", "attention.key_length_swa", number(4097), "attention.key_length_swa"},
      {"gemma4", "attention.key_length_swa", number(6), "value_length_swa"},
      {"gemma4", "rope.dimension_count_swa", number(5), "odd number of dimensions"},
      {"gemma4", "rope.dimension_count_swa", number(10), "dimension_count_swa"},
      {"gemma4", "rope.dimension_count", number(1000), "dimension_count"},
      {"gemma4", "embedding_length_per_layer_input", number(100000), "per_layer_input"},
      {"gemma4", "embedding_length_per_layer_input", number(64), "inp_gate.weight"},
      {"gemma3n", "activation_sparsity_scale", reals({1, 1, 0}), "activation_sparsity_scale"},
      {"gemma3n", "activation_sparsity_scale", numbers({1, 1, 0, 0}), "sparsity_scale"},
      {"gemma3n", "activation_sparsity_scale", reals({1, nan_value, 0, 0}), "sparsity_scale"},
      {"gemma3n", "altup.num_inputs", number(1), "altup.num_inputs"},
      {"gemma3n", "altup.num_inputs", number(17), "altup.num_inputs"},
      {"gemma3n", "altup.num_inputs", number(3), "altup_router"},
      {"gemma3n", "altup.active_idx", number(1), "altup.active_idx"},
      {"gemma3n", "attention.shared_kv_layers", number(4), "shared_kv_layers"},
      // experts
      {"gpt-oss", "expert_count", number(0), "blk.0.ffn_up.weight"},
      {"gpt-oss", "expert_count", number(4), "ffn_gate_inp.weight"},
      {"gpt-oss", "expert_count", number(16), "ffn_gate_inp.weight"},
      {"gpt-oss", "expert_count", number(1025), "expert_count"},
      {"gpt-oss", "expert_used_count", number(0), "expert_used_count"},
      {"gpt-oss", "expert_used_count", number(9), "expert_used_count"},
      {"gpt-oss", "expert_used_count", numbers({2, 2, 2, 2}), "expert_used_count"},
      {"qwen3moe", "expert_used_count", nullptr, "expert_used_count"},
      {"qwen3moe", "expert_feed_forward_length", number(0), "expert_feed_forward_length"},
      {"qwen3moe", "expert_feed_forward_length", number(32), "ffn_gate_exps.weight"},
      {"bailingmoe2", "expert_group_count", number(3), "of 3 groups"},
      {"bailingmoe2", "expert_group_count", number(9), "expert_group_count"},
      {"bailingmoe2", "expert_weights_norm", number(1), "expert_weights_norm"},
      {"bailingmoe2", "expert_weights_scale", real(infinity), "expert_weights_scale"},
      {"bailingmoe2", "expert_gating_func", number(5), "expert_gating_func"},
      {"glm4moe", "leading_dense_block_count", number(2), "no layer for them"},
      {"glm4moe", "leading_dense_block_count", number(4000000000), "no layer for them"},
      {"glm4moe", "leading_dense_block_count", number(1), "blk.0.ffn_up.weight"},
      {"ernie4_5-moe", "interleave_moe_layer_step", number(0), "no layer for them"},
      {"ernie4_5-moe", "interleave_moe_layer_step", number(3), "no layer for them"},
      {"qwen2moe", "expert_shared_feed_forward_length", number(64), "shexp.weight"},
      {"qwen2moe", "expert_shared_feed_forward_length", number(0), "shexp"},
      {"dots1", "expert_shared_count", number(1025), "expert_shared_count"},
      // sizes
      {"qwen3", "attention.key_length", number(1), "attention.key_length"},
      {"qwen3", "attention.key_length", number(64), "attention.value_length"},
      {"qwen3", "attention.head_count", number(3), "3 query heads for 2"},
      {"qwen3", "attention.head_count", number(1025), "attention.head_count"},
      {"qwen3", "block_count", number(3), "blk.2.attn_norm.weight"},
      {"qwen3", "block_count", number(1), "blk.1."},
      {"qwen3", "block_count", number(0), "block_count"},
      {"qwen3", "embedding_length", number(32), "token_embd.weight"},
      {"glm4", "nextn_predict_layers", number(2), "nextn_predict_layers"},
      {"glm4", "rope.dimension_sections", reals({8, 8}), "rope.dimension_sections"},
      {"glm4", "rope.dimension_count", number(3), "odd number of dimensions"},
      {"phi3", "feed_forward_length", number(48), "ffn_up.weight"},
      {"qwen3", "attention.shared_kv_layers", number(1), "shared_kv_layers"},
      {"deepseek2", "attention.kv_lora_rank", number(40), "kv_lora_rank"},
      {"deepseek2", "attention.kv_lora_rank", number(0), "kv_lora_rank"},
      {"deepseek2", "attention.kv_lora_rank", number(4096), "length"},
      {"deepseek2", "attention.key_length_mla", number(16), "of which 16 rotate"},
      {"deepseek2", "attention.value_length_mla", number(32), "attn_v_b.weight"},
      {"deepseek2", "attention.head_count_kv", number(2), "2 KV heads for 4 query heads"},
      {"deepseek2", "rope.dimension_count", number(7), "of 48 numbers and 7 rotated"},
      {"minicpm3", "attention.q_lora_rank", number(0), "q_lora_rank"},
      {"minicpm3", "attention.q_lora_rank", number(16), "attn_q_a.weight"},
      {"minicpm3", "attention.key_length", number(16), "of which 16 rotate"},
      // states
      {"qwen35", "ssm.conv_kernel", number(1), "ssm.conv_kernel"},
      {"qwen35", "ssm.conv_kernel", number(100), "ssm.conv_kernel"},
      {"qwen35", "ssm.time_step_rank", number(3), "3 heads in 2 groups"},
      {"qwen35", "ssm.group_count", number(3), "4 heads in 3 groups"},
      {"qwen35", "ssm.group_count", number(1025), "ssm.group_count"},
      {"qwen35", "ssm.state_size", number(32), "attn_qkv.weight"},
      {"qwen35", "attention.recurrent_layers", flags({true, false}), "2 values for 4 layers"},
      {"qwen35", "attention.recurrent_layers", reals({1, 0, 1, 0}), "recurrent_layers"},
      {"qwen35", "full_attention_interval", number(0), "full_attention_interval"},
      {"qwen35", "full_attention_interval", number(5), "no layer that attends"},
      {"lfm2", "shortconv.l_cache", number(0), "shortconv.l_cache"},
      {"lfm2", "attention.head_count_kv", numbers({0, 0, 0, 0}), "no layer that attends"},
      {"granitehybrid", "ssm.inner_size", number(0), "ssm.inner_size"},
      {"granitehybrid", "ssm.state_size", number(4097), "ssm.state_size"},
      {"nemotron_h", "feed_forward_length", numbers({96, 96, 96, 96}), "no layer that attends"},
      // numbers that are not
      {"mistral3", "rope.scaling.yarn_log_multiplier", real(nan_value), "yarn_log_multiplier"},
      {"mistral3", "rope.scaling.factor", real(1e-9f), "rope.scaling.factor"},
      {"mistral3", "rope.scaling.type", text("ntk"), "ntk"},
      {"mistral3", "rope.scaling.type", number(1), "rope.scaling.type"},
      {"mistral3", "rope.scaling.original_context_length", number(0), "original_context_length"},
      {"mistral3", "attention.temperature_scale", real(nan_value), "temperature_scale"},
      {"mistral3", "attention.temperature_length", number(0), "temperature_length"},
      {"granite", "rope.scaling.finetuned", number(0), "rope.scaling.finetuned"},
      {"granite", "attention.scale", real(-1), "attention.scale"},
      {"granite", "embedding_scale", real(nan_value), "embedding_scale"},
      {"minicpm", "residual_scale", real(infinity), "residual_scale"},
      {"cohere2", "logit_scale", real(nan_value), "logit_scale"},
      {"command-r", "attention.layer_norm_epsilon", real(0), "layer_norm_epsilon"},
      {"gemma2", "attn_logit_softcapping", real(-1), "attn_logit_softcapping"},
      {"gemma2", "final_logit_softcapping", real(nan_value), "final_logit_softcapping"},
      {"hunyuan-dense", "rope.scaling.alpha", real(-1), "rope.scaling.alpha"},
      {"hunyuan-dense", "rope.freq_base", real(0), "rope.freq_base"},
      {"starcoder2", "attention.causal", number(1), "attention.causal"},
      {"starcoder2", "attention.causal", value(false), "not causal"},
  };
  return all;
}

void reverse_floats(MadeTensor* t) {
  std::vector<float> x(t->bytes.size() / sizeof(float));
  std::memcpy(x.data(), t->bytes.data(), t->bytes.size());
  std::reverse(x.begin(), x.end());
  if (x.size() == 1) x[0] *= 1.5f;
  std::memcpy(t->bytes.data(), x.data(), t->bytes.size());
}

void fill(MadeTensor* t, float x) {
  for (std::size_t i = 0; i < t->bytes.size(); i += sizeof x)
    std::memcpy(&t->bytes[i], &x, sizeof x);
}

}  // namespace

TEST_CASE("every tensor of every architecture changes the logits") {
  Scratch scratch;
  for_each_architecture([&](const MadeModel& model) {
    std::vector<float> expected, logits;
    const Status s = scratch.run(model.build(), &expected);
    REQUIRE_MESSAGE(s.ok(), std::string(s.message()));
    for (std::size_t i = 0; i < model.tensors.size(); ++i) {
      MadeModel other = model;
      MadeTensor& t = other.tensors[i];
      CAPTURE(t.name);
      // A factor of the last layer's output is lost in the norm after it.
      if (t.part() == "layer_output_scale" && t.layer + 1 == static_cast<int>(model.config.depth()))
        continue;
      reverse_floats(&t);
      const Status changed = scratch.run(other.build(), &logits);
      REQUIRE_MESSAGE(changed.ok(), std::string(changed.message()));
      CHECK(logits != expected);
    }
  });
}

TEST_CASE("metadata that contradicts itself is refused by name") {
  Scratch scratch;
  for (const Lie& lie : lies()) {
    CAPTURE(std::string(lie.architecture));
    CAPTURE(std::string(lie.key));
    CAPTURE(std::string(lie.words));
    const MadeModel model = made(lie.architecture);
    const std::string key = std::string(lie.architecture) + "." + lie.key;
    count_faults("metadata of a model that contradicts itself");
    const Status s = scratch.run(with_tensors(with_key(model, key, lie.put), model.tensors));
    CHECK((s.code() == Code::corrupt || s.code() == Code::unsupported || s.code() == Code::limit));
    CHECK_MESSAGE(contains(s.message(), lie.words), std::string(s.message()));
  }
}

TEST_CASE("sizes that follow from others are refused by name where they are none") {
  // Metadata alone, of four layers.
  const auto read = [](const std::string& architecture, uint32_t heads, uint32_t feed_forward,
                       std::initializer_list<const char*> tensors, ModelConfig* out) {
    GgufBuilder b;
    const std::string at = architecture + ".";
    b.key("general.architecture", architecture).key(at + "block_count", uint32_t{4});
    b.key(at + "embedding_length", uint32_t{64}).key(at + "context_length", uint32_t{512});
    b.key(at + "attention.head_count", heads);
    b.key(at + "feed_forward_length", std::vector<uint32_t>(4, feed_forward));
    if (feed_forward == 0)
      b.key(at + "expert_count", uint32_t{4}).key(at + "expert_used_count", uint32_t{2});
    for (const char* name : tensors) b.tensor(name, {64, 96}, TensorType::f32);
    const std::vector<std::byte> bytes = b.build();
    Gguf gguf;
    REQUIRE(Gguf::parse(bytes, &gguf).ok());
    return ModelConfig::read(gguf, out);
  };
  ModelConfig c;
  CHECK(contains(read("llama", 64, 96, {}, &c).message(), "attention.key_length"));
  CHECK(contains(read("llama", 4, 0, {}, &c).message(), "expert_feed_forward_length"));
  // Values are keys only where the file has no values, in any tensor.
  REQUIRE(read("gemma4", 4, 96, {"blk.1.attn_v.weight", "blk.2.attn_qkv.weight"}, &c).ok());
  CHECK(c.layer(0).v_is_k);
  CHECK_FALSE(c.layer(1).v_is_k);
  CHECK_FALSE(c.layer(2).v_is_k);
}

TEST_CASE("a tensor of another architecture is refused by name") {
  Scratch scratch;
  for (const auto& [architecture, name] :
       {std::pair("llama", "blk.0.layer_output_scale.weight"),
        std::pair("qwen3", "altup_proj.weight"), std::pair("qwen3", "blk.0.attn_sinks.weight"),
        std::pair("olmo2", "blk.0.attn_q.bias"), std::pair("llama", "blk.0.ffn_gate_inp.weight"),
        std::pair("glm4moe", "blk.2.attn_q.weight"), std::pair("gpt-oss", "blk.0.ffn_gate.weight"),
        std::pair("gemma3", "blk.0.inp_gate.weight")}) {
    CAPTURE(std::string(architecture));
    CAPTURE(std::string(name));
    MadeModel model = made(architecture);
    model.tensors.push_back(
        {name, {1}, TensorRole::vector, 0, TensorType::f32, std::vector<std::byte>(sizeof(float))});
    const Status s = scratch.run(model.build());
    CHECK(s.code() == Code::unsupported);
    CHECK_MESSAGE(contains(s.message(), name), std::string(s.message()));
  }
}

TEST_CASE("any number of the metadata may lie") {
  Scratch scratch;
  for_each_architecture([&](const MadeModel& model) {
    const std::vector<std::byte> bytes = model.build();
    Gguf gguf;
    REQUIRE(Gguf::parse(bytes, &gguf).ok());
    for (const auto& [name, entry] : gguf.entries()) {
      if (name.substr(0, 10) == "tokenizer.") continue;
      const bool array = entry.type == GgufType::array;
      const auto size = static_cast<uint32_t>(entry.bytes.size() / entry.count);
      if (entry.type == GgufType::string || size < 1 || size > 8) continue;
      const auto at = static_cast<std::size_t>(entry.bytes.data() - bytes.data());
      uint64_t honest = 0;
      std::memcpy(&honest, &bytes[at], size);
      for (const uint64_t lie : hostile::lies(honest, 64, size)) {
        CAPTURE(std::string(name));
        CAPTURE(lie);
        CAPTURE(array);
        std::vector<std::byte> other = bytes;
        std::memcpy(&other[at], &lie, size);
        count_faults("a number of a model's metadata that lies");
        const Status s = scratch.run(other);
        if (s.ok()) continue;
        CHECK_MESSAGE((s.code() == Code::corrupt || s.code() == Code::unsupported ||
                       s.code() == Code::limit || s.code() == Code::bad_argument ||
                       s.code() == Code::context_full),
                      std::string(s.message()));
      }
    }
  });
}

TEST_CASE("a tensor that is missing or has another shape is refused by name") {
  Scratch scratch;
  for_each_architecture([&](const MadeModel& model) {
    for (std::size_t i = 0; i < model.tensors.size(); ++i) {
      if (model.tensors[i].layer > 1) continue;
      const auto check = [&](const char* what, const std::vector<MadeTensor>& tensors, bool may) {
        const std::string& name = model.tensors[i].name;
        CAPTURE(name);
        CAPTURE(std::string(what));
        count_faults("a tensor of a model that is missing or misshapen");
        const Status s = scratch.run(with_tensors(model.keys, tensors));
        if (may && s.ok()) return;
        CHECK((s.code() == Code::corrupt || (may && s.code() == Code::unsupported)));
        CHECK_MESSAGE((contains(s.message(), "tensor") || contains(s.message(), "layer")),
                      std::string(s.message()));
        if (!may) CHECK_MESSAGE(contains(s.message(), name), std::string(s.message()));
      };
      std::vector<MadeTensor> others = model.tensors;
      others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
      check("missing", others, true);
      for (std::size_t d = 0; d < model.tensors[i].dims.size(); ++d)
        for (const bool more : {true, false}) {
          others = model.tensors;
          others[i].dims[d] =
              more ? others[i].dims[d] + 1 : std::max<uint64_t>(1, others[i].dims[d] / 2);
          if (others[i].dims == model.tensors[i].dims) continue;
          // The rank of LAuReL and the presence of some tensors follow from the file alone.
          check(more ? "larger" : "smaller", others, others[i].part().starts_with("laurel"));
        }
      others = model.tensors;
      others[i].dims.push_back(2);
      check("one dimension more", others, false);
    }
  });
}

TEST_CASE("NaN, infinity and huge numbers in any tensor fail by name") {
  Scratch scratch;
  for_each_architecture([&](const MadeModel& model) {
    for (std::size_t i = 0; i < model.tensors.size(); ++i) {
      if (model.tensors[i].layer > 1) continue;
      for (const float x : {nan_value, infinity, -3e38f}) {
        MadeModel other = model;
        MadeTensor& t = other.tensors[i];
        CAPTURE(t.name);
        CAPTURE(x);
        fill(&t, x);
        count_faults("weights of a model that are no numbers");
        const Status s = scratch.run(other.build());
        if (std::isfinite(x) && s.ok()) continue;  // a norm behind it brings them back
        CHECK(s.code() == Code::corrupt);
        CHECK_MESSAGE((contains(s.message(), t.name) || contains(s.message(), "made NaN")),
                      std::string(s.message()));
      }
    }
  });
}
