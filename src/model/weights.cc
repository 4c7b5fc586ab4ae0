// Tensor names to places in the forward pass.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "base/magnitude.h"
#include "base/quoted.h"
#include "gguf/limits.h"
#include "model/model.h"

namespace kvasir {
namespace {

class Binder {
 public:
  Binder(const Gguf& gguf, const std::byte* file)
      : gguf_(gguf), file_(file), used_(gguf.tensors().size()) {}

  WeightView matrix(const std::string& name, uint32_t rows, uint32_t cols) {
    const GgufTensor* t = take(name, true);
    if (!t || !check_shape(*t, cols, rows)) return {};
    return {file_ + t->offset, t->type, rows, cols, static_cast<std::size_t>(t->bytes / rows)};
  }

  // A small vector, which read() copies to *out as floats; *out stays empty when it is absent and
  // not required.
  void vector(const std::string& name, uint32_t size, bool required, Array<float>* out) {
    const GgufTensor* t = take(name, required);
    if (!t || !check_shape(*t, size, 1)) return;
    copies_.push_back({t, out});
    copied_numbers_ += size;
  }

  void linear(const std::string& name, uint32_t rows, uint32_t cols, bool biases, Linear* out) {
    out->w = matrix(name + ".weight", rows, cols);
    if (biases) vector(name + ".bias", rows, false, &out->bias);
  }

  bool has(const std::string& name) const { return gguf_.find_tensor(name) != nullptr; }

  // Everything in the file must have found its place: a tensor we do not know would change the
  // result.
  Status finish() {
    for (const GgufTensor& t : gguf_.tensors())
      if (!used_[number(t)])
        fail(Status::error(Code::unsupported,
                           "the model has a tensor '%s' that Kvasir has no place for",
                           Quoted(t.name).text()));
    if (copied_numbers_ > gguf_limits::copied_numbers)
      fail(Status::error(Code::limit,
                         "the model's norms and biases are %llu numbers: at most %llu can be read",
                         static_cast<unsigned long long>(copied_numbers_),
                         static_cast<unsigned long long>(gguf_limits::copied_numbers)));
    return std::move(status_);
  }

  // After finish(): copies the vectors.
  Status read() {
    for (const Copy& copy : copies_) {
      const GgufTensor& t = *copy.tensor;
      const auto size = static_cast<uint32_t>(t.dims[0]);  // as it was asked for
      copy.out->resize(size);
      cpu_kernels().dequantize_row(
          {file_ + t.offset, t.type, 1, size, static_cast<std::size_t>(t.bytes)}, 0,
          copy.out->data());
      if (!all_finite(*copy.out))
        return Status::error(Code::corrupt, "tensor '%s' holds a number that is not finite",
                             Quoted(t.name).text());
    }
    return {};
  }

 private:
  struct Copy {
    const GgufTensor* tensor;
    Array<float>* out;
  };

  std::size_t number(const GgufTensor& t) const {
    return static_cast<std::size_t>(&t - gguf_.tensors().data());
  }

  const GgufTensor* take(const std::string& name, bool required) {
    const GgufTensor* t = gguf_.find_tensor(name);
    if (t) used_[number(*t)] = true;
    if (!t && required)
      fail(Status::error(Code::corrupt, "the model has no tensor '%s'", name.c_str()));
    return t;
  }

  bool check_shape(const GgufTensor& t, uint64_t d0, uint64_t d1) {
    if (t.dims[0] == d0 && t.dims[1] == d1 && t.dims[2] == 1 && t.dims[3] == 1) return true;
    fail(Status::error(Code::corrupt,
                       "tensor '%s' is %llu x %llu where the metadata says %llu x %llu",
                       Quoted(t.name).text(), static_cast<unsigned long long>(t.dims[0]),
                       static_cast<unsigned long long>(t.dims[1]),
                       static_cast<unsigned long long>(d0), static_cast<unsigned long long>(d1)));
    return false;
  }

  void fail(Status s) {
    if (status_.ok()) status_ = std::move(s);
  }

