// Metadata of a file: it makes a LayerConfig for each layer, or an error that names the key.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "gguf/gguf_builder.h"
#include "model/config.h"

using namespace kvasir;
using test::GgufBuilder;

namespace {

// Four layers of an architecture, without tensors.
GgufBuilder model_of(const std::string& architecture) {
  GgufBuilder b;
  b.key("general.architecture", architecture);
  const auto number = [&](const char* key, uint32_t value) {
    b.key(architecture + "." + key, value);
  };
  number("block_count", 4), number("embedding_length", 64), number("context_length", 512);
  number("attention.head_count", 4), number("attention.head_count_kv", 2);
  number("feed_forward_length", 96);
  return b;
}

Status read_config(const GgufBuilder& file, ModelConfig* out) {
  const std::vector<std::byte> bytes = file.build();
  Gguf gguf;
  const Status s = Gguf::parse(bytes, &gguf);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return ModelConfig::read(gguf, out);
}

ModelConfig config_of(const GgufBuilder& file) {
  ModelConfig c;
  const Status s = read_config(file, &c);
  REQUIRE_MESSAGE(s.ok(), s.message());
  REQUIRE(c.layer_configs.size() >= c.layers + c.windows.layers);
  return c;
}

// The message names the key.
void check_refused(const GgufBuilder& file, const std::string& key) {
  CAPTURE(key);
  ModelConfig c;
  const Status s = read_config(file, &c);
  CHECK_MESSAGE(s.code() == Code::unsupported, s.message());
  CHECK_MESSAGE(std::string(s.message()).find(key) != std::string::npos, s.message());
  CHECK(c.layer_configs.empty());
}

}  // namespace

TEST_CASE("an architecture's row and the file fill every layer") {
  const ModelConfig llama = config_of(model_of("llama")), qwen3 = config_of(model_of("qwen3"));
  for (uint32_t l = 0; l < llama.layers; ++l) {
    const LayerConfig& layer = llama.layer(l);
    CHECK(layer.mixer == MixerKind::attention);
    CHECK(layer.activation == Activation::silu);
    CHECK(layer.gated);
    CHECK_FALSE(layer.has_experts());
    CHECK(layer.norms == NormPlacement::before);
    CHECK(layer.qk_norm == QkNorm::none);
    CHECK(layer.has_rope());
    CHECK(layer.window == 0);
    CHECK(layer.q_width() == 64);
    CHECK(layer.kv_width() == 32);
    CHECK(layer.feed_forward == 96);
    CHECK(qwen3.layer(l).qk_norm == QkNorm::head);
  }
  CHECK_FALSE(llama.ropes.at(0).neox);
  CHECK(qwen3.ropes.at(0).neox);
}

TEST_CASE("every fourth layer of smollm3 has no RoPE") {
  const ModelConfig c = config_of(model_of("smollm3"));
  for (uint32_t l = 0; l < c.layers; ++l) CHECK(c.layer(l).has_rope() == (l != 3));
}

TEST_CASE("olmo2 has norms after its blocks and of whole projections, and no biases") {
  const ModelConfig c = config_of(model_of("olmo2"));
  for (const LayerConfig& layer : c.layer_configs) {
    CHECK_FALSE(layer.norm_before());
    CHECK(layer.norm_after());
    CHECK(layer.qk_norm == QkNorm::projection);
    CHECK_FALSE(layer.biases);
  }
}

TEST_CASE("layers with a window are numbered apart from those without") {
  const ModelConfig c =
      config_of(model_of("olmo2").key("olmo2.attention.sliding_window", 64u));  // OLMo 3
  CHECK(c.depth() == 4);
  CHECK(c.layers == 1);
  CHECK(c.windows.layers == 3);
  CHECK(c.windows.kv_heads == 2);
  CHECK(c.window == 64);
  CHECK_FALSE(c.chunked);
  for (uint32_t l = 0; l < c.depth(); ++l) {
    CHECK(c.layer(l).is_windowed() == (l != 3));
    CHECK(c.layer(l).kv == (l == 3 ? 0 : l));
  }
  // A window beyond the context is as long as it.
  CHECK(config_of(model_of("olmo2").key("olmo2.attention.sliding_window", 4000000000u)).window ==
        512);
}

