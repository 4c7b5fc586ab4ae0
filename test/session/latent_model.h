// Models of latent attention with random weights. Each head's matrices may be quantised, and be two
// tensors or one.
#pragma once

#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../fuzz/tiny_model.h"
#include "backend/kernels.h"
#include "temp_folder.h"

namespace kvasir::test {

struct LatentSize {
  uint32_t layers = 2, width = 32, heads = 2;
  uint32_t rank = 512, rotated = 64, plain = 32, values = 32;  // rank and rotated of DeepSeek
};

// Bytes of a matrix of a type, [rows][cols]; those of quantised types are random but for their
// scales.
inline std::vector<std::byte> random_matrix(TensorType type, uint64_t rows, uint64_t cols,
                                            std::mt19937* random) {
  const TensorTypeInfo& info = *tensor_type_info(type);
  std::vector<std::byte> bytes(rows * cols / info.block_elements * info.block_bytes);
  if (type == TensorType::f32) {
    std::normal_distribution<float> normal(0, 0.3f / std::sqrt(static_cast<float>(cols)));
    for (std::size_t i = 0; i < rows * cols; ++i) {
      const float x = normal(*random);
      std::memcpy(&bytes[i * sizeof x], &x, sizeof x);
    }
    return bytes;
  }
  for (std::byte& b : bytes) b = static_cast<std::byte>((*random)());
  // of a block: the scale as F16, at these bytes
  const std::map<TensorType, std::pair<std::vector<std::size_t>, uint16_t>> scales = {
      {TensorType::q8_0, {{0}, 0x1000}},     // 2^-11
      {TensorType::q4_0, {{0}, 0x2000}},     // 2^-7
      {TensorType::q4_k, {{0, 2}, 0x0400}},  // 2^-14
      {TensorType::q6_k, {{208}, 0x0400}}};
  const auto& [places, scale] = scales.at(type);
  for (std::size_t at = 0; at < bytes.size(); at += info.block_bytes)
    for (const std::size_t place : places) std::memcpy(&bytes[at + place], &scale, sizeof scale);
  return bytes;
}

inline std::vector<float> dequantised(TensorType type, const std::vector<std::byte>& bytes,
                                      uint64_t rows, uint64_t cols) {
  std::vector<float> out(rows * cols);
  const WeightView view = {bytes.data(), type, static_cast<uint32_t>(rows),
                           static_cast<uint32_t>(cols), bytes.size() / rows};
  for (uint32_t r = 0; r < rows; ++r) cpu_kernels().dequantize_row(view, r, out.data() + r * cols);
  return out;
}

inline std::vector<std::byte> bytes_of(const std::vector<float>& numbers) {
  std::vector<std::byte> out(numbers.size() * sizeof(float));
  std::memcpy(out.data(), numbers.data(), out.size());
  return out;
}

// The matrices of all heads of a layer.
struct HeadMatrices {
  bool joint = false;
  TensorType keys_type = TensorType::f32, values_type = TensorType::f32;
  std::vector<std::byte> keys, values;  // joint: all in `keys`

  static HeadMatrices random(const LatentSize& s, bool joint, TensorType keys, TensorType values,
                             std::mt19937* random) {
    HeadMatrices m{joint, keys, joint ? keys : values, {}, {}};
    if (joint) {
      m.keys = random_matrix(keys, uint64_t{s.heads} * (s.plain + s.values), s.rank, random);
      return m;
    }
    m.keys = random_matrix(keys, uint64_t{s.heads} * s.rank, s.plain, random);
    m.values = random_matrix(values, uint64_t{s.heads} * s.values, s.rank, random);
    return m;
  }

