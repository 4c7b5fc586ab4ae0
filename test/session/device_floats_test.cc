// Prefill on a GPU with models of floats and any number of heads: products load several inputs at a
// time, at any alignment. Without a GPU the cases pass and say so.
#include <algorithm>
#include <iterator>
#include <string>

#include "../kernels/weights.h"
#include "../text/test_vocabulary.h"
#include "device_helpers.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint32_t layers = 3, width = 64, head_dim = 64, feed_forward = 96, vocabulary = 256;

// A llama model with random weights of a type, as a file.
std::string save_model(const TempFolder& folder, const test::Type& type, uint32_t heads,
                       uint32_t kv_heads) {
  Random random(heads);
  GgufBuilder file = bpe_file(byte_vocabulary());
  const auto number = [&](const char* key, uint32_t value) {
    file.key(std::string("llama.") + key, value);
  };
  file.key("general.architecture", "llama").key("general.name", "floats");
  number("block_count", layers), number("embedding_length", width),
      number("feed_forward_length", feed_forward), number("context_length", 4096);
  number("attention.head_count", heads), number("attention.head_count_kv", kv_heads);
  number("attention.key_length", head_dim), number("attention.value_length", head_dim);
  const auto bytes_of = [](const void* from, std::size_t size) {
    const auto* bytes = static_cast<const std::byte*>(from);
    return std::vector<std::byte>(bytes, bytes + size);
  };
  const auto matrix = [&](const std::string& name, uint32_t cols, uint32_t rows) {
    const test::Weights w(type, rows, cols, random);
    file.tensor(name, {cols, rows}, type.type, bytes_of(w.bytes.data(), w.bytes.size()));
  };
  const auto norm = [&](const std::string& name, float weight) {
    const std::vector<float> weights(width, weight);
    file.tensor(name, {width}, TensorType::f32, bytes_of(weights.data(), width * sizeof(float)));
  };
  matrix("token_embd.weight", width, vocabulary);
  // small: attention and answers that nothing stands out in show all that goes into them
  norm("output_norm.weight", 0.1f);
  for (uint32_t l = 0; l < layers; ++l) {
    const std::string layer = "blk." + std::to_string(l) + ".";
    norm(layer + "attn_norm.weight", 0.1f), norm(layer + "ffn_norm.weight", 0.1f);
    matrix(layer + "attn_q.weight", width, heads * head_dim),
        matrix(layer + "attn_output.weight", heads * head_dim, width);
    matrix(layer + "attn_k.weight", width, kv_heads * head_dim),
        matrix(layer + "attn_v.weight", width, kv_heads * head_dim);
    matrix(layer + "ffn_gate.weight", width, feed_forward),
        matrix(layer + "ffn_up.weight", width, feed_forward);
    matrix(layer + "ffn_down.weight", feed_forward, width);
  }
  std::string path = folder.file("floats.gguf");
  const std::vector<std::byte> bytes = file.build();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  return path;
}

// What comes after a text is known by the logits of its last token, which alone are computed.
std::vector<float> log_probabilities(Session* session) {
  std::vector<float> out(vocabulary);
  for (Token t = 0; t < static_cast<Token>(vocabulary); ++t)
    out[static_cast<std::size_t>(t)] = score(session, {&t, 1})[0];
  return out;
}

}  // namespace

TEST_CASE(
    "texts of odd numbers of tokens, of whose last one alone logits are wanted, are read with "
    "models of floats and any number of heads") {
  if (!device_model()) return;
  TempFolder folder;
  std::vector<Token> tokens(vocabulary);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<Token>(i * 37 % 200 + 10);
  for (const TensorType type : {TensorType::f16, TensorType::f32, TensorType::bf16}) {
    const test::Type& its = *std::find_if(std::begin(types), std::end(types),
                                          [&](const test::Type& t) { return t.type == type; });
    for (const auto& [heads, kv_heads] :
         {std::pair(6u, 2u), std::pair(9u, 3u), std::pair(14u, 2u)}) {
      CAPTURE(std::string(its.name));
      CAPTURE(heads);
      const std::string path = save_model(folder, its, heads, kv_heads);
      std::shared_ptr<const Model> devices;
      const Status s = Model::open(path, "raw", &devices, {"cuda"});
      REQUIRE_MESSAGE(s.ok(), s.message());
      std::shared_ptr<const Model> processors;
      REQUIRE(Model::open(path, "raw", &processors).ok());
      SessionOptions o;
      o.threads = 2;
      auto by_device = open_session(devices, o), by_processor = open_session(processors, o);
      for (const auto& [first, n] : {std::pair(0, 101), std::pair(101, 33), std::pair(134, 67)}) {
        CAPTURE(n);
        read(by_device.get(), {tokens.data() + first, static_cast<std::size_t>(n)});
        read(by_processor.get(), {tokens.data() + first, static_cast<std::size_t>(n)});
        CHECK(attends(*by_device));
        const std::vector<float> found = log_probabilities(by_device.get()),
                                 expected = log_probabilities(by_processor.get());
        CHECK(mean_difference(found, expected) < 3e-3);
      }
    }
  }
}
