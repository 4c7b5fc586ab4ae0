// Models whose layers have other parts than llama's, on a GPU, against those of the CPU: windows,
// sink logits, other norms and activations, shared keys and values. Without a GPU the cases pass
// and say so.
#include <algorithm>
#include <cmath>
#include <string>

#include "../gguf/gguf_builder.h"
#include "../text/test_vocabulary.h"
#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t window = 24;

std::vector<Token> layer_tokens(std::size_t n) {
  std::vector<Token> out(n);
  uint32_t state = 5;
  for (Token& t : out) {
    state = state * 1664525u + 1013904223u;
    t = static_cast<Token>(state >> 24);
  }
  return out;
}

std::shared_ptr<const Model> layers_on_gpu(const std::string& path) {
  std::shared_ptr<const Model> model;
  const Status s = Model::open(path, "", &model, {.name = "cuda"});
  REQUIRE_MESSAGE(s.ok(), s.message());
  return model;
}

// Random weights of heads that a GPU attends: 64 dimensions, or 256.
class Builder {
 public:
  Builder(const std::string& architecture, uint32_t head_dim)
      : dim(head_dim), prefix_(architecture + ".") {
    file_ = bpe_file(byte_vocabulary());
    file_.key("general.architecture", architecture).key("general.name", "layers");
    key("block_count", layers), key("embedding_length", width), key("context_length", 4096u);
    key("feed_forward_length", inner), key("attention.head_count", heads);
    key("attention.head_count_kv", kv_heads), key("attention.key_length", dim);
    key("attention.value_length", dim), key("attention.sliding_window", window);
    matrix("token_embd.weight", {width, 256});
    vector("output_norm.weight", width);
  }
  template <class T>
  void key(const char* name, T value) {
    file_.key(prefix_ + name, value);
  }
  void matrix(const std::string& name, std::vector<uint64_t> dims) {
    const float scale = 1.5f / std::sqrt(static_cast<float>(dims[0]));
    add(name, std::move(dims), 0, scale);
  }
  void vector(const std::string& name, uint64_t n) { add(name, {n}, 1, 0.3f); }
  // norms: names of vectors of the stream's width.
  void attention(const std::string& at, std::initializer_list<const char*> norms) {
    for (const char* norm : norms) vector(at + norm + ".weight", width);
    matrix(at + "attn_q.weight", {width, heads * dim});
    matrix(at + "attn_k.weight", {width, kv_heads * dim});
    matrix(at + "attn_v.weight", {width, kv_heads * dim});
    matrix(at + "attn_output.weight", {heads * dim, width});
  }
  void network(const std::string& at) {
    matrix(at + "ffn_gate.weight", {width, inner}), matrix(at + "ffn_up.weight", {width, inner});
    matrix(at + "ffn_down.weight", {inner, width});
  }
  std::string save(const TempFolder& folder) {
    std::string path = folder.file("layers.gguf");
    const std::vector<std::byte> bytes = file_.build();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path;
  }
  static std::string layer(uint32_t l) { return "blk." + std::to_string(l) + "."; }

  static constexpr uint32_t layers = 4, width = 64, inner = 96, heads = 4, kv_heads = 2;
  const uint32_t dim;

 private:
  void add(const std::string& name, std::vector<uint64_t> dims, float mean, float scale) {
    uint64_t count = 1;
    for (const uint64_t n : dims) count *= n;
    std::vector<std::byte> contents;
    for (uint64_t i = 0; i < count; ++i) {
      state_ = state_ * 1664525u + 1013904223u;
      append(&contents, mean + scale * (static_cast<float>(state_ >> 16) / 32768.0f - 1.0f));
    }
    file_.tensor(name, std::move(dims), TensorType::f32, std::move(contents));
  }
  const std::string prefix_;
  GgufBuilder file_;
  uint32_t state_ = 7;
};

std::string save_model(const std::string& name, const TempFolder& folder) {
  Builder b(name, name == "gemma3" ? 256 : 64);
  for (uint32_t l = 0; l < Builder::layers; ++l) {
    const std::string at = Builder::layer(l);
    if (name == "olmo2" || name == "exaone4") {
      b.attention(at, {"post_attention_norm", "post_ffw_norm"});
      b.vector(at + "attn_q_norm.weight", name == "olmo2" ? Builder::heads * b.dim : 64);
      b.vector(at + "attn_k_norm.weight", name == "olmo2" ? Builder::kv_heads * b.dim : 64);
      b.network(at);
    } else if (name == "cohere2") {
      b.attention(at, {"attn_norm"});
      b.network(at);
    } else if (name == "gemma2" || name == "gemma3") {
      b.attention(at, {"attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"});
      if (name == "gemma3")
        for (const char* norm : {"attn_q_norm.weight", "attn_k_norm.weight"})
          b.vector(at + norm, b.dim);
      b.network(at);
    } else {
      b.attention(at, {"attn_norm", "post_attention_norm"});
      b.vector(at + "attn_sinks.weight", Builder::heads);
      b.matrix(at + "ffn_gate_inp.weight", {Builder::width, 4});
      for (const char* part : {"ffn_gate_exps.weight", "ffn_up_exps.weight"})
        b.matrix(at + part, {Builder::width, Builder::inner, 4});
      b.matrix(at + "ffn_down_exps.weight", {Builder::inner, Builder::width, 4});
    }
  }
  if (name == "cohere2") b.key("logit_scale", 0.25f);
  if (name == "gemma3") b.key("attention.sliding_window_pattern", 2u);
  if (name == "gpt-oss") {
    b.key("expert_count", 4u), b.key("expert_used_count", 2u);
    b.key("expert_feed_forward_length", Builder::inner);
  }
  return b.save(folder);
}

