// Whole models of any architecture with random weights, made in memory.
//
//   ModelRecipe recipe;
//   recipe.architecture = "qwen3moe", recipe.experts = 8, recipe.used = 2;
//   recipe.type_of = [](const MadeTensor& t) { return t.cols() % 256 ? q5_0 : q4_k; };
//   const MadeModel model = make_model(recipe);
//   write(path, model.build());         // as the recipe says
//   write(path, model.build_floats());  // the same weights, as F32
//
// The layers are those that ModelConfig reads from the recipe's metadata. Fixtures of other
// programs' files show that it reads them right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf_builder.h"
#include "model/config.h"

namespace kvasir::test {

enum class TensorRole { matrix, embedding, router, norm, vector, decay };

struct MadeTensor {
  std::string name;
  std::vector<uint64_t> dims;  // as in the file: the contiguous one first
  TensorRole role;
  int layer = -1;  // -1: of no layer
  TensorType type = TensorType::f32;
  std::vector<std::byte> bytes;

  uint64_t cols() const { return dims[0]; }
  uint64_t rows() const;          // of all matrices
  std::string_view part() const;  // "ffn_down" of "blk.3.ffn_down.weight"
};

struct ModelRecipe {
  std::string architecture = "llama";
  uint32_t layers = 2, width = 64, heads = 4, kv_heads = 2, head_dim = 16, feed_forward = 96;
  std::vector<uint32_t> layer_kv_heads, layer_feed_forward;  // of each layer, in place of one
  uint32_t context = 512, window = 0;
  uint32_t layer_input = 32, window_head_dim = 8;  // of Gemma 3n and 4
  uint32_t experts = 0, used = 0, expert_width = 0, shared_width = 0;
  bool biases = false;                       // of attention and of experts
  bool fused_qkv = false, fused_up = false;  // one tensor of q, k and v; of gate and up
  bool tied = false;                         // no output matrix
  bool keys_are_values = false;              // Gemma 4: in layers without a window
  uint32_t latent_rank = 0;                  // of latent attention; 0: none
  uint32_t rank = 16;                        // of LAuReL; of the queries of latent attention
  float router_gain = 4;                     // of the logits of routers
  std::function<void(GgufBuilder*, const std::string& prefix)> more_keys;
  std::function<TensorType(const MadeTensor&)> type_of;  // of matrices; default: F32
  uint32_t seed = 1;
};

struct MadeModel {
  GgufBuilder keys;  // metadata and vocabulary
  ModelConfig config;
  std::vector<MadeTensor> tensors;

  MadeTensor* find(std::string_view name);
  std::vector<std::byte> build() const;
  std::vector<std::byte> build_floats() const;
};

MadeModel make_model(const ModelRecipe& recipe);

// A small recipe of each architecture that Kvasir runs, with all features of its published models.
std::vector<ModelRecipe> recipes_of_all_architectures();

}  // namespace kvasir::test
