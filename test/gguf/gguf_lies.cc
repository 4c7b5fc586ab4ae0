// A model's file whose numbers lie. Every length, count, offset, type and dimension of the format,
// and every number among the metadata, is replaced in turn by each of hostile::lies(). A lie costs
// its author nothing, because a file may be sparse: each case is also tried in a file of 8 TiB that
// is a hole behind the model. No call may take more than test/hostile/measure.h allows.
//
//   gguf-lies N    every Nth case; 1: all. Of the models of all architectures, a quarter of them
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "../text/test_vocabulary.h"
#include "gguf/limits.h"
#include "gguf_builder.h"
#include "hostile/lies.h"
#include "hostile/measure.h"
#include "kvasir.h"
#include "made_model.h"
#include "temp_folder.h"

using namespace kvasir;
using namespace kvasir::test;

namespace {

constexpr uint64_t sparse_bytes = uint64_t{1} << 43;

int failures = 0;

void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  ++failures;
}

struct Field {
  std::string name;
  uint64_t offset;
  uint32_t bytes;
  uint64_t plausible;  // the greatest number that a real model may have here
};

// Walks a good file by the format's description, not by the library's parser.
class Walker {
 public:
  explicit Walker(const std::vector<std::byte>& file) : file_(file) {}

  std::vector<Field> fields() {
    at_ = 4;
    number("version", 4, 3);
    const uint64_t tensors = number("tensor count", 8, gguf_limits::tensors);
    const uint64_t keys = number("key count", 8, gguf_limits::keys);
    for (uint64_t i = 0; i < keys; ++i) key();
    for (uint64_t i = 0; i < tensors; ++i) tensor();
    return fields_;
  }

 private:
  uint64_t number(const std::string& name, uint32_t bytes, uint64_t plausible, bool listed = true) {
    uint64_t value = 0;
    std::memcpy(&value, file_.data() + at_, bytes);
    if (listed) fields_.push_back({name, at_, bytes, plausible});
    at_ += bytes;
    return value;
  }

  std::string text(const std::string& name, uint64_t plausible, bool listed = true) {
    const uint64_t size = number("length of " + name, 8, plausible, listed);
    const std::string out(reinterpret_cast<const char*>(file_.data()) + at_, size);
    at_ += size;
    return out;
  }

  static uint32_t bytes_of(uint64_t type) {
    constexpr uint32_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < std::size(bytes) ? bytes[type] : 0;
  }

  static uint64_t plausible_number(const std::string& key) {
    const std::pair<const char*, uint64_t> limits[] = {
        {"block_count", gguf_limits::layers},
        {"embedding_length", gguf_limits::width},
        {"feed_forward_length", gguf_limits::feed_forward},
        {"head_count", gguf_limits::heads}};
    for (const auto& [part, limit] : limits)
      if (key.find(part) != std::string::npos) return limit;
    return uint64_t{1} << 20;
  }

  void key() {
    const std::string name = text("the name of a key", 65535);
    const uint64_t type = number("type of " + name, 4, 12);
    if (type == 8) {
      text(name, gguf_limits::metadata_bytes);
    } else if (type == 9) {
      const uint64_t element = number("element type of " + name, 4, 12),
                     count = number("count of " + name, 8, gguf_limits::array_elements);
      for (uint64_t i = 0; i < count; ++i) {
        const bool listed = i == 0 || i == count / 2 || i + 1 == count;
        const std::string one = "element " + std::to_string(i) + " of " + name;
        if (element == 8) text(one, gguf_limits::token_bytes, listed);
        else number(one, bytes_of(element), uint64_t{1} << 20, listed);
      }
    } else {
      number(name, bytes_of(type), plausible_number(name));
    }
  }

  void tensor() {
    const std::string name = text("a tensor's name", 64);
    const uint64_t dims = number("dimensions of " + name, 4, 4);
    for (uint64_t d = 0; d < dims; ++d)
      number("dimension " + std::to_string(d) + " of " + name, 8, gguf_limits::feed_forward);
    number("type of " + name, 4, 42);
    number("offset of " + name, 8, uint64_t{1} << 42);
  }