struct Pair {
  std::unique_ptr<Session> cpu, gpu;
};

void read_both(Pair* pair, std::span<const Token> tokens) {
  read(pair->cpu.get(), tokens);
  read(pair->gpu.get(), tokens);
}

// Of forks, which stay out of the sequences.
double off(const Pair& pair) {
  Pair forks;
  REQUIRE(pair.cpu->fork(&forks.cpu).ok());
  REQUIRE(pair.gpu->fork(&forks.gpu).ok());
  // The strategy attends the tokens that are scored, and all of the sequence the one behind.
  static const auto tokens = layer_tokens(12);
  const double scores =
      mean_difference(score(forks.gpu.get(), tokens), score(forks.cpu.get(), tokens));
  return std::max(scores,
                  difference(logits_after(forks.gpu.get(), 9), logits_after(forks.cpu.get(), 9)));
}

// A prefill of several steps, an answer, a rewind, and what was saved.
void check_sequence(const std::string& path, const SessionOptions& options, double tolerance) {
  const auto cpu = open_model(path), gpu = layers_on_gpu(path);
  REQUIRE(gpu->device_weights().front().has_output());
  const auto tokens = layer_tokens(700);
  const TempFolder folder;
  Pair pair{open_session(cpu, options), open_session(gpu, options)};
  read_both(&pair, {tokens.data(), 300});
  CHECK(off(pair) < tolerance);
  read_both(&pair, {tokens.data() + 300, 35});
  CHECK(off(pair) < tolerance);
  for (std::size_t i = 0; i < 20; ++i) read_both(&pair, {tokens.data() + 335 + i, 1});
  CHECK(off(pair) < tolerance);
  // The answer, again: the same tokens.
  const std::vector<float> expected = logits_after(pair.cpu.get(), 11);
  CHECK(difference(logits_after(pair.gpu.get(), 11), expected) < tolerance);
  for (Session* session : {pair.cpu.get(), pair.gpu.get()}) REQUIRE(session->rewind(355).ok());
  CHECK(difference(logits_after(pair.gpu.get(), 11), expected) < tolerance);
  for (Session* session : {pair.cpu.get(), pair.gpu.get()}) REQUIRE(session->rewind(330).ok());
  read_both(&pair, {tokens.data() + 500, 5});
  CHECK(off(pair) < tolerance);
  REQUIRE(pair.gpu->save(folder.file("a.kv"), nullptr, {}).ok());
  Pair loaded{load(cpu, folder.file("a.kv"), options), load(gpu, folder.file("a.kv"), options)};
  CHECK(off(loaded) < tolerance);
  read_both(&loaded, {tokens.data() + 505, 90});
  CHECK(off(loaded) < tolerance);
  for (std::size_t i = 0; i < 3; ++i) read_both(&loaded, {tokens.data() + 600 + i, 1});
  CHECK(off(loaded) < tolerance);
}

SessionOptions exact_options() {
  SessionOptions o;
  o.threads = 2;
  o.select.strategy = "full";
  o.prefill_chunk = 128;
  return o;
}

bool computes_attention(const Session& session) {
  return attends(session) ||
         session.stats_json().find("\"gpu_coexecutes\":true") != std::string::npos;
}

bool has_windows_on(const char* executor, const Session& session) {
  return session.stats_json().find("sliding windows " + std::string(executor)) != std::string::npos;
}
}  // namespace

TEST_CASE("models of every kind of layer give on a GPU the CPU's logits, in full precision") {
  if (!device_model()) return;
  for (const char* name : {"command-r",   "stablelm-parallel",
                           "starcoder2",  "nemotron",
                           "granite",     "minicpm",
                           "glm4",        "hunyuan-dense",
                           "olmo2",       "olmo3",
                           "exaone4-swa", "cohere2",
                           "gemma2",      "gemma3",
                           "gemma4",      "gemma4-e",
                           "mistral3",    "llama4",
                           "gpt-oss",     "phi3",
                           "seed_oss",    "smollm3"}) {
    CAPTURE(std::string(name));
    SessionOptions options = exact_options();
    options.full_precision = true;
    const std::string path = FIXTURES "/models/" + std::string(name) + ".gguf";
    std::shared_ptr<const Model> model;
    const Status s = Model::open(path, "", &model, {.name = "cuda"});
    if (s.code() == Code::unsupported) {
      MESSAGE(std::string(name), ": ", std::string(s.message()));
      continue;
    }
    check_sequence(path, options, 1e-3);
  }
}

// The CPU keeps the older tokens of a window in 8 bits, and a GPU in full precision.
constexpr double eight_bits = 3e-2;

TEST_CASE("a GPU attends windows in every mode of the other layers") {
  if (!device_model()) return;
  const TempFolder folder;
  for (const char* name : {"olmo2", "cohere2", "exaone4", "gpt-oss", "gemma2", "gemma3"}) {
    CAPTURE(std::string(name));
    const std::string path = save_model(name, folder);
    for (const char* strategy : {"bounded", "full", "quest"}) {
      CAPTURE(std::string(strategy));
      SessionOptions options = exact_options();
      options.select.strategy = strategy;
      if (strategy != std::string("full")) options.select.budget_tokens = 3000;  // everything
      check_sequence(path, options, eight_bits);
      const auto session = open_session(layers_on_gpu(path), options);
      read(session.get(), layer_tokens(300));
      CHECK(computes_attention(*session) == (name != std::string("gemma2")));
      CHECK(has_windows_on("cuda:0", *session));
      (void)score(session.get(), layer_tokens(3));
      CHECK(computes_attention(*session) == (name != std::string("gemma2")));
      CHECK(has_windows_on("cuda:0", *session));
    }
  }
}