  const Gguf& gguf_;
  const std::byte* file_;
  std::vector<bool> used_;  // [tensors]
  std::vector<Copy> copies_;
  uint64_t copied_numbers_ = 0;
  Status status_;
};

std::string formats_by_bytes(const Gguf& gguf) {
  std::map<TensorType, uint64_t> bytes;
  for (const GgufTensor& t : gguf.tensors()) bytes[t.type] += t.bytes;
  std::vector<std::pair<uint64_t, TensorType>> order;
  for (const auto& [type, size] : bytes) order.emplace_back(size, type);
  std::sort(order.rbegin(), order.rend());
  std::string out;
  for (const auto& [size, type] : order)
    out += (out.empty() ? "" : " ") + std::string(tensor_type_info(type)->name);
  return out;
}

}  // namespace

static void bind_layer(Binder* bind, const ModelConfig& model, uint32_t number, LayerWeights* out) {
  const LayerConfig& layer = model.layer_configs[number];
  const TensorNames& names = model.architecture->names;
  const std::string at = "blk." + std::to_string(number) + ".";
  const auto norm = [&](bool exists, const char* name, uint32_t size, Array<float>* weight) {
    if (exists) bind->vector(at + name + ".weight", size, true, weight);
  };
  const auto linear = [&](const char* name, uint32_t rows, uint32_t cols, Linear* weights) {
    bind->linear(at + name, rows, cols, layer.biases, weights);
  };
  const uint32_t width = model.width, q_width = layer.q_width(), kv_width = layer.kv_width();
  norm(layer.norm_before(), names.mixer_norm, width, &out->mixer_norm);
  linear(names.q, q_width, width, &out->q);
  linear(names.k, kv_width, width, &out->k);
  linear(names.v, kv_width, width, &out->v);
  linear(names.o, width, q_width, &out->o);
  const bool qk_norm = layer.qk_norm != QkNorm::none, by_head = layer.qk_norm == QkNorm::head;
  norm(qk_norm, names.q_norm, by_head ? layer.head_dim : q_width, &out->q_norm);
  norm(qk_norm, names.k_norm, by_head ? layer.head_dim : kv_width, &out->k_norm);
  norm(layer.norm_after(), names.mixer_post_norm, width, &out->mixer_post_norm);
  norm(layer.norm_before(), names.ffn_norm, width, &out->ffn_norm);
  linear(names.gate, layer.feed_forward, width, &out->gate);
  linear(names.up, layer.feed_forward, width, &out->up);
  linear(names.down, width, layer.feed_forward, &out->down);
  norm(layer.norm_after(), names.ffn_post_norm, width, &out->ffn_post_norm);
}

Status bind_weights(const Gguf& gguf, const std::byte* file, const ModelConfig& c, ModelUse use,
                    Weights* out, Array<float>* rope_divisors) {
  Weights w;
  w.layers.resize(c.layers);
  Binder bind(gguf, file);
  w.embedding = bind.matrix("token_embd.weight", c.vocabulary, c.width);
  for (uint32_t l = 0; l < c.layers; ++l) bind_layer(&bind, c, l, &w.layers[l]);
  bind.vector("output_norm.weight", c.width, true, &w.output_norm);
  if (bind.has("output.weight")) {
    bind.linear("output", c.vocabulary, c.width, true, &w.output);
  } else {
    w.output.w = w.embedding;
  }
  bind.vector("rope_freqs.weight", c.ropes[0].dim / 2, false, rope_divisors);
  RETURN_IF_ERROR(bind.finish());
  if (use != ModelUse::inspect) RETURN_IF_ERROR(bind.read());
  for (float d : *rope_divisors)
    if (!(d > 0))
      return Status::error(Code::corrupt,
                           "tensor 'rope_freqs.weight' holds a number that is not positive");
  for (const GgufTensor& t : gguf.tensors()) {
    w.parameters += t.dims[0] * t.dims[1] * t.dims[2] * t.dims[3];
    w.bytes += t.bytes;
  }
  w.formats = formats_by_bytes(gguf);
  *out = std::move(w);
  return {};
}

}  // namespace kvasir