  const std::vector<std::byte>& file_;
  uint64_t at_ = 0;
  std::vector<Field> fields_;
};

void add_shape(GgufBuilder* b, uint32_t layers, uint32_t width) {
  b->key("general.architecture", "llama")
      .key("general.name", "lies")
      .key("llama.block_count", layers);
  b->key("llama.embedding_length", width)
      .key("llama.feed_forward_length", uint32_t{64})
      .key("llama.context_length", uint32_t{4096});
  b->key("llama.attention.head_count", uint32_t{2})
      .key("llama.attention.head_count_kv", uint32_t{1});
  b->key("llama.attention.key_length", uint32_t{8})
      .key("llama.attention.value_length", uint32_t{8});
  b->key("llama.rope.dimension_count", uint32_t{8}).key("general.alignment", uint32_t{32});
  b->key("tokenizer.chat_template", "{{ messages }}");
  b->key("tokenizer.ggml.bos_token_id", uint32_t{1}).key("tokenizer.ggml.add_bos_token", true);
}

// The first weight of each tensor is not 0: a large matrix of nothing else is refused as a hole.
void add_tensors(GgufBuilder* b, uint32_t layers, uint64_t width, uint64_t vocabulary) {
  const auto add = [&](const std::string& name, std::vector<uint64_t> dims) {
    b->tensor(name, std::move(dims), TensorType::f16, {std::byte{1}});
  };
  add("token_embd.weight", {width, vocabulary});
  for (uint32_t l = 0; l < layers; ++l) {
    const std::string at = "blk." + std::to_string(l) + ".";
    add(at + "attn_norm.weight", {width}), add(at + "ffn_norm.weight", {width});
    add(at + "attn_q.weight", {width, 16}), add(at + "attn_k.weight", {width, 8}),
        add(at + "attn_v.weight", {width, 8});
    add(at + "attn_q.bias", {16}), add(at + "attn_output.weight", {16, width});
    add(at + "ffn_gate.weight", {width, 64}), add(at + "ffn_up.weight", {width, 64}),
        add(at + "ffn_down.weight", {64, width});
  }
  add("output_norm.weight", {width});
  std::vector<std::byte> ones;
  for (int i = 0; i < 4; ++i) append(&ones, 1.0f);
  b->tensor("rope_freqs.weight", {4}, TensorType::f32, ones);
}

kv_status open_and_close(const std::string& path, kv_error* error = nullptr) {
  kv_model* model = nullptr;
  const kv_status status = kv_open(path.c_str(), nullptr, nullptr, &model, error);
  kv_close(model);
  return status;
}

void check_opens(const std::string& what, const std::string& path) {
  kv_error error{};
  if (open_and_close(path, &error) != KV_OK) fail(what + ": " + error.message);
}

kv_status inspect(const std::string& path) {
  kv_model_info info{};
  info.struct_size = sizeof info;
  return kv_model_inspect(path.c_str(), &info, nullptr);
}

void check_cost(const std::string& what, const std::function<kv_status()>& call) {
  kv_status status = KV_OK;
  hostile::Cost cost;
  for (int attempt = 0; attempt < 3; ++attempt) {
    cost = hostile::measure([&] { status = call(); });
    if (hostile::is_cheap(cost)) return;
  }
  fail(what + ": " + kv_status_text(status) + " after " + hostile::to_text(cost));
}

void put(std::fstream* file, uint64_t offset, const void* data, uint32_t bytes) {
  file->seekp(static_cast<std::streamoff>(offset));
  file->write(static_cast<const char*>(data), bytes);
  file->flush();
}

