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

  void linear(const std::string& name, uint32_t rows, uint32_t cols, Linear* out) {
    out->w = matrix(name + ".weight", rows, cols);
    vector(name + ".bias", rows, false, &out->bias);
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

Status bind_weights(const Gguf& gguf, const std::byte* file, const ModelConfig& c, ModelUse use,
                    Weights* out, Array<float>* rope_divisors) {
  Weights w;
  w.layers.reserve(c.layers);  // the binder keeps pointers into them
  Binder bind(gguf, file);
  w.embedding = bind.matrix("token_embd.weight", c.vocabulary, c.width);
  for (uint32_t l = 0; l < c.layers; ++l) {
    const std::string at = "blk." + std::to_string(l) + ".";
    LayerWeights& layer = w.layers.emplace_back();
    const bool norms = c.architecture == Architecture::qwen3;
    bind.vector(at + "attn_norm.weight", c.width, true, &layer.attention_norm);
    bind.linear(at + "attn_q", c.q_width(), c.width, &layer.q);
    bind.linear(at + "attn_k", c.kv_width(), c.width, &layer.k);
    bind.linear(at + "attn_v", c.kv_width(), c.width, &layer.v);
    bind.linear(at + "attn_output", c.width, c.q_width(), &layer.o);
    if (norms) bind.vector(at + "attn_q_norm.weight", c.head_dim, true, &layer.q_norm);
    if (norms) bind.vector(at + "attn_k_norm.weight", c.head_dim, true, &layer.k_norm);
    bind.vector(at + "ffn_norm.weight", c.width, true, &layer.ffn_norm);
    bind.linear(at + "ffn_gate", c.feed_forward, c.width, &layer.gate);
    bind.linear(at + "ffn_up", c.feed_forward, c.width, &layer.up);
    bind.linear(at + "ffn_down", c.width, c.feed_forward, &layer.down);
  }
  bind.vector("output_norm.weight", c.width, true, &w.output_norm);
  if (bind.has("output.weight")) {
    bind.linear("output", c.vocabulary, c.width, &w.output);
  } else {
    w.output.w = w.embedding;
  }
  bind.vector("rope_freqs.weight", c.rope.dim / 2, false, rope_divisors);
  if (Status s = bind.finish(); !s.ok()) return s;
  if (use == ModelUse::inspect) {
    // Nothing is read of the weights.
  } else if (Status s = bind.read(); !s.ok()) {
    return s;
  }
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
