// A model that follows a script: its next token depends on the newest token alone.
//
// The embedding of token t is the unit vector t, and no layer changes it. Row n of the output
// matrix has a 1 for each token that n follows, so that n has the largest logit after them. Keys
// and values depend on tokens and positions as in any model.
#pragma once

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "gguf/gguf_builder.h"
#include "text/test_vocabulary.h"

namespace kvasir::test {

class ScriptedModel {
 public:
  ScriptedModel() : words_(byte_vocabulary()) {}

  Token special(const char* text, int32_t kind = 3) { return words_.add(text, kind); }
  Token merged(const char* left, const char* right) { return words_.merge(left, right); }
  // After `first`, the model writes the bytes of `text` and then `last`. A byte must not occur
  // twice in all scripts.
  void script(Token first, const std::string& text, Token last) {
    for (const char c : text) {
      next_[first] = static_cast<unsigned char>(c);
      first = static_cast<unsigned char>(c);
    }
    next_[first] = last;
  }

  void write(const std::string& path, const std::string& chat_template) const {
    const uint64_t vocabulary = words_.tokens.size(), width = (vocabulary + 31) / 32 * 32;
    GgufBuilder b = bpe_file(words_);
    b.key("tokenizer.chat_template", chat_template).key("general.architecture", "llama");
    for (const auto& [key, value] : std::map<std::string, uint64_t>{{"block_count", 1},
                                                                    {"embedding_length", width},
                                                                    {"feed_forward_length", 32},
                                                                    {"context_length", 4096},
                                                                    {"attention.head_count", 2},
                                                                    {"attention.head_count_kv", 1},
                                                                    {"attention.key_length", 16},
                                                                    {"attention.value_length", 16}})
      b.key("llama." + key, static_cast<uint32_t>(value));
    std::vector<uint16_t> embedding(width * vocabulary), output(width * vocabulary);
    for (uint64_t token = 0; token < vocabulary; ++token) embedding[token * width + token] = kOne;
    for (const auto& [token, next] : next_)
      output[static_cast<uint64_t>(next) * width + static_cast<uint64_t>(token)] = kOne;
    b.tensor("token_embd.weight", {width, vocabulary}, TensorType::f16, bytes_of(embedding));
    b.tensor("output.weight", {width, vocabulary}, TensorType::f16, bytes_of(output));
    const std::vector<float> ones(width, 1.0f);
    for (const char* norm :
         {"output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"})
      b.tensor(norm, {width}, TensorType::f32, bytes_of(ones));
    for (const auto& [name, rows] : std::map<std::string, uint64_t>{
             {"attn_q", 32}, {"attn_k", 16}, {"attn_v", 16}, {"ffn_gate", 32}, {"ffn_up", 32}})
      b.tensor("blk.0." + name + ".weight", {width, rows}, TensorType::f32,
               bytes_of(numbers(width * rows)));
    b.tensor("blk.0.attn_output.weight", {32, width}, TensorType::f32);  // zeros
    b.tensor("blk.0.ffn_down.weight", {32, width}, TensorType::f32);
    const std::vector<std::byte> file = b.build();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(file.data()),
               static_cast<std::streamsize>(file.size()));
  }

 private:
  static constexpr uint16_t kOne = 0x3C00;  // 1 in binary16

  template <class T>
  static std::vector<std::byte> bytes_of(const std::vector<T>& values) {
    const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
    return {begin, begin + values.size() * sizeof(T)};
  }
  static std::vector<float> numbers(uint64_t count) {
    std::vector<float> out(count);
    uint32_t state = 7;
    for (float& x : out) {
      state = state * 1664525u + 1013904223u;
      x = static_cast<float>(state >> 16) / 32768.0f - 1.0f;
    }
    return out;
  }

  TestVocabulary words_;
  std::map<Token, Token> next_;
};

}  // namespace kvasir::test
