// Popular files: the types that quantisers give to the tensors of well-known families. Each mix is
// made with random weights. Its logits are those of the same weights as F32.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>

#include "../tools/bench/encode_weights.h"
#include "helpers.h"
#include "made_model.h"
#include "temp_folder.h"

using namespace kvasir;
using test::MadeModel;
using test::MadeTensor;
using test::ModelRecipe;
using test::TensorRole;

namespace {

using enum TensorType;

// ---- the rules of quantisers

// Which layers get more bits: the first and last eighth, and every third between them.
bool gets_more_bits(int layer, int layers) {
  const int eighth = layers / 8;
  return layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
}

// What replaces a type of blocks of 256 in rows that are no multiple of it.
TensorType in_rows_of(uint64_t cols, TensorType type) {
  if (cols % tensor_type_info(type)->block_elements == 0) return type;
  switch (type) {
    case q4_k:
      return q5_0;
    case q5_k:
      return q5_1;
    case q6_k:
      return q8_0;
    default:
      return iq4_nl;
  }
}

struct Question {
  const MadeTensor& tensor;
  std::string_view part;
  const ModelRecipe& recipe;

  bool is(std::initializer_list<std::string_view> parts) const {
    return std::find(parts.begin(), parts.end(), part) != parts.end();
  }
  bool more() const { return gets_more_bits(tensor.layer, static_cast<int>(recipe.layers)); }
  bool is_output() const { return part == "output" || (recipe.tied && part == "token_embd"); }
  bool is_down() const { return is({"ffn_down", "ffn_down_exps", "ffn_down_shexp"}); }
  bool is_expert() const { return part.ends_with("_exps"); }
  // Converters keep these in half precision.
  bool is_kept() const {
    return part.starts_with("altup") || part.starts_with("laurel") ||
           part == "per_layer_model_proj" || is({"inp_gate", "proj"});
  }
};

using Rule = TensorType (*)(const Question&);

TensorType q8(const Question&) { return q8_0; }
TensorType half(const Question&) { return f16; }
TensorType bfloat(const Question&) { return bf16; }

TensorType q4_k_m(const Question& q) {
  if (q.is_output()) return q6_k;
  if (q.part == "attn_qkv") return q5_k;
  if (q.part == "attn_v" || q.is_down()) return q.more() ? q6_k : q4_k;
  return q4_k;
}

TensorType q5_k_m(const Question& q) {
  if (q.is_output() || q.part == "attn_qkv") return q6_k;
  if (q.part == "attn_v" || q.is_down()) return q.more() ? q6_k : q5_k;
  return q5_k;
}

TensorType q3_k_m(const Question& q) {
  if (q.is_output()) return q6_k;
  if (q.part == "attn_v") return q.tensor.layer < 2 ? q5_k : q4_k;
  if (q.is_down()) return q.tensor.layer == 0 ? q5_k : q4_k;
  return q.is({"attn_output", "attn_qkv"}) ? q4_k : q3_k;
}

TensorType q2_k_s(const Question& q) {
  if (q.is_output()) return q6_k;
  if (q.is({"attn_v"})) return q4_k;
  return q.is_down() || q.part == "attn_output" ? q3_k : q2_k;
}

TensorType q6(const Question&) { return q6_k; }

TensorType iq4(const Question& q) {
  if (q.is_output()) return q6_k;
  return q.part == "attn_v" || (q.is_down() && q.tensor.layer == 0) ? q5_k : iq4_xs;
}

TensorType iq3_m(const Question& q) {
  if (q.is_output()) return q6_k;
  if (q.is_down()) return q.tensor.layer == 0 ? q4_k : iq3_s;
  return q.is({"attn_v", "attn_output", "attn_qkv"}) ? q4_k : iq3_s;
}

TensorType iq2_m(const Question& q) {
  if (q.is_output()) return q5_k;
  if (q.part == "attn_v") return q4_k;
  return q.part == "token_embd" || q.part == "attn_output" ? iq3_s : iq2_s;
}

TensorType iq1(const Question& q) {
  if (q.is_output()) return q5_k;
  if (q.part == "attn_v") return q4_k;
  if (q.part == "token_embd") return q2_k;
  return q.part == "attn_output" ? iq2_xxs : q.is_down() ? iq1_m : iq1_s;
}

// Unsloth's dynamic mixes: more bits for attention and for some layers' networks.
TensorType ud_q4_k_xl(const Question& q) {
  if (q.is_output() || q.part == "attn_v") return q6_k;
  if (q.is({"attn_q", "attn_k", "attn_output", "attn_qkv", "token_embd"})) return q5_k;
  if (q.is_down()) return q.more() ? q5_k : q4_k;
  return q.tensor.layer % 2 ? iq4_xs : q4_k;
}

TensorType ud_q2_k_xl(const Question& q) {
  if (q.is_output()) return q6_k;
  if (q.is({"attn_v", "attn_k"})) return q6_k;
  if (q.is({"attn_q", "attn_output", "attn_qkv", "token_embd"})) return q4_k;
  if (q.is_down()) return q.more() ? q3_k : iq3_xxs;
  return q.tensor.layer % 2 ? iq2_xxs : iq2_xs;
}

TensorType mxfp4_moe(const Question& q) { return q.is_expert() ? mxfp4 : q8_0; }
TensorType qat_q4_0(const Question& q) { return q.part == "token_embd" ? q6_k : q4_0; }
TensorType nvfp4_rule(const Question& q) { return q.is({"token_embd", "output"}) ? q8_0 : nvfp4; }

// gpt-oss keeps its experts' type in every file.
template <Rule rule>
TensorType gpt_oss(const Question& q) {
  return q.is_expert() ? mxfp4 : rule(q);
}

// ---- the table

struct Mix {
  const char *family, *name;
  Rule rule;
  const char* types;  // of the file, by name
  uint32_t width = 256, feed_forward = 512, expert_width = 0, shared_width = 0;
};

// Rows of 320, 288, 224, 704 and 800 are no multiples of 256.
const Mix mixes[] = {
    {"llama", "Q4_K_M", q4_k_m, "F32 Q4_K Q6_K"},
    {"llama", "Q5_K_M", q5_k_m, "F32 Q5_K Q6_K"},
    {"llama", "Q6_K", q6, "F32 Q6_K"},
    {"llama", "IQ3_M", iq3_m, "F32 IQ3_S Q4_K Q6_K"},
    {"llama", "IQ1_S", iq1, "F32 IQ1_M IQ1_S IQ2_XXS Q2_K Q4_K Q5_K"},
    {"llama", "BF16", bfloat, "BF16 F32"},
    {"llama", "NVFP4", nvfp4_rule, "F32 NVFP4 Q8_0"},
    {"qwen2", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K Q8_0", 224},
    {"qwen2", "Q8_0", q8, "F32 Q8_0", 224},
    {"qwen3", "UD-Q4_K_XL", ud_q4_k_xl, "F32 IQ4_XS Q4_K Q5_K Q6_K"},
    {"qwen3", "IQ2_M", iq2_m, "F32 IQ2_S IQ3_S Q4_K Q5_K"},
    {"qwen3moe", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K Q8_0", 256, 512, 704},
    {"qwen3moe", "UD-Q2_K_XL", ud_q2_k_xl, "F32 IQ2_XS IQ2_XXS IQ3_XXS Q3_K Q4_K Q6_K", 256, 512,
     768},
    {"qwen3moe", "UD-Q4_K_XL", ud_q4_k_xl, "F32 IQ4_XS Q4_K Q5_0 Q5_1 Q5_K Q6_K", 256, 512, 704},
    {"qwen3moe", "MXFP4_MOE", mxfp4_moe, "F32 MXFP4 Q8_0", 256, 512, 704},
    {"qwen2moe", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K Q8_0", 256, 512, 352, 800},
    {"glm4moe", "MXFP4_MOE", mxfp4_moe, "F32 MXFP4 Q8_0", 256, 512, 352, 800},
    {"glm4moe", "UD-Q2_K_XL", ud_q2_k_xl, "F32 IQ2_XS IQ2_XXS IQ4_NL Q4_K Q6_K", 256, 512, 352,
     800},
    {"gpt-oss", "MXFP4", gpt_oss<q8>, "F32 MXFP4 Q8_0", 288, 512, 288},
    {"gpt-oss", "Q4_K_M", gpt_oss<q4_k_m>, "F32 MXFP4 Q4_K Q5_0 Q8_0", 288, 512, 288},
    {"gpt-oss", "F16", gpt_oss<half>, "F16 F32 MXFP4", 288, 512, 288},
    {"gemma3", "QAT Q4_0", qat_q4_0, "F32 Q4_0 Q8_0", 320, 640},
    {"gemma3", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K Q8_0", 320},
    {"gemma3", "F16", half, "F16 F32", 320},
    {"gemma4", "Q4_K_M", q4_k_m, "F16 F32 Q4_K Q5_0 Q6_K"},
    {"gemma4", "UD-Q4_K_XL", ud_q4_k_xl, "F16 F32 IQ4_NL IQ4_XS Q4_K Q5_1 Q5_K Q6_K"},
    {"gemma3n", "Q8_0", q8, "F16 F32 Q8_0"},
    {"phi3", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_K Q6_K"},
    {"phi3", "Q3_K_M", q3_k_m, "F32 Q3_K Q4_K Q5_K Q6_K"},
    {"mistral3", "Q4_K_M", q4_k_m, "F32 Q4_K Q6_K"},
    {"mistral3", "IQ4_XS", iq4, "F32 IQ4_XS Q5_K Q6_K"},
    {"granite", "Q5_K_M", q5_k_m, "F32 Q5_K Q6_K"},
    {"granite", "Q2_K", q2_k_s, "F32 Q2_K Q3_K Q4_K Q6_K"},
    {"glm4", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K Q8_0", 256, 704},
    {"deepseek2", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K Q8_0", 256, 512, 352, 800},
    {"minicpm3", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K"},
    {"qwen35", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q5_K Q6_K"},
    // rounded activations: below.
    {"qwen3next", "F16", half, "F16 F32", 256, 512, 352, 800},
    {"lfm2", "Q4_K_M", q4_k_m, "F32 Q4_K Q6_K"},
    {"granitehybrid", "Q4_K_M", q4_k_m, "F32 Q4_K Q5_0 Q6_K"},
    {"smollm3", "Q8_0", q8, "F32 Q8_0"},
    {"smollm3", "UD-Q4_K_XL", ud_q4_k_xl, "F32 IQ4_XS Q4_K Q5_K Q6_K"},
};

ModelRecipe recipe_of(const Mix& mix) {
  ModelRecipe r;
  for (ModelRecipe& each : test::recipes_of_all_architectures())
    if (each.architecture == mix.family) r = std::move(each);
  r.layers = 4, r.width = mix.width, r.feed_forward = mix.feed_forward;
  r.heads = 4, r.kv_heads = 2, r.head_dim = 64;
  if (r.experts > 0) r.experts = 6, r.used = 2, r.expert_width = mix.expert_width;
  r.shared_width = mix.shared_width;
  if (r.latent_rank > 0) r.latent_rank = 96, r.rank = 96;
  r.type_of = [recipe = r, rule = mix.rule](const MadeTensor& t) {
    const Question q{t, t.part(), recipe};
    return q.is_kept() ? f16 : in_rows_of(t.cols(), rule(q));
  };
  return r;
}

std::string sorted_words(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words(std::istream_iterator<std::string>(in), {});
  std::sort(words.begin(), words.end());
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

constexpr std::size_t all_tokens = 48;

// Logits of a prompt in one step, then of single tokens: products of many inputs, and of few.
std::vector<float> logits_of(const std::shared_ptr<const Model>& model) {
  constexpr std::size_t prompt = 40;
  SessionOptions options;
  options.full_precision = true;
  auto session = test::open_session(model, options);
  std::vector<Token> tokens(all_tokens);
  uint32_t state = 11;
  for (Token& t : tokens) t = static_cast<Token>((state = state * 1664525 + 1013904223) >> 24);
  const std::size_t vocabulary = model->config().vocabulary;
  std::vector<float> logits(all_tokens * vocabulary);
  const auto read = [&](std::size_t first, std::size_t n) {
    uint64_t done = 0;
    const Status s =
        session->prefill_tokens(std::span<const Token>(tokens).subspan(first, n),
                                logits.data() + first * vocabulary, nullptr, {}, &done);
    REQUIRE_MESSAGE(s.ok(), s.message());
  };
  read(0, prompt);
  for (std::size_t i = prompt; i < all_tokens; ++i) read(i, 1);
  return logits;
}

std::shared_ptr<const Model> open(const std::vector<std::byte>& bytes) {
  TempFolder folder;
  const std::string path = folder.file("a.gguf");
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return test::open_model(path);  // its mapping outlives the file's name
}

bool is_quantised(const MadeModel& made) {
  return std::any_of(made.tensors.begin(), made.tensors.end(), [](const MadeTensor& t) {
    return tensor_type_info(t.type)->block_elements > 1;
  });
}

// Quantised weights meet rounded activations. Those make a router take another expert where two are
// nearly equal, which changes the logits of such a token by more: in mixtures of experts a few
// tokens do not count.
void check_same(const std::vector<float>& a, const std::vector<float>& b, bool quantised,
                bool routed) {
  const std::size_t vocabulary = a.size() / all_tokens;
  std::vector<std::pair<double, double>> errors;  // of each token: relative, squared; and its norm
  for (std::size_t i = 0; i < a.size(); i += vocabulary) {
    double off = 0, norm = 0;
    for (std::size_t v = i; v < i + vocabulary; ++v) {
      off += std::pow(static_cast<double>(a[v]) - static_cast<double>(b[v]), 2);
      norm += std::pow(static_cast<double>(b[v]), 2);
    }
    errors.emplace_back(off / norm, norm);
  }
  std::sort(errors.begin(), errors.end());
  CHECK(std::sqrt(errors.back().first) < (quantised ? (routed ? 0.5 : 0.1) : 5e-5));
  if (quantised && routed) errors.resize(all_tokens - all_tokens / 12);
  double off = 0, norm = 0;
  for (const auto& [error, of] : errors) off += error * of, norm += of;
  CHECK(std::sqrt(off / norm) < (quantised ? 3e-2 : 2e-5));
}

}  // namespace

TEST_CASE("popular files give the logits of their weights as F32") {
  for (const Mix& mix : mixes) {
    CAPTURE(std::string(mix.family));
    CAPTURE(std::string(mix.name));
    const ModelRecipe recipe = recipe_of(mix);
    const MadeModel made = test::make_model(recipe);
    const auto model = open(made.build()), floats = open(made.build_floats());
    CHECK(model->config().architecture->name == std::string(mix.family));
    CHECK(sorted_words(model->weights().formats) == mix.types);
    CHECK(floats->weights().formats == "F32");
    check_same(logits_of(model), logits_of(floats), is_quantised(made), recipe.experts > 0);
  }
}

// Random weights of this family amplify any error: rounding the embeddings to Q8_0, 0.4%, changes
// the logits by 20%. So rounded activations cost more than 3%, most of it in the delta net. With 8
// bits, tensor by tensor with the fixture: attn_qkv 26% to 33%, ssm_out 4% to 15%, attn_gate 12%,
// alpha and beta 4%, attention 0.2%; routers are F32. What 4-bit weights cost is the measure here.
TEST_CASE("rounded activations cost Qwen3-Next a fraction of what 4-bit weights cost it") {
  const MadeModel made =
      test::make_model(recipe_of({"qwen3next", "Q4_K_M", q4_k_m, "", 256, 512, 352, 800}));
  MadeModel rounded = made;
  for (MadeTensor& t : rounded.tensors) {
    if (tensor_type_info(t.type)->block_elements == 1) continue;
    const auto rows = static_cast<uint32_t>(t.rows()), cols = static_cast<uint32_t>(t.cols());
    const WeightView from = {t.bytes.data(), t.type, rows, cols, t.bytes.size() / rows};
    std::vector<float> numbers(std::size_t{rows} * cols);
    for (uint32_t r = 0; r < rows; ++r)
      cpu_kernels().dequantize_row(from, r, numbers.data() + std::size_t{r} * cols);
    const TensorTypeInfo& info = *tensor_type_info(q4_0);
    std::vector<std::byte> bytes(numbers.size() / info.block_elements * info.block_bytes);
    encode_weights(q4_0, numbers.data(), numbers.size(), bytes.data());
    t.type = q4_0, t.bytes = std::move(bytes);
  }
  const std::vector<float> exact = logits_of(open(made.build_floats())),
                           engine = logits_of(open(made.build())),
                           format = logits_of(open(rounded.build_floats()));
  const auto error_of = [&](const std::vector<float>& logits) {
    double off = 0, norm = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      off += std::pow(static_cast<double>(logits[i]) - static_cast<double>(exact[i]), 2);
      norm += std::pow(static_cast<double>(exact[i]), 2);
    }
    return std::sqrt(off / norm);
  };
  CAPTURE(error_of(format));
  CHECK(error_of(engine) < error_of(format) / 3);
}

// Each is the widest input of a product in turn. Products quantise their inputs in a workspace for
// the widest one: a sanitizer sees one that is too small, and so do the logits.
TEST_CASE("any input may be a model's widest") {
  const auto of = [](const char* family) {
    for (ModelRecipe& r : test::recipes_of_all_architectures())
      if (r.architecture == family) return std::move(r);
    return ModelRecipe();
  };
  std::vector<std::pair<const char*, ModelRecipe>> all;
  const auto add = [&](const char* what, const char* family) {
    return &all.emplace_back(what, of(family)).second;
  };
  for (const char* family : {"gemma3n", "gemma4"}) {
    ModelRecipe* r = add("the input of a layer", family);
    r->layer_input = 2048, r->rank = r->width;
  }
  add("the stream, with AltUp", "gemma3n")->width = 1024;
  add("the dense network", "llama")->feed_forward = 2048;
  add("the heads", "qwen3")->head_dim = 512;
  add("the heads of windowed layers", "gemma4")->window_head_dim = 512;
  for (const char* family : {"qwen2moe", "gpt-oss", "llama4"})
    add("an expert", family)->expert_width = 2048;
  add("the shared expert", "qwen2moe")->shared_width = 2048;
  for (auto& [what, recipe] : all) {
    CAPTURE(std::string(what));
    CAPTURE(recipe.architecture);
    recipe.type_of = [](const MadeTensor& t) {
      return t.part() == "token_embd" ? f16 : t.cols() % 32 ? f32 : q8_0;
    };
    const MadeModel made = test::make_model(recipe);
    check_same(logits_of(open(made.build())), logits_of(open(made.build_floats())), true,
               recipe.experts > 0);
  }
}