  // The same numbers as two tensors of floats.
  HeadMatrices as_floats(const LatentSize& s) const {
    HeadMatrices out;
    if (!joint) {
      out.keys = bytes_of(dequantised(keys_type, keys, uint64_t{s.heads} * s.rank, s.plain));
      out.values = bytes_of(dequantised(values_type, values, uint64_t{s.heads} * s.values, s.rank));
      return out;
    }
    const std::size_t both = s.plain + s.values, rank = s.rank;
    const std::vector<float> all = dequantised(keys_type, keys, s.heads * both, rank);
    std::vector<float> k, v;
    for (std::size_t h = 0; h < s.heads; ++h) {
      const float* head = all.data() + h * both * rank;
      for (std::size_t c = 0; c < rank; ++c)
        for (std::size_t d = 0; d < s.plain; ++d) k.push_back(head[d * rank + c]);
      v.insert(v.end(), head + s.plain * rank, head + both * rank);
    }
    out.keys = bytes_of(k), out.values = bytes_of(v);
    return out;
  }
};

// The keys of a DeepSeek model's shape. `leave_out`: one that the file lacks.
inline void add_latent_keys(GgufBuilder* b, const LatentSize& s,
                            const std::string& leave_out = "") {
  const std::string at = "deepseek2.";
  b->key("general.architecture", "deepseek2");
  const std::pair<const char*, uint32_t> keys[] = {
      {"block_count", s.layers},
      {"embedding_length", s.width},
      {"feed_forward_length", 48},
      {"context_length", 8192},
      {"attention.head_count", s.heads},
      {"attention.head_count_kv", 1},
      {"attention.kv_lora_rank", s.rank},
      {"attention.key_length", s.rank + s.rotated},
      {"attention.value_length", s.rank},
      {"attention.key_length_mla", s.plain + s.rotated},
      {"attention.value_length_mla", s.values},
      {"rope.dimension_count", s.rotated}};
  for (const auto& [key, value] : keys)
    if (key != leave_out) b->key(at + key, value);
}

// matrices: of each layer.
inline std::string save_latent_model(const std::string& path, const LatentSize& s,
                                     const std::vector<HeadMatrices>& matrices) {
  GgufBuilder b = bpe_file(byte_vocabulary());
  add_latent_keys(&b, s);
  std::mt19937 random(3);
  const auto add = [&](const std::string& name, std::vector<uint64_t> dims) {
    std::vector<std::byte> bytes =
        random_matrix(TensorType::f32, dims.size() > 1 ? dims[1] : 1, dims[0], &random);
    if (dims.size() == 1) bytes = bytes_of(std::vector<float>(dims[0], 1.0f));
    b.tensor(name, std::move(dims), TensorType::f32, std::move(bytes));
  };
  add("token_embd.weight", {s.width, 256}), add("output_norm.weight", {s.width});
  for (uint32_t l = 0; l < s.layers; ++l) {
    const std::string at = "blk." + std::to_string(l) + ".";
    const HeadMatrices& m = matrices[l];
    add(at + "attn_norm.weight", {s.width}), add(at + "ffn_norm.weight", {s.width});
    add(at + "attn_q.weight", {s.width, s.heads * (s.plain + s.rotated)});
    add(at + "attn_kv_a_mqa.weight", {s.width, s.rank + s.rotated});
    add(at + "attn_kv_a_norm.weight", {s.rank});
    if (m.joint) {
      b.tensor(at + "attn_kv_b.weight", {s.rank, s.heads * (s.plain + s.values)}, m.keys_type,
               m.keys);
    } else {
      b.tensor(at + "attn_k_b.weight", {s.plain, s.rank, s.heads}, m.keys_type, m.keys);
      b.tensor(at + "attn_v_b.weight", {s.rank, s.values, s.heads}, m.values_type, m.values);
    }
    add(at + "attn_output.weight", {s.heads * s.values, s.width});
    add(at + "ffn_gate.weight", {s.width, 48}), add(at + "ffn_up.weight", {s.width, 48});
    add(at + "ffn_down.weight", {48, s.width});
  }
  write_model(path, b);
  return path;
}

inline std::vector<HeadMatrices> random_heads(const LatentSize& s, bool joint = false,
                                              TensorType keys = TensorType::f32,
                                              TensorType values = TensorType::f32) {
  std::mt19937 random(9);
  std::vector<HeadMatrices> out;
  for (uint32_t l = 0; l < s.layers; ++l)
    out.push_back(HeadMatrices::random(s, joint, keys, values, &random));
  return out;
}

}  // namespace kvasir::test