// The lies of one good file; every `stride`th, `*number` being the first's.
void tell(const std::string& kind, const std::vector<std::byte>& good, uint64_t stride,
          uint64_t* number) {
  TempFolder folder;
  const std::string path = folder.file("lies.gguf");
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(good.data()), static_cast<std::streamsize>(good.size()));
  check_opens(kind + ": the honest file", path);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  for (const Field& field : Walker(good).fields()) {
    uint64_t honest = 0;
    std::memcpy(&honest, good.data() + field.offset, field.bytes);
    for (const uint64_t lie : hostile::lies(honest, field.plausible, field.bytes)) {
      if ((*number)++ % stride != 0) continue;
      put(&file, field.offset, &lie, field.bytes);
      for (const uint64_t size : {uint64_t{good.size()}, sparse_bytes}) {
        std::filesystem::resize_file(path, size);
        const std::string what = kind + ": " + field.name + " is " + std::to_string(lie) +
                                 (size == sparse_bytes ? " in a sparse file" : "");
        check_cost(what + ", opened", [&] { return open_and_close(path); });
        check_cost(what + ", inspected", [&] { return inspect(path); });
      }
    }
    put(&file, field.offset, good.data() + field.offset, field.bytes);
  }
}

// A file that is all metadata: the beginning, a hole, the end.
std::string write_sparse(const TempFolder& folder, const std::vector<std::byte>& beginning,
                         uint64_t hole, const std::vector<std::byte>& end) {
  const std::string path = folder.file("sparse.gguf");
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(beginning.data()),
            static_cast<std::streamsize>(beginning.size()));
  out.seekp(static_cast<std::streamoff>(hole), std::ios::cur);
  out.write(reinterpret_cast<const char*>(end.data()), static_cast<std::streamsize>(end.size()));
  out.close();
  std::filesystem::resize_file(path, beginning.size() + hole + end.size());
  return path;
}

// A vocabulary of so many empty tokens before nothing else.
void check_empty_tokens(uint64_t count, bool merges) {
  TempFolder folder;
  GgufBuilder b;
  add_shape(&b, 1, 32);
  b.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", "gpt-2");
  if (merges) b.key("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"});
  std::vector<std::byte> array;
  append(&array, GgufType::string);
  append(&array, count);
  b.raw_key(merges ? "tokenizer.ggml.merges" : "tokenizer.ggml.tokens",
            static_cast<uint32_t>(GgufType::array), array);
  const std::string path = write_sparse(folder, b.build(), 8 * count, {});
  const std::string what = std::to_string(count) + (merges ? " empty merges" : " empty tokens");
  check_cost(what + ", opened", [&] { return open_and_close(path); });
  check_cost(what + ", inspected", [&] { return inspect(path); });
}

// So many layers so wide, whose tensors lie in a hole.
void check_wide(uint32_t layers, uint32_t width, bool opens) {
  TempFolder folder;
  GgufBuilder b;
  add_shape(&b, layers, width);
  b.key("tokenizer.ggml.model", "gpt2").key("tokenizer.ggml.pre", "gpt-2");
  const TestVocabulary words = byte_vocabulary();
  b.key("tokenizer.ggml.tokens", words.tokens).key("tokenizer.ggml.merges", words.merges);
  uint64_t offset = 0;
  const auto add = [&](const std::string& name, std::vector<uint64_t> dims) {
    uint64_t bytes = 2;
    for (const uint64_t dim : dims) bytes *= dim;
    b.raw_tensor(name, static_cast<uint32_t>(dims.size()), dims,
                 static_cast<uint32_t>(TensorType::f16), offset);
    offset += (bytes + 31) / 32 * 32;
  };
  add("token_embd.weight", {width, words.tokens.size()});
  for (uint32_t l = 0; l < layers; ++l) {
    const std::string at = "blk." + std::to_string(l) + ".";
    add(at + "attn_norm.weight", {width}), add(at + "ffn_norm.weight", {width});
    add(at + "attn_q.weight", {width, 16}), add(at + "attn_k.weight", {width, 8}),
        add(at + "attn_v.weight", {width, 8});
    add(at + "attn_output.weight", {16, width}), add(at + "attn_output.bias", {width}),
        add(at + "ffn_down.bias", {width});
    add(at + "ffn_gate.weight", {width, 64}), add(at + "ffn_up.weight", {width, 64}),
        add(at + "ffn_down.weight", {64, width});
  }
  add("output_norm.weight", {width});
  const std::string path = write_sparse(folder, b.build(), offset + 64, {});
  const std::string what = std::to_string(layers) + " layers " + std::to_string(width) + " wide";
  if (!opens) check_cost(what + ", opened", [&] { return open_and_close(path); });
  check_cost(what + ", inspected", [&] { return inspect(path); });
  // Its numbers are plausible; only its large matrices are a hole.
  if (opens && open_and_close(path) != KV_CORRUPT) fail(what + ": not refused as a hole");
}

