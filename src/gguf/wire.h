// Values of a GGUF file: unaligned and little-endian. Used by the parser and the accessors.
#pragma once

#include <bit>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "gguf/gguf.h"

namespace kvasir {

static_assert(std::endian::native == std::endian::little,
              "values are read from the file as they stand");

// Bytes of one value; 0 for types without a fixed size.
inline uint64_t scalar_bytes(GgufType type) {
  switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean:
      return 1;
    case GgufType::u16:
    case GgufType::i16:
      return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32:
      return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64:
      return 8;
    case GgufType::string:
    case GgufType::array:
      return 0;
  }
  return 0;
}

inline bool is_integer(GgufType type) {
  return scalar_bytes(type) != 0 && type != GgufType::f32 && type != GgufType::f64 &&
         type != GgufType::boolean;
}

template <class T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// The integer at p; nothing when it does not fit T or is not an integer.
template <class T>
std::optional<T> load_integer(GgufType type, const std::byte* p) {
  const auto fit = [](auto value) -> std::optional<T> {
    if (!std::in_range<T>(value)) return std::nullopt;
    return static_cast<T>(value);
  };
  switch (type) {
    case GgufType::u8:
      return fit(load<uint8_t>(p));
    case GgufType::i8:
      return fit(load<int8_t>(p));
    case GgufType::u16:
      return fit(load<uint16_t>(p));
    case GgufType::i16:
      return fit(load<int16_t>(p));
    case GgufType::u32:
      return fit(load<uint32_t>(p));
    case GgufType::i32:
      return fit(load<int32_t>(p));
    case GgufType::u64:
      return fit(load<uint64_t>(p));
    case GgufType::i64:
      return fit(load<int64_t>(p));
    default:
      return std::nullopt;
  }
}

inline std::string_view as_text(const std::byte* p, uint64_t size) {
  return {reinterpret_cast<const char*>(p), static_cast<std::size_t>(size)};
}

inline std::string_view name_of(const Gguf::Entry& entry) { return entry.first; }
inline std::string_view name_of(const GgufTensor& tensor) { return tensor.name; }

}  // namespace kvasir