TEST_CASE("an architecture's row gives norms, activation and scales") {
  const ModelConfig starcoder2 = config_of(model_of("starcoder2"));
  CHECK(starcoder2.norm == NormKind::layer);
  CHECK_FALSE(starcoder2.layer(0).gated);
  CHECK(starcoder2.layer(0).activation == Activation::gelu);
  CHECK(config_of(model_of("nemotron")).layer(0).activation == Activation::relu_squared);
  CHECK(config_of(model_of("command-r")).layer(0).is_parallel());

  const ModelConfig granite = config_of(model_of("granite")
                                            .key("granite.attention.scale", 0.5f)
                                            .key("granite.embedding_scale", 12.0f)
                                            .key("granite.residual_scale", 0.25f)
                                            .key("granite.logit_scale", 8.0f));
  CHECK(granite.embedding_scale == 12);
  CHECK(granite.residual_scale == 0.25f);
  CHECK(granite.logit_scale == 0.125f);
  CHECK(granite.layer(0).query_scale == 2);  // 0.5 * sqrt(16)
  CHECK(config_of(model_of("command-r").key("command-r.logit_scale", 0.25f)).logit_scale == 0.25f);

  // Defaults that minicpm's older files leave out.
  const ModelConfig minicpm = config_of(model_of("minicpm"));
  CHECK(minicpm.embedding_scale == 12);
  CHECK(minicpm.residual_scale == 0.7f);  // 1.4 / sqrt(4)
  CHECK(minicpm.logit_scale == 0.25f);    // width / 256
}

TEST_CASE("layers are recurrent by a period, by a list or where they have no KV heads") {
  const auto with_matrices = [](const std::string& name) {
    GgufBuilder b = model_of(name);
    const auto number = [&](const char* key, uint32_t value) {
      b.key(name + ".ssm." + key, value);
    };
    number("conv_kernel", 4), number("inner_size", 64), number("state_size", 16);
    number("time_step_rank", 4), number("group_count", 2);
    return b;
  };
  const ModelConfig qwen35 = config_of(with_matrices("qwen35"));
  CHECK(qwen35.layers == 1);
  CHECK(qwen35.recurrent_layers == 3);
  CHECK(qwen35.recurrent.cyclic_keys);
  CHECK(qwen35.recurrent.channels == 128);
  CHECK(qwen35.recurrent.value_dim == 16);
  // [3][128] inputs, and a panel of 16 columns for each head
  CHECK(qwen35.recurrent.state_size() == 3 * 128 + 4 * 16 * 16);
  CHECK(qwen35.layer(3).gates_output);
  CHECK(qwen35.layer(3).kv == 0);
  CHECK_FALSE(qwen35.layer(2).has_attention());
  CHECK(qwen35.layer(2).state == 2);
  const ModelConfig listed = config_of(
      with_matrices("qwen3next")
          .key("qwen3next.attention.recurrent_layers", std::vector<uint32_t>{0, 1, 1, 0}));
  CHECK(listed.layers == 2);
  CHECK(listed.layer(1).is_recurrent());
  check_refused(with_matrices("qwen3next").key("qwen3next.attention.recurrent_layers", true),
                "recurrent_layers");

  const auto of = [](const std::string& name, const std::vector<uint32_t>& kv_heads,
                     const std::vector<uint32_t>& feed_forward) {
    GgufBuilder b;
    b.key("general.architecture", name);
    for (const auto& [key, value] :
         {std::pair("block_count", 4u), std::pair("embedding_length", 64u),
          std::pair("context_length", 512u), std::pair("attention.head_count", 4u),
          std::pair("ssm.conv_kernel", 4u), std::pair("ssm.inner_size", 128u),
          std::pair("ssm.state_size", 16u), std::pair("ssm.time_step_rank", 4u),
          std::pair("ssm.group_count", 1u), std::pair("shortconv.l_cache", 3u)})
      b.key(name + "." + key, value);
    b.key(name + ".attention.head_count_kv", kv_heads);
    b.key(name + ".feed_forward_length", feed_forward);
    return b;
  };
  const ModelConfig lfm2 = config_of(of("lfm2", {0, 2, 0, 0}, {96, 96, 96, 96}));
  CHECK(lfm2.recurrent_layers == 3);
  CHECK(lfm2.kv_heads == 2);
  CHECK(lfm2.recurrent.state_size() == 2 * 64);
  const ModelConfig nemotron = config_of(of("nemotron_h", {0, 0, 2, 0}, {0, 96, 0, 0}));
  CHECK(nemotron.layer(1).mixer == MixerKind::none);
  CHECK(nemotron.layer(1).has_dense());
  CHECK_FALSE(nemotron.layer(0).has_feed_forward());
  CHECK(nemotron.layer(2).has_attention());
  CHECK_FALSE(nemotron.layer(2).has_rope());
  CHECK(nemotron.recurrent_layers == 2);
  check_refused(of("nemotron_h", {0, 0, 0, 0}, {0, 96, 0, 0}), "head_count_kv");
  check_refused(of("llama", {0, 0, 2, 0}, {96, 96, 96, 96}), "head_count_kv");
  const ModelConfig falcon = config_of(with_matrices("falcon-h1"));
  CHECK(falcon.layer(0).mixer == MixerKind::both);
  CHECK(falcon.layers == 4);
  CHECK(falcon.recurrent_layers == 4);
}

