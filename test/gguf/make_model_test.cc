// The model writer: its files parse, its vocabulary works, it refuses what no model can be.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gguf/gguf.h"
#include "text/tokenizer.h"

namespace kvasir {
namespace {

using Bytes = std::vector<std::byte>;

std::string output_path() {
  static const std::string path = (std::filesystem::temp_directory_path() /
                                   ("kvasir-make-model-" + std::to_string(getpid()) + ".gguf"))
                                      .string();
  return path;
}

// True when the program says that it wrote the file.
bool make(const std::string& options) {
  const std::string command =
      "\"" MAKE_MODEL "\" " + options + " -o \"" + output_path() + "\" >/dev/null 2>&1";
  return std::system(command.c_str()) == 0;
}

// The file just made, which is removed.
Bytes take_file() {
  std::ifstream in(output_path(), std::ios::binary);
  REQUIRE(in);
  Bytes bytes(std::filesystem::file_size(output_path()));
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  std::filesystem::remove(output_path());
  return bytes;
}

TEST_CASE("a made model of every type parses with the shape asked for") {
  for (const char* type :
       {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_XS", "IQ3_S",
        "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"}) {
    CAPTURE(type);
    REQUIRE(make(std::string("--shape tiny --layers 3 --kv-heads 1 --vocab 700 --untied --type ") +
                 type));
    const Bytes bytes = take_file();
    Gguf gguf;
    const Status status = Gguf::parse(bytes, &gguf);
    REQUIRE_MESSAGE(status.ok(), status.message());
    CHECK(gguf.get_uint("llama.block_count") == 3);
    CHECK(gguf.get_float("llama.rope.freq_base") == 500000);
    CHECK(gguf.tensors().size() == 3 + 3 * 9);
    const GgufTensor* k = gguf.find_tensor("blk.2.attn_k.weight");
    REQUIRE(k);
    CHECK(k->dims[0] == 256);
    CHECK(k->dims[1] == 64);
    CHECK(tensor_type_info(k->type)->name == std::string(type));
    CHECK(gguf.find_tensor("output.weight")->dims[1] == 700);
    CHECK(gguf.find_tensor("blk.0.attn_norm.weight")->type == TensorType::f32);
  }
}

TEST_CASE("a made mixture of experts has the tensors of its architecture") {
  const std::string small =
      " --layers 2 --width 256 --ffn 64 --experts 6 --used 2 --vocab 512 --untied --type F16"
      " --expert-type Q8_0";
  for (const auto& [shape, tensors] :
       {std::pair{"30b-a3b", 3 + 2 * 12}, std::pair{"gpt-oss-20b", 3 + 2 * 19}}) {
    CAPTURE(shape);
    REQUIRE(make(std::string("--shape ") + shape + small));
    const Bytes bytes = take_file();
    Gguf gguf;
    const Status status = Gguf::parse(bytes, &gguf);
    REQUIRE_MESSAGE(status.ok(), status.message());
    const std::string architecture(gguf.get_string("general.architecture").value());
    CHECK(gguf.get_uint(architecture + ".expert_count") == 6);
    CHECK(gguf.get_uint(architecture + ".expert_used_count") == 2);
    CHECK(gguf.tensors().size() == static_cast<std::size_t>(tensors));
    const GgufTensor* down = gguf.find_tensor("blk.1.ffn_down_exps.weight");
    REQUIRE(down);
    CHECK(down->type == TensorType::q8_0);
    CHECK(down->dims[0] == 64);
    CHECK(down->dims[1] == 256);
    CHECK(down->dims[2] == 6);
    CHECK(gguf.find_tensor("blk.1.attn_q.weight")->type == TensorType::f16);
    CHECK(gguf.find_tensor("blk.1.ffn_gate_inp.weight")->type == TensorType::f32);
  }
}

TEST_CASE("a made hybrid has delta nets, and attention in every fourth layer") {
  const std::string small = " --layers 5 --width 256 --heads 4 --kv-heads 2 --vocab 512 --type F16";
  for (const auto& [options, tensors] :
       {std::pair{"--shape qwen35-4b --ffn 512", 2 + 4 * 14 + 11},
        std::pair{"--shape qwen35-35b-a3b --ffn 64 --experts 6 --used 2", 2 + 4 * 19 + 16}}) {
    CAPTURE(options);
    REQUIRE(make(options + small));
    const Bytes bytes = take_file();
    Gguf gguf;
    const Status status = Gguf::parse(bytes, &gguf);
    REQUIRE_MESSAGE(status.ok(), status.message());
    CHECK(gguf.tensors().size() == static_cast<std::size_t>(tensors));
    CHECK(gguf.find_tensor("blk.3.attn_q.weight")->dims[1] == 2 * 4 * 256);
    CHECK(!gguf.find_tensor("blk.3.ssm_a"));
    CHECK(!gguf.find_tensor("blk.4.attn_q.weight"));
    const GgufTensor* taps = gguf.find_tensor("blk.4.ssm_conv1d.weight");
    REQUIRE(taps);
    CHECK(taps->dims[0] == 4);
    CHECK(taps->dims[1] == 8192);
    CHECK(taps->type == TensorType::f32);
  }
}

TEST_CASE("a made model with sandwich norms has four norms a layer and a window") {
  REQUIRE(make("--shape gemma3-4b --layers 2 --width 256 --ffn 512 --vocab 512 --type F16"));
  const Bytes bytes = take_file();
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  CHECK(gguf.tensors().size() == 2 + 2 * 13);
  CHECK(gguf.get_uint("gemma3.attention.sliding_window") == 1024);
  CHECK(gguf.find_tensor("blk.1.post_ffw_norm.weight"));
}

TEST_CASE("every merge of a made vocabulary joins two tokens into a third") {
  REQUIRE(make("--shape tiny --vocab 32768"));
  const Bytes bytes = take_file();
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  const auto tokens = gguf.get_strings("tokenizer.ggml.tokens").value();
  const auto merges = gguf.get_strings("tokenizer.ggml.merges").value();
  std::set<std::string> known;
  for (std::string_view token : tokens) known.emplace(token);
  CHECK(tokens.size() == 32768);
  CHECK(known.size() == tokens.size());
  CHECK(merges.size() == tokens.size() - 256 - 3);
  for (std::string_view merge : merges) {
    const std::size_t space = merge.find(' ');
    const std::string left(merge.substr(0, space)), right(merge.substr(space + 1));
    if (!known.count(left) || !known.count(right) || !known.count(left + right))
      FAIL("merge '", std::string(merge), "'");
  }
}

TEST_CASE("a made vocabulary tokenizes and spells the text again") {
  REQUIRE(make("--shape tiny --vocab 4096"));
  const Bytes bytes = take_file();
  Gguf gguf;
  REQUIRE(Gguf::parse(bytes, &gguf).ok());
  std::unique_ptr<const Tokenizer> tokenizer;
  const Status status = Tokenizer::load(gguf, &tokenizer);
  REQUIRE_MESSAGE(status.ok(), status.message());
  CHECK(tokenizer->ends_turn(tokenizer->find("<|im_end|>")));
  const std::string text = "the cat, 42 \xc3\xa4pfel\n";
  Array<Token> tokens;
  REQUIRE(tokenizer->encode(text, false, true, &tokens).ok());
  CHECK(tokens.size() < text.size());
  std::string spelled;
  for (Token token : tokens) spelled += tokenizer->piece(token, false);
  CHECK(spelled == text);
}

TEST_CASE("the same seed makes the same file, another seed another") {
  REQUIRE(make("--shape tiny --seed 5"));
  const Bytes first = take_file();
  REQUIRE(make("--shape tiny --seed 5"));
  CHECK(take_file() == first);
  REQUIRE(make("--shape tiny --seed 6"));
  CHECK(take_file() != first);
}

TEST_CASE("a shape that no model can have leaves no file behind") {
  for (const char* options :
       {"--shape tiny --heads 3", "--shape tiny --head-dim 63", "--shape tiny --vocab 258",
        "--shape tiny --width 96 --type Q4_K", "--shape huge", "--shape tiny --experts 4",
        "--shape 30b-a3b --used 129", "--type Q4_2", "--layers 0"}) {
    CAPTURE(options);
    CHECK(!make(options));
    CHECK(!std::filesystem::exists(output_path()));
  }
}

}  // namespace
}  // namespace kvasir
