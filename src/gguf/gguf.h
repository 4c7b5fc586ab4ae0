// GGUF v2 and v3: bytes to metadata and a list of tensors. No I/O, no copies of weights, no
// recursion.
//
// parse() accepts any bytes. Counts are limited by gguf_limits and by the remaining bytes before
// anything is allocated. Every returned tensor is inside the file, is aligned and overlaps no
// other. Names are unique, no dimension is zero, and every value is as long as its type and count
// require. A file without tensors (a bare vocabulary) is valid. Strings and arrays are views of the
// caller's bytes, which must outlive the Gguf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "gguf/tensor_type.h"

namespace kvasir {

enum class GgufType : uint32_t {
  u8 = 0,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64,
};

struct GgufValue {
  GgufType type;          // of the value; for an array: GgufType::array
  GgufType element_type;  // of an array's elements
  uint64_t count;         // of an array's elements; 1 otherwise
  // The value's bytes in the file; for a string, without its length.
  std::span<const std::byte> bytes;
};

struct GgufTensor {
  std::string_view name;
  TensorType type;
  uint32_t n_dims;
  uint64_t dims[4];  // dims[0] is contiguous; missing ones are 1
  uint64_t offset;   // from the file's beginning, bytes
  uint64_t bytes;

  // Of a name such as "blk.2.ffn_up.weight": 2. Nothing: it has none.
  std::optional<uint32_t> layer() const;
};

// The strings of an array, in order, in place. Nothing is copied.
class GgufStrings {
 public:
  class Iterator {
   public:
    using value_type = std::string_view;
    using difference_type = std::ptrdiff_t;
    using reference = std::string_view;
    using pointer = const std::string_view*;
    using iterator_category = std::input_iterator_tag;
    explicit Iterator(const std::byte* at) : at_(at) {}
    std::string_view operator*() const;
    Iterator& operator++();
    bool operator==(const Iterator&) const = default;

   private:
    const std::byte* at_;
  };
  GgufStrings(std::span<const std::byte> bytes, uint64_t count) : bytes_(bytes), count_(count) {}
  uint64_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  // The array's bytes in the file, 8 for the length of each string included.
  uint64_t bytes() const { return bytes_.size(); }
  Iterator begin() const { return Iterator(bytes_.data()); }
  Iterator end() const { return Iterator(bytes_.data() + bytes_.size()); }

 private:
  std::span<const std::byte> bytes_;
  uint64_t count_;
};

class Gguf {
 public:
  // On failure *out is unchanged. The message names the key or tensor; offset() is its place.
  // Code::unsupported: no GGUF file, another version, big-endian, a tensor type that the library
  // cannot compute with. Code::limit: beyond gguf_limits. Code::corrupt: all other failures.
  static Status parse(std::span<const std::byte> file, Gguf* out);

  using Entry = std::pair<std::string_view, GgufValue>;

  uint32_t version() const { return version_; }
  // Offset of the tensor data, bytes; the size of the file without tensors.
  uint64_t data_offset() const { return data_offset_; }

  const GgufValue* find(std::string_view key) const;
  const GgufTensor* find_tensor(std::string_view name) const;
  std::span<const GgufTensor> tensors() const { return tensors_; }  // in file order
  std::span<const Entry> entries() const { return entries_; }       // in file order

  // Typed access: nothing when the key is absent or of another type. Integers of any width convert
  // when the value (of an array: every value) fits; get_float takes f32 and f64.
  std::optional<uint64_t> get_uint(std::string_view key) const;
  std::optional<double> get_float(std::string_view key) const;
  std::optional<bool> get_bool(std::string_view key) const;
  std::optional<std::string_view> get_string(std::string_view key) const;
  // Arrays; nothing when absent or of another element type. Booleans are the integers 0 and 1.
  std::optional<GgufStrings> get_strings(std::string_view key) const;
  std::optional<std::vector<float>> get_floats(std::string_view key) const;
  std::optional<std::vector<int32_t>> get_ints(std::string_view key) const;

 private:
  friend class GgufParser;

  uint32_t version_ = 0;
  uint64_t data_offset_ = 0;
  std::vector<Entry> entries_;
  std::vector<GgufTensor> tensors_;
  // Indices into entries_ and tensors_, sorted by name. Not hash tables: no choice of names in a
  // file makes these slow.
  std::vector<uint32_t> key_order_;
  std::vector<uint32_t> tensor_order_;
};

}  // namespace kvasir