// A plausible vocabulary still opens.
void check_large_vocabulary() {
  TempFolder folder;
  GgufBuilder b;
  add_shape(&b, 1, 32);
  TestVocabulary words = byte_vocabulary();
  while (words.tokens.size() < 262144) words.add("token " + std::to_string(words.tokens.size()));
  b.key("tokenizer.ggml.model", "gpt2")
      .key("tokenizer.ggml.pre", "gpt-2")
      .key("tokenizer.ggml.tokens", words.tokens);
  b.key("tokenizer.ggml.merges", std::vector<std::string>(446189, "a b"));
  add_tensors(&b, 1, 32, words.tokens.size());
  const std::string path = write_sparse(folder, b.build(), 0, {});
  check_opens("262,144 tokens and 446,189 merges", path);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc == 2 ? std::strtoull(argv[1], nullptr, 10) : 0;
  if (stride == 0) return std::printf("an argument is needed: how many cases to go on by\n"), 1;
  uint64_t number = 0;
  {
    GgufBuilder b;
    add_shape(&b, 2, 32);
    TestVocabulary words = byte_vocabulary();
    words.merge("a", "b"), words.merge("ab", "ab"), words.add("<|im_end|>", 3),
        words.add("<tab>", 4);
    b.key("tokenizer.ggml.model", "gpt2")
        .key("tokenizer.ggml.pre", "gpt-2")
        .key("tokenizer.ggml.tokens", words.tokens);
    b.key("tokenizer.ggml.token_type", words.types).key("tokenizer.ggml.merges", words.merges);
    add_tensors(&b, 2, 32, words.tokens.size());
    tell("byte-level BPE", b.build(), stride, &number);
  }
  {
    GgufBuilder b;
    add_shape(&b, 1, 32);
    TestVocabulary words = spm_vocabulary();
    words.add("a"), words.add("b"), words.add("ab", 1, 1);
    b.key("tokenizer.ggml.model", "llama").key("tokenizer.ggml.tokens", words.tokens);
    b.key("tokenizer.ggml.token_type", words.types).key("tokenizer.ggml.scores", words.scores);
    add_tensors(&b, 1, 32, words.tokens.size());
    tell("SentencePiece", b.build(), stride, &number);
  }
  for (const ModelRecipe& recipe : recipes_of_all_architectures())
    tell(recipe.architecture, make_model(recipe).build(), 4 * stride, &number);
  for (const uint64_t count :
       {gguf_limits::tokens, gguf_limits::tokens + 1, uint64_t{60'000'000}, uint64_t{1} << 40}) {
    check_empty_tokens(count, false);
    check_empty_tokens(count, true);
  }
  check_wide(300, 1 << 20, false);
  check_wide(1024, 1 << 16, false);
  check_wide(30, 1 << 16, true);
  check_large_vocabulary();
  std::printf("%llu cases: every %llu. was tried, %d took too much\n",
              static_cast<unsigned long long>(number), static_cast<unsigned long long>(stride),
              failures);
  return failures != 0;
}