TEST_CASE("a state whose sizes contradict each other is refused") {
  const auto with = [](uint32_t heads, uint32_t groups, uint32_t inner, uint32_t state) {
    GgufBuilder b = model_of("qwen35");
    const auto number = [&](const char* key, uint32_t value) {
      b.key(std::string("qwen35.ssm.") + key, value);
    };
    number("conv_kernel", 4), number("inner_size", inner), number("state_size", state);
    number("time_step_rank", heads), number("group_count", groups);
    ModelConfig c;
    return read_config(b, &c).code();
  };
  CHECK(with(4, 2, 64, 16) == Code::ok);
  CHECK(with(3, 1, 64, 16) == Code::corrupt);  // no whole number of values a head
  CHECK(with(4, 3, 64, 16) == Code::corrupt);
  CHECK(with(128, 2, 64, 16) == Code::corrupt);
  CHECK(with(1024, 1024, 1 << 18, 4096) == Code::limit);
  CHECK(with(64, 1, 1 << 18, 4096) == Code::limit);
}

TEST_CASE("granite without fine-tuned RoPE has none") {
  CHECK(config_of(model_of("granite")).layer(0).has_rope());
  CHECK_FALSE(config_of(model_of("granite").key("granite.rope.scaling.finetuned", false))
                  .layer(0)
                  .has_rope());
}

TEST_CASE("RoPE's magnitude follows YaRN, its log multiplier and the file's factor") {
  const auto yarn = [](float multiplier) {
    return model_of("mistral3")
        .key("mistral3.rope.scaling.type", "yarn")
        .key("mistral3.rope.scaling.factor", 16.0f)
        .key("mistral3.rope.scaling.yarn_log_multiplier", multiplier);
  };
  CHECK(config_of(yarn(0)).ropes[0].magnitude == doctest::Approx(1 + 0.1 * std::log(16.0)));
  CHECK(config_of(yarn(1)).ropes[0].magnitude == doctest::Approx(1));
  CHECK(
      config_of(model_of("phi3").key("phi3.rope.scaling.attn_factor", 1.19f)).ropes[0].magnitude ==
      doctest::Approx(1.19));
}

TEST_CASE("divisors of RoPE serve sets of their own size only") {
  const auto with = [](const char* architecture, uint32_t dimensions) {
    const std::string name = architecture;
    GgufBuilder b = model_of(name);
    b.key(name + ".attention.sliding_window", 64u).key(name + ".rope.dimension_count", 16u);
    b.key(name + ".rope.dimension_count_swa", dimensions);
    b.key(name + ".attention.sliding_window_pattern", 2u);
    b.tensor("rope_freqs.weight", {8}, TensorType::f32, std::vector<std::byte>(32));
    return b;
  };
  CHECK(config_of(with("gemma3", 16)).ropes.size() == 2);
  check_refused(with("gemma3", 8), "divisors");
  CHECK(config_of(with("gemma4", 8)).ropes[1].dim == 8);  // its windowed layers have none
}

