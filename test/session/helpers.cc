#include "helpers.h"

#include <cstring>
#include <fstream>
#include <iterator>

#include "temp_folder.h"

namespace kvasir::test {

std::string book_text(std::size_t bytes) {
  static const std::string text = [] {
    std::ifstream in(EXAMPLES "/demo.txt", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }();
  return text.substr(0, bytes);
}

std::vector<Token> book_tokens(std::size_t n) {
  Array<Token> ids;
  const Status s = mini_model()->tokenizer().encode(book_text(8 * n), false, true, &ids);
  REQUIRE(s.ok());
  REQUIRE(ids.size() >= n);
  return {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n)};
}

std::shared_ptr<const Model> model_over(GgufBuilder file, uint32_t vocabulary, const char* chat,
                                        const std::map<std::string, float>& filled) {
  constexpr uint32_t width = 32;
  const auto number = [&](const char* key, uint32_t value) {
    file.key(std::string("llama.") + key, value);
  };
  file.key("general.architecture", "llama").key("general.name", "small");
  number("block_count", 1);
  number("embedding_length", width);
  number("feed_forward_length", width);
  number("attention.head_count", 1);
  number("context_length", 65536);
  const auto tensor = [&](const std::string& name, std::vector<uint64_t> dims) {
    uint64_t size = 1;
    for (const uint64_t d : dims) size *= d;
    const auto value = filled.find(name);
    std::vector<float> numbers(size, value == filled.end() ? 0.0f : value->second);
    if (numbers.back() == 0)
      numbers.back() = 1e-30f;  // a large matrix of nothing but zeros is refused as a hole
    std::vector<std::byte> bytes(size * sizeof(float));
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    file.tensor(name, std::move(dims), TensorType::f32, std::move(bytes));
  };
  tensor("token_embd.weight", {width, vocabulary});
  tensor("output_norm.weight", {width});
  if (filled.count("output.weight")) tensor("output.weight", {width, vocabulary});
  for (const char* name : {"attn_norm", "ffn_norm"})
    tensor(std::string("blk.0.") + name + ".weight", {width});
  for (const char* name :
       {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
    tensor(std::string("blk.0.") + name + ".weight", {width, width});
  const std::vector<std::byte> bytes = file.build();
  TempFolder folder;
  {
    std::ofstream out(folder.file("a.gguf"), std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
  }
  std::shared_ptr<const Model> model;  // its mapping outlives the file's name
  const Status s = Model::open(folder.file("a.gguf"), chat, &model);
  REQUIRE_MESSAGE(s.ok(), s.message());
  return model;
}

}  // namespace kvasir::test
