// The fixture files parse, and show what their makers wrote into them.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "gguf/gguf.h"
#include "gguf/gguf_builder.h"

namespace kvasir {
namespace {

std::vector<std::byte> read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in, path.string());
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

std::vector<std::filesystem::path> gguf_files(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".gguf") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TEST_CASE("every model fixture parses with its shape and weight type") {
  std::ifstream in(FIXTURES "/models/fixtures.json");
  const nlohmann::json fixtures = nlohmann::json::parse(in);
  REQUIRE(fixtures.size() == gguf_files(FIXTURES "/models").size());
  for (const auto& fixture : fixtures) {
    const std::string name = fixture["model"];
    CAPTURE(name);
    const std::vector<std::byte> bytes = read_file(FIXTURES "/models/" + name);
    Gguf gguf;
    const Status status = Gguf::parse(bytes, &gguf);
    REQUIRE_MESSAGE(status.ok(), status.message());
    const std::string arch = fixture["arch"];
    CHECK(gguf.get_string("general.architecture") == arch);
    CHECK(gguf.get_uint(arch + ".block_count").value_or(0) > 0);
    CHECK((gguf.get_float(arch + ".attention.layer_norm_rms_epsilon").value_or(0) > 0 ||
           gguf.get_float(arch + ".attention.layer_norm_epsilon").value_or(0) > 0));

    const GgufTensor* embedding = gguf.find_tensor("token_embd.weight");
    REQUIRE(embedding);
    CHECK(embedding->n_dims == 2);
    CHECK(embedding->dims[0] == gguf.get_uint(arch + ".embedding_length"));
    CHECK(embedding->dims[1] == uint64_t{fixture["shape"][1]});
    CHECK(embedding->offset >= gguf.data_offset());
    // A mixture such as Q4_K_M is called after its main type, which most weights have.
    const std::string weights = fixture["weights"];
    CHECK(std::any_of(gguf.tensors().begin(), gguf.tensors().end(), [&](const GgufTensor& t) {
      return weights.rfind(tensor_type_info(t.type)->name, 0) == 0;
    }));
    CHECK(gguf.get_strings("tokenizer.ggml.tokens").value().size() == embedding->dims[1]);
  }
}

TEST_CASE("every vocabulary fixture parses without tensors") {
  for (const auto& path : gguf_files(FIXTURES "/tokenizers")) {
    CAPTURE(path.string());
    const std::vector<std::byte> bytes = read_file(path);
    Gguf gguf;
    const Status status = Gguf::parse(bytes, &gguf);
    REQUIRE_MESSAGE(status.ok(), status.message());
    CHECK(gguf.tensors().empty());
    CHECK(gguf.data_offset() == bytes.size());
    const auto tokens = gguf.get_strings("tokenizer.ggml.tokens");
    REQUIRE(tokens);
    CHECK(tokens->size() > 1000);
    CHECK(gguf.get_ints("tokenizer.ggml.token_type").value().size() == tokens->size());
    const bool spm = gguf.get_string("tokenizer.ggml.model") == "llama";
    const bool scored = spm || gguf.get_string("tokenizer.ggml.model") == "gemma4";
    CHECK(gguf.get_floats("tokenizer.ggml.scores").has_value() == scored);
    CHECK(gguf.get_strings("tokenizer.ggml.merges").has_value() != spm);
    if (spm) CHECK(*std::next(tokens->begin()) == "<s>");
  }
}

TEST_CASE("tensors lie inside the file, apart from each other") {
  const std::vector<std::byte> bytes = read_file(FIXTURES "/models/llama-q4_k_m.gguf");
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  std::vector<GgufTensor> tensors(gguf.tensors().begin(), gguf.tensors().end());
  std::sort(tensors.begin(), tensors.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  uint64_t end = gguf.data_offset();
  for (const GgufTensor& tensor : tensors) {
    CAPTURE(tensor.name);
    CHECK(tensor.offset >= end);
    CHECK(tensor.offset % 32 == 0);
    end = tensor.offset + tensor.bytes;
  }
  CHECK(end <= bytes.size());
}

TEST_CASE("no cut through a fixture's header and tables parses") {
  const std::vector<std::byte> bytes = read_file(FIXTURES "/models/llama-q2_k.gguf");
  Gguf whole;
  REQUIRE(Gguf::parse(bytes, &whole).ok());
  for (std::size_t size = 0; size <= whole.data_offset(); ++size) {
    const std::vector<std::byte> cut(bytes.begin(),
                                     bytes.begin() + static_cast<std::ptrdiff_t>(size));
    Gguf gguf;
    if (Gguf::parse(cut, &gguf).ok()) FAIL("cut to ", size, " bytes");
  }
}

TEST_CASE("a vocabulary of 256K tokens does not take long to parse") {
  std::vector<std::string> tokens(262144);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = "token" + std::to_string(i);
  const std::vector<std::byte> bytes = test::GgufBuilder()
                                           .key("tokenizer.ggml.tokens", tokens)
                                           .key("tokenizer.ggml.merges", tokens)
                                           .build();
  double best_ms = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    Gguf gguf;
    REQUIRE(Gguf::parse(bytes, &gguf).ok());
    CHECK(gguf.get_strings("tokenizer.ggml.tokens").value().size() == tokens.size());
    best_ms = std::min(
        best_ms, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
                     .count());
  }
  MESSAGE("two arrays of 256K strings: ", best_ms, " ms");
  CHECK(best_ms < 200);  // takes about 3; the slack is for sanitizers and busy machines
}

}  // namespace
}  // namespace kvasir
