#include "model/tensor_binder.h"

#include <algorithm>
#include <cmath>

#include "base/magnitude.h"
#include "base/quoted.h"
#include "gguf/limits.h"

namespace kvasir {

// "64 x 128", "64 x 128 x 8"
static std::string text_of_dims(std::array<uint64_t, 3> dims) {
  std::string text = std::to_string(dims[0]) + " x " + std::to_string(dims[1]);
  return dims[2] == 1 ? text : text + " x " + std::to_string(dims[2]);
}

WeightView TensorBinder::matrix(const std::string& name, uint32_t rows, uint32_t cols) {
  const GgufTensor* t = take(name, true);
  if (!t || !check_shape(*t, {cols, rows, 1})) return {};
  return {file_ + t->offset, t->type, rows, cols, static_cast<std::size_t>(t->bytes / rows),
          scale_of(name)};
}

void TensorBinder::table(const std::string& name, uint32_t size, uint32_t count, bool required,
                         Array<float>* out) {
  const GgufTensor* t = take(name, required);
  if (!t || !check_shape(*t, {size, count, 1})) return;
  copies_.push_back({t, size, count, 0, out});
  copied_numbers_ += uint64_t{size} * count;
}

void TensorBinder::taps(const std::string& name, uint32_t taps, uint32_t channels,
                        Array<float>* out) {
  const std::size_t before = copies_.size();
  table(name, taps, channels, true, out);
  if (copies_.size() > before) copies_.back().transposes = true;
}

void TensorBinder::linear(const std::string& name, uint32_t rows, uint32_t cols, bool biases,
                          Linear* out) {
  out->w = matrix(name + ".weight", rows, cols);
  if (biases) vector(name + ".bias", rows, false, &out->bias);
}

void TensorBinder::fused(const std::string& name, uint32_t cols, bool biases,
                         std::initializer_list<Part> parts) {
  uint32_t rows = 0, first = 0;
  for (const Part& part : parts) rows += part.rows;
  const WeightView all = matrix(name + ".weight", rows, cols);
  const GgufTensor* bias = biases ? take(name + ".bias", false) : nullptr;
  if (bias && !check_shape(*bias, {rows, 1, 1})) bias = nullptr;
  for (const Part& part : parts) {
    part.out->w = all;
    part.out->w.rows = part.rows;
    if (all.data) part.out->w.data += std::size_t{first} * all.row_bytes;
    if (bias) copies_.push_back({bias, part.rows, 1, first, &part.out->bias});
    first += part.rows;
  }
  if (bias) copied_numbers_ += rows;
}

void TensorBinder::matrices(const std::string& name, uint32_t count, uint32_t rows, uint32_t cols,
                            ExpertMatrices* out) {
  const GgufTensor* t = take(name + ".weight", true);
  if (t && check_shape(*t, {cols, rows, count})) {
    out->stride = static_cast<std::size_t>(t->bytes / count);
    out->first = {file_ + t->offset, t->type, rows, cols, out->stride / rows};
  }
}

void TensorBinder::experts(const std::string& name, uint32_t count, uint32_t rows, uint32_t cols,
                           ExpertMatrices* out) {
  matrices(name, count, rows, cols, out);
  table(name + ".bias", rows, count, false, &out->biases);
  vector(name + ".scale", count, false, &out->scales);
}

uint32_t TensorBinder::rows_of(const std::string& name, uint32_t most) const {
  const GgufTensor* t = gguf_.find_tensor(name);
  return t && t->dims[1] <= most ? std::max(1u, static_cast<uint32_t>(t->dims[1])) : 1;
}

Status TensorBinder::finish(std::string_view block) {
  for (const GgufTensor& t : gguf_.tensors())
    if (!used_[number(t)] &&
        (block.empty() ? !is_skipped(t) : t.name.substr(0, block.size()) == block))
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

Status TensorBinder::read() {
  for (const Copy& each : copies_) RETURN_IF_ERROR(copy(each));
  return {};
}

Status TensorBinder::copy(const Copy& copy) const {
  const GgufTensor& t = *copy.tensor;
  copy.out->resize(std::size_t{copy.size} * copy.count);
  const auto cols = static_cast<uint32_t>(t.dims[0]);
  const WeightView rows = {file_ + t.offset, t.type, copy.count, cols,
                           static_cast<std::size_t>(t.bytes / copy.count)};
  Array<float> row(cols);
  for (uint32_t r = 0; r < copy.count; ++r) {
    cpu_kernels().dequantize_row(rows, r, row.data());
    float* out = copy.out->data() + (copy.transposes ? r : std::size_t{r} * copy.size);
    for (uint32_t i = 0; i < copy.size; ++i)
      out[copy.transposes ? std::size_t{i} * copy.count : i] = row[copy.first + i];
  }
  if (all_finite(*copy.out)) return {};
  return Status::error(Code::corrupt, "tensor '%s' holds a number that is not finite",
                       Quoted(t.name).text());
}

// NAME.scale of a matrix NAME.weight: the second scale of NVFP4 files.
float TensorBinder::scale_of(const std::string& matrix) {
  const std::string name = matrix.substr(0, matrix.rfind('.')) + ".scale";
  const GgufTensor* t = gguf_.find_tensor(name);
  if (!t || t->n_dims != 1 || t->dims[0] != 1) return 1;  // a router has another kind
  (void)take(name, false);
  float scale = 0;
  cpu_kernels().dequantize_row({file_ + t->offset, t->type, 1, 1, t->bytes}, 0, &scale);
  if (!std::isfinite(scale))
    fail(Status::error(Code::corrupt, "tensor '%s' holds a number that is not finite",
                       Quoted(t->name).text()));
  return scale;
}

// Layers behind the last one, and divisors that no set of RoPE uses.
bool TensorBinder::is_skipped(const GgufTensor& t) const {
  if (t.name.starts_with("rope_")) return true;
  const std::optional<uint32_t> layer = t.layer();
  return layer && *layer >= depth_ && *layer - depth_ < skipped_layers_;
}

const GgufTensor* TensorBinder::take(const std::string& name, bool required) {
  const GgufTensor* t = gguf_.find_tensor(name);
  if (t) used_[number(*t)] = true;
  if (!t && required)
    fail(Status::error(Code::corrupt, "the model has no tensor '%s'", name.c_str()));
  return t;
}

bool TensorBinder::check_shape(const GgufTensor& t, std::array<uint64_t, 3> dims) {
  if (std::equal(dims.begin(), dims.end(), t.dims) && t.dims[3] == 1) return true;
  fail(Status::error(Code::corrupt, "tensor '%s' is %s where the metadata says %s",
                     Quoted(t.name).text(), text_of_dims({t.dims[0], t.dims[1], t.dims[2]}).c_str(),
                     text_of_dims(dims).c_str()));
  return false;
}

}  // namespace kvasir
