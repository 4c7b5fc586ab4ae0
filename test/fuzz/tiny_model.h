// The smallest model that runs, so that what a call costs is the library's own work; and how
// targets read their inputs as recipes.
#pragma once

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "../gguf/gguf_builder.h"
#include "../text/test_vocabulary.h"
#include "base/memory.h"
#include "kvasir.h"
#include "kvasir_experimental.h"
#include "replay.h"

namespace kvasir::test {

// An input as a sequence of values. Behind its end everything is 0, so that every beginning of an
// input is an input too.
class Recipe {
 public:
  Recipe(const uint8_t* data, std::size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}
  bool empty() const { return rest_.empty(); }
  uint8_t byte() { return static_cast<uint8_t>(number(1)); }
  uint32_t word() { return static_cast<uint32_t>(number(4)); }
  uint64_t number(std::size_t bytes) {
    uint64_t value = 0;
    for (std::size_t i = 0; i < std::min(bytes, rest_.size()); ++i)
      value |= uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
    rest_.remove_prefix(std::min(bytes, rest_.size()));
    return value;
  }
  std::string_view bytes(std::size_t n) {
    const std::string_view out = rest_.substr(0, n);
    rest_.remove_prefix(out.size());
    return out;
  }
  std::string_view text() { return bytes(byte()); }  // a byte says how long it is

 private:
  std::string_view rest_;
};

struct ModelSize {
  uint32_t layers, width, heads, kv_heads, head_dim, feed_forward, context;
};
constexpr ModelSize tiny_size = {2, 16, 2, 1, 8, 16, 4096};

// Adds the shape, and weights that are not all alike, to a file that has a vocabulary of so many
// tokens.
inline void add_weights(GgufBuilder* builder, const ModelSize& size, uint64_t vocabulary) {
  GgufBuilder& b = *builder;
  b.key("general.architecture", "llama")
      .key("llama.block_count", size.layers)
      .key("llama.embedding_length", size.width);
  b.key("llama.feed_forward_length", size.feed_forward).key("llama.context_length", size.context);
  b.key("llama.attention.head_count", size.heads)
      .key("llama.attention.head_count_kv", size.kv_heads);
  b.key("llama.attention.key_length", size.head_dim)
      .key("llama.attention.value_length", size.head_dim);
  uint32_t state = 7;
  const auto add = [&](const std::string& name, std::vector<uint64_t> dims) {
    uint64_t count = 1;
    for (const uint64_t dim : dims) count *= dim;
    std::vector<std::byte> contents;
    contents.reserve(count * sizeof(float));
    for (uint64_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      append(&contents,
             dims.size() == 1 ? 1.0f : static_cast<float>(state >> 16) / 32768.0f - 1.0f);
    }
    b.tensor(name, std::move(dims), TensorType::f32, std::move(contents));
  };
  const uint64_t width = size.width, q = uint64_t{size.heads} * size.head_dim,
                 kv = uint64_t{size.kv_heads} * size.head_dim;
  add("token_embd.weight", {width, vocabulary});
  for (uint32_t l = 0; l < size.layers; ++l) {
    const std::string at = "blk." + std::to_string(l) + ".";
    add(at + "attn_norm.weight", {width}), add(at + "ffn_norm.weight", {width});
    add(at + "attn_q.weight", {width, q}), add(at + "attn_k.weight", {width, kv}),
        add(at + "attn_v.weight", {width, kv});
    add(at + "attn_output.weight", {q, width});
    add(at + "ffn_gate.weight", {width, size.feed_forward}),
        add(at + "ffn_up.weight", {width, size.feed_forward});
    add(at + "ffn_down.weight", {size.feed_forward, width});
  }
  add("output_norm.weight", {width});
}

inline void write_model(const std::string& path, const GgufBuilder& builder) {
  const std::vector<std::byte> file = builder.build();
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(file.data()), static_cast<std::streamsize>(file.size()));
  require(out.good(), "a temporary model");
}

// Bytes, and the marks of the chat format that they make: the id of a byte is its value.
inline void write_tiny_model(const std::string& path) {
  TestVocabulary words = byte_vocabulary();
  words.merge("a", "b"), words.merge("ab", "ab"), words.merge("e", " ");
  words.add("<|im_start|>", 3), words.add("<|im_end|>", 3);
  GgufBuilder builder = bpe_file(words);
  add_weights(&builder, tiny_size, words.tokens.size());
  write_model(path, builder);
}

// The library's large allocations while this object lives: the largest, and all but the first so
// many succeed.
class Allocations {
 public:
  explicit Allocations(uint64_t fail_from = UINT64_MAX) {
    largest_ = 0;
    left_ = fail_from;
    allocation_fault = note;
  }
  ~Allocations() { allocation_fault = nullptr; }
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;
  static std::size_t largest() { return largest_; }
  static bool failed() { return left_ == 0; }

 private:
  static bool note(std::size_t size) {
    std::size_t largest = largest_;
    while (largest < size && !largest_.compare_exchange_weak(largest, size)) {
    }
    if (left_ == UINT64_MAX) return false;
    if (left_ > 0) --left_;
    return left_ == 0;
  }
  static inline std::atomic<std::size_t> largest_{0};
  static inline std::atomic<uint64_t> left_{UINT64_MAX};
};

inline bool is_one_of(kv_status status, std::initializer_list<kv_status> allowed) {
  return std::find(allowed.begin(), allowed.end(), status) != allowed.end();
}

// A call's answer: one of those that its entry in kvasir.h names, and a message with every failure.
inline kv_status check_status(const char* call, kv_status status, const kv_error& error,
                              std::initializer_list<kv_status> allowed) {
  if (status == KV_OK) return status;
  if (!is_one_of(status, allowed))
    std::fprintf(stderr, "%s: %s: %s\n", call, kv_status_text(status), error.message);
  require(is_one_of(status, allowed), "a refusal that the call's entry names");
  require(error.status == status && error.message[0] != 0, "a refusal says why");
  return status;
}

}  // namespace kvasir::test
