// Builds GGUF files in memory for tests: right ones by default, and wrong ones because nothing
// given is checked.
//
//   GgufBuilder b;
//   b.key("general.architecture", "llama").key("llama.block_count", uint32_t{2});
//   b.key("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"});
//   b.tensor("output_norm.weight", {64}, TensorType::f32);             // zeros
//   std::vector<std::byte> file = b.build();
//   patch(&file, 4, uint32_t{1});                                      // the version
//
// Values keep their C++ type: uint32_t{2} is written as u32, 2.0f as f32, true as boolean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gguf/gguf.h"

namespace kvasir::test {

template <class T>
void append(std::vector<std::byte>* out, T value) {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
  const std::size_t at = out->size();
  out->resize(at + sizeof value);
  std::memcpy(out->data() + at, &value, sizeof value);
}

inline void append_text(std::vector<std::byte>* out, std::string_view text) {
  append(out, uint64_t{text.size()});
  const std::size_t at = out->size();
  out->resize(at + text.size());
  if (!text.empty()) std::memcpy(out->data() + at, text.data(), text.size());
}

// Overwrites the bytes at `at`.
template <class T>
void patch(std::vector<std::byte>* file, std::size_t at, T value) {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
  std::memcpy(&file->at(at + sizeof value - 1) - (sizeof value - 1), &value, sizeof value);
}

template <class T>
constexpr GgufType gguf_type_of() {
  if constexpr (std::is_same_v<T, bool>) return GgufType::boolean;
  else if constexpr (std::is_same_v<T, float>) return GgufType::f32;
  else if constexpr (std::is_same_v<T, double>) return GgufType::f64;
  else if constexpr (std::is_same_v<T, std::string>) return GgufType::string;
  else if constexpr (sizeof(T) == 1) return std::is_signed_v<T> ? GgufType::i8 : GgufType::u8;
  else if constexpr (sizeof(T) == 2) return std::is_signed_v<T> ? GgufType::i16 : GgufType::u16;
  else if constexpr (sizeof(T) == 4) return std::is_signed_v<T> ? GgufType::i32 : GgufType::u32;
  else return std::is_signed_v<T> ? GgufType::i64 : GgufType::u64;
}

class GgufBuilder {
 public:
  uint32_t version = 3;
  // used for placing; written to the file only by key("general.alignment", ...)
  uint64_t alignment = 32;

  GgufBuilder& key(std::string_view name, std::string_view text) {
    begin_key(name, GgufType::string);
    append_text(&keys_, text);
    return *this;
  }
  GgufBuilder& key(std::string_view name, const char* text) {
    return key(name, std::string_view(text));
  }

  template <class T>
  requires std::is_arithmetic_v<T> GgufBuilder& key(std::string_view name, T value) {
    begin_key(name, gguf_type_of<T>());
    append(&keys_, value);
    return *this;
  }

  template <class T>
  GgufBuilder& key(std::string_view name, const std::vector<T>& values) {
    begin_key(name, GgufType::array);
    append(&keys_, gguf_type_of<T>());
    append(&keys_, uint64_t{values.size()});
    for (const auto& value : values) {
      if constexpr (std::is_same_v<T, std::string>) append_text(&keys_, value);
      else append(&keys_, static_cast<T>(value));
    }
    return *this;
  }

  // A key of any type, whose value is these bytes.
  GgufBuilder& raw_key(std::string_view name, uint32_t type, const std::vector<std::byte>& value) {
    begin_key(name, static_cast<GgufType>(type));
    keys_.insert(keys_.end(), value.begin(), value.end());
    return *this;
  }

  // A tensor of zeros, placed after the ones before.
  GgufBuilder& tensor(std::string_view name, std::vector<uint64_t> dims, TensorType type) {
    return tensor(name, std::move(dims), type, {});
  }

  // A tensor with its encoded contents; shorter contents are filled up with zeros.
  GgufBuilder& tensor(std::string_view name, std::vector<uint64_t> dims, TensorType type,
                      std::vector<std::byte> contents) {
    const TensorTypeInfo* info = tensor_type_info(type);
    uint64_t bytes = info ? info->block_bytes : 1;
    for (uint64_t dim : dims) bytes *= dim;
    contents.resize(info ? bytes / info->block_elements : bytes);
    raw_tensor(name, static_cast<uint32_t>(dims.size()), dims, static_cast<uint32_t>(type),
               data_.size());
    data_.insert(data_.end(), contents.begin(), contents.end());
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    return *this;
  }

  // A tensor's entry as given, with nothing behind it.
  GgufBuilder& raw_tensor(std::string_view name, uint32_t n_dims, const std::vector<uint64_t>& dims,
                          uint32_t type, uint64_t offset) {
    append_text(&tensors_, name);
    append(&tensors_, n_dims);
    for (uint64_t dim : dims) append(&tensors_, dim);
    append(&tensors_, type);
    append(&tensors_, offset);
    ++tensor_count_;
    return *this;
  }

  // Bytes of zeros at the data's end, for raw_tensor to point at.
  GgufBuilder& data(std::size_t size) {
    data_.resize(data_.size() + size);
    return *this;
  }

  // Where the tensors' entries begin, and where the data does, in what build() gives.
  std::size_t tensors_offset() const { return 24 + keys_.size(); }
  std::size_t data_offset() const {
    return (tensors_offset() + tensors_.size() + alignment - 1) / alignment * alignment;
  }

  std::vector<std::byte> build() const {
    std::vector<std::byte> file;
    for (char c : {'G', 'G', 'U', 'F'}) append(&file, c);
    append(&file, version);
    append(&file, tensor_count_);
    append(&file, key_count_);
    file.insert(file.end(), keys_.begin(), keys_.end());
    file.insert(file.end(), tensors_.begin(), tensors_.end());
    if (!data_.empty()) file.resize(data_offset());
    file.insert(file.end(), data_.begin(), data_.end());
    return file;
  }

 private:
  void begin_key(std::string_view name, GgufType type) {
    append_text(&keys_, name);
    append(&keys_, type);
    ++key_count_;
  }

  uint64_t key_count_ = 0;
  uint64_t tensor_count_ = 0;
  std::vector<std::byte> keys_;
  std::vector<std::byte> tensors_;
  std::vector<std::byte> data_;
};

}  // namespace kvasir::test
