// Finds the tensors of a file by name, checks their shapes, and gives them places.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "model/model.h"

namespace kvasir {

class TensorBinder {
 public:
  // file: the bytes that the tensors' offsets refer to. All must outlive the object.
  TensorBinder(const Gguf& gguf, const std::byte* file, const ModelConfig& config)
      : gguf_(gguf), file_(file), depth_(config.depth()), skipped_layers_(config.skipped_layers),
        used_(gguf.tensors().size()) {}

  WeightView matrix(const std::string& name, uint32_t rows, uint32_t cols);
  // A small vector, which read() copies to *out as floats; *out stays empty when it is absent and
  // not required.
  void vector(const std::string& name, uint32_t size, bool required, Array<float>* out) {
    table(name, size, 1, required, out);
  }
  // Several of them: [count][size].
  void table(const std::string& name, uint32_t size, uint32_t count, bool required,
             Array<float>* out);
  // The taps of every channel, which the file has side by side, become [taps][channels].
  void taps(const std::string& name, uint32_t taps, uint32_t channels, Array<float>* out);
  void linear(const std::string& name, uint32_t rows, uint32_t cols, bool biases, Linear* out);
  // Matrices whose rows are one after another in one tensor.
  struct Part {
    uint32_t rows;
    Linear* out;
  };
  void fused(const std::string& name, uint32_t cols, bool biases,
             std::initializer_list<Part> parts);
  // Several matrices in one tensor, those of all experts for instance.
  void matrices(const std::string& name, uint32_t count, uint32_t rows, uint32_t cols,
                ExpertMatrices* out);
  // The same with their biases and factors.
  void experts(const std::string& name, uint32_t count, uint32_t rows, uint32_t cols,
               ExpertMatrices* out);

  // Rows of a matrix that the file alone knows: 1 to `most`.
  uint32_t rows_of(const std::string& name, uint32_t most) const;
  void ignore(const std::string& name) { (void)take(name, false); }
  bool has(const std::string& name) const { return gguf_.find_tensor(name) != nullptr; }

  // Everything in the file, or of one block of it, must have found its place: a tensor we do not
  // know would change the result. Returns the first error of any call.
  Status finish(std::string_view block = {});
  // After finish(): copies the vectors.
  Status read();

 private:
  struct Copy {
    const GgufTensor* tensor;
    uint32_t size, count;  // [count][size],
    uint32_t first;        // from this column on
    Array<float>* out;
    bool transposes = false;  // to [size][count]
  };
  float scale_of(const std::string& matrix);
  bool is_skipped(const GgufTensor& t) const;
  std::size_t number(const GgufTensor& t) const {
    return static_cast<std::size_t>(&t - gguf_.tensors().data());
  }
  const GgufTensor* take(const std::string& name, bool required);
  bool check_shape(const GgufTensor& t, std::array<uint64_t, 3> dims);
  Status copy(const Copy& copy) const;
  void fail(Status s) {
    if (status_.ok()) status_ = std::move(s);
  }

  const Gguf& gguf_;
  const std::byte* file_;
  const uint32_t depth_, skipped_layers_;
  std::vector<bool> used_;  // [tensors]
  std::vector<Copy> copies_;
  uint64_t copied_numbers_ = 0;
  Status status_;
};

}  // namespace kvasir