TEST_CASE("experts without a width of their own share the network's, where the row says so") {
  const auto width = [](const std::string& name) {
    return config_of(
               model_of(name).key(name + ".expert_count", 8u).key(name + ".expert_used_count", 2u))
        .layer(0)
        .experts.width;
  };
  CHECK(width("qwen3moe") == 48);
  CHECK(width("qwen2moe") == 48);
  CHECK(width("llama") == 96);
  CHECK(width("dots1") == 96);
}

TEST_CASE("queries grow with the position beyond the temperature's length") {
  const ModelConfig c = config_of(model_of("mistral3")
                                      .key("mistral3.attention.temperature_scale", 0.1f)
                                      .key("mistral3.rope.scaling.original_context_length", 64u));
  CHECK(c.temperature.at(0) == 1);
  CHECK(c.temperature.at(63) == 1);
  CHECK(c.temperature.at(64) == doctest::Approx(1 + 0.1 * std::log(2.0)));
  CHECK(c.temperature.at(191) == doctest::Approx(1 + 0.1 * std::log(3.0)));
}

TEST_CASE("blocks that predict several tokens are no layers") {
  const ModelConfig c = config_of(model_of("qwen2").key("qwen2.nextn_predict_layers", 1u));
  CHECK(c.depth() == 3);
  CHECK(c.skipped_layers == 1);
}

TEST_CASE("the page of models names every architecture and weight type") {
  std::ifstream in(FIXTURES "/../../docs/models.md");
  const std::string page((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  REQUIRE(page.size() > 1000);
  std::string names = architecture_names();
  for (std::size_t at; (at = names.find(" and ")) != names.npos;) names.replace(at, 5, ", ");
  std::istringstream list(names);
  for (std::string name; std::getline(list >> std::ws, name, ',');) {
    CAPTURE(name);
    CHECK(page.find("`" + name + "`") != page.npos);
  }
  for (uint32_t id = 0; tensor_type_name(id); ++id) {
    const TensorTypeInfo* info = tensor_type_info(static_cast<TensorType>(id));
    if (!info) continue;
    CAPTURE(info->name);
    CHECK(page.find(info->name) != page.npos);
  }
}

TEST_CASE("sizes may be one number for all layers or one each") {
  GgufBuilder file;
  file.key("general.architecture", "llama");
  for (const auto& [key, value] : {std::pair("block_count", 4u), std::pair("embedding_length", 64u),
                                   std::pair("context_length", 512u)})
    file.key(std::string("llama.") + key, value);
  file.key("llama.attention.head_count", std::vector<uint32_t>(4, 8));
  file.key("llama.feed_forward_length", std::vector<uint32_t>(4, 32));
  const ModelConfig c = config_of(file);
  CHECK(c.heads == 8);
  CHECK(c.kv_heads == 8);
  CHECK(c.feed_forward == 32);
  CHECK(c.layer(3).head_dim == 8);
}

TEST_CASE("a feature that the engine lacks is refused by name") {
  const auto with = [](const char* key, auto value) {
    return model_of("llama").key(std::string("llama.") + key, value);
  };
  check_refused(with("attention.sliding_window", 128u), "llama.attention.sliding_window");
  check_refused(with("attention.key_length", 514u).key("llama.attention.value_length", 514u),
                "514");
  check_refused(with("attention.value_length", 32u), "llama.attention.value_length");
  for (const char* key :
       {"attn_logit_softcapping", "final_logit_softcapping", "attention.scale", "logit_scale",
        "embedding_scale", "residual_scale", "attention.max_alibi_bias", "attention.clamp_kqv"})
    check_refused(with(key, 0.5f), key);
  check_refused(with("rope.scaling.type", "dynamic"), "dynamic");
  check_refused(model_of("no-such-model"), "no-such-model");
  // A window that no sequence outgrows is no feature.
  CHECK(config_of(with("attention.sliding_window", 512u)).layer(0).window == 0);
}
